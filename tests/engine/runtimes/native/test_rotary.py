"""Rows of queries and keys in llama.cpp's order: the logits are those of transformers' order, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine.moe.kernels.bindings import available
from engine.runtimes.native import weights
from engine.runtimes.native.bindings import Trunk
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import our_run
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels

HEADS = {"q_proj": 6, "k_proj": 2}
WIDTH = 20
"""Values of a head: not a multiple of any vector."""


def write_both(folder: Path, dtype: str) -> tuple[Path, Path]:
    """One model twice: in transformers' order and in llama.cpp's."""
    halves = write_tiny_model(
        folder / "halves",
        "llama",
        dtype=dtype,
        head_dim=WIDTH,
        num_attention_heads=HEADS["q_proj"],
        num_key_value_heads=HEADS["k_proj"],
        attention_bias=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0},
    )
    pairs = folder / "pairs"
    shutil.copytree(halves, pairs)
    tensors = load_file(halves / "model.safetensors")
    for name, tensor in tensors.items():
        heads = next((count for part, count in HEADS.items() if f".{part}." in name), None)
        if heads is not None:
            tensors[name] = tensor.view(heads, 2, WIDTH // 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, pairs / "model.safetensors", metadata={"format": "pt"})
    return halves, pairs


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_of_rows_give_the_bits_of_halves(
    instructions: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in one and in several pieces, and steps after it, of one row and of three."""
    halves, pairs = write_both(tmp_path, dtype)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    expected, unmarked = load_native(halves, dtype=dtype), load_native(pairs, dtype=dtype)
    monkeypatch.setattr(weights, "Trunk", lambda **fields: Trunk(**fields | {"paired_rotary": 1}))
    marked = load_native(pairs, dtype=dtype)
    tokens, answer = prompt_of(37), [5, 9, 2]
    for chunks in (1, 4):
        ours, theirs = our_run(marked, tokens, chunks, answer), our_run(expected, tokens, chunks, answer)
        assert np.stack(ours).tobytes() == np.stack(theirs).tobytes()
    assert not np.allclose(our_run(unmarked, tokens, 1, answer), theirs)
    branches = []
    for model in (marked, expected):
        rows = model.start()
        rows.extend(tokens)
        fan = rows.fan_out(3)
        branches.append(np.stack([fan.step([5, 9, 2]), fan.step([7, 7, 3])]))
    assert branches[0].tobytes() == branches[1].tobytes()
