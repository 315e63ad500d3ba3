"""Writes random models with the shapes of real ones, as large as those in every direction but depth.

Decoding speed depends on shapes and bytes, not on what the weights say, so a model with the real shapes and few layers
measures what the full one would cost per layer, and fits where the full one does not.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import BF16_BYTES, Shape

TILE = (1 << 24) + 4099
"""Random words drawn once and repeated: a length that no row length divides, so that repeated rows differ."""

SCALE = 0.02
"""Standard deviation of the matrices' entries."""

SYNC_BYTES = 1 << 28
"""Written so much, the file is synchronised: dirty pages must not pile up."""


def bf16_words(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 rounded to bfloat16 (to nearest, ties to even), as words."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)


def write_synthetic(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the model to ``folder`` (config.json, model.safetensors), unless it is there already.

    ``shape`` is a dataclass. Memory: two tiles of random words (64 MiB), whatever the model's size.
    """
    done = folder / "shape.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == describe(shape):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    config = shape.config()
    random = np.random.default_rng(seed)
    tile = random.standard_normal(TILE, dtype=np.float32)
    embedding, matrices = (bf16_words(tile * np.float32(scale)) for scale in (shape.embedding_scale, SCALE))
    # Norms near one, but not one: a model that forgets to apply them must not pass for equal.
    norms = bf16_words(np.float32(1) + random.standard_normal(config["hidden_size"], dtype=np.float32) * 0.1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(shape))
        unsynced = 0
        for index, (name, dimensions) in enumerate(shape.tensors()):
            if len(dimensions) == 1:
                file.write(norms[: dimensions[0]].tobytes())
                continue
            words = embedding if name == "model.embed_tokens.weight" else matrices
            count = int(np.prod(dimensions))
            _write_repeated(file, words, count, start=index * 7919)
            unsynced += BF16_BYTES * count
            if unsynced > SYNC_BYTES:
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    done.write_text(json.dumps(describe(shape)), encoding="utf-8")
    return folder


def describe(shape: Shape) -> dict[str, Any]:
    """What ``shape.json`` says of a model that is written: another shape is written anew."""
    fields: dict[str, Any] = asdict(shape)  # type: ignore[call-overload]
    return fields if shape.embedding_scale == SCALE else fields | {"embedding_scale": shape.embedding_scale}


def _header(shape: Shape) -> bytes:
    """The head of the safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dimensions in shape.tensors():
        size = BF16_BYTES * int(np.prod(dimensions))
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def _write_repeated(file: BinaryIO, tile: NDArray[np.uint16], count: int, start: int) -> None:
    """Write ``count`` words taken cyclically from ``tile``, beginning at ``start``."""
    position = start % tile.size
    while count:
        piece = tile[position : position + count]
        file.write(piece.data)
        count -= piece.size
        position = 0
