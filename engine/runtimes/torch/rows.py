"""Rows of tokens in the cache of a torch model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.moe.timing import Phase
from engine.runtimes.protocol import Logits, TokenRows
from engine.runtimes.row_contents import RowContents
from engine.runtimes.torch.cache import AnyCache
from engine.runtimes.torch.cache_contents import contents_of

Done = TypeVar("Done")


class TorchPasses(Protocol):
    """What rows need of the model they belong to."""

    device: torch.device

    @property
    def facts(self) -> ModelFacts: ...

    def run(self, phase: Phase, tokens: list[list[int]], cache: AnyCache, want_logits: bool) -> Logits | None: ...

    def with_room(self, work: Callable[[], Done]) -> Done:
        """What ``work`` gives; where memory runs out that experts hold, it is done again with less of them there."""
        ...


class TorchTokenRows(TokenRows):
    """Rows of tokens in a cache of transformers.

    ``shared`` is how many leading positions all rows have in common: the prompt, which reordering never touches.
    """

    def __init__(self, model: TorchPasses, cache: AnyCache, rows: int = 1, shared: int = 0) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._shared = shared

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def length(self) -> int:
        return self._cache.position.length

    @property
    def can_truncate(self) -> bool:
        return self._cache.can_truncate

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Prefill ``tokens`` after what is there; the logits after the last one, [vocabulary], float32."""
        if self._rows != 1:
            raise ValueError(f"extend works on one row, not on {self._rows}")
        if not tokens:
            raise ValueError("extend needs at least one token")
        logits = self._model.run("prefill", [list(tokens)], self._cache, want_logits)
        return None if logits is None else logits[0]

    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token per row; logits [rows, vocabulary], float32."""
        if len(tokens) != self._rows:
            raise ValueError(f"{len(tokens)} tokens for {self._rows} rows")
        logits = self._model.run("decode", [[token] for token in tokens], self._cache, True)
        assert logits is not None
        return logits

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens; costs nothing, the buffers stay."""
        if self._rows != 1:
            raise ValueError(f"truncate works on one row, not on {self._rows}")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        if length == self.length:
            return
        if not self.can_truncate:
            raise ModelError(f"The {self._model.facts.family} family keeps a state that cannot be cut back.")
        self._cache.position.length = length
        self._shared = min(self._shared, length)

    def fan_out(self, rows: int) -> TorchTokenRows:
        """``rows`` copies of this row; the prompt is copied once per row and never again."""
        if self._rows != 1:
            raise ValueError(f"fan_out works on one row, not on {self._rows}")
        if rows < 1:
            raise ValueError(f"{rows} rows cannot be made")
        with torch.inference_mode():
            cache = self._model.with_room(lambda: self._cache.rows_copied(rows))
            return TorchTokenRows(self._model, cache, rows, shared=self.length)

    def contents(self, checkpoint: TokenRows | None = None) -> RowContents | None:
        """Of the only row, which has at least one token."""
        assert checkpoint is None
        return contents_of(self._cache)

    def reorder(self, parents: Sequence[int]) -> int:
        """Row i becomes a copy of row ``parents[i]``; returns the bytes moved (0 if every row keeps its place)."""
        if len(parents) != self._rows or not all(0 <= parent < self._rows for parent in parents):
            raise ValueError(f"{list(parents)} are not parents of {self._rows} rows")
        changed = [row for row, parent in enumerate(parents) if row != parent]
        if not changed:
            return 0
        device = self._model.device
        with torch.inference_mode():
            return self._cache.move(
                torch.tensor(changed, device=device),
                torch.tensor([parents[row] for row in changed], device=device),
                self._shared,
            )
