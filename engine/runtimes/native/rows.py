"""Rows of tokens in the cache of the native trunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.moe.timing import Phase
from engine.runtimes.native.bindings import STEPS_TOGETHER
from engine.runtimes.native.cache import Segments
from engine.runtimes.protocol import Logits, TokenRows
from engine.runtimes.row_contents import RowContents


class NativePasses(Protocol):
    """What rows need of the model they belong to."""

    @property
    def facts(self) -> ModelFacts: ...

    def run(
        self, phase: Phase, tokens: list[list[int]], cache: Segments, want_logits: bool, as_steps: bool = False
    ) -> Logits | None: ...


class NativeTokenRows(TokenRows):
    """Rows of tokens in pages of keys and values.

    ``shared`` is how many leading positions all rows have in common by reference: the prompt of a beam search.
    """

    def __init__(self, model: NativePasses, cache: Segments, shared: int = 0) -> None:
        self._model = model
        self._cache = cache
        # [row, row]: how many leading positions two rows have in common; those need not be moved.
        self._common = np.full((cache.rows, cache.rows), shared)

    @property
    def rows(self) -> int:
        return self._cache.rows

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def can_truncate(self) -> bool:
        return self._cache.states is None

    @property
    def steps_together(self) -> int:
        return STEPS_TOGETHER

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Prefill ``tokens`` after what is there; the logits after the last one, [vocabulary], float32."""
        return self._prefill(tokens, want_logits, as_steps=False)

    def replay(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """As :meth:`extend`, with the bits of as many steps."""
        if len(tokens) > STEPS_TOGETHER:
            raise ValueError(f"{len(tokens)} tokens in one pass; at most {STEPS_TOGETHER} equal as many steps")
        return self._prefill(tokens, want_logits, as_steps=True)

    def _prefill(self, tokens: Sequence[int], want_logits: bool, as_steps: bool) -> Logits | None:
        if self.rows != 1:
            raise ValueError(f"a prompt is run on one row, not on {self.rows}")
        if not tokens:
            raise ValueError("a pass needs at least one token")
        logits = self._model.run("prefill", [list(tokens)], self._cache, want_logits, as_steps)
        return None if logits is None else logits[0]

    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token per row; logits [rows, vocabulary], float32."""
        if len(tokens) != self.rows:
            raise ValueError(f"{len(tokens)} tokens for {self.rows} rows")
        logits = self._model.run("decode", [[token] for token in tokens], self._cache, want_logits=True)
        assert logits is not None
        return logits

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of the only row."""
        if self.rows != 1:
            raise ValueError(f"truncate works on one row, not on {self.rows}")
        if not 0 <= length <= self.length:
            raise ValueError(f"{length} is not a length between 0 and {self.length}")
        if length < self.length and not self.can_truncate:
            raise ModelError(f"The {self._model.facts.family} family keeps a state that cannot be cut back.")
        self._cache.truncate(length)

    def fan_out(self, rows: int) -> NativeTokenRows:
        """``rows`` rows that share this single row's keys and values. This one is unchanged and stays usable."""
        if self.rows != 1:
            raise ValueError(f"fan_out works on one row, not on {self.rows}")
        if rows < 1:
            raise ValueError(f"{rows} rows cannot be made")
        return NativeTokenRows(self._model, self._cache.shared(rows), self.length)

    def checkpoint(self) -> TokenRows | None:
        """As :meth:`fan_out` into one row, which copies neither pages nor states."""
        return None if self.can_truncate else self.fan_out(1)

    def contents(self, checkpoint: TokenRows | None = None) -> RowContents | None:
        """Of the only row, which has at least one token."""
        assert checkpoint is None or isinstance(checkpoint, NativeTokenRows)
        return self._cache.contents(None if checkpoint is None else checkpoint._cache)

    def reorder(self, parents: Sequence[int]) -> int:
        """Row i becomes a copy of row ``parents[i]``. Moves what the two do not have in common; returns the bytes."""
        if len(parents) != self.rows or not all(0 <= parent < self.rows for parent in parents):
            raise ValueError(f"{list(parents)} does not name a parent among {self.rows} rows for each of them")
        changed = [(row, parent, int(self._common[row, parent])) for row, parent in enumerate(parents) if row != parent]
        if not changed:
            return 0
        moved = self._cache.move(changed)
        if self._cache.states is not None:
            self._cache.states.reorder(parents)
        common = self._common[np.ix_(parents, parents)]
        siblings = np.equal.outer(np.asarray(parents), np.asarray(parents))
        self._common = np.where(siblings, self.length, common)
        return moved
