"""Rows of several conversations, kept so that two clients do not evict one another, and the choice among them. Pure.

Only the rows' properties are read, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.runtimes.protocol import Logits, TokenRows
from engine.session.origins import Origins

MOST_KEPT = 16
"""Maximum number of rows kept beside the current one."""

_COMPARED = 512
"""Tokens that are compared at once."""

FORK_TOKENS = 32
"""Number of tokens from which on a cut makes a copy: the old row is kept, and its copy is cut."""


@dataclass(eq=False)
class CachedRow:
    """The keys and values of ``tokens``, with their ``origins``. ``rows`` is None if it is empty."""

    rows: TokenRows | None = None
    tokens: list[int] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)
    known: tuple[int, Logits] | None = None
    """Length of the last prompt in tokens, and the logits after it, with which it can be answered again."""
    checkpoints: tuple[TokenRows, ...] = ()
    """What the row was after fewer tokens, the shortest first: from there a prompt goes on if the row cannot be cut
    back. They are copied, and never run themselves."""
    owner: str = ""
    """Owner of the conversation, under whose name the row may be kept on disk; empty: it may not be."""
    client: object = None
    """Client that asked last, and its conversation; None if that is not known."""
    path: Path | None = None
    """File in which the row is kept."""
    on_disk: int = 0
    """Number of the row's first tokens that are in the file."""

    def knows(self, length: int) -> bool:
        """Whether the logits after the first ``length`` tokens are known."""
        return self.known is not None and self.known[0] == length

    def belongs_to(self, owner: str) -> None:
        """Give the row to ``owner``. A file of another owner stays as it is."""
        if owner != self.owner:
            self.owner, self.path, self.on_disk = owner, None, 0

    def reusable(self, prompt: Sequence[int], wanted: Origins | None) -> int:
        """Number of tokens of ``prompt`` that need not be run, if its origins are to be ``wanted`` (None: any)."""
        if self.rows is None or self.rows.void:
            return 0
        return reusable_length(
            len(prompt),
            shared_length(self.tokens, prompt),
            self.origins,
            wanted,
            known_length=0 if self.known is None else self.known[0],
            shortest_cut=self.rows.shortest_cut,
            checkpoints=[saved.length for saved in self.checkpoints],
        )

    def checkpoint(self, most: int) -> TokenRows | None:
        """The longest checkpoint of at most ``most`` tokens."""
        return max((saved for saved in self.checkpoints if saved.length <= most), key=_length, default=None)

    def save(self, most: int) -> None:
        """Make a checkpoint, if the runtime can. At most ``most`` are kept, as :func:`spread` says."""
        assert self.rows is not None
        saved = self.rows.checkpoint()
        if saved is not None:
            found = (*self.checkpoints, saved)
            self.checkpoints = tuple(found[index] for index in spread([each.length for each in found], most))

    def copied(self) -> CachedRow:
        """A copy that can go on in another way. This row is unchanged."""
        assert self.rows is not None
        # A row that cannot be cut back goes on at a checkpoint, which copies nothing.
        rows = self.rows.fan_out(1) if self.rows.can_truncate else self.rows
        return CachedRow(rows, list(self.tokens), self.origins, self.known, self.checkpoints)

    def forked(self) -> CachedRow:
        """A copy of a row that goes on by itself meanwhile."""
        assert self.rows is not None
        rows = self.rows.checkpoint() or self.rows.fan_out(1)
        return CachedRow(rows, list(self.tokens), self.origins, self.known, self.checkpoints)

    def nbytes(self, per_token: int, state: int) -> int:
        """Bytes of memory, with ``per_token`` bytes of kept keys and values and ``state`` bytes for a state."""
        checkpoints = sum(saved.checkpoint_bytes for saved in self.checkpoints)
        forgotten = 0 if self.rows is None else self.rows.forgotten_bytes
        return len(self.tokens) * per_token - forgotten + state + checkpoints


def _length(rows: TokenRows) -> int:
    return rows.length


def reusable_length(
    prompt: int,
    shared: int,
    origins: Origins,
    wanted: Origins | None,
    *,
    known_length: int,
    shortest_cut: int,
    checkpoints: Sequence[int],
) -> int:
    """Number of a ``prompt``'s tokens that a row can supply, so that they are not run again.

    The row's tokens have ``origins``, and the first ``shared`` are the prompt's, too. Only tokens with the origins
    ``wanted`` count; None: all. The logits are known after ``known_length`` tokens. The row can be cut back to
    ``shortest_cut`` tokens or more, or to one of the ``checkpoints``, which are numbers of tokens.
    """
    usable = (origins if wanted is None else wanted.shared(origins)).cut(shared)
    if usable.length == prompt and known_length != prompt:
        usable = usable.cut(prompt - 1)
    if usable.length >= shortest_cut:
        return usable.length
    return max((length for length in checkpoints if length <= usable.length), default=0)


def spread(lengths: Sequence[int], most: int) -> list[int]:
    """Indices of at most ``most`` of the rising ``lengths``.

    While there are too many, the one goes whose neighbours are closest together. The last stays.
    """
    indices = list(range(len(lengths)))
    while len(indices) > most:
        gaps = [
            lengths[after] - (lengths[before] if before >= 0 else 0)
            for before, after in zip([-1, *indices], indices[1:], strict=False)
        ]
        del indices[gaps.index(min(gaps))]
    return indices


def best_row(rows: Sequence[CachedRow], prompt: Sequence[int], wanted: Origins | None) -> tuple[CachedRow, int]:
    """The row of ``rows`` with most to reuse for ``prompt``, the first among equals, and the number of reusable
    tokens."""
    reusable = [row.reusable(prompt, wanted) for row in rows]
    most = max(reusable)
    return rows[reusable.index(most)], most


def to_keep(sizes: Sequence[int], budget: int) -> list[int]:
    """Indices of the rows to keep within ``budget`` bytes, of rows with ``sizes`` bytes, the latest first.

    A row that does not fit is skipped. At most :data:`MOST_KEPT` are kept.
    """
    indices: list[int] = []
    for index, size in enumerate(sizes):
        if size <= budget and len(indices) < MOST_KEPT:
            indices.append(index)
            budget -= size
    return indices


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    most = min(len(left), len(right))
    for begin in range(0, most, _COMPARED):
        one, other = left[begin : begin + _COMPARED], right[begin : begin + _COMPARED]
        if one == other:
            continue
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False), begin):
            if mine != theirs:
                return index
    return most
