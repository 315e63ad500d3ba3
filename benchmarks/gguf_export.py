"""Writes a Mixtral- or Qwen3-MoE-shaped Hugging Face folder as GGUF with the same bfloat16 weights, for llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]


@dataclass(frozen=True)
class _Entry:
    """One tensor of the GGUF: its shape, whether it is stored in float32, and how to make its bfloat16 words."""

    name: str
    shape: tuple[int, ...]
    float32: bool
    words: Callable[[], Words]


def half_rotation(weight: Words, heads: int) -> Words:
    """Rows of a query or key projection, reordered from Hugging Face's rotary layout (halves) to llama.cpp's (pairs).

    ``weight`` is [heads * head_dimension, hidden].
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


class _Folder:
    """The tensors of a safetensors folder as bfloat16 words, read when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._where: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(path, framework="pt")
            self._where.update(dict.fromkeys(opened.keys(), opened))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def words(self, name: str) -> Words:
        import torch

        tensor = self._where[name].get_tensor(name)
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}; only bfloat16 models are compared")
        words: Words = tensor.contiguous().view(torch.uint16).numpy()
        return words

    def __contains__(self, name: str) -> bool:
        return name in self._where


@dataclass(frozen=True)
class _Family:
    """How a family's folder and its GGUF call things."""

    architecture: str
    """llama.cpp's name of the family."""
    rotary_pairs: bool
    """Whether llama.cpp rotates neighbours (query and key rows are reordered then) rather than halves."""
    moe: str
    """The MoE block in a layer; below it the router is ``gate``, and the experts have ``parts``."""
    parts: tuple[str, str, str]
    """Gate, up and down of an expert."""
    experts_key: str
    ffn_key: str
    head_norms: bool = False
    """Whether each head's query and key are normed."""


_FAMILIES = {
    "mixtral": _Family("llama", True, "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size"),
    "qwen3_moe": _Family(
        "qwen3moe", False, "mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size", True
    ),
}


def _layer_entries(folder: _Folder, family: _Family, layer: int) -> list[_Entry]:
    config = folder.config
    source, target = f"model.layers.{layer}", f"blk.{layer}"
    moe, attention = f"{source}.{family.moe}", f"{source}.self_attn"
    experts = config[family.experts_key]

    def plain(name: str, theirs: str, float32: bool = False) -> _Entry:
        return _Entry(f"{target}.{name}.weight", folder.shape(theirs), float32, lambda: folder.words(theirs))

    def rotated(name: str, theirs: str, heads: int) -> _Entry:
        def words() -> Words:
            return half_rotation(folder.words(theirs), heads)

        return _Entry(f"{target}.{name}.weight", folder.shape(theirs), False, words if family.rotary_pairs else
                      lambda: folder.words(theirs))  # fmt: skip

    def stacked(name: str, part: str) -> _Entry:
        names = [f"{moe}.experts.{expert}.{part}.weight" for expert in range(experts)]

        def words() -> Words:
            return np.stack([folder.words(theirs) for theirs in names])

        return _Entry(f"{target}.{name}.weight", (experts, *folder.shape(names[0])), False, words)

    gate, up, down = family.parts
    entries = [
        plain("attn_norm", f"{source}.input_layernorm.weight", float32=True),
        plain("ffn_norm", f"{source}.post_attention_layernorm.weight", float32=True),
        rotated("attn_q", f"{attention}.q_proj.weight", config["num_attention_heads"]),
        rotated("attn_k", f"{attention}.k_proj.weight", config["num_key_value_heads"]),
        plain("attn_v", f"{attention}.v_proj.weight"),
        plain("attn_output", f"{attention}.o_proj.weight"),
        plain("ffn_gate_inp", f"{moe}.gate.weight", float32=True),
        stacked("ffn_gate_exps", gate),
        stacked("ffn_down_exps", down),
        stacked("ffn_up_exps", up),
    ]
    if family.head_norms:
        entries.append(plain("attn_q_norm", f"{attention}.q_norm.weight", float32=True))
        entries.append(plain("attn_k_norm", f"{attention}.k_norm.weight", float32=True))
    return entries


def _entries(folder: _Folder, family: _Family) -> list[_Entry]:
    def plain(name: str, theirs: str, float32: bool = False) -> _Entry:
        return _Entry(name, folder.shape(theirs), float32, lambda: folder.words(theirs))

    entries = [plain("token_embd.weight", "model.embed_tokens.weight")]
    entries.append(plain("output_norm.weight", "model.norm.weight", float32=True))
    if "lm_head.weight" in folder and not folder.config.get("tie_word_embeddings"):
        entries.append(plain("output.weight", "lm_head.weight"))
    for layer in range(folder.config["num_hidden_layers"]):
        entries += _layer_entries(folder, family, layer)
    return entries


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], family: _Family) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = config.get("rope_parameters") or {}
    theta = rotary.get("rope_theta") or config.get("rope_theta") or 10000.0
    if rotary.get("rope_type", "default") != "default":
        raise ValueError(f"rotary scaling {rotary['rope_type']} is not written to GGUF here")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("layers without experts are not written to GGUF here")
    if not config.get("norm_topk_prob", True):
        raise ValueError("routing weights that are not normalised are not written to GGUF here")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if config[family.ffn_key] != config["intermediate_size"]:
        writer.add_expert_feed_forward_length(config[family.ffn_key])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config[family.experts_key])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    # Prompts are token ids: llama.cpp needs no vocabulary for that.
    writer.add_tokenizer_model("no_vocab")


def write_gguf(folder: Path, destination: Path) -> Path:
    """Write the model in ``folder`` to ``destination``, unless that is there and newer.

    Memory: one stacked tensor (all experts of a layer, one matrix each). Raises ValueError if the model is of another
    family than those above, has something this does not write, or is not bfloat16.
    """
    newest = max(path.stat().st_mtime for path in (*folder.glob("*.safetensors"), folder / "config.json"))
    if destination.is_file() and destination.stat().st_mtime > newest:
        return destination
    source = _Folder(folder)
    family = _FAMILIES.get(source.config["model_type"])
    if family is None:
        raise ValueError(f"{folder} is {source.config['model_type']}, not {' or '.join(_FAMILIES)}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    unfinished = destination.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, family.architecture)
    _describe(writer, source.config, family)
    entries = _entries(source, family)
    for entry in entries:
        count = int(np.prod(entry.shape))
        if entry.float32:
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), 4 * count)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.uint16), 2 * count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        words = entry.words()
        if entry.float32:
            writer.write_tensor_data((words.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.write_tensor_data(words)
    writer.close()
    unfinished.rename(destination)
    return destination
