"""The row of the prefix cache that one turn uses, and the prefill of what is missing in it.

In a ring, parts of the row are on other machines. When one is lost, the remaining machines form a new ring, and read
and write everything again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from engine.errors import Cancelled, ModelError, PeerLost
from engine.generation.drafts import Repetitions, TokenDraft
from engine.generation.programs import Program, Reading, decode, decode_choosing, read
from engine.generation.sampling import Sampler
from engine.ipc.messages import Notice, RingChanged
from engine.planning.memory import CUT_BACK_TOKENS
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits, TokenRows
from engine.session.chunks import chunks
from engine.session.kept_rows import CachedRow, shared_length
from engine.session.origins import Origins
from engine.session.prefix_cache import CHECKPOINT_TAIL, PrefixCache
from engine.session.reading_again import Closest
from engine.session.turn import Turn
from engine.system.free_memory import give_back

LONG_CHUNK = 128
"""Smallest prefill chunk, in tokens, whose buffers are returned to the system."""

MOST_FORMATIONS = 5
"""Maximum re-formations of the ring per turn; after that the answer ends with an error."""

REPLAY_INTERVAL_S = 1 / 4
"""Seconds between two progress events while decoded tokens are run again."""


Look = Callable[[Sequence[int], Turn], None]
"""Makes the rows of pictures of which some of the tokens are. It may raise Cancelled."""


class TurnCache:
    """The part of ``cache`` that ``turn`` uses.

    ``rows`` holds the keys and values of ``tokens``, or is None if there are none. ``chunk`` is the number of tokens of
    a prefill chunk. ``look`` is called with the tokens that are about to be run. After an exception in a forward pass
    the caller must call :meth:`forget`, because the row is then in an unknown state. :meth:`close` ends the use.

    ``repeatable``: the same prompt gets the same logits as before, to the bit, which may take longer. Answers drawn
    without a seed do not need that. ``drafts``: tokens are guessed ahead where the rows can verify them.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        turn: Turn,
        chunk: int,
        repeatable: bool,
        look: Look | None = None,
        *,
        drafts: bool = True,
    ) -> None:
        self._cache = cache
        self._model = model
        self._turn = turn
        self._chunk = chunk
        self._repeatable = repeatable
        self._look = look
        self._drafts = drafts
        self._row: CachedRow | None = None
        """None until the first prefill takes one."""
        self._stored: CachedRow | None = None
        """The row that was read from disk for it."""
        self._context = model.context
        """Context of the ring that holds the row."""
        self._formed_again = 0
        self.first = False
        """Whether nothing had been read since the model was loaded."""
        self.closest: Closest | None = None
        """What was kept that shares most with the first prompt."""
        self.reused: int | None = None
        """Tokens of the first prompt that were not run; None before it."""
        self._repetitions: Repetitions | None = None
        self._ahead: deque[tuple[int, Logits]] = deque()
        """Guessed tokens that the rows hold behind the row's own, and the logits after each. There are none while this
        waits for a pass, or ends."""

    @property
    def rows(self) -> TokenRows | None:
        return None if self._row is None else self._row.rows

    @property
    def tokens(self) -> list[int]:
        return [] if self._row is None else self._row.tokens

    def forget(self) -> None:
        """Drop the row, and everything that is kept."""
        if self._row is not None:
            if self._stored is not None:
                self._cache.discard_stored(self._stored)
            self._row = self._cache.replace(self._row, CachedRow())
        self._cache.forget()

    def close(self) -> None:
        """Give the row back. May be called twice."""
        if self._row is not None:
            self._cache.give_back(self._row)
            self._row = None
        self._model.end_turn(self._turn.cancelled)

    def branch(self) -> TurnCache:
        """The same contents, which go on by themselves; to be dropped (:meth:`drop`)."""
        other = TurnCache(self._cache, self._model, self._turn, self._chunk, self._repeatable, self._look)
        other._drafts = self._drafts
        other._row = self._cache.fork(self._current)
        other._context = self._context
        return other

    def drop(self) -> None:
        """Forget a branch."""
        self._cache.drop(self._current)
        self._row = None

    def take_back_peers(self, prompt: Sequence[int]) -> None:
        """Form the ring again if its machines changed and that pays. This empties the cache.

        Called before the first prefill, of ``prompt``. Waiting for the ring's machines ends when the turn is cancelled,
        until :meth:`close`. Raises Cancelled, ModelError.
        """
        turn = self._turn
        self._model.begin_turn(turn.cancelled)
        void = True
        try:
            void = self._model.between_turns(
                turn.report,
                lambda text: turn.emit(Notice(text=text)),
                *self._cache.again(prompt, self._repeatable),
            )
        finally:
            self._context = self._model.context
            if void:
                self._cache.lose()

    def prefill(self, prompt: list[int]) -> Program[Logits | None]:
        """Bring ``prompt`` into the row. Returns the logits after it, or None if cancelled.

        If a peer is lost, everything is run again.
        """
        self._repetitions = None
        remembered = self._cache.remembered.get(prompt) if self._repeatable else None
        if self._row is None:
            self.first, self.closest = self._cache.unread, self._cache.closest(prompt)
            taken = self._cache.take(prompt, remembered, self._repeatable, self._turn.cancelled)
            self._row, remembered, self._stored = taken.row, taken.origins, taken.stored
        lost_beginning = self._cache.lost_beginning(prompt, self._repeatable)
        origins = self._cache.origins_for(self._row, prompt, lost_beginning) if remembered is None else remembered
        logits: Logits | None
        try:
            logits = yield from self._run(prompt, origins)
        except PeerLost as lost:
            logits = yield from self._run_again(lost, prompt, origins)
        if logits is not None:
            self._row.known = len(prompt), logits
            if self._repeatable:
                self._cache.remembered.put(prompt, origins)
        return logits

    def step(self, token: int, choose: Callable[[Logits], int], sampler: Sampler | None = None) -> Program[int | None]:
        """Run ``token``, and return the next token: the result of ``choose(logits)``, or the choice of ``sampler``
        where the logits are.

        What was guessed and is right has been run already. If a peer is lost, the remaining machines run everything
        again. Returns None if that is cancelled.
        """
        row = self._current
        assert row.rows is not None
        if self._ahead and self._ahead[0][0] == token:
            self._append([token], row.origins.written())
            self._turn.accept()
            return choose(self._ahead.popleft()[1])
        self._cut_ahead()
        drafted: list[int] = []

        def draft(most: int) -> TokenDraft | None:
            if self._repetitions is None or self._repetitions.tokens is not row.tokens:
                self._repetitions = Repetitions(row.tokens)
            room = self._model.facts.context_limit - len(row.tokens) - 1
            found = self._repetitions.guess(token, min(most, room)) if room > 0 else None
            drafted[:] = [] if found is None else found.tokens
            return found

        outcome: Logits | int
        try:
            outcome = yield from decode_choosing(
                row.rows, token, sampler, draft if self._drafts and row.rows.verified_together else None
            )
        except Interrupted:
            return None
        except PeerLost as lost:
            logits = yield from self._run_again(lost, [*row.tokens, token], row.origins.written())
            return None if logits is None else choose(logits)
        self._append([token], row.origins.written())
        if not isinstance(outcome, int):
            self._ahead.extend(zip(drafted, outcome[1:], strict=False))
            self._turn.drafted_tokens += len(self._ahead)
            return choose(outcome[0])
        assert sampler is not None
        sampler.take(outcome)
        return outcome

    def settle(self) -> None:
        """End the answer. Guessed tokens, and a step that the runtime began ahead, are discarded."""
        self._cut_ahead()
        if self.rows is not None:
            self.rows.settle()

    def rows_again(self, lost: PeerLost) -> Program[TokenRows]:
        """Rows with the row's contents, for a beam search whose ring was lost. Raises Interrupted if cancelled."""
        row = self._current
        if (yield from self._run_again(lost, row.tokens, row.origins)) is None:
            raise Interrupted
        assert self.rows is not None
        return self.rows

    def _cut_ahead(self) -> None:
        """Cut off the guessed tokens."""
        guessed = bool(self._ahead)
        self._ahead.clear()
        if guessed and self.rows is not None:
            self.rows.truncate(len(self.tokens))

    @property
    def _current(self) -> CachedRow:
        assert self._row is not None, "a prompt was prefilled"
        return self._row

    def _use(self, row: CachedRow) -> None:
        self._row = self._cache.replace(self._current, row)

    def _begin(self, tokens: list[int], origins: Origins) -> TokenRows:
        """Cut the row back to its common prefix with ``tokens`` with the same ``origins``.

        The prefix never contains all tokens unless the logits after them are known.
        """
        now = self._current
        reused = origins.shared(now.origins).cut(shared_length(now.tokens, tokens))
        if reused == origins and not now.knows(origins.length):
            reused = origins.cut(origins.length - 1)
        rows = None if now.rows is None or now.rows.void else now.rows
        if rows is None or (reused != now.origins and not reused.length) or reused.length < rows.shortest_cut:
            # Something must be left to run.
            saved = now.checkpoint(min(reused.length, origins.length - 1))
            fresh = None if saved is None else saved.checkpoint()
            if saved is not None and fresh is not None:
                kept = tuple(each for each in now.checkpoints if each.length <= saved.length)
                self._use(CachedRow(fresh, tokens[: saved.length], origins.cut(saved.length), checkpoints=kept))
                return fresh
            rows = self._model.start()
            self._use(CachedRow(rows))
            return rows
        if reused != now.origins:
            rows.truncate(reused.length)
            del now.tokens[reused.length :]
            now.origins = reused
            now.on_disk = min(now.on_disk, reused.length)
            if now.known is not None and now.known[0] > reused.length:
                now.known = None
        return rows

    def _run(self, tokens: list[int], origins: Origins, again: bool = False) -> Program[Logits | None]:
        """Bring ``tokens`` into the row, with these ``origins``. Returns the logits after them, or None if cancelled.

        ``again``: they were in it before the ring was lost.
        """
        turn, rows = self._turn, self._begin(tokens, origins)
        row = self._current
        row.belongs_to(turn.owner)
        row.client = turn.client
        reused = len(row.tokens)
        self.reused = reused if self.reused is None else self.reused
        turn.show_prefill(reused, len(tokens), reused)
        if self._look is not None and reused < len(tokens):
            try:
                self._look(tokens[reused:], turn)
            except Cancelled:
                return None
        logits = row.known[1] if row.known is not None and reused == len(tokens) else None
        pictures = self._model.pictures
        whole = [] if pictures is None else pictures.whole(tokens)
        saved_at = len(tokens) - CHECKPOINT_TAIL if self._model.facts.state_bytes else 0
        for run in origins.after(reused):
            begin, end = len(row.tokens), len(row.tokens) + abs(run)
            sizes = chunks(begin, end, self._chunk, whole, saved_at)
            if run < 0:
                sizes = chunks(begin, end, max(rows.steps_together, 1))
            for count in sizes:
                if turn.cancelled():
                    return None
                begun = len(row.tokens)
                turn.watch()
                part, last = tokens[begun : begun + count], begun + count == len(tokens)
                try:
                    with turn.passing():
                        if run < 0 and count == 1:
                            logits = (yield from decode(rows, part))[0]
                        else:
                            logits = yield from read(Reading(rows, part, last, as_steps=run < 0, check=turn.check))
                except Interrupted:
                    return None
                if run > 0:
                    self._append(part, row.origins.read(count))
                    rows.forget_unseen(begun - CUT_BACK_TOKENS)
                    if not rows.can_truncate and len(row.tokens) <= saved_at:
                        self._cache.save(row, tail=len(row.tokens) == saved_at)
                    if count >= LONG_CHUNK:
                        give_back()
                else:
                    self._append(part, row.origins.written(count))
                done = begun + count
                turn.ran_of_prompt(begun, done)
                if again and not last:
                    with contextlib.suppress(Cancelled):  # found before the next pass
                        turn.report("running the answer again", done, len(tokens), "tokens")
                elif run > 0 or last or turn.due("replay", REPLAY_INTERVAL_S):
                    turn.show_prefill(done, len(tokens), reused)
                turn.show_timing()
        return logits

    def _append(self, tokens: Sequence[int], origins: Origins) -> None:
        self._current.tokens += tokens
        self._current.origins = origins

    def _run_again(self, lost: PeerLost, tokens: list[int], origins: Origins) -> Program[Logits | None]:
        """Form the ring and run everything again after the loss ``lost``, until it succeeds or the maximum is
        reached."""
        if not self._repeatable:
            origins = Origins().read(len(tokens))
        while self._form_again(lost):
            try:
                return (yield from self._run(tokens, origins, again=True))
            except PeerLost as once_more:
                lost = once_more
        return None

    def _form_again(self, lost: PeerLost) -> bool:
        """Form the ring again with an empty cache. Returns False if cancelled. Raises ModelError if the remaining
        machines cannot go on."""
        turn = self._turn
        # The current conversation is run again at once.
        self._use(CachedRow())
        if self._model.context is not self._context:
            # Another answer formed it again already.
            self._context = self._model.context
            return not turn.cancelled()
        self._cache.lose()
        if turn.cancelled():
            return False
        self._formed_again += 1
        if self._formed_again > MOST_FORMATIONS:
            raise ModelError(f"A machine of the ring is gone: {lost}.", kind="network") from lost
        try:
            self._model.recover(lost, turn.report, lambda text: turn.emit(Notice(text=text)))
        except Cancelled:
            return False
        finally:
            self._context = self._model.context
        found = self._model.facts
        turn.emit(RingChanged(ring=found.ring, executor=found.executor))
        return True
