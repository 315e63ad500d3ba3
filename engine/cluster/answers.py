"""The answer of a machine that runs the whole model for a head: one frame per pass, with the last rows' logits or the
token that was chosen by them."""

from __future__ import annotations

import numpy as np

from discovery.names import plain_text
from engine.cluster.contributions import REASON_BYTES, NodeFailed
from engine.cluster.parts import Observer, nobody_observes
from engine.cluster.transport.exchange import Link, RingProtocolError
from engine.generation.sampling import NotNumbersError
from engine.runtimes.protocol import Interrupted, Logits

DONE, GAVE_UP, FAILED, NOT_NUMBERS = b"\x00", b"\x01", b"\x02", b"\x03"
"""First byte: logits, a token or nothing follow; the head gave up the pass; a reason in UTF-8 follows; or such a reason
why no token could be chosen."""
FLOAT = np.dtype("<f4")
TOKEN = np.dtype("<i4")


class Answers:
    """The machine's side, in place of a :class:`engine.moe.expert_parallel.LayerExchange`: it notifies the head of each
    pass.

    :meth:`stop` from any thread, everything else from the one that runs the passes.
    """

    def __init__(self, link: Link, observe: Observer = nobody_observes) -> None:
        self._link = link
        self._observe = observe
        self._number = 0
        self._answered = True
        self._stop = 0

    def begin_pass(self) -> None:
        self._number += 1
        self._answered = False

    def stop(self, number: int) -> None:
        """The head gives up pass ``number``, counted from one. It may not have begun here."""
        self._stop = number

    def check(self) -> None:
        """Called between two layers. Raises Interrupted if the head gave up the pass."""
        self._observe("checked", self)
        if self.stopped:
            raise Interrupted

    @property
    def stopped(self) -> bool:
        """Whether the head gave up the pass that runs now."""
        return self._stop == self._number

    def done(self, found: Logits | int | None) -> None:
        """``found``: logits [vocabulary] or [rows, vocabulary], or the chosen token, as far as they are wanted."""
        dtype = TOKEN if isinstance(found, int) else FLOAT
        self._answer(DONE, b"" if found is None else np.ascontiguousarray(found, dtype).tobytes())

    def not_numbers(self, reason: str) -> None:
        self._answer(NOT_NUMBERS, reason.encode()[:REASON_BYTES])

    def gave_up(self) -> None:
        self._answer(GAVE_UP, b"")

    def give_up(self, reason: str = "") -> bool:
        """Report that this machine cannot go on. Returns False if the head has its answer already."""
        if self._answered:
            return False
        self._answer(FAILED, reason.encode()[:REASON_BYTES])
        return True

    def _answer(self, kind: bytes, rest: bytes) -> None:
        self._answered = True
        self._link.send(kind, rest)


def answer_limit(nbytes: int) -> int:
    """Maximum bytes of an answer of ``nbytes``."""
    return 1 + max(REASON_BYTES, nbytes)


def read_answer(frame: memoryview, nbytes: int, rank: int) -> memoryview:
    """The ``nbytes`` in the answer of node ``rank``.

    Raises Interrupted if the pass was given up, NodeFailed if the node cannot go on, NotNumbersError if it could choose
    no token, RingProtocolError for anything else.
    """
    kind, rest = bytes(frame[:1]), frame[1:]
    if kind == GAVE_UP and not len(rest):
        raise Interrupted
    if kind in (FAILED, NOT_NUMBERS):
        said = plain_text(bytes(rest[:REASON_BYTES]).decode("utf-8", "replace"), REASON_BYTES)
        if kind == NOT_NUMBERS:
            raise NotNumbersError(said)
        raise NodeFailed(said or "it gave no reason", [rank])
    if kind != DONE or len(rest) != nbytes:
        raise RingProtocolError(
            f"The machine that computes sent {len(frame)} bytes where an answer of {1 + nbytes} was expected; ask "
            "once more, or leave the ring."
        )
    return rest


def read_logits(data: memoryview, rows: int, vocabulary: int) -> Logits:
    """The logits [rows, vocabulary] in ``data``."""
    return np.frombuffer(data, FLOAT).astype(np.float32).reshape(rows, vocabulary)


def read_token(data: memoryview, vocabulary: int) -> int:
    """The token in ``data``. Raises RingProtocolError if it is not one of the ``vocabulary``."""
    token = int(np.frombuffer(data, TOKEN)[0])
    if not 0 <= token < vocabulary:
        raise RingProtocolError(
            f"The machine that computes chose token {token} of a vocabulary of {vocabulary}; ask once more, or leave "
            "the ring."
        )
    return token
