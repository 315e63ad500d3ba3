"""Whatever a config.json holds, it is a sentence or a model: the same one when it is planned and when it is loaded."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.ipc.messages import Load, Plan
from engine.models.architectures.config_values import check_config, without_implementations
from engine.models.architectures.families import check_supported
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.sizes import check_sizes
from engine.runtimes.mlx.families import unsupported_config
from engine.runtimes.native.shape import read_shape, unsupported_shape
from engine.session.loading import load_session
from engine.session.plan_model import plan_model
from tests.support.tiny_families import TINY_FAMILIES, tiny_config
from tests.support.tiny_models import write_tiny_model

ABSENT = object()
HOSTILE: tuple[Any, ...] = (
    ABSENT, None, True, 0, -1, 1, 3, 7, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308, math.nan, math.inf,
    "", "x", "a/b", "sdpa", [], [1], {}, {"a": 1},
)  # fmt: skip
MORE = (
    "sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling", "partial_rotary_factor",
    "layer_types", "torch_dtype", "attn_implementation", "_attn_implementation", "experts_implementation",
    "use_kernels", "kernel_config", "model_file", "quantization_config", "text_config", "mlp_only_layers",
)  # fmt: skip
ROTARY = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "truncate", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
SCALED = {
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FEW = 35
"""Number of hostile values of a family that are tried. The soak tests try all of them, about 900."""


def mutations(config: dict[str, Any]) -> list[dict[str, Any]]:
    """``config`` with one setting replaced by each hostile value, in an order that is always the same."""
    found: list[dict[str, Any]] = []

    def add(changed: dict[str, Any], section: dict[str, Any], key: str, value: Any) -> None:
        if value is ABSENT:
            section.pop(key, None)
        else:
            section[key] = value
        found.append(changed)

    for value in HOSTILE:
        for key in dict.fromkeys([*config, *MORE]):
            changed = json.loads(json.dumps(config))
            add(changed, changed, key, value)
        for key in ROTARY:
            for kind in ("yarn", "linear", "llama3"):
                changed = {**json.loads(json.dumps(config)), "rope_parameters": {"rope_type": kind, **SCALED}}
                add(changed, changed["rope_parameters"], key, value)
    random.Random(1).shuffle(found)
    return found


def verdict(work: Any) -> str:
    try:
        work()
    except ModelError as error:
        text = str(error)
        assert text and text.isprintable(), text
        return "refused"
    return "taken"


@pytest.mark.sampled
@pytest.mark.parametrize("tried", [FEW, pytest.param(None, marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen2_moe", "olmoe", "granitemoe"])
def test_a_plan_refuses_what_loading_refuses_and_only_in_a_sentence(
    tmp_path: Path, family: str, tried: int | None
) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    load = Load(id=1, model=str(folder), partitioning="cpu")
    for changed in mutations(config)[:tried]:
        (folder / "config.json").write_text(json.dumps(changed))
        planned = verdict(lambda: plan_model(Plan(id=1, load=load)))
        loaded = verdict(lambda: load_session(load, lambda *report: None).close())
        difference = {key: value for key, value in changed.items() if config.get(key) != value}
        assert planned == loaded, difference


def places(settings: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where ``settings`` and its sections hold something."""
    for key, value in settings.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, *place) for place in places(value))


def read_all(config: dict[str, Any]) -> None:
    """What is read before any library sees ``config``."""
    check_config(config, "config.json")
    check_supported(config)
    check_sizes(config)
    if unsupported_shape(config) is None:
        read_shape(config, ())
    unsupported_config(config)


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_any_setting_of_any_family_is_read_or_refused_in_a_sentence(family: str) -> None:
    text = tiny_config(family).to_json_string(use_diff=False)
    for *sections, key in places(json.loads(text)):
        for value in HOSTILE:
            config = json.loads(text)
            section = functools.reduce(dict.__getitem__, sections, config)
            if value is ABSENT:
                del section[key]
            else:
                section[key] = value
            verdict(lambda config=config: read_all(config))


def test_a_family_with_experts_of_which_no_layer_has_any_is_planned(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0, 1, 2])
    load = Load(id=1, model=str(folder), partitioning="cpu")
    assert verdict(lambda: plan_model(Plan(id=1, load=load))) == "taken"
    assert verdict(lambda: load_session(load, lambda *report: None).close()) == "taken"


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_a_plan_refuses_tensors_that_loading_refuses(tmp_path: Path, kept: int) -> None:
    """Tensors that are missing, of another shape or in numbers that nothing reads."""
    import numpy as np

    from engine.models.formats.safetensors_files import encode_header, read_header

    folder = write_tiny_model(tmp_path / "model", "qwen3")
    path = folder / "model.safetensors"
    entries = list(read_header(path).items())
    name = entries[kept][0]
    changes = {
        "float8": [(key, "F8_E4M3" if key == name else each.dtype, each.shape) for key, each in entries],
        "missing": [(key, each.dtype, each.shape) for key, each in entries if key != name],
        "longer": [
            (key, each.dtype, (each.shape[0] + 1, *each.shape[1:]) if key == name else each.shape)
            for key, each in entries
        ],
    }
    load = Load(id=1, model=str(folder), partitioning="cpu")
    for what, changed in changes.items():
        header = encode_header(changed, {})
        widths = {"F8_E4M3": 1, "F32": 4}
        size = sum(int(np.prod(shape)) * widths[dtype] for _, dtype, shape in changed)
        path.write_bytes(header + bytes(size))
        assert verdict(lambda: plan_model(Plan(id=1, load=load))) == "refused", what
        assert verdict(lambda: load_session(load, lambda *report: None).close()) == "refused", what


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("head_dim", 2**63, r"gives 9223372036854775808 for head_dim, a number beyond 64 bits"),
        ("rope_parameters", 3, r"gives 3 for rope_parameters, which must be a table of settings"),
        ("hidden_act", {}, r"gives \{\} for hidden_act, which must be one of gelu"),
        ("max_window_layers", "x", r"gives x for max_window_layers, which must be a whole number from 0"),
        ("sliding_window", 2**31, r"gives 2147483648 for sliding_window, which must be a whole number from 0 to 214"),
        ("eos_token_id", list(range(100_001)), r"has 100001 entries in eos_token_id, over 100000"),
        ("architectures", [[[]] * 3], r"for architectures, which must be a list of names"),
        ("layer_types", ["full_attention"], r"gives 1 entries for layer_types and 3 layers"),
        ("rms_norm_eps", math.nan, r"gives nan for rms_norm_eps, which must be a number over 0"),
        ("partial_rotary_factor", 2.0, r"partial_rotary_factor, which must be a number over 0, at most 1"),
        ("per_layer_config", {"1": {"head_dim": "x"}}, r"gives x for per_layer_config\.1\.head_dim, which must be a"),
        ("tie_word_embeddings", "no", r"gives no for tie_word_embeddings, which must be true or false"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(tmp_path: Path, key: str, value: object, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3, key: value}))
    with pytest.raises(ModelError, match=said):
        read_config(tmp_path)


def test_settings_within_one_another_end_somewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100 + "1" + "}" * 100)
    with pytest.raises(ModelError, match="more than 64 deep"):
        read_config(tmp_path)


def test_yarn_with_numbers_that_have_no_logarithm_is_a_sentence(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    load = Load(id=1, model=str(folder), runtime="native", partitioning="cpu")
    for wrong in ({"rope_theta": 1.0}, {"beta_fast": 1e308}):
        config["rope_parameters"] = {"rope_type": "yarn", **SCALED, **wrong}
        (folder / "config.json").write_text(json.dumps(config))
        assert verdict(lambda: load_session(load, lambda *report: None)) == "refused"


# --- code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_map": {"AutoModel": "x.Y"}},
        {"text_config": {"auto_map": {"AutoModel": "x.Y"}}},
        {"model_file": "evil.py"},
        {"kernel_config": {"RMSNorm": "attacker/evil:Layer"}},
        {"custom_generate": "attacker/evil"},
        {"attn_implementation": "attacker/evil-kernel"},
        {"_attn_implementation": "attacker/evil-kernel@main"},
        {"text_config": {"_attn_implementation": "attacker/evil-kernel"}},
        {"attn_implementation": {"text_config": "attacker/evil-kernel"}},
        {"experts_implementation": "attacker/evil"},
        {"use_kernels": "attacker/evil"},
    ],
)
def test_a_setting_that_names_code_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    with pytest.raises(ModelError, match="asks for code from"):
        read_config(tmp_path)


def test_implementations_are_left_out_at_every_depth() -> None:
    config = {
        "a": 1,
        "attn_implementation": "x",
        "text_config": {"_experts_implementation": "y", "b": {"use_kernels": 1}},
    }
    assert without_implementations(config) == {"a": 1, "text_config": {"b": {}}}


# --- sizes --------------------------------------------------------------------------------------------------------


def test_more_experts_than_any_model_has_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 10_000, "num_local_experts": 100_000, "quantization": {"bits": 4}}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    from engine.models.folders.weight_layout import layout_of

    with pytest.raises(ModelError, match="asks for 100000 experts in each of 10000 layers"):
        layout_of(folder)


def test_a_long_list_of_dense_layers_is_looked_up_at_once(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2_moe")
    config = json.loads((folder / "config.json").read_text())
    config["mlp_only_layers"] = [1, *range(100, 100 + 90_000)]
    (folder / "config.json").write_text(json.dumps(config))
    experts = open_model(folder).experts
    assert experts is not None and experts.layers == (0, 2)


# --- cancelling ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_a_load_is_cancelled_in_each_of_its_phases(tmp_path: Path, runtime: Any) -> None:
    from engine.errors import Cancelled

    folder = write_tiny_model(tmp_path / "model", "mixtral", shards=True)
    load = Load(id=1, model=str(folder), runtime=runtime, partitioning="cpu")
    seen: list[str] = []
    load_session(load, lambda stage, *rest: seen.append(stage)).close()
    assert {"opening the model", "reading the tokenizer", "reading the trunk"} <= set(seen)
    released: list[bool] = []
    for number in range(len(seen)):
        count = 0

        def stop_there(stage: str, *rest: Any, number: int = number) -> None:
            nonlocal count
            count += 1
            if count > number:
                raise Cancelled(f"Stopped while {stage}.")

        with pytest.raises(Cancelled, match=seen[number]):
            load_session(load, stop_there, release=lambda: released.append(True))
