"""The cables of :mod:`network_namespaces`: what is cut or blocked is lost, and nothing else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.support.network_namespaces import Network, Space, network

PORTS = (4100, 4101)
LOST_S = 0.5
"""Seconds after which what did not come is lost: the answers of the others take well under a millisecond."""


@pytest.fixture
def three() -> Iterator[Network]:
    with network(3) as made:
        yield made


def listening(space: Space, port: int) -> socket.socket:
    return space.call(lambda: socket.create_server((space.address(), port)))


def connected(here: Space, there: Space, port: int = PORTS[0], seconds: float = LOST_S) -> socket.socket | None:
    def connect() -> socket.socket | None:
        with contextlib.suppress(TimeoutError):
            return socket.create_connection((there.address(), port), timeout=seconds)
        return None

    return here.call(connect)


def reaches(here: Space, there: Space, port: int = PORTS[0]) -> bool:
    opened = connected(here, there, port)
    if opened is not None:
        opened.close()
    return opened is not None


def test_one_pair_is_cut_and_the_others_are_not(three: Network) -> None:
    one, two, last = three.spaces
    with contextlib.ExitStack() as open_sockets:
        for space in three.spaces:
            open_sockets.enter_context(listening(space, PORTS[0]))
        assert all(reaches(here, there) for here in three.spaces for there in three.spaces)
        three.cut(0, 1)
        assert not reaches(one, two) and not reaches(two, one)
        assert reaches(one, last) and reaches(last, two)
        three.mend(0, 1)
        assert reaches(one, two) and reaches(two, one)


def test_a_cable_that_is_cut_one_way_still_carries_the_other(three: Network) -> None:
    one, two, _ = three.spaces

    def receiver(space: Space) -> socket.socket:
        opened = space.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        opened.bind((space.address(), PORTS[0]))
        opened.settimeout(LOST_S)
        return opened

    with receiver(one) as first, receiver(two) as second:
        first.sendto(b"both know where the other is", second.getsockname())
        assert second.recv(100)
        second.sendto(b"as do their machines", first.getsockname())
        assert first.recv(100)
        three.cut(0, 1, "there")
        first.sendto(b"lost", second.getsockname())
        with pytest.raises(TimeoutError):
            second.recv(100)
        second.sendto(b"heard", first.getsockname())
        assert first.recv(100) == b"heard"


def test_one_port_is_blocked_also_for_open_connections(three: Network) -> None:
    one, two, last = three.spaces
    listeners = [listening(two, port) for port in PORTS]
    opened = connected(one, two)
    assert opened is not None
    accepted, _ = listeners[0].accept()
    three.block(PORTS[0], 0, 1)
    opened.sendall(b"later")
    accepted.settimeout(LOST_S)
    with pytest.raises(TimeoutError):
        accepted.recv(100)
    assert not reaches(one, two, PORTS[0])
    assert reaches(one, two, PORTS[1]) and reaches(last, two, PORTS[0])
    three.unblock(PORTS[0], 0, 1)
    accepted.settimeout(20)
    assert accepted.recv(100) == b"later"
    for one_socket in (*listeners, opened, accepted):
        one_socket.close()
