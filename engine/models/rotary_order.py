"""Queries and keys of GGUF files with their rows in transformers' order, for runtimes that expect it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.models.files import StoredTensor

PAIRED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
"""Ends of the names of tensors whose rows are in another order if the rotation's pairs lie side by side."""


def halves_order(rows: int, head_size: int) -> NDArray[np.int64]:
    """The rows of a file with paired rotation in transformers' order, in which the values of a pair are half a head
    apart."""
    heads = rows // head_size
    return np.arange(rows, dtype=np.int64).reshape(heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def in_halves(tensor: StoredTensor, head_size: int) -> StoredTensor:
    """A copy of queries' or keys' weights with their rows in transformers' order, whatever the format."""
    return StoredTensor(tensor.dtype, tensor.words[halves_order(len(tensor.words), head_size)])
