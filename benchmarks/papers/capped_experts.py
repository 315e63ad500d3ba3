"""Experts of which a limited number is in memory: reads from disk, in threads, past the system's cache.

Only the reads and the limit are what is measured: what is read is thrown away, and the experts are computed from the
system's own memory. So a model that fits in memory shows what a larger one would wait for.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.models.formats.model_files import Experts
from engine.runtimes.torch.offload.tensor_backend import TensorBackend

READERS = 4
PIECE_BYTES = 2**20
"""Bytes of one read: as many as the product asks the system for at a time, so that one expert is read in parallel."""
AHEAD = 4
"""Experts that were read ahead and wait for their layer."""
_PAGE = mmap.PAGESIZE

Key = tuple[int, int]
"""(layer, expert)."""
Guess = Callable[[int, torch.Tensor], Sequence[int]]
"""From a layer and its experts' input [1, width] to the experts that the next layer is expected to need."""


def reads_past_the_cache() -> bool:
    """Whether this system can read a file past its cache."""
    return hasattr(os, "O_DIRECT")


@dataclass(frozen=True)
class Piece:
    """Whole pages of a file that hold a part of an expert."""

    key: Key
    path: Path
    start: int
    nbytes: int


def pieces_of(experts: Experts, key: Key) -> list[Piece]:
    """The reads of one expert, of at most PIECE_BYTES each."""
    pieces = []
    for span in experts.place(*key).spans:
        stop = span.stop + -span.stop % _PAGE
        for start in range(span.start - span.start % _PAGE, stop, PIECE_BYTES):
            pieces.append(Piece(key, span.file.path, start, min(PIECE_BYTES, stop - start)))
    return pieces


class CappedExperts:
    """The most recently used ``slots`` of each layer's ``experts`` are in memory, and AHEAD that were read ahead and
    are not used yet. Use as a context."""

    def __init__(self, experts: Experts, slots: int) -> None:
        """Raises OSError if a file of the experts cannot be read past the cache."""
        self._experts = experts
        self._slots = slots
        self._there: dict[int, OrderedDict[int, None]] = {layer: OrderedDict() for layer in experts.layers}
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        self._needed: set[Key] = set()
        """Those that somebody waits for."""
        self._asked: list[Piece] = []
        self._left: dict[Key, int] = {}
        """Pieces of an expert that are to be read."""
        self._news = threading.Condition()
        self._closed = False
        self._problem: OSError | None = None
        self._files: dict[Path, int] = {}
        self.bytes_read = 0
        paths = {span.file.path for layer in experts.layers for span in experts.place(layer, 0).spans}
        try:
            for path in paths:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._close_files()
            raise
        self._threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> CappedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        self._close_files()

    def __contains__(self, key: Key) -> bool:
        return key[1] in self._there[key[0]] or key in self._ahead

    def __len__(self) -> int:
        return sum(map(len, self._there.values())) + len(self._ahead)

    def need(self, layer: int, wanted: Collection[int]) -> None:
        """Return when all of ``wanted`` were in memory. Raises OSError if a read failed."""
        with self._news:
            self._drop_others(layer, wanted)
            for key in [(layer, expert) for expert in wanted]:
                if key in self:
                    self._use(key)
                    continue
                self._needed.add(key)
                if key not in self._left:
                    self._ask(key)
                self._asked.sort(key=lambda piece: piece.key not in self._needed)
            self._news.notify_all()
            self._news.wait_for(lambda: self._problem is not None or not self._needed)
            if self._problem is not None:
                raise self._problem

    def announce(self, layer: int, guessed: Collection[int]) -> None:
        """Read those of ``guessed`` that are not in memory when nothing is waited for."""
        with self._news:
            for key in [(layer, expert) for expert in guessed]:
                if key not in self and key not in self._left:
                    self._ask(key)
            self._news.notify_all()

    def _ask(self, key: Key) -> None:
        pieces = pieces_of(self._experts, key)
        self._left[key] = len(pieces)
        self._asked += pieces

    def _drop_others(self, layer: int, wanted: Collection[int]) -> None:
        """Of the guesses for ``layer`` that were wrong, those of which nothing was read yet."""
        waiting = Counter(piece.key for piece in self._asked if piece.key[0] == layer and piece.key[1] not in wanted)
        wrong = {key for key, count in waiting.items() if count == len(pieces_of(self._experts, key))}
        self._asked = [piece for piece in self._asked if piece.key not in wrong]
        for key in wrong:
            del self._left[key]

    def _use(self, key: Key) -> None:
        layer, expert = key
        self._ahead.pop(key, None)
        kept = self._there[layer]
        kept[expert] = None
        kept.move_to_end(expert)
        while len(kept) > self._slots:
            kept.popitem(last=False)

    def _arrived(self, key: Key) -> None:
        if key in self._needed:
            self._needed.remove(key)
            self._use(key)
            return
        self._ahead[key] = None
        while len(self._ahead) > AHEAD:
            self._ahead.popitem(last=False)

    def _read_all(self) -> None:
        with mmap.mmap(-1, PIECE_BYTES + _PAGE) as buffer:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._closed or bool(self._asked))
                    if self._closed:
                        return
                    piece = self._asked.pop(0)
                problem = self._read(piece, buffer)
                with self._news:
                    self._done(piece, problem)

    def _read(self, piece: Piece, buffer: mmap.mmap) -> OSError | None:
        with memoryview(buffer)[: piece.nbytes] as part:
            try:
                count = os.preadv(self._files[piece.path], [part], piece.start)
            except OSError as problem:
                return problem
        return None if count else OSError(f"{piece.path.name} ended before an expert.")

    def _done(self, piece: Piece, problem: OSError | None) -> None:
        self._problem = self._problem or problem
        self.bytes_read += piece.nbytes
        self._left[piece.key] -= 1
        if not self._left[piece.key]:
            del self._left[piece.key]
            self._arrived(piece.key)
        self._news.notify_all()

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)


@dataclass(frozen=True)
class LayerRun:
    """The experts that a layer needed, and those that were guessed (none for the first layer)."""

    layer: int
    needed: tuple[int, ...]
    guessed: tuple[int, ...]


class CappedBackend(TensorBackend):
    """Runs the experts of ``inner`` once they are in the memory of ``capped``, and announces what ``guess``, if it is
    set, expects of the next layer. ``runs`` has all layers that were run."""

    def __init__(self, inner: TensorBackend, capped: CappedExperts) -> None:
        super().__init__(inner.experts, inner.dtype)
        self.popularity = inner.popularity
        self._inner = inner
        self._capped = capped
        self._guessed: tuple[int, ...] = ()
        self.guess: Guess | None = None
        self.runs: list[LayerRun] = []

    @property
    def description(self) -> str:
        return self._inner.description

    @property
    def result_dtype(self) -> torch.dtype:
        return self._inner.result_dtype

    def run(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool = False,
    ) -> torch.Tensor:
        wanted = tuple(indices.unique().tolist())
        self.runs.append(LayerRun(layer, wanted, self._guessed))
        self._guessed = ()
        if self.guess is not None and layer + 1 in self.experts.layers:
            self._guessed = tuple(self.guess(layer, hidden))
            self._capped.announce(layer + 1, self._guessed)
        self._capped.need(layer, wanted)
        return self._inner.run(layer, hidden, indices, weights, scale_input)

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._inner.outputs(layer, hidden, indices, input_weights)

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        return self._inner.combined(routed, tokens, weights)
