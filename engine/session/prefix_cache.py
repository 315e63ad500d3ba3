"""The prefix cache: the keys and values of a conversation, and the prefill of what is missing.

A repeated question gets the same answer, to the bit. To ensure this, a prompt is prefilled by the same passes as
before, and new passes continue only where an earlier pass ended (see :mod:`engine.session.passes`). In a ring, parts of
the cache are on other machines. When one is lost, the remaining machines form a new ring and run the same passes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from engine.errors import Cancelled, ModelError, PeerLost
from engine.generation.sampling import Sampler
from engine.ipc.messages import Notice, Prefill, RingChanged
from engine.planning.memory import CUT_BACK_TOKENS
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits, TokenRows
from engine.session.disk_prefixes import DiskPrefixes
from engine.session.kept_rows import (
    FORK_TOKENS,
    CachedRow,
    RowCheckpoint,
    best_row,
    shared_length,
    to_keep,
)
from engine.session.passes import PassSequence, RememberedPasses
from engine.session.turn import Turn
from engine.system.free_memory import give_back

LONG_CHUNK = 128
"""Smallest prefill chunk, in tokens, whose buffers are returned to the system."""

MOST_FORMATIONS = 5
"""Maximum re-formations of the ring per turn; after that the answer ends with an error."""

RING_TOKENS = 2048
"""Tokens of the current prompt and other conversations that a ring keeps: half of what its plan has room for."""

REPLAY_INTERVAL_S = 1 / 4
"""Seconds between two progress events while decoded tokens are run again."""


CHECKPOINT_TAIL = 16
"""Tokens at the end of a prompt that are run apart if the model's state cannot be cut back. A checkpoint lies before
them: they hold what the template writes before an answer, which the next prompt replaces."""


Look = Callable[[Sequence[int], Turn], None]
"""Makes the rows of pictures of which some of the tokens are. It may raise Cancelled."""


class PrefixCache:
    """The cache of the current conversation and of others.

    ``rows`` holds the keys and values of ``tokens``, or is None if the cache is empty. ``chunk`` is the number of
    tokens of a prefill chunk. ``budget`` gives the bytes that other conversations may take, if they take those of its
    argument now. ``disk`` keeps conversations between runs, if it is not None. ``look`` is
    called with the tokens that are about to be run. After an exception in a forward pass the
    caller must call :meth:`forget`, because the cache is then in an unknown state.
    """

    def __init__(
        self,
        model: LoadedModel,
        chunk: int,
        budget: Callable[[int], int] = lambda kept: 0,
        disk: DiskPrefixes | None = None,
        look: Look | None = None,
    ) -> None:
        self._model = model
        self._disk = disk
        self._look = look
        self._chunk = chunk
        self._budget = budget
        self._now = CachedRow()
        self._kept: list[CachedRow] = []
        """Rows of other conversations, the latest first."""
        self._turn: Turn | None = None
        """The turn for which the current row was chosen."""
        self._from_disk: CachedRow | None = None
        """The row that was read from disk for it."""
        self._remembered = RememberedPasses()
        self._lost: list[tuple[list[int], PassSequence]] = []
        """Tokens and passes of the cache at the time when the ring was formed again."""
        self._repeatable = True
        self._formed_again = 0

    @property
    def rows(self) -> TokenRows | None:
        return self._now.rows

    @property
    def tokens(self) -> list[int]:
        return self._now.tokens

    @property
    def kept_tokens(self) -> list[int]:
        """Number of tokens of each other conversation in the cache, the latest first."""
        return [len(row.tokens) for row in self._kept]

    def forget(self) -> None:
        """Empty the cache of all conversations."""
        if self._turn is not None and self._from_disk is not None and self._disk is not None:
            self._disk.discard(self._from_disk)
        self._now = CachedRow()
        self._kept.clear()

    def forget_others(self) -> None:
        """Free the memory of all conversations but the current one."""
        self._kept.clear()

    def take_back_peers(self, turn: Turn, prompt: Sequence[int], repeatable: bool) -> None:
        """Form the ring again if its machines changed and that pays. This empties the cache.

        Called before each question, with ``prompt`` and ``repeatable`` as in :meth:`prefill`. Waiting for the ring's
        machines ends when ``turn`` is cancelled, until :meth:`turn_over`. Raises Cancelled, ModelError.
        """
        self._formed_again = 0
        self._model.turn(turn.cancelled)
        void = True
        try:
            void = self._model.between_turns(
                turn.report, lambda text: turn.emit(Notice(text=text)), *self._again(prompt, repeatable)
            )
        finally:
            if void:
                self._lose()

    def _again(self, prompt: Sequence[int], repeatable: bool) -> tuple[int, int]:
        """The work that ``prompt`` would take with an empty cache: tokens to prefill, and passes over decoded
        tokens."""
        row, reusable = best_row([self._now, *self._kept], prompt, None)
        runs = row.passes.cut(reusable).runs if row.rows is not None else ()
        if not repeatable:
            return sum(map(abs, runs)), 0
        together = max(row.rows.steps_together, 1) if row.rows is not None else 1
        return sum(run for run in runs if run > 0), sum(-(run // together) for run in runs if run < 0)

    def turn_over(self) -> None:
        self._turn = self._from_disk = None
        self._model.turn(lambda: False)

    def prefill(self, prompt: list[int], turn: Turn, repeatable: bool) -> Logits | None:
        """Bring ``prompt`` into the cache. Returns the logits after it, or None if cancelled.

        If a peer is lost, everything is run again. ``repeatable``: the same prompt gets the same logits as before, to
        the bit, which may take longer. Answers drawn without a seed do not need that.
        """
        self._repeatable = repeatable
        remembered = self._remembered.get(prompt) if repeatable else None
        if turn is not self._turn:
            self._turn = turn
            remembered = self._take_up(prompt, remembered, turn)
        lost = self._lost_beginning(prompt)
        passes = self._passes_for(self._now, prompt, lost) if remembered is None else remembered
        logits: Logits | None
        try:
            logits = self._run(prompt, passes, turn)
        except PeerLost as lost:
            logits = self._run_again(lost, prompt, passes, turn)
        if logits is not None:
            self._now.known = len(prompt), logits
            if repeatable:
                self._remembered.put(prompt, passes)
        return logits

    def step(
        self, token: int, turn: Turn, choose: Callable[[Logits], int], sampler: Sampler | None = None
    ) -> int | None:
        """Run ``token``, and return the next token: the result of ``choose(logits)``, or the choice of ``sampler``
        where the logits are.

        If a peer is lost, the remaining machines run everything again. Returns None if that is cancelled.
        """
        assert self.rows is not None
        logits: Logits | None = None
        try:
            chosen = None if sampler is None else self.rows.step_choosing(token, sampler)
            if chosen is None:
                logits = self.rows.step([token])[0]
        except Interrupted:
            return None
        except PeerLost as lost:
            logits = self._run_again(lost, [*self.tokens, token], self._now.passes.decoded(), turn)
            return None if logits is None else choose(logits)
        self._append([token], self._now.passes.decoded())
        if logits is not None:
            return choose(logits)
        if sampler is not None and chosen is not None:
            sampler.take(chosen)
        return chosen

    def settle(self) -> None:
        """End the answer. A step that the runtime began ahead is discarded."""
        if self.rows is not None:
            self.rows.settle()

    def rows_again(self, lost: PeerLost, turn: Turn) -> TokenRows:
        """Rows with the cache's contents, for a beam search whose ring was lost. Raises Interrupted if cancelled."""
        if self._run_again(lost, self.tokens, self._now.passes, turn) is None:
            raise Interrupted
        assert self.rows is not None
        return self.rows

    # --- which passes ---------------------------------------------------------------------------------------------

    def _passes_for(
        self, row: CachedRow, prompt: Sequence[int], lost: tuple[list[int], PassSequence] | None = None
    ) -> PassSequence:
        """The passes by which ``row`` would bring a new ``prompt`` into the cache, if what is ``lost`` were there."""
        tokens, passes = lost or (row.tokens, row.passes)
        shared = shared_length(tokens, prompt)
        if shared == len(prompt) and not row.knows(shared):
            shared -= 1
        reused = passes.cut(shared)
        if row.rows is not None and reused.length < row.rows.shortest_cut:
            saved = row.checkpoint
            reused = saved.passes if saved is not None and saved.begins(prompt) else PassSequence()
        pictures = self._model.pictures
        whole = [] if pictures is None else pictures.whole(prompt)
        tail = len(prompt) - CHECKPOINT_TAIL
        if self._model.facts.state_bytes and reused.length < tail:
            reused = reused.up_to(tail, self._chunk, whole)
        return reused.up_to(len(prompt), self._chunk, whole)

    def _lost_beginning(self, prompt: Sequence[int]) -> tuple[list[int], PassSequence] | None:
        """The conversation, lost with the ring since the last prompt, that shares most with ``prompt``; None if none
        was."""
        lost, self._lost = self._lost, []
        if not self._repeatable or not lost:
            return None
        return max(lost, key=lambda each: each[1].cut(shared_length(each[0], prompt)).length)

    def _lose(self) -> None:
        """Discard all rows. Their contents are remembered until the next prompt, which may need the same passes."""
        rows = [row for row in (self._now, *self._kept) if row.rows is not None]
        if rows:
            self._lost = [(row.tokens, row.passes) for row in rows]
        self.forget()

    # --- which row ------------------------------------------------------------------------------------------------

    def _take_up(self, prompt: Sequence[int], passes: PassSequence | None, turn: Turn) -> PassSequence | None:
        """Make the row that shares most with ``prompt`` current, and set the others aside.

        ``passes``: those by which the prompt must be brought into the cache; None: any. Returns them, or those that a
        row from disk requires.
        """
        row, reusable = best_row([self._now, *self._kept], prompt, passes)
        if self._disk is not None:
            self._take_forgotten()
            wanted = passes
            if wanted is None and self._repeatable:
                # An answer that can be repeated does not depend on what the disk happens to hold.
                wanted = self._passes_for(row if reusable else CachedRow(), prompt)
            self._from_disk = self._disk.better(prompt, wanted, reusable, turn.cancelled)
            if self._from_disk is not None:
                row, passes = self._from_disk, wanted
                reusable = row.reusable(prompt, wanted)
        self._adopt(row, reusable, prompt)
        return passes

    def _adopt(self, row: CachedRow, reusable: int, prompt: Sequence[int]) -> None:
        """Make ``row`` current, of which ``prompt`` reuses ``reusable`` tokens. If it would lose much, a copy is
        used."""
        if row is not self._now or not reusable:
            if self._now.rows is not None:
                self._kept.insert(0, self._now)
            self._now = row if reusable else CachedRow()
        self._kept = [other for other in self._kept if other is not self._now]
        self._free(prompt)
        if self._now.rows is None or len(row.tokens) - reusable < FORK_TOKENS:
            return
        self._kept.insert(0, row)
        self._free(prompt)
        if row in self._kept:
            self._now = row.copied()

    def _take_forgotten(self) -> None:
        if self._disk is not None:
            self._disk.take_forgotten([self._now, *self._kept])

    def write(self, should_stop: Callable[[], bool], *, last: bool = False) -> list[str]:
        """Write to disk what may be kept there and has grown, until ``should_stop()``. ``last``: write all of it.

        Returns sentences for the person.
        """
        if self._disk is None:
            return []
        self._take_forgotten()
        said = []
        for row in (self._now, *self._kept):
            if self._disk.due(row, last=last) and not should_stop():
                said.append(self._disk.write(row, should_stop))
        return [text for text in said if text]

    def _free(self, prompt: Sequence[int]) -> None:
        """Forget the least recently used rows, as far as memory requires."""
        if not self._kept:
            return
        facts = self._model.facts
        if facts.ring is not None and len(facts.ring.nodes) > 1:
            self._keep(to_keep(self.kept_tokens, RING_TOKENS - len(prompt)))
        sizes = [row.nbytes(facts.key_value_bytes_per_token, facts.state_bytes) for row in self._kept]
        self._keep(to_keep(sizes, self._budget(sum(sizes))))

    def _keep(self, indices: Sequence[int]) -> None:
        self._kept = [self._kept[index] for index in indices]

    def _begin(self, tokens: list[int], passes: PassSequence) -> TokenRows:
        """Cut the cache back to its common prefix with ``tokens`` under the same ``passes``.

        The prefix never contains all tokens unless the logits after them are known.
        """
        now = self._now
        reused = passes.shared(now.passes).cut(shared_length(now.tokens, tokens))
        if reused == passes and not now.knows(passes.length):
            reused = passes.cut(passes.length - 1)
        rows = now.rows
        if rows is None or (reused != now.passes and not reused.length) or reused.length < rows.shortest_cut:
            saved = now.checkpoint
            if saved is not None and saved.begins(tokens) and passes.shared(saved.passes) == saved.passes:
                fresh = saved.rows.checkpoint() if saved.passes != passes else None
                if fresh is not None:
                    self._now = CachedRow(fresh, list(saved.tokens), saved.passes, None, saved)
                    return fresh
            rows = self._model.start()
            self._now = CachedRow(rows)
            return rows
        if reused != now.passes:
            rows.truncate(reused.length)
            del now.tokens[reused.length :]
            now.passes = reused
            now.on_disk = min(now.on_disk, reused.length)
            if now.known is not None and now.known[0] > reused.length:
                now.known = None
        return rows

    # --- running them ---------------------------------------------------------------------------------------------

    def _run(self, tokens: list[int], passes: PassSequence, turn: Turn, again: bool = False) -> Logits | None:
        """Bring ``tokens`` into the cache by ``passes``. Returns the logits after them, or None if cancelled.

        ``again``: they were in the cache before the ring was lost.
        """
        rows = self._begin(tokens, passes)
        self._now.belongs_to(turn.owner)
        reused = len(self.tokens)
        turn.emit(Prefill(id=turn.id, done=reused, total=len(tokens), reused=reused))
        if self._look is not None and reused < len(tokens):
            try:
                self._look(tokens[reused:], turn)
            except Cancelled:
                return None
        known = self._now.known
        logits = known[1] if known is not None and reused == len(tokens) else None
        for run in passes.after(reused):
            for count in [run] if run > 0 else _parts(-run, max(rows.steps_together, 1)):
                if turn.cancelled():
                    return None
                begun = len(self.tokens)
                turn.watch()
                part, last = tokens[begun : begun + count], begun + count == len(tokens)
                try:
                    with turn.passing():
                        if run < 0 and count == 1:
                            logits = rows.step(part)[0]
                        else:
                            with self._interruptible(turn):
                                logits = (rows.extend if run > 0 else rows.replay)(part, want_logits=last)
                except Interrupted:
                    return None
                if run > 0:
                    self._append(part, self._now.passes.prefilled(count))
                    rows.forget_unseen(begun - CUT_BACK_TOKENS)
                    if len(self.tokens) == len(tokens) - CHECKPOINT_TAIL and not rows.can_truncate:
                        self._save(rows)
                    if count >= LONG_CHUNK:
                        give_back()
                else:
                    self._append(part, self._now.passes.decoded(count))
                done = begun + count
                turn.ran_of_prompt(begun, done)
                if again and not last:
                    with contextlib.suppress(Cancelled):  # found before the next pass
                        turn.report("running the answer again", done, len(tokens), "tokens")
                elif run > 0 or last or turn.due("replay", REPLAY_INTERVAL_S):
                    turn.emit(Prefill(id=turn.id, done=done, total=len(tokens), reused=reused))
                turn.show_timing()
        return logits

    def _save(self, rows: TokenRows) -> None:
        saved = rows.checkpoint()
        self._now.checkpoint = None if saved is None else RowCheckpoint(list(self.tokens), self._now.passes, saved)

    def _append(self, tokens: Sequence[int], passes: PassSequence) -> None:
        self._now.tokens += tokens
        self._now.passes = passes

    def _run_again(self, lost: PeerLost, tokens: list[int], passes: PassSequence, turn: Turn) -> Logits | None:
        """Form the ring and run everything again after the loss ``lost``, until it succeeds or the maximum is
        reached."""
        if not self._repeatable:
            passes = PassSequence().up_to(len(tokens), self._chunk)
        while self._form_again(lost, turn):
            try:
                return self._run(tokens, passes, turn, again=True)
            except PeerLost as once_more:
                lost = once_more
        return None

    def _form_again(self, lost: PeerLost, turn: Turn) -> bool:
        """Form the ring again with an empty cache. Returns False if cancelled. Raises ModelError if the remaining
        machines cannot go on."""
        # The current conversation is run again at once.
        self._now = CachedRow()
        self._lose()
        if turn.cancelled():
            return False
        self._formed_again += 1
        if self._formed_again > MOST_FORMATIONS:
            raise ModelError(f"A machine of the ring is gone: {lost}.", kind="network") from lost
        try:
            self._model.recover(lost, turn.report, lambda text: turn.emit(Notice(text=text)))
        except Cancelled:
            return False
        found = self._model.facts
        turn.emit(RingChanged(ring=found.ring, executor=found.executor))
        return True

    @contextlib.contextmanager
    def _interruptible(self, turn: Turn) -> Iterator[None]:
        """Let a forward pass inside end early if the turn is cancelled and the runtime supports that."""
        self._model.between_layers = turn.check
        try:
            yield
        finally:
            self._model.between_layers = None


def _parts(count: int, most: int) -> list[int]:
    """``count`` split into parts of at most ``most``."""
    whole, rest = divmod(count, most)
    return [most] * whole + ([rest] if rest else [])
