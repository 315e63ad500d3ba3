"""GGUF files of DeepSeek's kind, whose attention keeps latents: DeepSeek V2 to V3.2, GLM-4.7-Flash, GLM-5.

Newer files have the projection of latents in two tensors, of keys and of values, one matrix for each head; that of the
keys is transposed, so that queries can be multiplied by it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.architectures.gguf_parts import grouped_experts
from engine.models.formats.gguf_file import GgufFile

_SOFTMAX, _SIGMOID = 1, 2
_GLM_VOCABULARY = 154880
"""Tokens of GLM-4.7-Flash; its files do not say that its router is one of sigmoids."""
_GLM_SPLITS = ("glm4", "chatglm-bpe")
FULL, SHARED = "full", "shared"
"""Kinds of layers with indexers (``indexer_types``): with one of their own, or with that of a layer before them."""


def scores_by_sigmoid(metadata: Metadata) -> bool:
    """Whether the router is one of sigmoids, not a softmax. Raises ModelError if it is of an unknown kind."""
    tokens = metadata.file.metadata.get("tokenizer.ggml.tokens")
    stated = metadata.get("expert_gating_func", 0)
    if stated == 0:
        stated = _SIGMOID if isinstance(tokens, list) and len(tokens) == _GLM_VOCABULARY else _SOFTMAX
    if stated not in (_SOFTMAX, _SIGMOID):
        path = metadata.file.path
        raise ModelError(f"{path} routes by the function {stated}, which is not supported; use another model.")
    return bool(stated == _SIGMOID)


def splits_as_glm(metadata: Metadata) -> bool:
    """Whether texts are split into tokens as GLM does it."""
    return metadata.file.metadata.get("tokenizer.ggml.pre") in _GLM_SPLITS


def settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that these families have in common. Raises ModelError for a number that is missing
    or impossible."""
    heads, rotated = metadata.number("attention.head_count"), metadata.rotated()
    split = metadata.has("attention.key_length_mla")
    keys = metadata.number("attention.key_length_mla" if split else "attention.key_length")
    values = metadata.number("attention.value_length_mla" if split else "attention.value_length")
    layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "q_lora_rank": metadata.number("attention.q_lora_rank", 0) or None,
        **grouped_experts(metadata, normalised=False),
    }


def indexed_settings(metadata: Metadata) -> dict[str, Any]:
    """:func:`settings` of families whose attention has indexers. Raises ModelError as that does, and if the router is
    none of sigmoids."""
    stated = metadata.get("expert_gating_func", _SIGMOID)
    if stated not in (0, _SIGMOID):
        path = metadata.file.path
        raise ModelError(f"{path} routes by the function {stated}, which is not supported; use another model.")
    return settings(metadata) | {
        "index_n_heads": metadata.number("attention.indexer.head_count"),
        "index_head_dim": metadata.number("attention.indexer.key_length"),
        "index_topk": metadata.number("attention.indexer.top_k"),
    }


def indexer_types(metadata: Metadata, layers: int) -> list[str] | None:
    """The kinds of the first ``layers`` layers; None if the file does not say them. Raises ModelError if it says
    something impossible."""
    kinds = metadata.get("attention.indexer.types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (0, 1) for kind in kinds):
        raise ModelError(
            f"{metadata.file.path} is damaged: its attention.indexer.types is {shown(kinds)}, not 0 or 1 for each of "
            f"{layers} layers; download it again."
        )
    return [FULL if kind else SHARED for kind in kinds[:layers]]


def yarn(metadata: Metadata) -> dict[str, Any]:
    """What yarn multiplies attention by: files hold a tenth of it."""
    factor = metadata.short_real("rope.scaling.yarn_log_multiplier", 0.0)
    both = round(10 * factor, 6)
    return {"mscale": both, "mscale_all_dim": both} if both else {}


def attention_shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, there: str) -> Iterator[NamedTensor]:
    """The tensors of a layer's attention over latents, the layer's norm left out."""
    hidden, heads, latents = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, values = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    prefix = there + "self_attn."
    for source, name, shape in (
        *_queries(config),
        ("attn_kv_a_mqa", "kv_a_proj_with_mqa", (latents + rotated, hidden)),
        ("attn_kv_a_norm", "kv_a_layernorm", (latents,)),
        ("attn_output", "o_proj", (hidden, heads * values)),
    ):
        yield NamedTensor.whole(f"{here}{source}.weight", f"{prefix}{name}.weight", shape)
    if f"{here}attn_kv_b.weight" in gguf.tensors:
        whole = (heads * (plain + values), latents)
        yield NamedTensor.whole(f"{here}attn_kv_b.weight", f"{prefix}kv_b_proj.weight", whole)
        return
    for source, name, each in (("attn_k_b", "k_b_proj", (latents, plain)), ("attn_v_b", "v_b_proj", (values, latents))):
        yield NamedTensor.whole(f"{here}{source}.weight", f"{prefix}{name}.weight", (heads, *each))


def indexed_shapes(
    with_indexers: Callable[[Mapping[str, Any], int], list[int]],
) -> Callable[[GgufFile, Mapping[str, Any], str, str], Iterator[NamedTensor]]:
    """:func:`attention_shapes`, with the tensors of indexers in the layers that have one."""

    def shapes(gguf: GgufFile, config: Mapping[str, Any], here: str, prefix: str) -> Iterator[NamedTensor]:
        yield from attention_shapes(gguf, config, here, prefix)
        if int(here.split(".")[1]) not in with_indexers(config, config["num_hidden_layers"]):
            return
        width, heads, hidden = config["index_head_dim"], config["index_n_heads"], config["hidden_size"]
        for source, name, shape in (
            ("attn_q_b.weight", "wq_b.weight", (heads * width, config["q_lora_rank"])),
            ("attn_k.weight", "wk.weight", (width, hidden)),
            ("k_norm.weight", "k_norm.weight", (width,)),
            ("k_norm.bias", "k_norm.bias", (width,)),
            ("proj.weight", "weights_proj.weight", (heads, hidden)),
        ):
            yield NamedTensor.whole(f"{here}indexer.{source}", f"{prefix}self_attn.indexer.{name}", shape)

    return shapes


def _queries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    hidden, rank = config["hidden_size"], config["q_lora_rank"]
    rows = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if rank is None:
        yield "attn_q", "q_proj", (rows, hidden)
        return
    yield "attn_q_a", "q_a_proj", (rank, hidden)
    yield "attn_q_a_norm", "q_a_layernorm", (rank,)
    yield "attn_q_b", "q_b_proj", (rows, rank)
