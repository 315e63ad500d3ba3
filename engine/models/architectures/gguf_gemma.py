"""GGUF files of Gemma 4 with experts (gemma4): layers with a sliding window and with full attention have heads of
different sizes, and every layer has a dense feed-forward network beside its experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor, projections
from engine.models.formats.gguf_file import GgufFile

_UNTURNED = 1e20
"""Divisor of a rotary frequency from which on it stands for a value that is not rotated."""


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is missing or impossible,
    and for what models without experts have: keys shared by layers, and embeddings of every layer."""
    gguf, layers = metadata.file, metadata.number("block_count")
    for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        if metadata.number(key, 0):
            raise ModelError(
                f"{gguf.path} has a {key} of {metadata.number(key)}, which does not run; use Gemma-4-26B-A4B."
            )
    slides = metadata.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) < layers or slides[layers - 1]:
        raise ModelError(
            f"{gguf.path} is damaged: its sliding_window_pattern is {shown(slides)}, not one entry for each of "
            f"{layers} layers, the last without a window; download it again."
        )
    slides = slides[:layers]
    wide = metadata.number("attention.key_length")
    heads = metadata.get("attention.head_count_kv")
    counts = heads if isinstance(heads, list) else [heads] * layers
    if len(counts) < layers or not all(type(count) is int and count > 0 for count in counts):
        raise ModelError(f"{gguf.path} is damaged: its head_count_kv is {shown(heads)}; download it again.")
    full = slides.index(False)
    narrow = slides.index(True) if True in slides else full
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": metadata.number("attention.sliding_window"),
        "head_dim": metadata.number("attention.key_length_swa"),
        "global_head_dim": wide,
        "num_key_value_heads": counts[narrow],
        "num_global_key_value_heads": counts[full],
        # Files leave the values of such layers out, as they are the keys.
        "attention_k_eq_v": not {f"blk.{full}.attn_v.weight", f"blk.{full}.attn_qkv.weight"} & gguf.tensors.keys(),
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": True,
        "use_double_wide_mlp": False,
        "num_experts": metadata.number("expert_count"),
        "top_k_experts": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "final_logit_softcapping": metadata.short_real("final_logit_softcapping", 30.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_part(gguf, wide),
                "rope_theta": metadata.real("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _rotated_part(gguf: GgufFile, width: int) -> float:
    """Which part of a wide head is rotated: the other frequencies are divided by more than any number. Raises
    ModelError if a file divides them by anything else."""
    if "rope_freqs.weight" not in gguf.tensors:
        return 1.0
    divisors = gguf.floats("rope_freqs.weight").reshape(-1)
    turned = int(np.count_nonzero(divisors < _UNTURNED))
    if divisors.shape != (width // 2,) or not turned or not (divisors[:turned] == 1.0).all():
        raise ModelError(f"{gguf.path} scales its positions in a way that is not Gemma 4's; use another file.")
    return turned / divisors.size


def layer_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
    """The tensors of a layer but for its experts, its router and the norms that layers of all kinds have."""
    layer = int(here.split(".")[1])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kind = "" if config["layer_types"][layer] == "sliding_attention" else "global_"
    size, groups = config[f"{kind}head_dim"], config[f"num_{kind}key_value_heads"]
    queries, keys = config["num_attention_heads"] * size, groups * size
    rows = {"q": queries, "k": keys} | ({} if kind and config["attention_k_eq_v"] else {"v": keys})
    each = ((f"{here}attn_{short}.weight", f"{there}self_attn.{short}_proj.weight", rows[short]) for short in rows)
    yield from projections(gguf, here + "attn_qkv.weight", each, (hidden,))
    found: list[tuple[str, str, tuple[int, ...]]] = [
        ("attn_output.weight", "self_attn.o_proj.weight", (hidden, queries)),
        ("attn_q_norm.weight", "self_attn.q_norm.weight", (size,)),
        ("attn_k_norm.weight", "self_attn.k_norm.weight", (size,)),
        ("ffn_gate.weight", "mlp.gate_proj.weight", (inner, hidden)),
        ("ffn_up.weight", "mlp.up_proj.weight", (inner, hidden)),
        ("ffn_down.weight", "mlp.down_proj.weight", (hidden, inner)),
        ("ffn_norm.weight", "pre_feedforward_layernorm.weight", (hidden,)),
        ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", (hidden,)),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", (hidden,)),
        ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", (hidden,)),
        ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", (hidden,)),
        ("ffn_gate_inp.scale", "router.scale", (hidden,)),
        ("ffn_down_exps.scale", "router.per_expert_scale", (config["num_experts"],)),
        ("layer_output_scale.weight", "layer_scalar", (1,)),
    ]
    for source, name, shape in found:
        yield NamedTensor.whole(here + source, there + name, shape)
