"""The records of families: what they say is what transformers, llama.cpp and mlx-lm say."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
from gguf import MODEL_ARCH_NAMES

from engine.errors import ModelError
from engine.models.architectures import records
from engine.models.architectures.composite import language_only
from engine.models.architectures.config_values import check_config
from engine.models.architectures.families import FAMILIES, completed, layer_kinds, renamed
from engine.models.architectures.layer_rules import KINDS
from engine.models.architectures.record import Family
from engine.models.folders.sizes import check_sizes
from engine.runtimes.mlx.families import unsupported_config
from engine.runtimes.native.activations import ACTIVATIONS, WITHOUT_GATE, read_gate
from engine.runtimes.native.shape import (
    read_shape,
    rope_of_kind,
    unsupported_shape,
)
from tests.support.published_step import PUBLISHED
from tests.support.tiny_families import TINY_FAMILIES, tiny_config


def families(of: Callable[[Family], Any] = lambda family: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "family", [pytest.param(each, id=name) for name, each in FAMILIES.items() if of(each)]
    )


NEVER_USED = {("deepseek_v2", "n_group"), ("deepseek_v2", "topk_group")}
"""Defaults that transformers leaves empty, as its own default for ``topk_method`` does not need them."""


def library_default(family: Family, key: str) -> Any:
    """What transformers takes for ``key`` if ``config.json`` leaves it out."""
    from transformers import CONFIG_MAPPING

    # Without it, windows of other families are None, whatever their size.
    config = CONFIG_MAPPING[family.model_type](use_sliding_window=True).get_text_config(decoder=True)
    settings = config.to_dict()
    return settings[key] if key in settings else getattr(config, key, None)  # which has another name in files


@families()
def test_defaults_are_those_of_transformers(family: Family) -> None:
    settings = {key: value for key, value in family.defaults.items() if (family.model_type, key) not in NEVER_USED}
    not_stored = {"full_attention_interval", "use_sliding_window"}  # used up by transformers' constructor, or given
    found = {key: library_default(family, key) for key in settings.keys() - not_stored}
    assert found == {key: value for key, value in settings.items() if key not in not_stored}


GEMMA_3 = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
"""What the published files say of the language model, beside its window and positions."""


@pytest.mark.parametrize("size", GEMMA_3)
def test_the_published_files_of_gemma_3_say_enough(size: str) -> None:
    from transformers import CONFIG_MAPPING

    rope = {"rope_type": "linear", "factor": 8.0}
    section = {"model_type": "gemma3_text", **GEMMA_3[size], "rope_scaling": rope, "sliding_window": 1024}
    found = language_only({"model_type": "gemma3", "text_config": section})
    check_sizes(found)
    read = read_shape(found, ())
    complete = CONFIG_MAPPING["gemma3"](text_config=dict(section)).get_text_config().to_dict()
    assert read == read_shape(complete, ())
    assert (read.vocabulary, read.context) == (262_208, 131_072)
    assert unsupported_shape(found) is None


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_assumes(name: str) -> None:
    config = tiny_config(name)
    short, full = (renamed(json.loads(config.to_json_string(use_diff=left_out))) for left_out in (True, False))
    assert len(short) < len(full)
    check_sizes(short)
    assert (unsupported_shape(short), unsupported_config(short)) == (unsupported_shape(full), unsupported_config(full))
    if unsupported_shape(full) is None:
        assert read_shape(short, ()) == read_shape(full, ())


@families(lambda family: family.native)
def test_rotary_bases_epsilons_and_activations_are_those_of_transformers(family: Family) -> None:
    rope = library_default(family, "rope_parameters")
    if rope is None:
        assert family.decoder.head_kinds is not None
        assert set(family.decoder.head_kinds({}, 4)) == {family.decoder.unrotated}
    elif family.decoder.kind_rope is not None and rope.keys() <= set(KINDS):
        found = {kind: family.decoder.kind_rope({"rope_parameters": rope}, kind) for kind in rope}
        assert found == rope
    else:
        assert rope["rope_theta"] == family.decoder.rope_theta
        assert (rope.get("partial_rotary_factor") or 1.0) == (family.decoder.rotated or 1.0)
        assert {key: rope.get(key) for key in family.decoder.rope} == family.decoder.rope
    epsilon = family.decoder.epsilon_setting
    assert library_default(family, epsilon) == family.defaults.get(epsilon, 1e-6)
    activation = read_gate({"model_type": family.model_type, **family.defaults}).kind
    if activation != "clamped":
        named = library_default(family, family.decoder.activation_setting) or "silu"
        assert (ACTIVATIONS | WITHOUT_GATE)[named] == activation


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}}, 2048),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_theta": 5e5}, 4096),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}}, "rope_scaling": None}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7e3}}, "rope_scaling": {"factor": 2.0}}, 4096),
    ],
)
@pytest.mark.parametrize("name", ["gemma3_text", "olmo3"])
def test_rotary_settings_of_kinds_are_standardised_as_by_transformers(
    name: str, settings: dict[str, Any], longest: int
) -> None:
    from transformers import CONFIG_MAPPING

    settings = {"model_type": name, "max_position_embeddings": longest, **settings}
    expected = CONFIG_MAPPING[name](**copy.deepcopy(settings)).rope_parameters
    assert {kind: rope_of_kind(settings, FAMILIES[name].decoder, kind) for kind in KINDS} == expected


def test_the_older_base_of_windows_in_gemma_3_is_read() -> None:
    from transformers import CONFIG_MAPPING

    settings = {"model_type": "gemma3_text", "rope_theta": 3e5, "rope_local_base_freq": 2e3}
    expected = CONFIG_MAPPING["gemma3_text"](**settings).rope_parameters
    assert {kind: rope_of_kind(settings, FAMILIES["gemma3_text"].decoder, kind) for kind in KINDS} == expected


@families(lambda family: family.decoder.mixer in ("delta-net", "lightning"))
def test_kinds_of_layers_are_those_of_transformers(family: Family) -> None:
    kinds = library_default(family, "layer_types")
    kinds = family.renamed({"layer_types": kinds}).get("layer_types", kinds)
    assert layer_kinds({"model_type": family.model_type, "num_hidden_layers": len(kinds)}) == kinds


NEWER_THAN_GGUF = ("glm5-next", "deepseek4", "hy_v3", "qwen4exp", "bailingmoe3", "deepseek32")
"""Architectures that llama.cpp has, and not yet the gguf package that is installed here."""


@families(lambda family: family.gguf)
def test_names_of_models_are_those_of_transformers_and_gguf(family: Family) -> None:
    import transformers

    assert family.gguf is not None
    assert hasattr(transformers, family.gguf.class_name)
    assert (family.gguf.name in MODEL_ARCH_NAMES.values()) != (family.gguf.name in NEWER_THAN_GGUF)


@families(lambda family: family.mlx)
def test_mlx_lm_has_the_module_and_a_routing_of_that_name(family: Family) -> None:
    pytest.importorskip("mlx_lm")
    from engine.runtimes.mlx.routing import ROUTES

    assert family.mlx is not None
    module = importlib.import_module(f"mlx_lm.models.{family.mlx.module}")
    assert all(hasattr(module, name) for name in family.mlx.classes)
    assert (family.mlx.route in ROUTES) == (family.moe is not None)


KIMI = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 7,
    "linear_attn_config": {
        "full_attn_layers": [4, 7],
        "head_dim": 64,
        "kda_layers": [1, 2, 3, 5, 6],
        "num_heads": 16,
        "short_conv_kernel_size": 3,
    },
    "model_max_length": 4096,
    "moe_renormalize": False,
    "num_expert_group": 2,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
}
"""Settings as the published files of Kimi-Linear name them."""


def test_published_settings_of_kimi_linear_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    library, found = CONFIG_MAPPING["kimi_linear"].from_dict(KIMI), renamed(dict(KIMI))
    added = {key: value for key, value in found.items() if key not in KIMI}
    assert len(added) == 9
    assert added == {key: getattr(library, key) for key in added}
    assert renamed(found) == found
    assert layer_kinds(completed(found)) == library.layer_types


@pytest.mark.parametrize("linear", [[1, 2, 3, 5], [1, 2, 3, 5, 7], [1, 2, 3, 5, 6, 9]])
def test_layers_that_kimi_linear_does_not_name_once_are_a_sentence(linear: list[int]) -> None:
    with pytest.raises(ModelError, match="do not name every layer, from 1 on, exactly once"):
        renamed({**KIMI, "linear_attn_config": {"full_attn_layers": [4, 7], "kda_layers": linear}})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"linear_attention": "lightning"}, "Ling 2.5 has another kind of layers"),
        ({"group_norm_size": 4}, "Ling 2.5 has another kind of layers"),
    ],
)
def test_another_family_under_the_name_of_ling_is_refused(settings: dict[str, Any], problem: str) -> None:
    config = {"model_type": "bailing_hybrid", "num_experts_per_token": 3}
    assert renamed(dict(config))["num_experts_per_tok"] == 3
    with pytest.raises(ModelError, match=problem):
        renamed(config | settings)


def test_published_settings_of_step_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    library = CONFIG_MAPPING["step3p5"].from_dict(copy.deepcopy(PUBLISHED)).to_dict()
    check_config(PUBLISHED, "config.json")
    found = renamed(copy.deepcopy(PUBLISHED))
    named = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_parameters")
    numbers = ("num_sliding_attention_heads", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
    assert {key: found[key] for key in (*named, *numbers)} == {key: library[key] for key in (*named, *numbers)}
    moe_layers = tuple(range(3, 45))
    assert read_shape(found, moe_layers) == read_shape(library, moe_layers)
    assert renamed(found) == found
    assert unsupported_shape(found) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"moe_layers_enum": "3,x"}, "gives 3,x for moe_layers_enum, which must be a list of layers"),
        ({"moe_layers_enum": 3}, "gives 3 for moe_layers_enum, which must be a list of layers"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "a num_attention_groups of 4, which does not run"),
        ({"attention_other_setting": {"head_dim": 64}}, "a head_dim of 64, which does not run"),
        ({"rope_theta": []}, "no rotary settings of layer 1"),
        ({"swiglu_limits": [7.0]}, r"gives \[7.0\] for swiglu_limits, which must be a limit for each layer"),
        ({"swiglu_limits": [-1.0] * 45}, "for swiglu_limits, which must be a limit for each layer"),
        ({"swiglu_limits_shared": 7}, "gives 7 for swiglu_limits_shared, which must be a limit for each layer"),
    ],
)
def test_settings_of_step_that_cannot_be_are_a_sentence(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        read_shape(renamed({**PUBLISHED, **settings}), tuple(range(3, 45)))


@pytest.mark.parametrize("shares", [[0.5], [0.5, 1.0, 0.0, 0.0, 0.0, 0.0], 0.5, ["0.5"] * 6])
def test_shares_of_gates_that_cannot_be_are_a_sentence(shares: Any) -> None:
    config = json.loads(tiny_config("gemma3n_text").to_json_string())
    with pytest.raises(
        ModelError, match="for activation_sparsity_pattern, which must be a share below 1 for each layer"
    ):
        read_shape(renamed({**config, "activation_sparsity_pattern": shares}), ())


def test_published_settings_of_gemma_3n_say_enough() -> None:
    """E4B as published, which leaves out what its networks' gates and kinds of layers usually are."""
    from transformers import CONFIG_MAPPING

    section = {"model_type": "gemma3n_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    numbers = {"vocab_size": 262_400, "hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 35}
    section |= numbers | {"intermediate_size": [16_384] * 35}
    whole = {"model_type": "gemma3n", "text_config": section}
    check_config(whole, "config.json")
    read = read_shape(renamed(language_only(whole)), ())
    library = CONFIG_MAPPING["gemma3n"](text_config=copy.deepcopy(section)).get_text_config().to_dict()
    assert read == read_shape(renamed(library), ())
    assert (read.vocabulary, read.own_vocabulary, read.ffns[0]) == (262_400, 262_144, 16_384)
    assert [one is not None for one in read.deviations] == [True] * 10 + [False] * 25
    assert read.windows[:5] == (512, 512, 512, 512, 0)


def test_published_settings_of_deepseek_v4_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    stored = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0]}
    library = CONFIG_MAPPING["deepseek_v4"].from_dict(dict(stored))
    assert layer_kinds(renamed(dict(stored))) == library.layer_types
    assert layer_kinds({"model_type": "deepseek_v4", "num_hidden_layers": 5}) == (
        CONFIG_MAPPING["deepseek_v4"](num_hidden_layers=5).layer_types
    )
    with pytest.raises(ModelError, match=r"gives 5 for the compress ratio of a layer, which must be 0, 4, 128"):
        renamed({**stored, "compress_ratios": [0, 5]})


def test_a_layer_that_shares_no_indexer_before_it_is_a_sentence() -> None:
    kinds = ["linear_attention", "full_attention", "full_attention", "full_attention"]
    config = completed({"model_type": "glm5_next_text", "num_hidden_layers": 4, "layer_types": kinds})
    with_indexers = FAMILIES["glm5_next_text"].decoder.index_layers
    assert with_indexers(config, 4) == [1, 2, 3]
    assert with_indexers({**config, "indexer_types": ["shared", "full", "shared", "full"]}, 4) == [1, 3]
    with pytest.raises(ModelError, match="lets layer 4 share the indexer of the one before it, which has none"):
        with_indexers({**config, "indexer_types": ["full", "full", "shared", "shared"]}, 4)


def test_every_file_of_records_is_found_and_no_family_is_there_twice() -> None:
    names = [
        family.model_type
        for module in pkgutil.iter_modules(records.__path__)
        for family in importlib.import_module(f"{records.__name__}.{module.name}").FAMILIES
    ]
    assert sorted(names) == sorted(FAMILIES)
    assert len(set(names)) == len(names)


def test_a_configuration_is_completed_and_keeps_what_it_says() -> None:
    config = {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    assert completed(config) == config
    assert completed({"model_type": "mistral"}) == {
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    assert completed({"model_type": "qwen2", "max_window_layers": None})["max_window_layers"] == 28
    assert completed({"model_type": "mamba"}) == {"model_type": "mamba"}


@families(lambda family: family.moe is not None and family.moe.router is not None)
def test_sums_of_scores_are_kept_from_zero_in_the_way_of_their_scoring(family: Family) -> None:
    assert family.moe is not None and family.moe.router is not None
    router = family.moe.router
    assert not (router.added_to_sum and router.scoring != "sigmoid")
    assert not (router.least_sum and router.scoring != "softmax")
