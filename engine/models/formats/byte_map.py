"""The byte map: the place of every matrix of a model's experts, with file, offset and number format.

The runtimes' views, copies to a device, prefetching, residency and the transfer between machines all start from an
:class:`ExpertPlace`, which the opened checkpoint provides.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, order=True)
class Run:
    """Bytes ``start`` to ``stop`` of file number ``file``."""

    file: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Runs = tuple[Run, ...]


class FileMapping(Protocol):
    """A file of the model as it is mapped into this process."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    @property
    def address(self) -> int:
        """Address of the mapping in this process's memory."""
        ...

    def check_unchanged(self) -> None:
        """Raises ModelError if the file at this path is no longer the one that was mapped, or was changed."""
        ...


@dataclass(frozen=True)
class FileSpan:
    """Bytes ``start`` to ``stop`` of a mapped file."""

    file: FileMapping
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def address(self) -> int:
        """Address of the first byte in this process's mapping of the file."""
        return self.file.address + self.start


@dataclass(frozen=True)
class MatrixPlace:
    """A matrix or bias of an expert within one of the expert's spans.

    ``format``: the number format by safetensors' name. ``span``: index of the span; ``offset``: bytes from the span's
    start; ``nbytes``: bytes of its own weights. ``shape`` is in weights, and ``stride`` too: of a format that packs
    weights in blocks it means nothing, as rows follow one another. ``scales`` and ``biases`` are those of a grouped
    format, in spans of their own.
    """

    format: str
    span: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    scales: MatrixPlace | None = None
    biases: MatrixPlace | None = None

    @property
    def weights(self) -> int:
        """Number of its weights, whatever bytes they take."""
        return math.prod(self.shape)

    @property
    def whole_bytes(self) -> int:
        """Bytes of its weights, with scales and biases."""
        return self.nbytes + sum(part.nbytes for part in (self.scales, self.biases) if part is not None)


@dataclass(frozen=True)
class ExpertPlace:
    """All bytes of one expert. ``spans`` follow the order of its matrices, which is the same for all experts of a
    model.

    ``matrices`` are named as the fields of :class:`engine.models.formats.model_files.ExpertWeights`; they may overlap
    (``gate_up`` is ``gate`` and ``up`` as one matrix). A span may have padding that belongs to no matrix.
    """

    spans: tuple[FileSpan, ...]
    matrices: Mapping[str, MatrixPlace]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def own(self) -> tuple[MatrixPlace, ...]:
        """The expert's matrices and biases, each once."""
        return tuple(matrix for name, matrix in self.matrices.items() if name != "gate_up")

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights, without padding."""
        return sum(matrix.whole_bytes for matrix in self.own)

    @property
    def weights(self) -> int:
        """Number of its weights."""
        return sum(matrix.weights for matrix in self.own)

    def runs(self, numbers: Mapping[str, int]) -> Runs:
        """The spans in the order of the files, adjacent ones merged. ``numbers`` are the file numbers by name."""
        return merged(Run(numbers[span.file.path.name], span.start, span.stop) for span in self.spans)

    def page_ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of the whole pages that hold the expert, ascending, adjacent ones merged."""
        ranges: list[tuple[int, int]] = []
        for span in sorted(self.spans, key=lambda span: span.address):
            start, stop = span.address, span.address + span.nbytes
            start, stop = start - start % PAGE_BYTES, stop + -stop % PAGE_BYTES
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        return [(start, stop - start) for start, stop in ranges]


def without(runs: Iterable[Run], taken: Runs) -> list[Run]:
    """What is left of each of ``runs``, in their order, without the bytes ``taken``, which are :func:`merged`."""
    left: list[Run] = []
    for run in runs:
        start = run.start
        for number in range(max(0, bisect.bisect(taken, run) - 1), len(taken)):
            cut = taken[number]
            if (cut.file, cut.start) >= (run.file, run.stop):
                break
            if cut.file == run.file and cut.stop > start:
                left += [Run(run.file, start, cut.start)] if cut.start > start else []
                start = cut.stop
        left += [Run(run.file, start, run.stop)] if start < run.stop else []
    return left


def merged(runs: Iterable[Run]) -> Runs:
    """``runs`` in the order of the files, adjacent ones merged."""
    joined: list[Run] = []
    for run in sorted(runs):
        if run.nbytes == 0:
            continue
        if joined and joined[-1].file == run.file and joined[-1].stop >= run.start:
            joined[-1] = Run(run.file, joined[-1].start, max(run.stop, joined[-1].stop))
        else:
            joined.append(run)
    return tuple(joined)
