"""Writes GGUF files of tiny models the way llama.cpp's converter lays them out, and leaves them damaged on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

TOKENS = [chr(code) for code in range(33, 127)] + [f"{a}{b}" for a in "abcdefgh" for b in "aeiou"] + ["Ġ", "Ċ"]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a Hugging Face tensor in a GGUF."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def rotated(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As llama.cpp stores q and k of the llama architecture: the two halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_tiny_gguf(
    path: Path,
    source: Path,
    architecture: str,
    *,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, NDArray[np.float32]] | None = None,
    leave_out: str = "",
    split: str = "gpt-2",
) -> Path:
    """The dense model in the Hugging Face folder ``source`` as a GGUF. ``extra``: metadata, architecture put before."""
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer, config["vocab_size"], split)
    tensors = {gguf_name(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    for name, tensor in {**tensors, **(extra_tensors or {})}.items():
        if name == leave_out:
            continue
        values = tensor.astype(np.float32)
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            values = rotated(values, heads if "attn_q" in name else config["num_key_value_heads"])
        kind = quantised if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter, size: int, split: str = "gpt-2") -> None:
    tokens = ["<|endoftext|>", "<s>", "</s>", *TOKENS]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens[:size])
    writer.add_token_types([3 if i < 3 else 1 for i in range(size)])
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in TOKENS if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
