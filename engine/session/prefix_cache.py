"""The prefix cache: the keys and values of a conversation, and the prefill of what is missing.

A repeated question gets the same answer, to the bit. To ensure this, a prompt is prefilled by the same passes as
before, and new passes continue only where an earlier pass ended (see :mod:`engine.session.passes`). In a ring, parts of
the cache are on other machines. When one is lost, the remaining machines form a new ring and run the same passes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.errors import Cancelled, ModelError, PeerLost
from engine.ipc.messages import Notice, Prefill, RingChanged
from engine.runtimes.protocol import (
    Draw,
    Interrupted,
    LoadedModel,
    Logits,
    TokenRows,
)
from engine.session.passes import PassSequence, RememberedPasses
from engine.session.turn import Turn
from engine.system.free_memory import give_back

LONG_CHUNK = 128
"""Smallest prefill chunk, in tokens, whose buffers are given back to the system."""

MOST_FORMATIONS = 5
"""Maximum re-formations of the ring per turn; after that the answer ends with an error."""

REPLAY_INTERVAL_S = 1 / 4
"""Time between two progress events while decoded tokens are run again, in seconds."""


CHECKPOINT_TAIL = 16
"""Tokens at the end of a prompt that are run by themselves where states cannot be cut back. They hold what a template
writes before the answer, so that the next prompt, which has other words there, has everything before them in common."""


@dataclass(frozen=True)
class _Checkpoint:
    """What the cache held after ``tokens``, made by ``passes``; ``rows`` is never run itself."""

    tokens: list[int]
    passes: PassSequence
    rows: TokenRows

    def begins(self, tokens: Sequence[int]) -> bool:
        return tokens[: len(self.tokens)] == self.tokens


class PrefixCache:
    """The cache of one conversation. ``rows`` holds the keys and values of ``tokens``, or is None if it is empty.

    ``chunk`` is the number of tokens of a prefill chunk. After an exception in a forward pass the caller must call
    :meth:`forget`, as the cache is then in an unknown state.
    """

    def __init__(self, model: LoadedModel, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self.rows: TokenRows | None = None
        self.tokens: list[int] = []
        self._passes = PassSequence()
        """The passes that made ``tokens``."""
        self._known: tuple[int, Logits] | None = None
        """The last prompt's length in tokens and the logits after it, so that it can be answered again."""
        self._remembered = RememberedPasses()
        self._checkpoint: _Checkpoint | None = None
        """Where the next prompt can go on if the cache cannot be cut back."""
        self._lost: tuple[list[int], PassSequence] | None = None
        """Tokens and passes that were in the cache when the ring was formed again between two questions."""
        self._repeatable = True
        self._formed_again = 0

    def forget(self) -> None:
        self.rows = None
        self.tokens = []
        self._passes = PassSequence()
        self._known = None
        self._checkpoint = None

    def take_back_peers(self, turn: Turn) -> None:
        """Form the ring again if its machines changed, which empties the cache. Called before each question.

        Until :meth:`turn_over`, waiting for the ring's machines ends when ``turn`` is cancelled. Raises Cancelled,
        ModelError.
        """
        self._formed_again = 0
        self._model.turn(turn.cancelled)
        void = True
        try:
            void = self._model.between_turns(turn.report, lambda text: turn.emit(Notice(text=text)))
        finally:
            if void:
                if self.rows is not None:
                    self._lost = self.tokens, self._passes
                self.forget()

    def turn_over(self) -> None:
        self._model.turn(lambda: False)

    def prefill(self, prompt: list[int], turn: Turn, repeatable: bool) -> Logits | None:
        """Bring ``prompt`` into the cache. Returns the logits after it, or None if cancelled.

        If a peer is lost, everything is run again. ``repeatable``: the same prompt gets the same logits as before, to
        the bit, which may take longer. Answers drawn without a seed do not need this.
        """
        self._repeatable = repeatable
        passes = self._passes_for(prompt)
        logits: Logits | None
        try:
            logits = self._run(prompt, passes, turn)
        except PeerLost as lost:
            logits = self._run_again(lost, prompt, passes, turn)
        if logits is not None:
            self._known = len(prompt), logits
            if repeatable:
                self._remembered.put(prompt, passes)
        return logits

    def step(self, token: int, turn: Turn) -> Logits | None:
        """The logits after one more ``token``. If a peer is lost, the remaining machines run everything again; None if
        that was cancelled."""
        assert self.rows is not None
        try:
            logits: Logits = self.rows.step([token])[0]
        except Interrupted:
            return None
        except PeerLost as lost:
            return self._run_again(lost, [*self.tokens, token], self._passes.decoded(), turn)
        self._append([token], self._passes.decoded())
        return logits

    def step_choosing(self, token: int, draw: Draw) -> int | None:
        """The token after one more ``token`` if the rows choose it themselves, else None."""
        chosen = None if self.rows is None else self.rows.step_choosing(token, draw)
        if chosen is not None:
            self._append([token], self._passes.decoded())
        return chosen

    def settle(self) -> None:
        """End of an answer: a step that the runtime began ahead is discarded."""
        if self.rows is not None:
            self.rows.settle()

    def rows_again(self, lost: PeerLost, turn: Turn) -> TokenRows:
        """Rows that hold what is in the cache, for a beam search whose ring was lost. Raises Interrupted if
        cancelled."""
        if self._run_again(lost, self.tokens, self._passes, turn) is None:
            raise Interrupted
        assert self.rows is not None
        return self.rows

    # --- which passes ---------------------------------------------------------------------------------------------

    def _passes_for(self, prompt: list[int]) -> PassSequence:
        """The passes by which ``prompt`` is brought into the cache."""
        lost, self._lost = self._lost, None
        found = self._remembered.get(prompt) if self._repeatable else None
        if found is not None:
            return found
        tokens, passes = lost if lost is not None and self._repeatable else (self.tokens, self._passes)
        shared = _shared(tokens, prompt)
        if shared == len(prompt) and not self._knows(shared):
            shared -= 1
        kept = passes.cut(shared)
        if kept != passes and self.rows is not None and not self.rows.can_truncate:
            saved = self._checkpoint
            kept = saved.passes if saved is not None and saved.begins(prompt) else PassSequence()
        tail = len(prompt) - CHECKPOINT_TAIL
        if self._model.facts.state_bytes and kept.length < tail:
            kept = kept.up_to(tail, self._chunk)
        return kept.up_to(len(prompt), self._chunk)

    def _knows(self, length: int) -> bool:
        """Whether the logits after the first ``length`` tokens are known."""
        return self._known is not None and self._known[0] == length

    def _begin(self, tokens: list[int], passes: PassSequence) -> TokenRows:
        """Cut the cache back to its common prefix with ``tokens`` under the same ``passes``.

        The prefix never contains all tokens unless the logits after them are known.
        """
        kept = passes.shared(self._passes).cut(_shared(self.tokens, tokens))
        if kept == passes and not self._knows(passes.length):
            kept = passes.cut(passes.length - 1)
        rows = self.rows
        if rows is None or (kept != self._passes and not (kept.length and rows.can_truncate)):
            saved = self._checkpoint
            if saved is not None and saved.begins(tokens) and passes.shared(saved.passes) == saved.passes:
                fresh = saved.rows.checkpoint() if saved.passes != passes else None
                if fresh is not None:
                    self.rows, self.tokens, self._passes = fresh, list(saved.tokens), saved.passes
                    self._known = None
                    return fresh
            self.forget()
            self.rows = self._model.start()
            return self.rows
        if kept != self._passes:
            rows.truncate(kept.length)
            del self.tokens[kept.length :]
            self._passes = kept
            if self._known is not None and self._known[0] > kept.length:
                self._known = None
        return rows

    # --- running them ---------------------------------------------------------------------------------------------

    def _run(self, tokens: list[int], passes: PassSequence, turn: Turn) -> Logits | None:
        """Bring ``tokens`` into the cache by ``passes``; the logits after them, or None if cancelled."""
        rows = self._begin(tokens, passes)
        reused = len(self.tokens)
        turn.emit(Prefill(id=turn.id, done=reused, total=len(tokens), reused=reused))
        logits = self._known[1] if self._known is not None and reused == len(tokens) else None
        for run in passes.after(reused):
            for count in [run] if run > 0 else [1] * -run:
                if turn.cancelled():
                    return None
                begun = len(self.tokens)
                turn.watch()
                part = tokens[begun : begun + count]
                if run > 0:
                    try:
                        with self._interruptible(turn), turn.passing():
                            logits = rows.extend(part, want_logits=begun + count == len(tokens))
                    except Interrupted:
                        return None
                    self._append(part, self._passes.prefilled(count))
                    if len(self.tokens) == len(tokens) - CHECKPOINT_TAIL and not rows.can_truncate:
                        self._save(rows)
                    if count >= LONG_CHUNK:
                        give_back()
                else:
                    try:
                        with turn.passing():
                            logits = rows.step(part)[0]
                    except Interrupted:
                        return None
                    self._append(part, self._passes.decoded())
                done = begun + count
                turn.ran_of_prompt(begun, done)
                if run > 0 or done == len(tokens) or turn.due("replay", REPLAY_INTERVAL_S):
                    turn.emit(Prefill(id=turn.id, done=done, total=len(tokens), reused=reused))
                turn.show_timing()
        return logits

    def _save(self, rows: TokenRows) -> None:
        saved = rows.checkpoint()
        self._checkpoint = None if saved is None else _Checkpoint(list(self.tokens), self._passes, saved)

    def _append(self, tokens: Sequence[int], passes: PassSequence) -> None:
        self.tokens += tokens
        self._passes = passes

    def _run_again(self, lost: PeerLost, tokens: list[int], passes: PassSequence, turn: Turn) -> Logits | None:
        """Form the ring and run everything again after ``lost``, until it succeeds or the maximum is reached."""
        if not self._repeatable:
            passes = PassSequence().up_to(len(tokens), self._chunk)
        while self._form_again(lost, turn):
            try:
                return self._run(tokens, passes, turn)
            except PeerLost as again:
                lost = again
        return None

    def _form_again(self, lost: PeerLost, turn: Turn) -> bool:
        """Form the ring again with an empty cache. Returns False if cancelled. Raises ModelError if the remaining
        machines cannot go on."""
        self.forget()
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
        """Let a forward pass inside end early when the turn is cancelled, if the runtime supports that."""
        self._model.between_layers = turn.check
        try:
            yield
        finally:
            self._model.between_layers = None


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
