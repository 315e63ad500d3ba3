"""Writes random models in the shapes of real ones as packed GGUF files, typed as their published files are.

The speed depends on shapes and formats, not on what the weights say. A file is opened by privatellm and by llama.cpp
alike; nothing is converted for either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.letters import add_letters
from benchmarks.packed_blocks import block_of, random_values
from benchmarks.packed_metadata import describe, rotary_divisors
from benchmarks.packed_tensors import PACKED_FAMILIES, Config, Mix, PackedTensor, packed_tensors

_DRAWN = 2
"""Version of how weights are drawn: files of another one are written anew."""
_TILE_ROWS = 4096
SCALE = 0.02
"""Standard deviation of the matrices' entries."""


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
    family = PACKED_FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(unfinished, family.architecture)
    describe(writer, config)
    if letters:
        add_letters(writer, config["vocab_size"], family.split or "gpt-2")
    else:
        writer.add_tokenizer_model("no_vocab")
        if family.split:
            writer.add_tokenizer_pre(family.split)
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
        if tensor.name == "rope_freqs.weight":
            writer.write_tensor_data(np.array(rotary_divisors(config), np.float32))
        else:
            values = tiles.of(tensor, index)
            factor = _factor(tensor, config)
            writer.write_tensor_data(values if factor == 1 else values * np.float32(factor))
    writer.close()
    unfinished.rename(path)
    note.write_text(described, encoding="utf-8")
    return path


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
        if len(tensor.shape) == 1:
            return _vector(tensor.name, chosen[0])
        return chosen


def _factor(tensor: PackedTensor, config: Config) -> float:
    """How much larger the entries of a tensor in float32 are than of others of its kind."""
    if "shortconv.conv." in tensor.name:
        # What it gives is a sum of few, and no norm follows.
        return 25.0
    if config.get("enable_moe_block"):
        # Gemma's router divides by the root of the width, and its attention does not, unlike that of others. Without
        # these factors the one would hold all experts for equal, and the other would see one token only.
        if tensor.name.endswith("ffn_gate_inp.scale"):
            return float(tensor.shape[0] ** 0.5)
        if tensor.name.endswith("attn_k_norm.weight"):
            return float(tensor.shape[0] ** -0.5)
    return 1.0


def _vector(name: str, row: NDArray[np.float32]) -> NDArray[np.float32]:
    if name.endswith("ssm_a"):
        # A state decays.
        decay: NDArray[np.float32] = -np.exp(row)
        return decay
    if name.endswith(".bias") and not name.endswith("ssm_dt.bias"):
        return row
    # Norms near one, but not one: a model that forgets to apply them must not pass for equal.
    norm: NDArray[np.float32] = np.float32(1) + row * np.float32(0.1 / SCALE)
    return norm


def _random_rows(name: str, columns: int, deviation: float) -> NDArray[Any]:
    # A number of rows that no tensor's divides, so that experts differ.
    rows = min(_TILE_ROWS, max(64, (1 << 24) // columns)) + 13
    if name == "F32":
        values: NDArray[np.float32] = np.random.default_rng(columns).standard_normal((rows, columns), np.float32)
        scaled: NDArray[np.float32] = values * np.float32(deviation)
        return scaled
    words, _ = random_values(name, rows, columns, seed=columns, deviation=deviation)
    return words
