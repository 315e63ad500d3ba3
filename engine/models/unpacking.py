"""Weights of GGUF files for runtimes that compute with plain numbers: blocks unpacked, rows in transformers' order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.models.files import StoredTensor
from engine.models.number_formats import is_packed

PAIRED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
"""Ends of the names of tensors whose rows are in another order if the rotation's pairs lie side by side."""


def unpacked(tensor: StoredTensor) -> StoredTensor:
    """A float32 copy of a packed tensor; a plain one unchanged."""
    if not is_packed(tensor.dtype):
        return tensor
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: NDArray[np.float32] = dequantize(np.ascontiguousarray(tensor.words), GGMLQuantizationType[tensor.dtype])
    return StoredTensor("F32", values.astype(np.float32, copy=False).view(np.uint32))


def halves_order(rows: int, head_size: int) -> NDArray[np.int64]:
    """The rows of a file with paired rotation in transformers' order, in which the values of a pair are half a head
    apart."""
    heads = rows // head_size
    return np.arange(rows, dtype=np.int64).reshape(heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def in_halves(tensor: StoredTensor, head_size: int) -> StoredTensor:
    """A copy of queries' or keys' weights with their rows in transformers' order, whatever the format."""
    return StoredTensor(tensor.dtype, tensor.words[halves_order(len(tensor.words), head_size)])
