"""The rate at which this machine's memory can be read in one pass, with which decoding speed is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.kernels.pool import Pool, shared_pool
from engine.system.free_memory import available_bytes

BUFFER_BYTES = 1 << 30
"""Bytes of a benchmark's buffer, much more than any processor's caches."""
SHORT_BUFFER_BYTES = 256 << 20
"""Bytes of the buffer while a ring waits for the figure."""
SMALLEST_BYTES = 64 << 20
"""Minimum bytes of the buffer, however little memory is free."""
_SHORT_ROUNDS = 3
_ROW = 4096

_known: dict[int, float] = {}


class StreamingRead:
    """Reads its own buffer of ``nbytes``, or of a quarter of the free memory if that is less, with ``threads`` threads.

    The rate is the best of plain reductions over the same memory, by numpy and by the native kernels if they are built.
    Which of them is the fastest differs between machines.
    """

    def __init__(
        self, threads: int, clock: Callable[[], float] = time.perf_counter, nbytes: int = BUFFER_BYTES
    ) -> None:
        nbytes = max(SMALLEST_BYTES, min(nbytes, available_bytes() // 4))
        self._words = np.ones(max(1, nbytes // (4 * _ROW * threads)) * _ROW * threads, dtype=np.int32)
        self._parts = np.split(self._words, threads)
        self._threads = threads
        self._clock = clock
        self._native = native_pool(threads)
        self.rate()  # warms up

    def rate(self) -> float:
        """Bytes per second, measured once."""
        seconds = []
        with ThreadPoolExecutor(self._threads) as pool:
            for read in (_greatest, _product):
                start = self._clock()
                list(pool.map(read, self._parts))
                seconds.append(self._clock() - start)
        if self._native is not None:
            seconds.append(self._native.read_seconds(self._words.ctypes.data, self._words.nbytes))
        fastest = min((taken for taken in seconds if taken > 0), default=0.0)
        return self._words.nbytes / fastest if fastest else 0.0


def memory_rate(threads: int) -> float:
    """Bytes per second at which this machine reads its memory with ``threads`` threads; measured once per process."""
    if threads not in _known:
        read = StreamingRead(threads, nbytes=SHORT_BUFFER_BYTES)
        _known[threads] = max(read.rate() for _ in range(_SHORT_ROUNDS))
    return _known[threads]


def native_pool(threads: int) -> Pool | None:
    """The native kernels' threads; None where the kernels were not built."""
    try:
        return shared_pool(threads)
    except ModelError:
        return None


def _greatest(part: NDArray[Any]) -> Any:
    return part.max()


def _product(part: NDArray[Any]) -> Any:
    return (part.view(np.float32).reshape(-1, _ROW) @ np.ones(_ROW, dtype=np.float32))[0]
