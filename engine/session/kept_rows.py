"""Rows of several conversations, kept so that two clients do not evict one another, and the choice among them.

Pure: only the rows' own properties are read, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runtimes.protocol import Logits, TokenRows
from engine.session.passes import PassSequence

MOST_KEPT = 16
"""Maximum number of rows that are kept beside the current one."""

FORK_TOKENS = 32
"""Number of tokens that a new turn would cut off, from which on the old row is kept and a copy is cut."""


@dataclass(frozen=True)
class Checkpoint:
    """What the cache held after ``tokens``, made by ``passes``; ``rows`` is never run itself."""

    tokens: list[int]
    passes: PassSequence
    rows: TokenRows

    def begins(self, tokens: Sequence[int]) -> bool:
        return tokens[: len(self.tokens)] == self.tokens


@dataclass(eq=False)
class CachedRow:
    """The keys and values of ``tokens``, made by ``passes``. ``rows`` is None if it is empty."""

    rows: TokenRows | None = None
    tokens: list[int] = field(default_factory=list)
    passes: PassSequence = field(default_factory=PassSequence)
    known: tuple[int, Logits] | None = None
    """The last prompt's length in tokens and the logits after it, so that it can be answered again."""
    checkpoint: Checkpoint | None = None
    """Where the next prompt can go on if the row cannot be cut back."""

    def knows(self, length: int) -> bool:
        """Whether the logits after the first ``length`` tokens are known."""
        return self.known is not None and self.known[0] == length

    def reusable(self, prompt: Sequence[int], wanted: PassSequence | None) -> int:
        """Number of tokens of ``prompt`` that need not be run, by the passes ``wanted`` (None: by any)."""
        if self.rows is None:
            return 0
        passes = self.passes if wanted is None else wanted.shared(self.passes)
        kept = passes.cut(shared_length(self.tokens, prompt))
        if kept.length == len(prompt) and not self.knows(len(prompt)):
            kept = kept.cut(len(prompt) - 1)
        if kept == self.passes or self.rows.can_truncate:
            return kept.length
        saved = self.checkpoint
        if saved is None or not saved.begins(prompt):
            return 0
        return len(saved.tokens) if wanted is None or wanted.shared(saved.passes) == saved.passes else 0

    def copied(self) -> CachedRow:
        """The same content, to go on elsewhere. This one is unchanged."""
        assert self.rows is not None
        # A row that cannot be cut back goes on at its checkpoint, which copies nothing.
        rows = self.rows.fan_out(1) if self.rows.can_truncate else self.rows
        return CachedRow(rows, list(self.tokens), self.passes, self.known, self.checkpoint)

    def nbytes(self, per_token: int, state: int) -> int:
        """Bytes of memory, at ``per_token`` for keys and values and ``state`` for a state."""
        states = state * (1 if self.checkpoint is None else 2)
        return len(self.tokens) * per_token + states


def best_row(rows: Sequence[CachedRow], prompt: Sequence[int], wanted: PassSequence | None) -> tuple[CachedRow, int]:
    """The row of ``rows`` with most to reuse for ``prompt``, the first of equals, and the number of those tokens."""
    reusable = [row.reusable(prompt, wanted) for row in rows]
    most = max(reusable)
    return rows[reusable.index(most)], most


def to_keep(sizes: Sequence[int], budget: int) -> list[int]:
    """Which rows, of ``sizes`` bytes and the latest first, are kept within ``budget`` bytes: each that leaves the later
    ones their place. At most :data:`MOST_KEPT`."""
    kept: list[int] = []
    for index, size in enumerate(sizes):
        if size <= budget and len(kept) < MOST_KEPT:
            kept.append(index)
            budget -= size
    return kept


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
