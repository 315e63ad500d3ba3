"""Exchanges between processes: equal results, and what happens when one of them is killed or stopped."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from discovery import certificates
from discovery.link_listener import LinkListener
from engine.bench.exchange_node import NeighbourNode, NodeConnected, NodePlan, NodePort, NodeRound, NodeSetup
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.envoy import EnvoyExchange
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.ipc.messages.ring import ExchangeName
from tests.engine.cluster.linked_nodes import LOOPBACK, LinkedNode, make_identity, opened
from tests.support.engine_forks import forked_module
from tests.support.eventually import eventually, has_ended
from tests.support.network_namespaces import Network, network

TRANSPORTS: tuple[ExchangeName, ...] = ("tls", "socket", "envoy")


class Ring:
    """Rank 0 in this process, the others in processes of their own that exchange until they are ended."""

    def __init__(
        self,
        size: int,
        transport: ExchangeName,
        nbytes: int = 1000,
        hosts: tuple[str, ...] = ("127.0.0.1",) * 8,
        within: tuple[str, ...] = (),
    ) -> None:
        self.identity = make_identity()
        self.listener = LinkListener.open(hosts[0])
        self.links = Links(self.identity)
        self.links.attach(self.listener)
        self.others: list[subprocess.Popen[bytes]] = []
        neighbours = [NeighbourNode(certificate=self.identity.certificate_pem, port=self.listener.port, host=hosts[0])]
        for rank in range(1, size):
            key, certificate = certificates.make_certificate()
            process = node_process(within)
            self.others.append(process)
            self.tell(process, NodeSetup(rank=rank, certificate=certificate, private_key=key, host=hosts[rank]))
            port = self.hear(process, NodePort).port
            neighbours.append(NeighbourNode(certificate=certificate, port=port, host=hosts[rank]))
        plan = NodePlan(epoch="e", key=secrets.token_bytes(32), neighbours=neighbours, exchanges=[transport])
        for process in self.others:
            self.tell(process, plan)
        members = tuple(
            Member(
                rank,
                certificates.fingerprint(certificates.der_of(one.certificate)),
                one.certificate,
                (f"{one.host}:{one.port}",),
                f"node {rank}",
            )
            for rank, one in enumerate(neighbours)
        )
        epoch = Epoch(f"e {transport}", 0, members, plan.key, LOOPBACK)
        self.exchange: Exchange = opened(LinkedNode(self.identity, self.listener, self.links, epoch), transport)
        for process in self.others:
            assert self.hear(process, NodeConnected).exchanges == [transport]
            self.tell(process, NodeRound(exchanges=[transport], sizes=[nbytes], repeats=[10**6], warm=0))
        self.nbytes = nbytes

    @staticmethod
    def tell(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()

    @staticmethod
    def hear(process: subprocess.Popen[bytes], kind: type[Any]) -> Any:
        assert process.stdout is not None
        return msgspec.json.decode(process.stdout.readline(), type=kind)

    def exchange_once(self) -> list[bytes]:
        self.exchange.send((bytes(self.nbytes),), self.nbytes)
        return [bytes(part) for part in self.exchange.receive()]

    def close(self) -> None:
        self.exchange.close()
        self.links.close()
        self.listener.close()
        for process in self.others:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()


def node_process(within: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """``within``: what stands before a command that is to run in a namespace."""
    module, pipe = "engine.bench.exchange_node", subprocess.PIPE
    if within:
        return subprocess.Popen([*within, sys.executable, "-m", module], stdin=pipe, stdout=pipe)
    return forked_module(module, stdin=pipe, stdout=pipe)  # type: ignore[return-value]


@pytest.fixture
def ring() -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(*arguments: Any, **options: Any) -> Ring:
        made.append(Ring(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("tls", 2),
        ("tls", 4),
        ("socket", 3),
        ("envoy", 2),
        pytest.param("socket", 4, marks=pytest.mark.soak),
        pytest.param("envoy", 4, marks=pytest.mark.soak),
    ],
)
def test_processes_get_each_others_bytes_until_one_is_killed(
    ring: Callable[..., Ring], transport: str, size: int
) -> None:
    nodes = ring(size, transport, nbytes=70_001)
    for _ in range(5):
        assert nodes.exchange_once() == [bytes([rank]) * 70_001 for rank in range(size)]
    nodes.others[-1].kill()
    with pytest.raises(PeerLost) as lost:
        while True:
            nodes.exchange_once()
    # Of more than two, one that is left may have noticed first and have left, which blames nobody.
    assert lost.value.ranks == (size - 1,) or (size > 2 and lost.value.ranks == ())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_peer_is_waited_for_until_somebody_closes(ring: Callable[..., Ring], transport: str) -> None:
    nodes = ring(2, transport)
    nodes.exchange_once()
    stop(nodes.others[0])
    caught: list[PeerLost] = []

    def go_on() -> None:
        try:
            while True:
                nodes.exchange_once()
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    eventually(lambda: nodes.exchange._in_use.locked() and nodes.exchange.missing() == [1])  # type: ignore[attr-defined]
    assert not caught  # it may come back: not this module's decision
    nodes.exchange.close()
    thread.join()
    assert len(caught) == 1


def test_a_stopped_peer_that_goes_on_is_no_loss(ring: Callable[..., Ring]) -> None:
    nodes = ring(2, "tls")
    stop(nodes.others[0])

    def resume() -> None:
        eventually(lambda: nodes.exchange._in_use.locked() and nodes.exchange.missing() == [1])  # type: ignore[attr-defined]
        nodes.others[0].send_signal(signal.SIGCONT)

    resuming = threading.Thread(target=resume)
    resuming.start()
    for _ in range(200):
        assert len(nodes.exchange_once()) == 2
    resuming.join()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def cable() -> Iterator[Network]:
    """Between two machines."""
    with network(2) as made:
        yield made


@pytest.mark.slow
def test_a_pulled_cable_is_noticed_by_the_kernel(ring: Callable[..., Ring], cable: Network) -> None:
    """Nobody closes anything, no packet says anything: the machines are there, but the cable is not."""
    here, there = cable.spaces
    hosts = (here.address(), there.address())
    silent, sending = (here.call(lambda: ring(2, "tls", hosts=hosts, within=there.prefix)) for _ in range(2))
    for nodes in (silent, sending):
        nodes.exchange_once()
    stop(silent.others[0])
    silent.exchange.send((bytes(10),), silent.nbytes)
    # All of it is acknowledged: what follows is waiting in silence.
    (link,) = silent.exchange._sockets  # type: ignore[attr-defined]
    eventually(lambda: unacknowledged(link.fileno()) == 0)
    cable.pull(0)
    busy = time.process_time()

    def notices(nodes: Ring) -> tuple[int, ...]:
        try:
            if nodes is silent:
                nodes.exchange.receive()
            while True:
                nodes.exchange_once()
        except PeerLost as lost:
            return tuple(lost.ranks)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(notices, (silent, sending))) == [(1,), (1,)]
    assert time.process_time() - busy < 1.0


def unacknowledged(descriptor: int) -> int:
    """Bytes that the other side of a TCP socket has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_an_envoy_ends_with_its_engine(ring: Callable[..., Ring]) -> None:
    nodes = ring(2, "envoy")
    nodes.exchange_once()
    envoys = psutil.Process(nodes.others[0].pid).children()
    assert len(envoys) == 1
    nodes.others[0].kill()
    eventually(lambda: all(has_ended(child) for child in envoys))


def test_a_killed_envoy_is_this_machines_own_loss(ring: Callable[..., Ring]) -> None:
    nodes = ring(2, "envoy")
    nodes.exchange_once()
    assert isinstance(nodes.exchange, EnvoyExchange)
    os.kill(nodes.exchange._process.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="This machine's envoy ended") as lost:
        while True:
            nodes.exchange_once()
    assert lost.value.ranks == (0,)


def test_envoys_leave_nothing_behind(ring: Callable[..., Ring]) -> None:
    me = psutil.Process()
    before, children = open_descriptors(), len(me.children())
    for _ in range(2):
        nodes = ring(2, "envoy")
        nodes.exchange_once()
        nodes.close()
    assert len(me.children()) == children
    assert open_descriptors() <= before


def open_descriptors() -> int:
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
