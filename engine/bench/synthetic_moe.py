"""A synthetic Mixture-of-Experts, so that a ring can be measured without downloading a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.formats.safetensors_files import encode_header

_WORDS = (1 << 22) + 1031
"""Random words drawn once and repeated: a length that no row length divides, so that repeated rows differ."""
_NORM_WORD = 0x3F80
"""1.0 in bfloat16."""


@dataclass(frozen=True)
class MoeShape:
    """Named and laid out as Mixtral, in bfloat16.

    By default DBRX's 16 experts of which 4 run, with a sixth of its widths and six layers: decoding reads as large a
    part of the weights as there, and a layer takes long enough to be worth an exchange."""

    layers: int = 6
    hidden: int = 1024
    ffn: int = 1792
    experts: int = 16
    experts_per_token: int = 4
    heads: int = 16
    key_value_heads: int = 4
    vocabulary: int = 8192
    positions: int = 2048

    @property
    def nbytes(self) -> int:
        return 2 * sum(int(np.prod(shape)) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and dimensions in the order in which they are stored."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            yield from self.layer_tensors(layer)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and dimensions of one layer's tensors, in the order in which they are stored."""
        at = f"model.layers.{layer}"
        hidden, narrow = self.hidden, self.hidden // self.heads * self.key_value_heads
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{at}.self_attn.k_proj.weight", (narrow, hidden)
        yield f"{at}.self_attn.v_proj.weight", (narrow, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.block_sparse_moe.gate.weight", (self.experts, hidden)
        for expert in range(self.experts):
            name = f"{at}.block_sparse_moe.experts.{expert}"
            yield f"{name}.w1.weight", (self.ffn, hidden)
            yield f"{name}.w2.weight", (hidden, self.ffn)
            yield f"{name}.w3.weight", (self.ffn, hidden)


def write_moe(folder: Path, shape: MoeShape, report: ProgressCallback) -> Path:
    """Write the model (config.json, model.safetensors) to ``folder``, which is made. Raises ModelError if the disk is
    too small, and what ``report`` raises."""
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * shape.nbytes:
        raise ModelError(
            f"{folder.parent} has {free / 1e9:.1f} GB free; a made-up model takes {shape.nbytes / 1e9:.1f} GB there, "
            "and as much should be left: free some space, or name a model to be measured.",
            kind="disk",
        )
    random = np.random.default_rng(0).standard_normal(_WORDS, dtype=np.float32) * np.float32(0.02)
    words = (random.view(np.uint32) >> 16).astype(np.uint16)
    tensors = list(shape.tensors())
    done = 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header([(name, "BF16", dimensions) for name, dimensions in tensors], {"format": "pt"}))
        for index, (_, dimensions) in enumerate(tensors):
            count = int(np.prod(dimensions))
            if len(dimensions) == 1:
                file.write(np.full(count, _NORM_WORD, np.uint16).data)
            else:
                _write_cyclic(file, words, count, index * 7919)
            done += 2 * count
            report("making up a model", done, shape.nbytes, "bytes")
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2), encoding="utf-8")
    return folder


def _write_cyclic(file: BinaryIO, words: NDArray[np.uint16], count: int, start: int) -> None:
    """``count`` of ``words``, from ``start`` on and again from the beginning."""
    at = start % len(words)
    while count:
        piece = words[at : at + count]
        file.write(piece.data)
        count -= len(piece)
        at = 0
