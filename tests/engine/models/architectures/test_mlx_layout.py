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
