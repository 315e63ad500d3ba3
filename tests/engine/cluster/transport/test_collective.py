"""Exchanges over gloo and mx.distributed: the contract of all exchanges, and what their engines cannot do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import certificates
from engine.bench.exchange_node import (
    ExchangeTimes,
    NeighbourNode,
    NodeConnected,
    NodePlan,
    NodePort,
    NodeRound,
    NodeSetup,
)
from engine.cluster.transport.collective import BLOCK, LENGTH, ROOM, CollectiveExchange, Gathering
from engine.cluster.transport.exchange import Exchange, PeerLost, RingProtocolError
from engine.cluster.transport.gloo import ExchangedStore, connect_gloo
from engine.cluster.transport.mesh import Mesh
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from tests.engine.cluster.linked_nodes import LinkedNode, LinkedNodes
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, on_all_ranks
from tests.support.engine_forks import forked_module, with_libraries
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked
from tests.support.random_examples import examples


class MemoryGathering(Gathering):
    """An all-gather between threads."""

    name = "gloo"
    rank = 0
    size = 0

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self.shared = rank, size, shared
        self.blocks: list[int] = []

    def gather(self, block: bytearray) -> list[memoryview]:
        shared, number = self.shared, len(self.blocks)
        self.blocks.append(len(block))
        with shared["condition"]:
            there = shared["rounds"].setdefault(number, {})
            there[self.rank] = bytes(block)
            shared["condition"].notify_all()
            ok = shared["condition"].wait_for(lambda: len(there) == self.size or shared["ended"], 120)
        assert ok
        if len(there) < self.size:
            raise PeerLost("ended")
        assert len({len(each) for each in there.values()}) == 1
        return [memoryview(there[rank]) for rank in range(self.size)]

    def end(self) -> None:
        with self.shared["condition"]:
            self.shared["ended"] = True
            self.shared["condition"].notify_all()


def memory_ring(size: int) -> list[CollectiveExchange]:
    shared = {"condition": threading.Condition(), "rounds": {}, "ended": False}
    return [CollectiveExchange(MemoryGathering(rank, size, shared)) for rank in range(size)]


def close_when_it_waits(exchange: Any) -> None:
    """From another thread than the one that receives: its all-gather has begun, and cannot end."""
    eventually(exchange._asked.empty)
    exchange.close()


def payload(rank: int, nbytes: int) -> bytes:
    return bytes((rank * 31 + position) % 251 for position in range(nbytes))


SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(ROOM - 2, ROOM + 2), st.integers(0, 60_000)), min_size=1)


@given(SIZES.filter(lambda sizes: len(sizes) <= 4))
@settings(max_examples=examples(15), deadline=None)
def test_everybody_gets_what_everybody_gave(sizes: list[int]) -> None:
    ring = memory_ring(len(sizes))

    def work(rank: int) -> list[bytes]:
        ring[rank].send([payload(rank, sizes[rank])], max(sizes))
        return [bytes(view) for view in ring[rank].receive()]

    for found in on_all_ranks(work, len(sizes)):
        assert found == [payload(rank, nbytes) for rank, nbytes in enumerate(sizes)]
    blocks = ring[0]._gathering.blocks  # type: ignore[attr-defined]
    assert blocks == [BLOCK] + ([max(sizes) - ROOM] if max(sizes) > ROOM else [])
    for end in ring:
        end.close()


def test_more_than_the_capacity_is_refused() -> None:
    ring = memory_ring(2)

    def work(rank: int) -> None:
        ring[rank].send([bytes(5000 * rank)], 5000 * rank)
        if rank == 0:
            with pytest.raises(RingProtocolError, match="5000 bytes"):
                ring[0].receive()

    assert on_all_ranks(work, 2) == [None, None]
    assert LENGTH.size == 8
    for end in ring:
        end.close()


def test_close_wakes_who_waits_and_nothing_works_afterwards() -> None:
    ring = memory_ring(2)
    ring[0].send([b"x"], 10)
    closing = threading.Thread(target=close_when_it_waits, args=(ring[0],))
    closing.start()
    with pytest.raises(PeerLost):
        ring[0].receive()
    closing.join()
    for act in (ring[0].receive, lambda: ring[0].send([b""], 0)):
        with pytest.raises(PeerLost):
            act()
    ring[0].close()
    ring[1].close()
    assert not any(thread.name == "gloo-exchange" for thread in threading.enumerate())


# --- gloo -----------------------------------------------------------------------------------------------------------


def gloo_ring(nodes: LinkedNodes) -> list[Exchange]:
    return nodes.everywhere(lambda node: open_exchange("gloo", node.links, node.epoch))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo(size: int, linked_nodes: Callable[..., LinkedNodes]) -> None:
    ring = gloo_ring(linked_nodes(size))
    sizes = [[0] * size, [12_304] * size, [rank * 50_000 for rank in range(size)], [7 for _ in range(size)]]

    def work(rank: int) -> list[list[bytes]]:
        found = []
        for each in sizes:
            ring[rank].send([payload(rank, each[rank])], max(each))
            found.append([bytes(view) for view in ring[rank].receive()])
        return found

    expected = [[payload(rank, nbytes) for rank, nbytes in enumerate(each)] for each in sizes]
    assert on_all_ranks(work, size) == [expected] * size
    assert [end.name for end in ring] == ["gloo"] * size
    assert [end.rank for end in ring] == list(range(size))
    for end in ring:
        end.close()


def test_gloo_notices_a_peer_that_closed(linked_nodes: Callable[..., LinkedNodes]) -> None:
    ring = gloo_ring(linked_nodes(2))
    ring[1].close()
    with pytest.raises(PeerLost):
        ring[0].send([b"x"], 10)
        ring[0].receive()
    ring[0].close()


def test_gloo_is_closed_from_another_thread(linked_nodes: Callable[..., LinkedNodes]) -> None:
    ring = gloo_ring(linked_nodes(2))
    ring[0].send([b"x"], 10)
    closing = threading.Thread(target=close_when_it_waits, args=(ring[0],))
    closing.start()
    with pytest.raises(PeerLost):
        ring[0].receive()
    closing.join()
    ring[1].close()


def test_gloo_can_be_made_again_in_the_same_process(linked_nodes: Callable[..., LinkedNodes]) -> None:
    for name in ("one", "two"):
        for end in gloo_ring(linked_nodes(2, name=name)):
            end.close()


def test_gloo_listens_at_the_links_addresses_only(linked_nodes: Callable[..., LinkedNodes]) -> None:
    def listening() -> set[str]:
        found = psutil.Process().net_connections("inet")
        return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}

    nodes = linked_nodes(3)
    before = listening()
    ring = gloo_ring(nodes)
    assert listening() - before <= {"127.0.0.1"}
    for end in ring:
        end.close()


def test_gloo_is_refused_on_a_link_that_nobody_called_trusted(linked_nodes: Callable[..., LinkedNodes]) -> None:
    def refused(node: LinkedNode) -> str:
        with pytest.raises(ModelError) as error:
            connect_gloo(node.links, node.epoch)
        return str(error.value)

    assert all("no network that was called trusted" in text for text in linked_nodes(2, trusted=()).everywhere(refused))


# --- mx.distributed: one group in the life of a process, so these are processes of their own ------------------------


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """Processes, which are at an end afterwards."""
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()


def test_mlx_gives_what_everybody_gave_until_a_peer_is_killed(tmp_path: Path, ended: list[Any]) -> None:
    pytest.importorskip("mlx.core")
    from tests.engine.cluster import mlx_node

    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(2):
            # Held until mlx listens there: nobody else is given the port meanwhile.
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        hosts = tmp_path / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        for rank in range(2):
            environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            ended.append(with_libraries(hooked(mlx_node.run, rank=rank, size=2), environment))
        assert [process.stdout.readline() for process in ended] == [b"equal\n"] * 2
    ended[1].kill()
    assert ended[0].stdout.readline() == b"lost\n"


def test_mlx_nodes_tell_each_other_their_ports(ended: list[Any]) -> None:
    pytest.importorskip("mlx.core")
    neighbours = []
    for rank in range(2):
        key, certificate = certificates.make_certificate()
        process = forked_module(
            "engine.bench.exchange_node", stdin=subprocess.PIPE, stdout=subprocess.PIPE, libraries=True
        )
        ended.append(process)
        told = ask(process, NodeSetup(rank=rank, certificate=certificate, private_key=key), NodePort)
        neighbours.append(NeighbourNode(certificate=certificate, port=told.port))
    plan = NodePlan(epoch="e", key=bytes(range(32)), neighbours=neighbours, exchanges=["mlx"])
    answers = on_all_ranks(lambda rank: ask(ended[rank], plan, NodeConnected), 2)
    assert [answer.exchanges for answer in answers] == [["mlx"]] * 2  # type: ignore[union-attr]
    wanted = NodeRound(exchanges=["mlx"], sizes=[12_288], repeats=[5], warm=1)
    times = on_all_ranks(lambda rank: ask(ended[rank], wanted, ExchangeTimes), 2)
    assert all(len(each.seconds["mlx"]["12288"]) == 5 for each in times)  # type: ignore[union-attr]


def ask(process: Any, message: msgspec.Struct, kind: type[Any]) -> Any:
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=kind)


def test_a_second_group_in_one_process_is_refused(
    linked_nodes: Callable[..., LinkedNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx.core")
    from engine.cluster.transport import mlx_group as group

    monkeypatch.setattr(group._Life, "used", True)
    nodes = linked_nodes(2)

    def refused(rank: int) -> str:
        node = nodes.nodes[rank]
        with pytest.raises(ModelError, match="a process can have one only") as caught:
            group.connect_mlx(node.links, node.epoch)
        return caught.value.kind

    assert on_all_ranks(refused, 2) == ["network"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere mlx could not listen at a port that is held")
def test_nobody_is_given_a_port_that_the_nodes_have_told(
    linked_nodes: Callable[..., LinkedNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine opens many connections while a ring is formed, and mlx listens last."""
    pytest.importorskip("mlx.core")
    from engine.cluster.transport import mlx_group as group

    def listens(mesh: Mesh, rank: int, states: Sequence[group.GroupState]) -> None:
        for state in states:
            host, _, port = state.address.rpartition(":")
            with socket.socket() as somebody, pytest.raises(OSError, match="in use"):
                somebody.bind((host, int(port)))
        mesh.send([], 0)  # they are held until all have looked
        mesh.receive()
        raise RuntimeError("all ports were held")

    monkeypatch.setattr(group, "_made", listens)
    nodes = linked_nodes(2)

    def connects(rank: int) -> str:
        with pytest.raises(ModelError) as caught:
            group.connect_mlx(nodes.nodes[rank].links, nodes.nodes[rank].epoch)
        return str(caught.value)

    assert all("all ports were held" in said for said in must_succeed(on_all_ranks(connects, 2)))


def test_no_node_tells_gloo_of_anothers_place() -> None:
    """What gloo reads of each node is what that node said, whatever others say of it."""
    ring = MemoryRing(3)

    def tells(rank: int) -> list[bytes]:
        store = ExchangedStore(ring.ends[rank])
        store.set(f"0/{rank}", f"of {rank}")
        if rank == 2:
            store.set("0/0", "not of 0")
            store.set("0/1/x", "nor of 1")
        found = store.multi_get(["0/0", "0/1", "0/2"])
        with pytest.raises(RuntimeError, match="no node has told 0/1/x"):
            store.get("0/1/x")
        return list(found)

    for found in must_succeed(on_all_ranks(tells, 3)):
        assert found == [b"of 0", b"of 1", b"of 2"]
