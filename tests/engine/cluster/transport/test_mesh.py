"""Every transport gives every node the same contributions, in rank order, whatever their sizes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster.transport.exchange import Exchange, PeerLost, RingProtocolError
from engine.cluster.transport.mesh import Mesh
from engine.ipc.messages.ring import ExchangeName
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.support.eventually import eventually
from tests.support.random_examples import examples

OURS: tuple[ExchangeName, ...] = ("tls", "socket", "envoy")
PATIENCE_S = 120.0
"""A test that hangs fails after so long."""
Make = Callable[..., LinkedNodes]


class Rings:
    """Connected exchanges, made once for all tests of this module: by (transport, size)."""

    def __init__(self) -> None:
        self._made: dict[tuple[ExchangeName, int], tuple[LinkedNodes, list[Exchange]]] = {}

    def get(self, transport: ExchangeName, size: int) -> list[Exchange]:
        key = (transport, size)
        if key not in self._made:
            nodes = LinkedNodes(size)
            self._made[key] = nodes, nodes.exchanges(transport)
        return self._made[key][1]

    def close(self) -> None:
        for nodes, exchanges in self._made.values():
            for exchange in exchanges:
                exchange.close()
            nodes.close()


@pytest.fixture(scope="module")
def rings() -> Iterator[Rings]:
    made = Rings()
    yield made
    made.close()


def in_threads(exchanges: list[Exchange], act: Callable[[Exchange], Any]) -> list[Any]:
    """``act`` on every rank at once; an error of one is raised here after all have ended."""
    results: list[Any] = [None] * len(exchanges)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(exchanges[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def gather(exchange: Exchange, payload: bytes, capacity: int) -> list[bytes]:
    exchange.send((payload[: len(payload) // 3], payload[len(payload) // 3 :]), capacity)
    return [bytes(part) for part in exchange.receive()]


@pytest.mark.parametrize("transport", OURS)
@settings(max_examples=examples(6), deadline=None)
@given(
    size=st.integers(1, 4),
    lengths=st.lists(
        st.lists(st.one_of(st.integers(0, 20_000), st.integers(0, 2_000_000)), min_size=4, max_size=4),
        min_size=1,
        max_size=3,
    ),
)
def test_all_nodes_get_all_contributions(
    rings: Rings, transport: ExchangeName, size: int, lengths: list[list[int]]
) -> None:
    exchanges = rings.get(transport, size)
    sent = [[random.Random(length).randbytes(length) for length in row[:size]] for row in lengths]

    def act(exchange: Exchange) -> list[list[bytes]]:
        return [gather(exchange, row[exchange.rank], 2_000_000) for row in sent]

    assert in_threads(exchanges, act) == [sent] * size


@pytest.mark.sampled
@pytest.mark.parametrize("transport", OURS)
@pytest.mark.parametrize(
    ("size", "capacity"), [(3, 12_000_001), pytest.param(2, 48_000_001, marks=pytest.mark.soak)], ids=["three", "two"]
)
def test_more_than_a_socket_takes_from_all_at_once_does_not_deadlock(
    rings: Rings, transport: ExchangeName, size: int, capacity: int
) -> None:
    exchanges = rings.get(transport, size)

    def act(exchange: Exchange) -> bool:
        got = gather(exchange, bytes([exchange.rank + 1]) * capacity, capacity)
        return [len(part) for part in got] == [capacity] * size and [part[-1] for part in got] == [
            rank + 1 for rank in range(size)
        ]

    assert in_threads(exchanges, act) == [True] * size


@pytest.mark.parametrize("transport", OURS)
def test_a_node_that_computes_between_sending_and_receiving(rings: Rings, transport: ExchangeName) -> None:
    exchanges = rings.get(transport, 3)

    for _ in range(3):
        waits = [threading.Event() for _ in exchanges]

        def act(exchange: Exchange, waits: list[threading.Event] = waits) -> list[bytes]:
            exchange.send((bytes([exchange.rank]) * 100_000,), 100_000)
            if exchange.rank:
                assert waits[exchange.rank - 1].wait(PATIENCE_S)
            waits[exchange.rank].set()
            return [bytes(part[:1]) for part in exchange.receive()]

        assert in_threads(exchanges, act) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("transport", OURS)
def test_parts_may_be_used_again_after_receiving(rings: Rings, transport: ExchangeName) -> None:
    exchanges = rings.get(transport, 2)

    def act(exchange: Exchange) -> list[list[bytes]]:
        buffer = bytearray(3_000_000)
        seen = []
        for turn in range(3):
            buffer[:] = bytes([10 * turn + exchange.rank]) * len(buffer)
            exchange.send((memoryview(buffer),), len(buffer))
            got = exchange.receive()
            buffer[:] = bytes(len(buffer))
            seen.append([bytes({bytes(part[:1]), bytes(part[-1:])}.pop()) for part in got])
        return seen

    expected = [[bytes([10 * turn]), bytes([10 * turn + 1])] for turn in range(3)]
    assert in_threads(exchanges, act) == [expected] * 2


@pytest.mark.parametrize("transport", OURS)
def test_a_contribution_over_the_capacity_is_refused(linked_nodes: Make, transport: ExchangeName) -> None:
    exchanges = linked_nodes(2).exchanges(transport)
    exchanges[0].send((bytes(1001),), 1000)
    exchanges[1].send((b"",), 1000)
    with pytest.raises(RingProtocolError, match="1001 bytes where 1000 are allowed"):
        exchanges[1].receive()
    with pytest.raises(PeerLost):
        exchanges[1].send((b"",), 1000)
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize("transport", OURS)
def test_closing_from_another_thread_wakes_who_waits(linked_nodes: Make, transport: ExchangeName) -> None:
    exchanges = linked_nodes(3).exchanges(transport)
    exchanges[0].send((b"alone",), 100)
    caught: list[PeerLost] = []

    def wait() -> None:
        try:
            exchanges[0].receive()
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(exchanges[0]._in_use.locked)  # type: ignore[attr-defined]
    exchanges[0].close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(caught) == 1 and caught[0].ranks == ()
    exchanges[0].close()
    with pytest.raises(PeerLost):
        exchanges[0].send((b"",), 1)

    # The others are told that it left: it is not one of those that are gone.
    def go_on(exchange: Exchange) -> PeerLost | None:
        if exchange.rank == 0:
            return None
        try:
            for _ in range(2):
                gather(exchange, b"", 100)
        except PeerLost as error:
            return error
        return None

    told = in_threads(exchanges, go_on)
    assert [error and error.ranks for error in told] == [None, (), ()]
    for exchange in exchanges:
        exchange.close()


def test_who_lost_a_node_tells_the_others_when_it_closes(linked_nodes: Make) -> None:
    """By then it can say whom it lost: the others ask it for that as soon as it leaves them."""
    zero, one, two = linked_nodes(3).meshes("tls")
    two._sockets[1].cut()
    for mesh in (zero, one):
        mesh.send((b"x",), 1)
    with pytest.raises(PeerLost) as lost:
        one.receive()
    assert lost.value.ranks == (2,)
    from_one = zero._sockets[0]
    assert bytes(from_one.pull(1) or b"") == b"x" and from_one.pull(1) is None
    one.close()
    with pytest.raises(PeerLost, match="left the ring"):
        while from_one.pull(1) is None:
            pass
    for mesh in (zero, two):
        mesh.close()


@pytest.mark.parametrize("transport", OURS)
def test_one_that_leaves_after_the_last_exchange_disturbs_nobody_in_it(
    linked_nodes: Make, transport: ExchangeName
) -> None:
    exchanges = linked_nodes(3).exchanges(transport)
    left = [threading.Event() for _ in exchanges]

    def act(exchange: Exchange) -> list[bytes]:
        exchange.send((bytes([exchange.rank]),), 1)
        if exchange.rank:
            assert left[exchange.rank - 1].wait(PATIENCE_S)
        got = [bytes(part) for part in exchange.receive()]
        exchange.close()
        left[exchange.rank].set()
        return got

    assert in_threads(exchanges, act) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_a_mesh_waits_without_computing(linked_nodes: Make, size: int) -> None:
    """Nothing spins: while the slowest node takes its time, the others take none of the processor's."""
    exchanges = linked_nodes(size).exchanges("tls")

    def act(exchange: Exchange) -> float:
        exchange.send((b"x",), 1)
        if exchange.rank == size - 1:
            time.sleep(0.3)
        began = time.thread_time()
        exchange.receive()
        return time.thread_time() - began

    assert max(in_threads(exchanges, act)) < 0.1
    for exchange in exchanges:
        exchange.close()


def test_a_mesh_needs_a_wire_to_every_other_rank() -> None:
    with pytest.raises(ValueError, match="needs a framed socket to every other rank"):
        Mesh(0, 2, {})


@pytest.mark.parametrize("transport", OURS)
def test_a_ring_of_one_needs_nobody(rings: Rings, transport: ExchangeName) -> None:
    (alone,) = rings.get(transport, 1)
    assert (alone.rank, alone.size) == (0, 1)
    assert gather(alone, b"my own", 6) == [b"my own"]
