"""The answer of a machine that runs the whole model for a head: one frame per pass, with the last rows' logits."""

from __future__ import annotations

import numpy as np

from discovery.names import plain_text
from engine.cluster.contributions import REASON_BYTES, NodeFailed
from engine.cluster.parts import Observer, nobody_observes
from engine.cluster.transport.exchange import Link, RingProtocolError
from engine.runtimes.protocol import Interrupted, Logits

DONE, GAVE_UP, FAILED = b"\x00", b"\x01", b"\x02"
"""First byte: logits (or nothing) follow; the head gave up the pass; or a reason in UTF-8 follows."""
FLOAT = np.dtype("<f4")


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

    def done(self, logits: Logits | None) -> None:
        """``logits`` [vocabulary] or [rows, vocabulary], as far as they are wanted."""
        found = b"" if logits is None else np.ascontiguousarray(logits, FLOAT).tobytes()
        self._answer(DONE, found)

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


def answer_limit(rows: int, vocabulary: int) -> int:
    """Maximum bytes of an answer to a pass of ``rows``."""
    return 1 + max(REASON_BYTES, rows * vocabulary * FLOAT.itemsize)


def read_answer(frame: memoryview, rows: int, vocabulary: int, rank: int) -> Logits:
    """The logits [rows, vocabulary] in the answer of node ``rank``; without ``rows`` none are wanted.

    Raises Interrupted if the pass was given up, NodeFailed if the node cannot go on, RingProtocolError for anything
    else.
    """
    kind, rest = bytes(frame[:1]), frame[1:]
    if kind == GAVE_UP and not len(rest):
        raise Interrupted
    if kind == FAILED:
        said = plain_text(bytes(rest[:REASON_BYTES]).decode("utf-8", "replace"), REASON_BYTES)
        raise NodeFailed(said or "it gave no reason", [rank])
    expected = rows * vocabulary * FLOAT.itemsize
    if kind != DONE or len(rest) != expected:
        raise RingProtocolError(
            f"The machine that computes sent {len(frame)} bytes where an answer of {1 + expected} was expected; ask "
            "once more, or leave the ring."
        )
    return np.frombuffer(rest, FLOAT).astype(np.float32).reshape(rows, vocabulary)
