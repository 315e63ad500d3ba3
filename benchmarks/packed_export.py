"""Writes random models in the shapes of real ones as packed GGUF files, typed as their published files are.

The speed depends on shapes and formats, not on what the weights say. A file is opened by privatellm and by llama.cpp
alike; nothing is converted for either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.letters import add_letters
from benchmarks.packed_blocks import block_of, random_values

Mix = Literal["Q4_K_M", "Q8_0", "MXFP4"]
"""The types of a file, as publishers name them."""

_DRAWN = 2
"""Version of how weights are drawn: files of another one are written anew."""
_TILE_ROWS = 4096
SCALE = 0.02
"""Standard deviation of the matrices' entries."""
_REAL_LAYERS = {"mixtral": 32, "qwen3_moe": 48, "llama": 16, "qwen3_5_moe_text": 40}
"""Layers of the models that the shapes stand for: their files store every third layer or so in more bits."""
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "llama": "llama", "qwen3_5_moe_text": "qwen35moe"}


@dataclass(frozen=True)
class PackedTensor:
    """``shape`` has the outermost dimension first; ``format`` is ggml's name."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        numbers, size = block_of(self.format)
        return int(np.prod(self.shape)) // numbers * size


def format_of(name: str, mix: Mix, layer: int, config: dict[str, Any]) -> str:
    """The type of a matrix in a file of ``mix``, as llama.cpp's quantiser chooses it. ``layer``: in a model of as many
    layers as the real one has."""
    if mix == "Q8_0":
        return "Q8_0"
    if mix == "MXFP4":
        return "MXFP4" if "_exps" in name else "Q8_0"
    if name in ("output", "token_embd"):
        return "Q6_K" if name == "output" or config["tie_word_embeddings"] else "Q4_K"
    layers = _REAL_LAYERS[config["model_type"]]
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if name in ("attn_k", "attn_v") and config.get("num_local_experts") == 8:
        return "Q8_0"
    return "Q6_K" if more and (name == "attn_v" or name.startswith("ffn_down")) else "Q4_K"


def packed_tensors(config: dict[str, Any], mix: Mix) -> Iterator[PackedTensor]:
    """The tensors of a model with this ``config.json``, of the families mixtral, qwen3_moe and llama."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    experts = config.get("num_experts") or config.get("num_local_experts")
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    vocabulary = (config["vocab_size"], hidden)
    yield PackedTensor("token_embd.weight", vocabulary, format_of("token_embd", mix, 0, config))
    for layer in range(layers):
        real = layer * _REAL_LAYERS[config["model_type"]] // layers
        delta_net = config.get("layer_types", ["full_attention"] * layers)[layer] == "linear_attention"
        gated = 2 if "layer_types" in config else 1
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (gated * heads * width, hidden),
            "attn_k": (groups * width, hidden),
            "attn_v": (groups * width, hidden),
            "attn_output": (hidden, heads * width),
        }
        if delta_net:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            shapes = {
                "attn_qkv": (2 * keys + values, hidden),
                "attn_gate": (values, hidden),
                "ssm_out": (hidden, values),
            }
            shapes |= dict.fromkeys(("ssm_alpha", "ssm_beta"), (config["linear_num_value_heads"], hidden))
            yield from _delta_net_vectors(config, f"blk.{layer}.", 2 * keys + values)
        many = (experts,) if experts else ()
        suffix = "_exps" if experts else ""
        shapes |= {f"ffn_{short}{suffix}": (*many, ffn, hidden) for short in ("gate", "up")}
        shapes |= {f"ffn_down{suffix}": (*many, hidden, ffn)}
        for name, shape in shapes.items():
            yield PackedTensor(f"blk.{layer}.{name}.weight", shape, format_of(name, mix, real, config))
        yield PackedTensor(f"blk.{layer}.attn_norm.weight", (hidden,), "F32")
        second = "post_attention_norm" if "layer_types" in config else "ffn_norm"
        yield PackedTensor(f"blk.{layer}.{second}.weight", (hidden,), "F32")
        if shared := config.get("shared_expert_intermediate_size"):
            yield PackedTensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", (hidden,), "F32")
            for short, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
                name = f"ffn_{short}_shexp"
                yield PackedTensor(f"blk.{layer}.{name}.weight", shape, format_of(name, mix, real, config))
        if experts:
            yield PackedTensor(f"blk.{layer}.ffn_gate_inp.weight", (experts, hidden), "F32")
        if config["model_type"] == "qwen3_moe" or ("layer_types" in config and not delta_net):
            yield PackedTensor(f"blk.{layer}.attn_q_norm.weight", (width,), "F32")
            yield PackedTensor(f"blk.{layer}.attn_k_norm.weight", (width,), "F32")
    yield PackedTensor("output_norm.weight", (hidden,), "F32")
    if not config["tie_word_embeddings"]:
        yield PackedTensor("output.weight", vocabulary, format_of("output", mix, 0, config))


def _delta_net_vectors(config: dict[str, Any], here: str, channels: int) -> Iterator[PackedTensor]:
    heads = config["linear_num_value_heads"]
    yield PackedTensor(here + "ssm_conv1d.weight", (channels, config["linear_conv_kernel_dim"]), "F32")
    yield PackedTensor(here + "ssm_norm.weight", (config["linear_value_head_dim"],), "F32")
    yield PackedTensor(here + "ssm_a", (heads,), "F32")
    yield PackedTensor(here + "ssm_dt.bias", (heads,), "F32")


def write_packed(
    path: Path, config: dict[str, Any], mix: Mix, embedding: float = SCALE, *, letters: bool = False
) -> Path:
    """Write the model to ``path``, unless it is there and of the same description.

    ``embedding``: standard deviation of the embedding's entries. ``letters``: whether it has a vocabulary
    (:mod:`benchmarks.letters`); else prompts are token ids. Memory: a tile for each format and row length.
    """
    tensors = list(packed_tensors(config, mix))
    description = [_DRAWN, config, embedding, [[each.name, each.shape, each.format] for each in tensors]]
    described = json.dumps([*description, "letters"] if letters else description)
    note = path.with_suffix(".json")
    if path.is_file() and note.is_file() and note.read_text(encoding="utf-8") == described:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, _ARCHITECTURES[config["model_type"]])
    describe(writer, config)
    if letters:
        add_letters(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.format]
        if tensor.format == "F32":
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes)
            continue
        numbers, size = block_of(tensor.format)
        stored = (*tensor.shape[:-1], tensor.shape[-1] // numbers * size)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tiles = _Tiles(embedding)
    for index, tensor in enumerate(tensors):
        writer.write_tensor_data(tiles.of(tensor, index))
    writer.close()
    unfinished.rename(path)
    note.write_text(described, encoding="utf-8")
    return path


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of ``config``, but for its tokenizer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    experts = config.get("num_experts") or config.get("num_local_experts")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(round(config.get("partial_rotary_factor", 1) * width))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "layer_types" in config:
        _describe_delta_net(writer, config, width)
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])


def _describe_delta_net(writer: gguf.GGUFWriter, config: dict[str, Any], width: int) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_rope_dimension_sections([*config["mrope_section"], 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


class _Tiles:
    """Random weights, drawn once for each format and row length and repeated from another row for each tensor."""

    def __init__(self, embedding: float) -> None:
        """``embedding``: standard deviation of the embedding's entries; all other matrices have :data:`SCALE`."""
        self._embedding = embedding
        self._tiles: dict[tuple[str, int, float], NDArray[Any]] = {}

    def of(self, tensor: PackedTensor, index: int) -> NDArray[Any]:
        columns = tensor.shape[-1]
        rows = int(np.prod(tensor.shape[:-1]))
        key = (tensor.format, columns, self._embedding if tensor.name.startswith("token_embd") else SCALE)
        if key not in self._tiles:
            self._tiles[key] = _random_rows(*key)
        tile = self._tiles[key]
        start = index * 977 % len(tile)
        chosen = tile[(start + np.arange(rows)) % len(tile)]
        if tensor.name.endswith("ssm_a"):
            # A state decays.
            decay: NDArray[np.float32] = -np.exp(chosen[0])
            return decay
        if len(tensor.shape) == 1:
            # Norms near one, but not one: a model that forgets to apply them must not pass for equal.
            norm: NDArray[np.float32] = np.float32(1) + chosen[0] * np.float32(0.1 / SCALE)
            return norm
        return chosen


def _random_rows(name: str, columns: int, deviation: float) -> NDArray[Any]:
    # A number of rows that no tensor's divides, so that experts differ.
    rows = min(_TILE_ROWS, max(64, (1 << 24) // columns)) + 13
    if name == "F32":
        values: NDArray[np.float32] = np.random.default_rng(columns).standard_normal((rows, columns), np.float32)
        scaled: NDArray[np.float32] = values * np.float32(deviation)
        return scaled
    words, _ = random_values(name, rows, columns, seed=columns, deviation=deviation)
    return words
