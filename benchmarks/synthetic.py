"""Writes a random Mixtral-shaped model, as large as the real one in every direction but depth.

Decoding speed depends on shapes and bytes, not on what the weights say, so a model with the real shapes and few layers
measures what the full one would cost per layer, and fits where the full one does not.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

BF16_BYTES = 2
TILE = (1 << 24) + 4099
"""Random words drawn once and repeated: a length that no row length divides, so that repeated rows differ."""


@dataclass(frozen=True)
class MixtralShape:
    """The defaults are Mixtral-8x7B's, but for ``layers``."""

    layers: int = 2
    hidden: int = 4096
    ffn: int = 14336
    experts: int = 8
    experts_per_token: int = 2
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 32000

    @property
    def layer_bytes(self) -> int:
        """Bytes of one decoder layer in bfloat16."""
        return BF16_BYTES * sum(int(np.prod(shape)) for _, shape in _layer_tensors(self, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model in bfloat16."""
        return self.layers * self.layer_bytes + 2 * BF16_BYTES * self.vocabulary * self.hidden


def config(shape: MixtralShape) -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _layer_tensors(shape: MixtralShape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"model.layers.{layer}"
    head = shape.hidden // shape.heads
    key_value = head * shape.key_value_heads
    yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
    yield f"{prefix}.self_attn.q_proj.weight", (shape.hidden, shape.hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (key_value, shape.hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (key_value, shape.hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, shape.hidden)
    yield f"{prefix}.block_sparse_moe.gate.weight", (shape.experts, shape.hidden)
    for expert in range(shape.experts):
        name = f"{prefix}.block_sparse_moe.experts.{expert}"
        yield f"{name}.w1.weight", (shape.ffn, shape.hidden)
        yield f"{name}.w2.weight", (shape.hidden, shape.ffn)
        yield f"{name}.w3.weight", (shape.ffn, shape.hidden)


def _tensors(shape: MixtralShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        yield from _layer_tensors(shape, layer)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocabulary, shape.hidden)


def bf16_words(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 rounded to bfloat16 (to nearest, ties to even), as words."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)


def write_synthetic(folder: Path, shape: MixtralShape, seed: int = 0) -> Path:
    """Write the model to ``folder`` (config.json, model.safetensors), unless it is there already.

    Memory: one tile of random words (32 MiB), whatever the model's size.
    """
    done = folder / "shape.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == asdict(shape):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    random = np.random.default_rng(seed)
    tile = bf16_words(random.standard_normal(TILE, dtype=np.float32) * np.float32(0.02))
    # Norms near one, but not one: a model that forgets to apply them must not pass for equal.
    norms = bf16_words(np.float32(1) + random.standard_normal(shape.hidden, dtype=np.float32) * np.float32(0.1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dimensions in _tensors(shape):
        size = BF16_BYTES * int(np.prod(dimensions))
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for index, (_, dimensions) in enumerate(_tensors(shape)):
            if len(dimensions) == 1:
                file.write(norms.tobytes())
            else:
                _write_repeated(file, tile, int(np.prod(dimensions)), start=index * 7919)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2), encoding="utf-8")
    done.write_text(json.dumps(asdict(shape)), encoding="utf-8")
    return folder


def _write_repeated(file: BinaryIO, tile: NDArray[np.uint16], count: int, start: int) -> None:
    """Write ``count`` words taken cyclically from ``tile``, beginning at ``start``; keep dirty pages from piling up."""
    position = start % tile.size
    while count:
        piece = tile[position : position + count]
        file.write(piece.data)
        count -= piece.size
        position = 0
    file.flush()
    os.fsync(file.fileno())
