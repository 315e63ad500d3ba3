"""Exchanges between processes: equal results, and what happens when one of them is killed or stopped."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from linked_nodes import LOOPBACK, make_identity

from discovery import certificates
from discovery.link_listener import LinkListener
from engine.bench.exchange_node import NeighbourNode, NodeConnected, NodePlan, NodePort, NodeRound, NodeSetup
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.envoy import EnvoyExchange
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.registry import open_exchange
from engine.ipc.messages.ring import ExchangeName

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
            process = subprocess.Popen(
                [*within, sys.executable, "-m", "engine.bench.exchange_node"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
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
        self.exchange: Exchange = open_exchange(transport, self.links, epoch)
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


@pytest.fixture
def ring() -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(*arguments: Any, **options: Any) -> Ring:
        made.append(Ring(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 4])
def test_processes_get_each_others_bytes(ring: Callable[..., Ring], transport: str, size: int) -> None:
    nodes = ring(size, transport, nbytes=70_001)
    for _ in range(5):
        assert nodes.exchange_once() == [bytes([rank]) * 70_001 for rank in range(size)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_peer_is_noticed(ring: Callable[..., Ring], transport: str, size: int) -> None:
    nodes = ring(size, transport)
    nodes.exchange_once()
    nodes.others[-1].kill()
    with pytest.raises(PeerLost) as lost:
        while True:
            nodes.exchange_once()
    # Of three, the one that is left may have noticed first and have left, which blames nobody.
    assert lost.value.ranks == (size - 1,) or (size == 3 and lost.value.ranks == ())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_peer_is_waited_for_until_somebody_closes(ring: Callable[..., Ring], transport: str) -> None:
    nodes = ring(2, transport)
    nodes.exchange_once()
    nodes.others[0].send_signal(signal.SIGSTOP)
    caught: list[PeerLost] = []

    def go_on() -> None:
        try:
            while True:
                nodes.exchange_once()
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    time.sleep(0.5)
    assert not caught  # it may come back: not this module's decision
    nodes.exchange.close()
    thread.join()
    assert len(caught) == 1


def test_a_stopped_peer_that_goes_on_is_no_loss(ring: Callable[..., Ring]) -> None:
    nodes = ring(2, "tls")
    nodes.others[0].send_signal(signal.SIGSTOP)
    threading.Timer(0.3, nodes.others[0].send_signal, (signal.SIGCONT,)).start()
    for _ in range(200):
        assert len(nodes.exchange_once()) == 2


@pytest.fixture
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace at the other end of a cable: its name, and the interface at this end."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    name, here, there = f"pllm{os.getpid()}", f"pa{os.getpid()}", f"pb{os.getpid()}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.213.7.1/24 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add 10.213.7.2/24 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespace here: {done.stderr.strip()}")
        yield name, here
    finally:
        subprocess.run(["ip", "link", "del", here], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("sending", [False, True])
def test_a_pulled_cable_is_noticed_by_the_kernel(
    ring: Callable[..., Ring], namespace: tuple[str, str], sending: bool
) -> None:
    """Nobody closes anything, no packet says anything: the machines are there, but the cable is not."""
    name, here = namespace
    nodes = ring(2, "tls", hosts=("10.213.7.1", "10.213.7.2"), within=("ip", "netns", "exec", name))
    nodes.exchange_once()
    if not sending:
        nodes.others[0].send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        nodes.exchange.send((bytes(10),), nodes.nbytes)
        time.sleep(0.5)  # it is acknowledged: what follows is waiting in silence
    subprocess.run(["ip", "link", "set", here, "down"], check=True)
    busy = time.process_time()
    with pytest.raises(PeerLost) as lost:
        if not sending:
            nodes.exchange.receive()
        while True:
            nodes.exchange_once()
    assert time.process_time() - busy < 1.0
    assert lost.value.ranks == (1,)


def test_an_envoy_ends_with_its_engine(ring: Callable[..., Ring]) -> None:
    nodes = ring(2, "envoy")
    nodes.exchange_once()
    envoys = psutil.Process(nodes.others[0].pid).children()
    assert len(envoys) == 1
    nodes.others[0].kill()
    psutil.wait_procs(envoys, timeout=5)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in envoys)


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
    for _ in range(3):
        nodes = ring(2, "envoy")
        nodes.exchange_once()
        nodes.close()
    assert len(me.children()) == children
    assert open_descriptors() <= before


def open_descriptors() -> int:
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
