"""An exchange between threads of one process, for tests: same contract as the real ones, no sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError

Done = TypeVar("Done")
PATIENCE_S = 120.0
"""A test that hangs fails after so long."""


class MemoryRing:
    """The ends of one epoch: ``ends[rank]`` is that rank's exchange. ``exchanges`` counts those that are complete."""

    def __init__(self, size: int) -> None:
        self.condition = threading.Condition()
        self.slots: dict[int, dict[int, bytes]] = {}
        self.lost: set[int] = set()
        self.exchanges = 0
        self.ends = [MemoryExchange(self, rank, size) for rank in range(size)]


class MemoryExchange:
    """See :class:`engine.cluster.transport.exchange.Exchange`. ``sent`` are the bytes of each contribution, ``idle_s``
    the seconds it waited for others."""

    name = "memory"

    def __init__(self, ring: MemoryRing, rank: int, size: int) -> None:
        self._ring = ring
        self._rank = rank
        self._size = size
        self._number = 0
        self._capacity = 0
        self.sent: list[int] = []
        self.idle_s = 0.0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        frame = b"".join(parts)
        self._capacity = capacity
        self.sent.append(len(frame))
        with self._ring.condition:
            self._check()
            self._ring.slots.setdefault(self._number, {})[self._rank] = frame
            self._ring.condition.notify_all()

    def receive(self) -> list[memoryview]:
        ring = self._ring
        with ring.condition:
            there = ring.slots.setdefault(self._number, {})
            began = time.perf_counter()
            complete = ring.condition.wait_for(lambda: len(there) == self._size or ring.lost, PATIENCE_S)
            self.idle_s += time.perf_counter() - began
            if not complete:
                raise AssertionError(f"exchange {self._number}: only {sorted(there)} of {self._size} came")
            if len(there) < self._size:
                self._check()
            ring.exchanges = max(ring.exchanges, self._number + 1)
            ring.slots.pop(self._number - 1, None)
        self._number += 1
        for rank, frame in there.items():
            if rank != self._rank and len(frame) > self._capacity:
                raise RingProtocolError(f"node {rank} sent {len(frame)} bytes of at most {self._capacity}")
        return [memoryview(there[rank]) for rank in range(self._size)]

    def missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._ring.slots.get(self._number, {})]

    def close(self) -> None:
        """This rank is gone: the others notice."""
        with self._ring.condition:
            self._ring.lost.add(self._rank)
            self._ring.condition.notify_all()

    def _check(self) -> None:
        if self._ring.lost:
            raise PeerLost(f"nodes {sorted(self._ring.lost)} are gone", sorted(self._ring.lost))


def note_order(end: Any, happened: list[str]) -> None:
    """From now on ``happened`` gets "send" and "receive" as they are called at ``end``."""
    send, receive = end.send, end.receive
    end.send = lambda *given: (happened.append("send"), send(*given))[1]
    end.receive = lambda: (happened.append("receive"), receive())[1]


def on_all_ranks(work: Callable[[int], Done], size: int) -> list[Done | BaseException]:
    """``work(rank)`` in a thread for each rank; what each returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return results


def must_succeed(results: list[Done | BaseException]) -> list[Done]:
    """``results`` of :func:`on_all_ranks`, none of which may be an error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
