"""The table of families: names, shapes and views, without a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.models.architectures.families import (
    FAMILIES,
    SUPPORTED,
    ExpertLayers,
    as_shaped,
    check_supported,
    expert_shape,
    layer_count,
    layer_of,
    match_tensor,
    part_shape,
    part_views,
    stored_shape,
)

SHAPE = ExpertLayers(hidden=6, ffn=5, count=3, layers=(0, 2))
MOE = [family for family in FAMILIES.values() if family.moe is not None]
LAYOUTS = [(family.model_type, index) for family in MOE for index in range(len(family.layouts))]


@pytest.mark.parametrize(
    ("family", "name", "layer", "expert", "parts"),
    [
        ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w1.weight", 3, 7, ("gate",)),
        ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w3.weight", 3, 7, ("up",)),
        ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w2.weight", 3, 7, ("down",)),
        ("mixtral", "model.layers.3.mlp.experts.gate_up_proj", 3, None, ("gate", "up")),
        ("deepseek_v3", "model.layers.60.mlp.experts.255.down_proj.weight", 60, 255, ("down",)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", 0, None, ("gate_bias", "up_bias")),
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight", 1, None, ("gate", "up")),
        ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight", 1, None, ("down",)),
        ("dbrx", "transformer.blocks.39.ffn.experts.mlp.v1", 39, None, ("up",)),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj", 1, None, ("down",)),
        ("llama4_text", "model.layers.1.feed_forward.experts.gate_up_proj", 1, None, ("gate", "up")),
    ],
)
def test_expert_tensors_are_recognised(family, name, layer, expert, parts):
    match = match_tensor(FAMILIES[family], name)
    assert match is not None
    assert (match.layer, match.expert, match.tensor.parts) == (layer, expert, parts)
    assert layer_of(FAMILIES[family], name) == layer


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.3.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.3.block_sparse_moe.experts.07.w1.weight"),
        ("mixtral", "model.layers.³.block_sparse_moe.experts.7.w1.weight"),
        ("mixtral", "xmodel.layers.3.block_sparse_moe.experts.7.w1.weight"),
        ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w1.weight.scale"),
        ("qwen2_moe", "model.layers.3.mlp.shared_expert.gate_proj.weight"),
        ("deepseek_v3", "model.layers.3.mlp.shared_experts.gate_proj.weight"),
        ("glm4_moe", "model.layers.0.mlp.gate_proj.weight"),
        ("llama4_text", "model.layers.1.feed_forward.shared_expert.gate_proj.weight"),
        ("llama", "model.layers.0.mlp.gate_proj.weight"),
        ("llama", "model.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_everything_else_is_trunk(family, name):
    assert match_tensor(FAMILIES[family], name) is None


@given(st.sampled_from(SUPPORTED), st.text(max_size=80))
def test_any_name_is_sorted_without_failing(family, name):
    match = match_tensor(FAMILIES[family], name)
    layer = layer_of(FAMILIES[family], name)
    assert match is None or match.layer == layer


@pytest.mark.parametrize(("name", "index"), LAYOUTS)
def test_views_have_the_canonical_shapes_and_cover_every_word_once(name, index):
    for tensor in FAMILIES[name].layouts[index]:
        shape = stored_shape(tensor, SHAPE)
        words = np.arange(np.prod(shape)).reshape(shape)
        experts = 1 if tensor.stacking == "separate" else SHAPE.count
        seen: list[int] = []
        for expert in range(experts):
            views = part_views(tensor, words, expert, SHAPE)
            assert [part for part, _ in views] == list(tensor.parts)
            for part, view in views:
                assert view.shape == part_shape(part, SHAPE)
                assert np.shares_memory(view, words)
                seen += view.ravel().tolist()
        assert sorted(seen) == list(range(words.size))


def test_views_put_interleaved_and_transposed_words_where_they_belong():
    gate_up = next(t for t in FAMILIES["gpt_oss"].layouts[0] if t.parts == ("gate", "up"))
    words = np.zeros(stored_shape(gate_up, SHAPE), dtype=int)
    expert, inputs, output = 2, 4, 3
    words[expert, inputs, 2 * output] = 11
    words[expert, inputs, 2 * output + 1] = 22
    views = dict(part_views(gate_up, words, expert, SHAPE))
    assert views["gate"][output, inputs] == 11
    assert views["up"][output, inputs] == 22
    down = next(t for t in FAMILIES["dbrx"].layouts[0] if t.parts == ("down",))
    rows = np.zeros(stored_shape(down, SHAPE), dtype=int)
    rows[expert * SHAPE.ffn + 1, 5] = 33
    assert dict(part_views(down, rows, expert, SHAPE))["down"][5, 1] == 33


def test_a_shape_says_whether_experts_are_transposed():
    family = FAMILIES["qwen3_vl_moe_text"]
    for name, plain, turned in (("gate_up_proj", (3, 10, 6), (3, 6, 10)), ("down_proj", (3, 6, 5), (3, 5, 6))):
        match = match_tensor(family, f"model.layers.0.mlp.experts.{name}")
        assert match is not None
        assert [as_shaped(family, match.tensor, SHAPE, each).transposed for each in (plain, turned)] == [False, True]
        assert as_shaped(family, match.tensor, SHAPE, (3, 7, 7)) == match.tensor


def test_an_unsupported_family_is_named_with_those_that_are():
    with pytest.raises(ModelError, match="no_such_family") as caught:
        check_supported({"model_type": "no_such_family"})
    for name in SUPPORTED:
        assert name in str(caught.value)


@pytest.mark.parametrize("value", [None, 7, "", ["llama"]])
def test_a_missing_family_is_said(value):
    with pytest.raises(ModelError, match="model_type"):
        check_supported({"model_type": value})


def test_a_family_name_cannot_reach_the_terminal_raw():
    with pytest.raises(ModelError) as caught:
        check_supported({"model_type": "\x1b[2Jx" + "y" * 1000})
    assert "\x1b" not in str(caught.value)
    assert "y" * 100 not in str(caught.value)


def test_layers_with_experts_follow_the_configuration():
    qwen = {
        "model_type": "qwen2_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "hidden_size": 8, "moe_intermediate_size": 4, "num_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    assert expert_shape(qwen, FAMILIES["qwen2_moe"]) == ExpertLayers(8, 4, 2, (1, 5))
    deepseek = {
        "num_hidden_layers": 4, "first_k_dense_replace": 3, "hidden_size": 8, "moe_intermediate_size": 4,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    assert expert_shape(deepseek, FAMILIES["deepseek_v3"]) == ExpertLayers(8, 4, 2, (3,))
    llama4 = {
        "model_type": "llama4_text", "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "hidden_size": 8,
        "intermediate_size": 4, "num_local_experts": 2,
    }  # fmt: skip
    assert expert_shape(llama4, FAMILIES["llama4_text"]) == ExpertLayers(8, 4, 2, (1, 3))
    hunyuan = {
        "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 4, "num_experts": 2, "moe_topk": [1, 1],
    }  # fmt: skip
    assert expert_shape(hunyuan, FAMILIES["hunyuan_v1_moe"]) == ExpertLayers(8, 4, 2, (0, 1))
    with pytest.raises(ModelError, match="does not say moe_topk"):
        expert_shape(hunyuan | {"moe_topk": [1, 2]}, FAMILIES["hunyuan_v1_moe"])
    dbrx = {"n_layers": 2, "d_model": 8, "ffn_config": {"ffn_hidden_size": 4, "moe_num_experts": 2, "moe_top_k": 1}}
    assert expert_shape(dbrx, FAMILIES["dbrx"]) == ExpertLayers(8, 4, 2, (0, 1))
    assert expert_shape({"num_hidden_layers": 2}, FAMILIES["llama"]) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.sampled_from(
    [
        "num_hidden_layers", "n_layers", "hidden_size", "d_model", "intermediate_size", "moe_intermediate_size",
        "num_experts", "num_local_experts", "n_routed_experts", "decoder_sparse_step", "mlp_only_layers",
        "first_k_dense_replace", "moe_layers", "interleave_moe_layer_step", "ffn_config", "text_config",
    ]
)  # fmt: skip


@given(st.sampled_from(SUPPORTED), st.dictionaries(SETTINGS, JSON | st.integers(1, 5)))
def test_any_configuration_gives_a_shape_or_one_sentence(name, config):
    family = FAMILIES[name]
    try:
        shape = expert_shape(config, family)
        layers = layer_count(config, family)
    except ModelError as error:
        assert "config.json" in str(error)
    else:
        assert layers > 0
        assert family.has_models(with_experts=shape is not None)


def test_importing_the_models_package_stays_light():
    code = (
        "import sys, json, engine.models.folders.opening, engine.models.folders.prepare; "
        "heavy = ('torch', 'transformers', 'mlx', 'huggingface_hub', 'safetensors'); "
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
