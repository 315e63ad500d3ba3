"""`peers forget` on a running ring of processes: soon nothing is open between the two machines any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from discovery.peers import PeersFile
from engine.bench.local_ring import NETWORK, LocalEngine
from engine.ipc.messages import ForgetPeer, Loaded, NetworkState
from engine.ipc.messages.ring import RingChoice
from tests.engine.cluster.head.test_forming_processes import Head, measuring_little, model
from tests.support.eventually import PATIENCE_S, eventually

__all__ = ["model"]
pytestmark = pytest.mark.slow


def between(one: LocalEngine, other: LocalEngine) -> list[tuple[int, int]]:
    """Ports (here, there) of the connections between two processes of this machine, however they were made."""

    def ends(engine: LocalEngine) -> set[tuple[int, int]]:
        found = psutil.Process(engine.process.pid).net_connections("inet")
        return {(c.laddr.port, c.raddr.port) for c in found if c.raddr and c.status == psutil.CONN_ESTABLISHED}

    mine, theirs = ends(one), ends(other)
    return sorted((here, there) for here, there in mine if (there, here) in theirs)


def forget(by: LocalEngine, who: str) -> None:
    """As `privatellm peers forget` does it: in another process, which changes the file."""
    peers = PeersFile(by.home / NETWORK)
    peers.forget(peers.find(who).node_id)


def until_apart(one: LocalEngine, other: LocalEngine) -> None:
    eventually(lambda: not between(one, other))


@pytest.fixture
def ring(tmp_path: Path, model: Path) -> Iterator[Head]:
    head = Head(tmp_path / "head", 2, measuring_little)
    try:
        loaded = head.load(model, RingChoice(even_if_slower=True, mode="exact", exchange="tls", overlap=False))
        assert isinstance(loaded, Loaded)
        assert loaded.facts.ring is not None
        assert len(loaded.facts.ring.nodes) == 3
        yield head
    finally:
        head.close()


def test_forgetting_cuts_all_links_whoever_forgets(ring: Head) -> None:
    gone, stays = ring.ring.engines
    # Control both ways, an exchange link and a command link; between the followers an exchange link.
    assert len(between(ring.engine, gone)) >= 4
    assert len(between(stays, gone)) == 1
    forget(ring.engine, "node 1")
    until_apart(ring.engine, gone)
    until_apart(stays, gone)
    assert len(ring.answer(4)) == 4
    # Nor does it come back: both have seen that they are not paired any more.
    ring.until(lambda peers: [peer.name for peer in peers] == ["node 2"])
    assert between(ring.engine, gone) == []
    # And the other way round: a follower forgets the head, on its own screen.
    assert len(between(stays, ring.engine)) >= 4
    since = len(stays.events)
    stays.ask(ForgetPeer(id=stays.new_id(), peer="head"))
    stays.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, PATIENCE_S, since)
    until_apart(stays, ring.engine)
    assert len(ring.answer(4)) == 4
    # The head still calls; an attempt is seen for a moment, until it is refused.
    until_apart(stays, ring.engine)
