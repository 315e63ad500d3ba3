"""Exchanges over a library's own all-gather (gloo, mx.distributed), which needs blocks of the same size from all ranks.

Every exchange is one all-gather of a block that begins with the length. What does not fit follows in a second one. They
run in a thread of their own, so that a waiting caller can be woken although the library cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from time import perf_counter
from typing import TypeVar

from engine.cluster.transport.epochs import Epoch
from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.ipc.messages.ring import ExchangeName

LENGTH = struct.Struct("<Q")
BLOCK = 16 * 1024
"""Bytes of the first all-gather, enough for a decoding step of most models."""
ROOM = BLOCK - LENGTH.size
CLOSE_WAIT_S = 0.5
POLL_S = 0.05
"""Seconds between two checks whether the epoch was given up."""

Made = TypeVar("Made")


def made_while_wanted(
    epoch: Epoch, make: Callable[[], Made], unmake: Callable[[Made], None], wake: Callable[[], None] = lambda: None
) -> Made:
    """The result of ``make``, which runs in a separate thread because libraries and processes may wait for ever for a
    dead node.

    If ``epoch`` is given up, the thread is left behind and ``wake`` is called. A late result is passed to ``unmake``.
    Raises PeerLost in that case, and whatever ``make`` raises.
    """
    result: Future[Made] = Future()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(made)

    threading.Thread(target=run, name="making a group", daemon=True).start()
    while not wait([result], timeout=POLL_S).done:
        if epoch.given_up.is_set():
            wake()
            result.add_done_callback(lambda late: unmake(late.result()) if late.exception() is None else None)
            raise PeerLost("The epoch was ended while its links were made.")
    return result.result()


class Gathering(ABC):
    """An all-gather of a library. Not thread-safe."""

    @property
    @abstractmethod
    def name(self) -> ExchangeName: ...

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def gather(self, block: bytearray) -> list[memoryview]:
        """The blocks of all ranks, in their order. ``block`` has the same length on all ranks. Raises PeerLost."""

    @abstractmethod
    def end(self) -> None:
        """Release what can be released, at once."""


class CollectiveExchange:
    """See :class:`engine.cluster.transport.exchange.Exchange`."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._asked: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[memoryview] | BaseException] = queue.SimpleQueue()
        self._closed = False
        self.idle_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{gathering.name}-exchange", daemon=True)
        self._thread.start()

    @property
    def name(self) -> ExchangeName:
        return self._gathering.name

    @property
    def rank(self) -> int:
        return self._gathering.rank

    @property
    def size(self) -> int:
        return self._gathering.size

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """See :class:`engine.cluster.transport.exchange.Exchange`."""
        if self._closed:
            raise PeerLost("The ring's links were closed.")
        self._asked.put((b"".join(parts), capacity))

    def receive(self) -> list[memoryview]:
        """See :class:`engine.cluster.transport.exchange.Exchange`."""
        if self._closed:
            raise PeerLost("The ring's links were closed.")
        began = perf_counter()
        result = self._done.get()
        self.idle_s += perf_counter() - began
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def missing(self) -> list[int]:
        """See :class:`engine.cluster.transport.exchange.Exchange`. An all-gather does not reveal for whom it waits, but
        one of two nodes waits for the other."""
        return [1 - self.rank] if self.size == 2 else []

    def close(self) -> None:
        """See :class:`engine.cluster.transport.exchange.Exchange`. A hanging all-gather is left to its thread."""
        if self._closed:
            return
        self._closed = True
        self._asked.put(None)
        self._done.put(PeerLost("The ring's links were closed."))
        with contextlib.suppress(Exception):
            self._gathering.end()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while True:
            asked = self._asked.get()
            if asked is None or self._closed:
                return
            try:
                self._done.put(self._exchanged(*asked))
            except BaseException as error:
                self._done.put(error)
                return

    def _exchanged(self, own: bytes, capacity: int) -> list[memoryview]:
        first = bytearray(BLOCK)
        LENGTH.pack_into(first, 0, len(own))
        first[LENGTH.size : LENGTH.size + min(len(own), ROOM)] = own[:ROOM]
        blocks = self._gathering.gather(first)
        lengths = [int(LENGTH.unpack_from(block)[0]) for block in blocks]
        longest = max(lengths)
        if longest > max(capacity, len(own)):
            rank = lengths.index(longest)
            raise RingProtocolError(f"Node {rank} sent {longest} bytes, more than the {capacity} of this exchange.")
        ends = [LENGTH.size + min(length, ROOM) for length in lengths]
        begun = [block[LENGTH.size : end] for block, end in zip(blocks, ends, strict=True)]
        if longest <= ROOM:
            return begun
        rest = bytearray(longest - ROOM)
        rest[: max(0, len(own) - ROOM)] = own[ROOM:]
        more = self._gathering.gather(rest)
        return [
            start if length <= ROOM else memoryview(b"".join((start, other[: length - ROOM])))
            for start, other, length in zip(begun, more, lengths, strict=True)
        ]
