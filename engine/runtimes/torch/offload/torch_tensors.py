"""Stored tensors as torch tensors: views of the mapped files, or copies in another dtype or of packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import mkldnn

from engine.errors import ModelError
from engine.models.formats.model_files import Change, StoredTensor
from engine.models.formats.number_formats import is_packed
from engine.runtimes.torch.offload.torch_unpacking import unpack, unpack_groups

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch's dtypes for a trunk or an expert, by safetensors' names."""

NAMES: dict[torch.dtype, str] = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def stored_dtype(name: str) -> torch.dtype:
    """torch's dtype for safetensors' ``name``. Raises ModelError if this runtime does not support it."""
    if name not in DTYPES:
        raise ModelError(
            f"The model's weights are stored as {name}, which the torch runtime cannot run; "
            "use a checkpoint in bfloat16, float16 or float32."
        )
    return DTYPES[name]


def view(stored: StoredTensor) -> torch.Tensor:
    """``stored`` as a tensor that shares its file-backed memory; same shape, possibly strided."""
    dtype = stored_dtype(stored.dtype)
    return torch.from_numpy(stored.words).view(dtype)


def computed_dtype(name: str) -> torch.dtype:
    """The dtype to compute in for weights stored as ``name``, if nobody chooses one.

    Raises ModelError if this runtime does not support them.
    """
    return torch.bfloat16 if is_packed(name) else stored_dtype(name)


def numbers(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """``stored`` in ``dtype``: a view if it is stored so, else a copy."""
    if is_packed(stored.dtype):
        return unpacked(stored, dtype)
    return view(stored).to(dtype)


def unpacked(stored: StoredTensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """The numbers of a packed matrix, a copy in ``dtype`` on ``device`` (None: the CPU)."""
    words = torch.from_numpy(stored.words)
    if stored.scales is None:
        return unpack(words, stored.dtype, dtype, device)
    flat = [
        torch.from_numpy(stored.words.reshape(-1, stored.words.shape[-1])),
        *map(_groups, (stored.scales, stored.biases)),
    ]
    codes, scales, biases = flat
    assert codes is not None and scales is not None
    return unpack_groups(codes, scales, biases, stored.dtype, dtype, device).view(stored.shape)


def _groups(stored: StoredTensor | None) -> torch.Tensor | None:
    return None if stored is None else view(stored).reshape(-1, stored.words.shape[-1])


def numbers_on(
    device: torch.device, stored: StoredTensor, dtype: torch.dtype, change: Change | None = None
) -> torch.Tensor:
    """A copy of ``stored`` in ``dtype`` on ``device``, after ``change``."""
    if change is not None:
        return _changed(device, stored, change).to(dtype)
    if is_packed(stored.dtype):
        return unpacked(stored, dtype, device)
    return view(stored).to(device=device, dtype=dtype, copy=True)


def _changed(device: torch.device, stored: StoredTensor, change: Change) -> torch.Tensor:
    """``stored`` in float32 on ``device``, after ``change``."""
    values = numbers_on(device, change.in_rows(stored), torch.float32)
    if change.columns is not None:
        values = values[:, torch.from_numpy(change.columns).to(device)]
    if change.subtracted:
        values = values - change.subtracted
    return (change.log_of * values).log() if change.log_of else values


# --- which matrix kernel runs ----------------------------------------------------------------------------------------


@contextmanager
def kernels_for(rows: int, convolves: bool = False) -> Iterator[None]:
    """Choose torch's own matrix-vector kernels for one row, oneDNN for more, and for models that convolve.

    Measured in bfloat16 on a CPU with AVX512_BF16 (GB/s of weights): one row 48 against 27, four rows 11 against 25.
    torch's own convolution of some thousand channels is hundreds of times slower than oneDNN's. The choice depends on
    the model and the rows alone, so that the same request gives the same bits.
    """
    if rows > 1 or convolves or not mkldnn.enabled:
        yield
        return
    mkldnn.enabled = False
    try:
        yield
    finally:
        mkldnn.enabled = True


def padded_rows(rows: int) -> int:
    """Number of rows that an expert is given instead of ``rows``: at most an eighth more, from few different numbers.

    oneDNN builds a kernel for every number of rows, which takes longer than running it on a small expert, and each
    expert of each layer gets another number of a prompt's tokens. Up to 16 rows, as in decoding, nothing is added.
    """
    if rows <= 16:
        return rows
    step = max(8, 1 << (rows.bit_length() - 4))
    return -(-rows // step) * step
