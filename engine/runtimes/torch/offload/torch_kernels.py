"""Which of torch's matrix kernels runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import mkldnn


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
    """How many rows an expert is given instead of ``rows``: at most an eighth more, and few different numbers.

    oneDNN builds a kernel for every number of rows, which takes longer than running it on a small expert; of a prompt,
    each expert of each layer gets another number. Up to 16 rows, as in decoding, nothing is added.
    """
    if rows <= 16:
        return rows
    step = max(8, 1 << (rows.bit_length() - 4))
    return -(-rows // step) * step
