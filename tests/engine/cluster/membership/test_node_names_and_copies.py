"""What machines are called once they are paired, the code that a service shows when asked, and identities that two
machines have."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery.code_requests import ask_for_code
from discovery.identity import load_identity
from discovery.pairing_service import pair_with
from discovery.peers import PeersFile, new_peer
from engine.cluster.membership.heartbeat import COPIED
from engine.cluster.membership.node import Node
from engine.cluster.network import ClusterNetwork
from engine.ipc.messages import AnyEvent, NetworkState, OpenNetwork, PeerFacts
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.support.eventually import eventually

LOCAL = "127.0.0.1:0"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, "head", "vm", lend=True)
    eventually(nodes.ready)
    yield nodes
    nodes.close()


def options_to(*others: Node) -> OpenNetwork:
    return OpenNetwork(id=1, name="head", listen=LOCAL, peers=[one.listening[0] for one in others])


def known(file: Path, copy: tuple[str, str]) -> bool:
    """Whether it is written down that the instance of ``copy`` has the identity of another machine."""
    node_id, instance = copy
    found = PeersFile(file.parent).get(node_id)
    return found is not None and found.copies == [instance]


def only(node: Node) -> PeerFacts:
    (facts,) = node.table.facts()
    return facts


def test_a_machine_that_starts_with_another_name_is_renamed_everywhere(tmp_path: Path, pair: Nodes) -> None:
    head, vm = pair.nodes
    where = vm.listening[0]
    vm.close()
    again = Node(pair.identities[1], pair.peers[1], OpenNetwork(id=1, name="studio", listen=where, lend=True))
    try:
        eventually(lambda: only(head).name == "studio")
        assert only(head).former_name == "vm" and head.table.name_of(again.identity.node_id) == "studio"
        eventually(lambda: [view.name for view in head.table.views()] == ["studio"])
        assert [peer.name for peer in PeersFile(tmp_path / "head").all()] == ["studio"]
    finally:
        again.close()


def test_two_machines_of_one_name_are_never_called_alike(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "head", "one", "two", lend=True)
    try:
        for index in (1, 2):
            nodes.nodes[index].name = "vm"
            nodes.nodes[index].close()
        places = [node.listening for node in nodes.nodes]
        assert places[1] and places[2]
        again = [
            Node(nodes.identities[index], nodes.peers[index], OpenNetwork(id=1, name="vm", listen=where[0], lend=True))
            for index, where in ((1, places[1]), (2, places[2]))
        ]
        try:
            wanted = {f"vm ({node.identity.node_id[:8]})" for node in again}
            eventually(lambda: {facts.name for facts in nodes.nodes[0].table.facts()} == wanted)
            assert {view.name for view in nodes.nodes[0].table.views()} == wanted
        finally:
            for node in again:
                node.close()
    finally:
        nodes.close()


def test_a_copied_identity_is_named_though_nobody_announces_anything(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "head", "vm", lend=True)
    shutil.copytree(tmp_path / "vm", tmp_path / "copy")
    copied = load_identity(tmp_path / "copy")
    copy = Node(copied, PeersFile(tmp_path / "copy"), OpenNetwork(id=1, name="copy", listen=LOCAL, lend=True))
    nodes.nodes[0].close()
    tried = [nodes.nodes[1].listening[0], copy.listening[0]]
    head = Node(nodes.identities[0], nodes.peers[0], OpenNetwork(id=1, name="head", listen=LOCAL, peers=tried))
    try:
        assert copied.node_id == nodes.identities[1].node_id and copied.instance != nodes.identities[1].instance
        eventually(head.problems_now)
        assert head.problems_now() == [
            f"2 machines announce the identity {copied.node_id[:8]}: the files of one were copied; give one of them a "
            "new identity (run `privatellm peers new-identity` there) and pair it again."
        ]
        head.peers.forget(copied.node_id)
        eventually(lambda: not head.problems_now())
    finally:
        head.close()
        copy.close()
        nodes.close()


def test_a_copy_takes_the_place_of_the_machine_neither_while_it_is_connected_nor_afterwards(
    tmp_path: Path, pair: Nodes
) -> None:
    """Until a person has decided, by pairing it anew. The machine itself comes back at any time."""
    head, vm = pair.nodes
    shutil.copytree(tmp_path / "vm", tmp_path / "copy")
    options = OpenNetwork(id=1, name="copy", listen=LOCAL, lend=True, peers=[head.listening[0]])
    copy = Node(load_identity(tmp_path / "copy"), PeersFile(tmp_path / "copy"), options)
    try:
        eventually(head.table.copies)
        heard = set()
        for _ in range(20):
            # The machine itself answers after the copy was heard, by which the copy is known.
            head.table.send_heartbeats(20.0)
            copy.table.send_heartbeats(20.0)
            view = head.table.view(vm.identity.node_id)
            assert view is not None and view.greeting is not None and view.load is not None
            heard.add((view.greeting.process, view.load.process, view.addresses[0]))
        assert heard == {(vm.process, vm.process, vm.listening[0])}
        where = vm.listening[0]
        vm.close()
        eventually(lambda: only(head).problem == COPIED)
        assert only(head).state == "refused" and only(head).name == "vm"
        for _ in range(5):
            copy.table.send_heartbeats(20.0)
            head.table.send_heartbeats(20.0)
            assert [(view.client, view.alive) for view in head.table.views()] == [(None, False)]
        # A head that starts again knows of the copy.
        restarted = Node(pair.identities[0], PeersFile(tmp_path / "head"), options_to(copy))
        try:
            eventually(lambda: only(restarted).problem == COPIED)
            assert [(view.client, view.alive) for view in restarted.table.views()] == [(None, False)]
        finally:
            restarted.close()
        options = OpenNetwork(id=1, name="vm", listen=where, lend=True)
        again = Node(load_identity(tmp_path / "vm"), pair.peers[1], options)
        try:
            eventually(lambda: only(head).state == "ready")
            assert [view.greeting.process for view in head.table.views() if view.greeting] == [again.process]
        finally:
            again.close()
        eventually(lambda: only(head).problem == COPIED)
        head.peers.forget(copy.identity.node_id)
        head.forget(copy.identity.node_id)
        head.peers.add(new_peer(pair.identities[1].certificate_der, "copy"))
        head.table.refresh()
        watch = head.table.watch(copy.identity.node_id)
        assert watch is not None
        watch.try_addresses(copy.listening, keep=True)  # where it was paired
        eventually(lambda: [view.greeting.process for view in head.table.views() if view.greeting] == [copy.process])
    finally:
        copy.close()


def test_pairing_anew_takes_a_copy_in_again_also_without_forgetting_it(tmp_path: Path, pair: Nodes) -> None:
    head, vm = pair.nodes
    shutil.copytree(tmp_path / "vm", tmp_path / "copy")
    options = OpenNetwork(id=1, name="copy", listen=LOCAL, lend=True, peers=[head.listening[0]])
    copy = Node(load_identity(tmp_path / "copy"), PeersFile(tmp_path / "copy"), options)
    try:
        where = (vm.identity.node_id, copy.identity.instance)
        copies = tmp_path / "head" / "peers.json"
        eventually(lambda: copy.table.send_heartbeats(20.0) or head.table.send_heartbeats(20.0) or known(copies, where))
        vm.close()
        eventually(lambda: only(head).problem == COPIED)
        head.peers.add(new_peer(pair.identities[1].certificate_der, "copy", copy.listening[0]))
        head.table.refresh()
        eventually(lambda: [view.greeting.process for view in head.table.views() if view.greeting] == [copy.process])
        assert not known(copies, where)
    finally:
        copy.close()


def test_a_machine_that_starts_again_is_no_copy(tmp_path: Path, pair: Nodes) -> None:
    head, vm = pair.nodes
    where = vm.listening[0]
    vm.close()
    again = Node(pair.identities[1], pair.peers[1], OpenNetwork(id=1, name="vm", listen=where, lend=True))
    try:
        eventually(lambda: [view.greeting.process for view in head.table.views() if view.greeting] == [again.process])
        assert head.problems_now() == [] and head.table.copies() == []
    finally:
        again.close()


def test_a_lent_machine_shows_a_code_when_its_account_asks_and_one_that_is_not_lent_does_not(tmp_path: Path) -> None:
    states: list[AnyEvent] = []
    identity, peers = make_identity(tmp_path / "typing")
    network = ClusterNetwork(states.append, tmp_path / "service")
    try:
        network.answer(OpenNetwork(id=1, name="studio", listen=LOCAL))
        assert ask_for_code(tmp_path / "service", 0.5) is None
        network.close()
        network.answer(OpenNetwork(id=2, name="studio", listen=LOCAL, lend=True))
        shown = ask_for_code(tmp_path / "service", 120.0)
        assert shown is not None and shown.name == "studio" and shown.tries == 3 and 0 < shown.seconds <= 120
        eventually(lambda: any(isinstance(said, NetworkState) and said.code == shown.code for said in states))
        host, _, port = shown.listening[0].rpartition(":")
        found = pair_with(host, int(port) + 1, shown.code, identity, peers, "typing")
        assert found.name == "studio" and [peer.name for peer in network.node.peers.all()] == ["typing"]
        assert not list((tmp_path / "service").glob("code-*"))
    finally:
        network.close()
