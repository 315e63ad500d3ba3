"""Parts that the records of several families share: layouts of experts, routers, names in checkpoints of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.architectures.config_values import number_of, whole_number
from engine.models.architectures.record import PARTS, Config, ExpertTensor, Layout, Part, RouterRecord

LAYER = "model.layers.{layer}."
MLP_EXPERTS = LAYER + "mlp.experts"


def per_expert(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Layout:
    """A tensor for each matrix of each expert."""
    names: tuple[tuple[Part, str], ...] = (("gate", gate), ("up", up), ("down", down))
    return tuple(ExpertTensor(f"{prefix}.{{expert}}.{name}.weight", (part,)) for part, name in names)


def fused(prefix: str, gate_up: str = "gate_up_proj", down: str = "down_proj", transposed: bool = False) -> Layout:
    """Two tensors for all experts of a layer, gate and up in one."""
    return (
        ExpertTensor(f"{prefix}{gate_up}", ("gate", "up"), "stacked", transposed),
        ExpertTensor(f"{prefix}{down}", ("down",), "stacked", transposed),
    )


def prepared(prefix: str) -> Layout:
    """The layout of prepared folders of a family whose own tensors are transposed or interleaved."""
    return fused(prefix, "gate_up_proj.weight", "down_proj.weight")


def of_mlx(prefix: str) -> Layout:
    """Three tensors for all experts of a layer, as mlx-lm writes them."""
    return tuple(ExpertTensor(f"{prefix}.{part}_proj.weight", (part,), "stacked") for part in PARTS[:3])


def biases(template: str) -> Layout:
    """Biases of all experts of a layer in a tensor for each matrix, which stands for ``{}`` in ``template``."""
    return tuple(
        ExpertTensor(template.replace("{}", part.removesuffix("_bias")), (part,), "stacked") for part in PARTS[3:]
    )


GGUF_MATRICES = tuple(ExpertTensor(f"{LAYER}ffn_{part}_exps.weight", (part,), "stacked") for part in PARTS[:3])
GGUF = (
    GGUF_MATRICES,
    fused(LAYER, "ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
)
"""Layouts of GGUF files (:mod:`engine.models.architectures.gguf_tensors`); old ones have the experts by name."""
FUSED_MLP = fused(MLP_EXPERTS + ".")
"""Layout as transformers holds most families in memory, and as some tools write them."""
BY_NAME = per_expert(MLP_EXPERTS)
QWEN = (BY_NAME, FUSED_MLP, of_mlx(LAYER + "mlp.switch_mlp"), *GGUF)
MIXTRAL = (
    per_expert(LAYER + "block_sparse_moe.experts", "w1", "w3", "w2"),
    per_expert(MLP_EXPERTS, "w1", "w3", "w2"),
    FUSED_MLP,
    BY_NAME,
    of_mlx(LAYER + "block_sparse_moe.switch_mlp"),
    *GGUF,
)

GROUPED = RouterRecord(
    ("mlp.gate.weight",),
    scoring="sigmoid",
    normalise="norm_topk_prob",
    added_to_sum=1e-20,
    correction="mlp.gate.e_score_correction_bias",
    groups=2,
    scale=number_of("routed_scaling_factor"),
)
"""Routers as those of DeepSeek V3."""


def shared_experts(setting: str, least: int = 0) -> Callable[[Config], int]:
    """Width of so many shared experts of a routed one's size as ``setting`` says, at least ``least``."""
    return lambda config: whole_number(config, "moe_intermediate_size") * whole_number(config, setting, minimum=least)


LATENTS = ((".self_attn.embed_q.", ".self_attn.k_b_proj."), (".self_attn.unembed_out.", ".self_attn.v_b_proj."))
"""Names in checkpoints of mlx-lm of the two halves of the projection of latents, and those in GGUF files."""
