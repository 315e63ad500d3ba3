"""Which path the heartbeats of two machines take that reach each other on several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery.identity import load_identity
from discovery.peers import PeersFile, new_peer
from engine.cluster.membership import heartbeat
from engine.cluster.membership.control_messages import NodeLoad
from engine.cluster.membership.node import Node
from engine.cluster.parts import EngineParts, TimeConstants
from engine.ipc.messages import OpenNetwork
from engine.ipc.messages.ring import LinkFacts
from tests.faults.slow_wire import PairProxy
from tests.support.eventually import eventually


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Node, Node, PairProxy, PairProxy]]:
    """Anna and Bob, and a second path to each of them. Bob looked for Anna on that one."""
    one, other = (load_identity(tmp_path / name) for name in ("Anna", "Bob"))
    anna_peers, bob_peers = (PeersFile(tmp_path / name) for name in ("Anna", "Bob"))
    anna_peers.add(new_peer(other.certificate_der, "Bob"))
    bob_peers.add(new_peer(one.certificate_der, "Anna"))
    with contextlib.ExitStack() as opened:
        patient = EngineParts(TimeConstants(lost_s=60.0, unanswered_s=60.0))
        anna = Node(one, anna_peers, OpenNetwork(id=1, name="Anna", listen="127.0.0.1:0"), parts=patient)
        opened.callback(anna.close)
        to_anna = PairProxy(anna.server.port)
        opened.callback(to_anna.close)
        options = OpenNetwork(id=1, name="Bob", listen="127.0.0.1:0", peers=[f"127.0.0.1:{to_anna.port}"])
        bob = Node(other, bob_peers, options)
        opened.callback(bob.close)
        to_bob = PairProxy(bob.server.port)
        opened.callback(to_bob.close)
        eventually(lambda: path_of(bob) == f"127.0.0.1:{to_anna.port}" and path_of(anna) == bob.listening[0])
        yield anna, bob, to_anna, to_bob


def path_of(node: Node) -> str:
    (view,) = node.table.views()
    return view.client.address if view.client is not None else ""


def test_heartbeats_take_the_path_of_the_links_and_leave_one_that_broke(
    proxied: tuple[Node, Node, PairProxy, PairProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    anna, bob, to_anna, to_bob = proxied
    (view,) = anna.table.views()
    before = view.client
    assert before is not None
    there = f"127.0.0.1:{to_bob.port}"
    link = LinkFacts(interface="eth1", address=f"127.0.0.1:{to_bob.port + 1}", latency_s=1e-4, bytes_per_s=1e8)
    anna.table.set_link(bob.identity.node_id, link)
    eventually(lambda: path_of(anna) == there)
    assert before.call("Beat", anna.load(), NodeLoad).process == bob.process, "a running call goes on"
    moment = anna.table.watch(bob.identity.node_id).send_heartbeats()  # type: ignore[union-attr]
    eventually(lambda: anna.table.watch(bob.identity.node_id).answered_since(moment))  # type: ignore[union-attr]
    assert path_of(anna) == there and path_of(bob) == f"127.0.0.1:{to_anna.port}"
    following = bob.table.watch(anna.identity.node_id)
    assert following is not None
    following.follow()
    eventually(lambda: path_of(bob) == anna.listening[0])
    # A path that nothing passes any more, and that takes no new connection.
    monkeypatch.setattr(heartbeat, "leads_there", lambda address: address != there)
    to_bob.unplug()
    paths = {there}
    eventually(lambda: paths.add(path_of(anna)) or path_of(anna) == bob.listening[0])
    assert paths == {there, bob.listening[0]}, "the machine was there all the time"


def test_a_machine_that_is_only_busy_is_not_looked_for_elsewhere(
    proxied: tuple[Node, Node, PairProxy, PairProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system there takes connections, whatever its programs do."""
    anna, bob, _, to_bob = proxied
    asked: list[str] = []
    leads = heartbeat.leads_there
    monkeypatch.setattr(heartbeat, "leads_there", lambda address: asked.append(address) or leads(address))
    there = f"127.0.0.1:{to_bob.port}"
    watch = anna.table.watch(bob.identity.node_id)
    assert watch is not None
    watch.try_addresses([there], keep=True)
    watch.go_over(there)
    eventually(lambda: path_of(anna) == there)
    to_bob.unplug()
    eventually(lambda: set(asked) == {there, bob.listening[0]})
    to_bob.plug_in()
    moment = watch.send_heartbeats()
    eventually(lambda: watch.answered_since(moment))
    assert path_of(anna) == there
