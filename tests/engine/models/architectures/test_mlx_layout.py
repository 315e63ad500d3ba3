"""What mlx-lm stores otherwise than transformers, by names and shapes alone."""

from __future__ import annotations

import pytest

from engine.models.architectures.composite import language_name
from engine.models.architectures.mlx_layout import as_transformers
from engine.models.formats.safetensors_files import TensorEntry


def tensor(*shape: int) -> TensorEntry:
    return TensorEntry("F32", shape, 0, 4)


@pytest.mark.parametrize(
    ("family", "stored", "name"),
    [
        ("glm4_moe_lite", "model.layers.0.self_attn.embed_q.weight", "model.layers.0.self_attn.k_b_proj.weight"),
        ("deepseek_v3", "model.layers.0.self_attn.unembed_out.weight", "model.layers.0.self_attn.v_b_proj.weight"),
        ("lfm2_moe", "model.layers.0.feed_forward.gate_proj.weight", "model.layers.0.feed_forward.w1.weight"),
        ("lfm2_moe", "model.layers.0.feed_forward.down_proj.weight", "model.layers.0.feed_forward.w2.weight"),
        ("lfm2_moe", "model.layers.0.feed_forward.w3.weight", "model.layers.0.feed_forward.w3.weight"),
        ("lfm2_moe", "model.layers.2.feed_forward.gate.weight", "model.layers.2.feed_forward.gate.weight"),
        ("llama", "model.layers.0.self_attn.embed_q.weight", "model.layers.0.self_attn.embed_q.weight"),
        ("step3p5", "model.layers.3.moe.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("step3p5", "model.layers.3.moe.router_bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("step3p5", "model.layers.3.share_expert.up_proj.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"),
        ("step3p5", "model.layers.3.moe.up_proj.weight", "model.layers.3.moe.up_proj.weight"),
    ],
)
def test_names(family: str, stored: str, name: str) -> None:
    headers, changes = as_transformers({"a": {stored: tensor(4, 4)}}, {"model_type": family})
    assert (list(headers["a"]), changes) == ([name], {})


@pytest.mark.parametrize(
    "stored",
    [
        *("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"),
        *("layers.3.attn.wq_a.weight", "layers.3.attn.wq_b.weight", "layers.3.attn.wkv.weight"),
        *("layers.3.attn.wo_a.weight", "layers.3.attn.wo_b.weight", "layers.3.attn.q_norm.weight"),
        *("layers.3.attn.kv_norm.weight", "layers.3.attn.attn_sink", "layers.3.attn_norm.weight"),
        *("layers.3.attn.compressor.wkv.weight", "layers.3.attn.compressor.wgate.weight"),
        *("layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.ape"),
        *("layers.3.attn.indexer.compressor.wkv.weight", "layers.3.attn.indexer.compressor.ape"),
        *("layers.3.attn.indexer.compressor.norm.weight", "layers.3.attn.indexer.wq_b.weight"),
        *("layers.3.attn.indexer.weights_proj.weight", "layers.3.ffn_norm.weight", "layers.3.ffn.gate.bias"),
        *("layers.3.hc_attn_fn", "layers.3.hc_ffn_base", "layers.3.ffn.gate.weight", "layers.1.ffn.gate.tid2eid"),
        *("layers.3.ffn.shared_experts.w1.weight", "layers.3.ffn.shared_experts.w2.weight"),
    ],
)
def test_published_names_of_deepseek_v4_become_those_of_transformers(stored: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    from tests.support.tiny_families import tiny_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    names = model.state_dict()
    expected, _ = rename_source_key(stored, rules, [], model.base_model_prefix, names)
    headers, _ = as_transformers({"a": {stored: tensor(4, 4)}}, {"model_type": "deepseek_v4"})
    assert list(headers["a"]) == [expected] and expected in names


def test_convolutions_turn_and_norms_lose_one() -> None:
    norms = ("model.norm.weight", "model.layers.3.self_attn.q_norm.weight", "model.layers.0.input_layernorm.weight")
    kernel = "model.layers.0.linear_attn.conv1d.weight"
    others = {name: tensor(8) for name in (*norms, "model.layers.0.linear_attn.norm.weight")}
    headers, changes = as_transformers({"a": {kernel: tensor(24, 4, 1)}, "b": others}, {"model_type": "qwen3_next"})
    assert headers["a"][kernel].shape == (24, 1, 4)
    assert {name: change.subtracted for name, change in changes.items()} == dict.fromkeys(norms, 1.0)
    as_saved, changes = as_transformers({"a": {kernel: tensor(24, 1, 4)}, "b": others}, {"model_type": "qwen3_next"})
    assert as_saved["a"][kernel].shape == (24, 1, 4) and changes == {}


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        ("mlp.gate.gate.weight", "mlp.gate.weight"),
        ("mlp.gate.router_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.share_expert.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ],
)
def test_norms_of_step_lose_one_where_mlx_lm_wrote_them(mark: str, name: str) -> None:
    norms = {"model.norm.weight": tensor(8), "model.layers.3.self_attn.k_norm.weight": tensor(8)}
    stored = {"a": {f"model.layers.3.{mark}": tensor(4, 4)}, "b": norms}
    headers, changes = as_transformers(stored, {"model_type": "step3p5"})
    assert list(headers["a"]) == [f"model.layers.3.{name}"]
    assert {each: change.subtracted for each, change in changes.items()} == dict.fromkeys(norms, 1.0)


def test_a_short_convolution_turns_alone() -> None:
    kernel = "model.layers.0.conv.conv.weight"
    headers, changes = as_transformers({"a": {kernel: tensor(8, 3, 1)}}, {"model_type": "lfm2_moe"})
    assert headers["a"][kernel].shape == (8, 1, 3) and changes == {}


@pytest.mark.parametrize(
    ("whole", "alone"),
    [
        ("language_model.model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight", None),
        ("vision_tower.blocks.0.attn.qkv.weight", None),
        ("vit_large_projector.weight", None),
        ("model.embed_audio.embedding_projection.weight", None),
    ],
)
def test_names_in_a_whole(whole: str, alone: str | None) -> None:
    assert language_name(whole) == alone
