"""The keys and values of a conversation: which tokens are in the cache, and bringing others there.

In a ring a part of the cache lies on other machines: when one is lost, what is left forms again and the tokens are run
again, while the person waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.errors import Cancelled, ModelError, PeerLost
from engine.free_memory import give_back
from engine.messages import Notice, Prefill, RingChanged
from engine.runtimes.protocol import Interrupted, Interruptible, LoadedModel, Logits, Recoverable, TokenRows
from engine.turn import Turn

LONG_CHUNK = 128
"""Tokens of a prefill chunk from which on its buffers are worth giving back to the system."""

FORMED_AGAIN = 5
"""So often the ring is formed again within one turn; then the answer ends with what there is."""


class ConversationCache:
    """``rows`` holds the keys and values of ``tokens``; None: of nothing. ``chunk`` is the tokens of a prefill chunk.

    Whoever gets an exception out of a forward pass must :meth:`forget`: nobody knows what the cache holds then.
    """

    def __init__(self, model: LoadedModel, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self.rows: TokenRows | None = None
        self.tokens: list[int] = []
        self._formed_again = 0

    def forget(self) -> None:
        self.rows = None
        self.tokens = []

    def take_back_peers(self, turn: Turn) -> None:
        """Between two questions a ring may be formed anew, by which the cache is lost. Raises Cancelled, ModelError."""
        self._formed_again = 0
        if not isinstance(self._model, Recoverable):
            return
        if self._model.between_turns(turn.report, lambda text: turn.emit(Notice(text=text))):
            self.forget()

    def prefill(self, prompt: list[int], turn: Turn) -> Logits | None:
        """Bring ``prompt`` into the cache, again if a peer is lost; the logits after it, or None if cancelled."""
        while True:
            try:
                return self._fill(prompt, turn)
            except PeerLost as lost:
                if not self._form_again(lost, turn):
                    return None

    def step(self, token: int, prompt: list[int], answer: list[int], turn: Turn) -> Logits | None:
        """The logits after ``token``, the last of ``answer``. If a peer is lost, what is left of the ring runs prompt
        and answer again; None if that was cancelled."""
        assert self.rows is not None
        try:
            logits: Logits = self.rows.step([token])[0]
            self.tokens.append(token)
            return logits
        except PeerLost as lost:
            gone = lost
        while self._form_again(gone, turn):
            try:
                return self._replay(prompt, answer, turn)
            except PeerLost as lost:
                gone = lost
        return None

    def prompt_again(self, lost: PeerLost, prompt: list[int], turn: Turn) -> TokenRows:
        """Rows that hold the prompt, for a beam search whose ring was lost. Raises Interrupted if cancelled."""
        if not self._form_again(lost, turn) or self.prefill(prompt, turn) is None:
            raise Interrupted
        assert self.rows is not None
        return self.rows

    def _replay(self, prompt: list[int], answer: list[int], turn: Turn) -> Logits | None:
        """Token by token, as the answer was made: a prompt's kernels round differently, and a token might change."""
        logits = self._fill(prompt, turn)
        for token in answer:
            if logits is None or turn.cancelled():
                return None
            assert self.rows is not None
            logits = self.rows.step([token])[0]
            self.tokens.append(token)
        return logits

    def _form_again(self, lost: PeerLost, turn: Turn) -> bool:
        """Nothing of the cache is left. False: cancelled. Raises ModelError if those who are there cannot go on."""
        self.forget()
        self._formed_again += 1
        if not isinstance(self._model, Recoverable) or self._formed_again > FORMED_AGAIN:
            raise ModelError(f"A machine of the ring is gone: {lost}.", kind="network") from lost
        try:
            self._model.recover(lost, turn.report, lambda text: turn.emit(Notice(text=text)))
        except Cancelled:
            return False
        found = self._model.facts
        turn.emit(RingChanged(ring=found.ring, executor=found.executor))
        return True

    def _fill(self, prompt: list[int], turn: Turn) -> Logits | None:
        rows = self._share_prefix(prompt)
        reused = position = len(self.tokens)
        turn.emit(Prefill(id=turn.id, done=position, total=len(prompt), reused=reused))
        logits: Logits | None = None
        while position < len(prompt):
            if turn.cancelled():
                return None
            chunk = prompt[position : position + self._chunk]
            position += len(chunk)
            turn.watch()
            try:
                with self._interruptible(turn), turn.passing():
                    logits = rows.extend(chunk, want_logits=position == len(prompt))
            except Interrupted:
                return None
            self.tokens += chunk
            if len(chunk) >= LONG_CHUNK:
                give_back()
            turn.prefilled += len(chunk)
            turn.emit(Prefill(id=turn.id, done=position, total=len(prompt), reused=reused))
            turn.show_timing()
        return logits

    @contextlib.contextmanager
    def _interruptible(self, turn: Turn) -> Iterator[None]:
        """Within it, a forward pass ends early if the turn is cancelled and the runtime can do that."""

        def check() -> None:
            if turn.cancelled():
                raise Interrupted

        model = self._model
        if not isinstance(model, Interruptible):
            yield
            return
        model.between_layers = check
        try:
            yield
        finally:
            model.between_layers = None

    def _share_prefix(self, prompt: list[int]) -> TokenRows:
        """The cache cut back to what it has in common with ``prompt``, the last prompt token always left out: its
        logits are needed."""
        shared = 0
        for cached, token in zip(self.tokens, prompt[:-1], strict=False):
            if cached != token:
                break
            shared += 1
        rows = self.rows
        if rows is not None and shared == len(self.tokens):
            return rows
        if rows is None or shared == 0 or not rows.can_truncate:
            self.forget()
            self.rows = rows = self._model.start()
        else:
            rows.truncate(shared)
            del self.tokens[shared:]
        return rows
