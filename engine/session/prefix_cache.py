"""The prefix cache: the keys and values of conversations, of which turns take the one that helps them most.

A repeated question gets the same answer, to the bit, where the bits of a token depend on those before it and on whether
it was read or written, as in the native runtime. To ensure this, what was written of a prompt is written again, and
not read (see :mod:`engine.session.origins`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import PeerLost
from engine.runtimes.protocol import LoadedModel, TokenRows
from engine.session.disk_prefixes import DiskPrefixes
from engine.session.kept_rows import FORK_TOKENS, MOST_KEPT, CachedRow, best_row, shared_length, to_keep
from engine.session.origins import Origins, RememberedOrigins
from engine.session.reading_again import Closest

RING_TOKENS = 2048
"""Tokens of the current prompt and other conversations that a ring keeps: half of what its plan has room for."""

CHECKPOINT_TAIL = 16
"""Tokens at the end of a prompt that are run apart if the model's state cannot be cut back. A checkpoint lies before
them: they hold what the template writes before an answer, which the next prompt replaces."""

CHECKPOINT_TOKENS = 1024
"""Tokens of a longer prompt between two checkpoints, to which a changed prompt, or another one with the same beginning,
goes back."""

MOST_CHECKPOINTS = 8
"""Maximum number of checkpoints of a row."""

CHECKPOINT_SHARE = 2
"""Part of the memory for other conversations that checkpoints of those in use may take: one half."""


@dataclass(frozen=True)
class Taken:
    """A row that a turn has taken.

    ``origins``: those that the prompt's tokens must have; None: any. ``stored``: the row that was read from disk for
    it, if one was.
    """

    row: CachedRow
    origins: Origins | None
    stored: CachedRow | None


class PrefixCache:
    """The rows of conversations. A turn takes one (:meth:`take`) and gives it back.

    ``budget`` gives the bytes that rows which nobody uses may take, if they take those of its argument now. ``disk``
    keeps conversations between runs, if it is not None.
    """

    def __init__(
        self,
        model: LoadedModel,
        budget: Callable[[int], int] = lambda kept: 0,
        disk: DiskPrefixes | None = None,
    ) -> None:
        self._model = model
        self._budget = budget
        self._disk = disk
        self._latest = CachedRow()
        """The row that was given back last."""
        self._kept: list[CachedRow] = []
        """Rows of other conversations, the latest first."""
        self._used: list[CachedRow] = []
        """Rows that turns have taken."""
        self._given_up: deque[tuple[array[int], object]] = deque(maxlen=MOST_KEPT)
        """Tokens and clients of the rows that were dropped last, because memory was wanted."""
        self.unread = True
        """Whether no turn has taken a row yet."""
        self._lost: list[tuple[list[int], Origins]] = []
        """Tokens and origins of the rows at the time when the ring was formed again."""
        self.remembered = RememberedOrigins()

    @property
    def rows(self) -> TokenRows | None:
        """The row of the latest turn; None if it is empty."""
        return self._latest.rows

    @property
    def tokens(self) -> list[int]:
        """The tokens of the latest turn's row."""
        return self._latest.tokens

    @property
    def newest_tokens(self) -> list[int]:
        """The tokens of the row that a turn took last, while it uses it; otherwise those of the latest turn's row."""
        used = self._used[-1:]
        return used[0].tokens if used else self.tokens

    @property
    def kept_tokens(self) -> list[int]:
        """Number of tokens of each other conversation that nobody uses, the latest first."""
        return [len(row.tokens) for row in self._kept]

    def forget(self) -> None:
        """Empty the cache, but for what turns use."""
        self._latest = CachedRow()
        self._kept.clear()

    def forget_others(self) -> None:
        """Free the memory of all conversations but the latest one, and those that turns use."""
        self._kept.clear()

    # --- which row ------------------------------------------------------------------------------------------------

    def closest(self, prompt: Sequence[int]) -> Closest | None:
        """What was kept, or given up, that shares most with ``prompt``; None if there was nothing."""
        rows = [row for row in (self._latest, *self._kept, *self._used) if row.rows is not None]
        lengths: list[tuple[int, int]] = [(shared_length(row.tokens, prompt), 1) for row in rows]
        lengths += [(shared_length(tokens.tolist(), prompt), 0) for tokens, _ in self._given_up]
        if not lengths:
            return None
        best = max(range(len(lengths)), key=lengths.__getitem__)
        shared = lengths[best][0]
        if best >= len(rows):
            tokens, client = self._given_up[best - len(rows)]
            return Closest.of(tokens, shared, client, given_up=True)
        row = rows[best]
        assert row.rows is not None
        return Closest.of(row.tokens, shared, row.client, shortest_cut=row.rows.shortest_cut)

    def take(
        self, prompt: Sequence[int], origins: Origins | None, repeatable: bool, cancelled: Callable[[], bool]
    ) -> Taken:
        """Give a turn the row that shares most with ``prompt``: an empty one, if none shares anything.

        ``origins``: those that the prompt's tokens must have; None: any. A row that would lose much, or that another
        turn uses, is copied.
        """
        self.unread = False
        row, reusable = best_row([self._latest, *self._kept, *self._used], prompt, origins)
        stored: CachedRow | None = None
        if self._disk is not None:
            self._take_forgotten()
            wanted = origins
            if wanted is None and repeatable:
                # An answer that can be repeated does not depend on what the disk happens to hold.
                wanted = self.origins_for(row if reusable else CachedRow(), prompt)
            stored = self._disk.better(prompt, wanted, reusable, cancelled)
            if stored is not None:
                row, origins = stored, wanted
                reusable = row.reusable(prompt, wanted)
        taken = Taken(self._adopt(row, reusable, prompt), origins, stored)
        self._used.append(taken.row)
        return taken

    def _adopt(self, row: CachedRow, reusable: int, prompt: Sequence[int]) -> CachedRow:
        """``row``, of which ``prompt`` reuses ``reusable`` tokens, taken from those that are kept, or a copy."""
        others = [other for other in (self._latest, *self._kept) if other.rows is not None and other is not row]
        self._latest, self._kept = CachedRow(), others
        if not reusable:
            if row.rows is not None and row not in self._used:
                self._kept.insert(0, row)
            row = CachedRow()
        self._free(prompt)
        if row in self._used:
            return _copied(row, row.forked)
        if row.rows is None or len(row.tokens) - reusable < FORK_TOKENS:
            return row
        self._kept.insert(0, row)
        self._free(prompt)
        return _copied(row, row.copied) if row in self._kept else row

    def save(self, row: CachedRow, *, tail: bool) -> None:
        """Make a checkpoint of ``row``, which cannot be cut back, before the ``tail`` of a prompt, and else far enough
        behind the last one if there is memory for several."""
        assert row.rows is not None
        last = row.checkpoints[-1].length if row.checkpoints else 0
        if not tail and len(row.tokens) - last < CHECKPOINT_TOKENS:
            return
        others = (saved for each in (*self._used, self._latest) if each is not row for saved in each.checkpoints)
        budget = self._budget(sum(self._sizes())) // CHECKPOINT_SHARE
        room = budget - sum(saved.checkpoint_bytes for saved in others)
        most = min(MOST_CHECKPOINTS, room // max(1, row.rows.checkpoint_bytes))
        if tail or most > 1:
            row.save(max(1, most))

    def replace(self, row: CachedRow, by: CachedRow) -> CachedRow:
        """Let a turn that uses ``row`` use ``by`` in its place. Returns ``by``."""
        self._used[self._used.index(row)] = by
        return by

    def fork(self, row: CachedRow) -> CachedRow:
        """A copy of ``row``, which a turn uses, for the same turn."""
        copy = _copied(row, row.forked)
        self._used.append(copy)
        return copy

    def drop(self, row: CachedRow) -> None:
        """End a turn's use of ``row``, which is not kept."""
        self._used.remove(row)

    def give_back(self, row: CachedRow) -> None:
        """End a turn's use of ``row``, which is kept as the latest, unless it is void."""
        self._used.remove(row)
        if row.rows is not None and row.rows.void:
            self._lost.append((row.tokens, row.origins))
            row = CachedRow()
        if self._latest.rows is not None:
            self._kept.insert(0, self._latest)
            self._free(())
        self._latest = row

    def _take_forgotten(self) -> None:
        if self._disk is not None:
            self._disk.take_forgotten([self._latest, *self._kept, *self._used])

    def _free(self, prompt: Sequence[int]) -> None:
        """Forget the least recently used rows, as far as memory requires."""
        if not self._kept:
            return
        facts = self._model.facts
        if facts.ring is not None and len(facts.ring.nodes) > 1:
            used = sum(len(row.tokens) for row in self._used)
            self._keep(to_keep(self.kept_tokens, RING_TOKENS - len(prompt) - used))
        sizes = self._sizes()
        budget = self._budget(sum(sizes))
        for row in reversed(self._kept):
            if sum(sizes) > budget:  # all but the last checkpoint go before a whole row does
                row.checkpoints = row.checkpoints[-1:]
                sizes = self._sizes()
        self._keep(to_keep(sizes, budget))

    def _sizes(self) -> list[int]:
        """Bytes of the rows that nobody uses, but for the latest."""
        facts = self._model.facts
        return [row.nbytes(facts.key_value_bytes_per_token, facts.state_bytes) for row in self._kept]

    def _keep(self, indices: Sequence[int]) -> None:
        for index in set(range(len(self._kept))).difference(indices):
            self._given_up.append((array("i", self._kept[index].tokens), self._kept[index].client))
        self._kept = [self._kept[index] for index in indices]

    # --- what is read and what is written -------------------------------------------------------------------------

    def origins_for(
        self, row: CachedRow, prompt: Sequence[int], lost: tuple[list[int], Origins] | None = None
    ) -> Origins:
        """The origins of a new ``prompt``: those that ``row`` has, or what is ``lost``, as far as it goes on there, and
        read behind."""
        tokens, origins = lost or (row.tokens, row.origins)
        shared = shared_length(tokens, prompt)
        if shared == len(prompt) and not row.knows(shared):
            shared -= 1
        reused = origins.cut(shared)
        if row.rows is not None and reused.length < row.rows.shortest_cut:
            saved = row.checkpoint(reused.length)
            reused = reused.cut(0 if saved is None else saved.length)
        return reused.read(len(prompt) - reused.length)

    def again(self, prompt: Sequence[int], repeatable: bool) -> tuple[int, int]:
        """The work that an empty cache would mean for ``prompt`` and for what turns use: tokens to prefill, and passes
        over decoded tokens."""
        row, reusable = best_row([self._latest, *self._kept], prompt, None)
        read = passes = 0
        lost = [(row, row.origins.cut(reusable), repeatable), *((used, used.origins, True) for used in self._used)]
        for each, origins, as_before in lost:
            if each.rows is None or each.rows.void:
                continue
            together = max(each.rows.steps_together, 1)
            for run in origins.runs:
                if run > 0 or not as_before:
                    read += abs(run)
                else:
                    passes -= run // together
        return read, passes

    def lose(self) -> None:
        """Discard all rows that nobody uses, because the ring is formed again. Their contents are remembered until the
        next prompt, which may need the same origins."""
        rows = [row for row in (*self._used, self._latest, *self._kept) if row.rows is not None]
        self._lost += [(row.tokens, row.origins) for row in rows]
        self.forget()

    def lost_beginning(self, prompt: Sequence[int], repeatable: bool) -> tuple[list[int], Origins] | None:
        """The conversation, lost with the ring since the last prompt, that shares most with ``prompt``; None if none
        was, or a ``repeatable`` answer is not wanted."""
        lost, self._lost = self._lost, []
        if not repeatable or not lost:
            return None
        return max(lost, key=lambda each: each[1].cut(shared_length(each[0], prompt)).length)

    # --- on disk --------------------------------------------------------------------------------------------------

    def write(self, should_stop: Callable[[], bool], *, last: bool = False) -> list[str]:
        """Write to disk what may be kept there and has grown, until ``should_stop()``. ``last``: write all of it.

        Returns sentences for the person.
        """
        if self._disk is None:
            return []
        self._take_forgotten()
        said = []
        for row in (self._latest, *self._kept):
            if self._disk.due(row, last=last) and not should_stop():
                said.append(self._disk.write(row, should_stop))
        return [text for text in said if text]

    def discard_stored(self, row: CachedRow) -> None:
        """Remove the file of ``row``, with which a turn failed."""
        if self._disk is not None:
            self._disk.discard(row)


def _copied(row: CachedRow, copied: Callable[[], CachedRow]) -> CachedRow:
    """What ``copied`` makes of ``row``. If the ring is lost meanwhile, the first pass over the copy finds that, too."""
    try:
        return copied()
    except PeerLost:
        return replace(row, tokens=list(row.tokens))
