"""``doctor --peer``, past the ports: whose certificate is shown there, and what that machine says to this one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app.commands import doctor_network
from app.commands.doctor_network import Finding
from discovery.link_listener import bind_pair
from engine.cluster.membership.node import LentState, Node
from engine.ipc.messages import OpenNetwork, PeerFacts
from engine.system.locations import locate
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.support.eventually import eventually


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """This home, whose node is closed, and the lent machine ``vm``, which is there."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    nodes = Nodes(tmp_path / "config", "network", "vm", lend=True)
    eventually(nodes.ready)
    nodes.nodes[0].close()
    yield nodes
    nodes.close()


@pytest.fixture
def greeting(pair: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine is greeted from this process, instead of an engine that is started for that."""

    async def facts_of(node_id: str, address: str) -> PeerFacts | None:
        node = Node(pair.identities[0], pair.peers[0], OpenNetwork(id=1, listen="127.0.0.1:0", peers=[address]))
        try:
            eventually(lambda: all(doctor_network._has_told(one) for one in node.table.facts()))
            return next(one for one in node.table.facts() if one.node_id == node_id)
        finally:
            node.close()

    monkeypatch.setattr(doctor_network, "_facts_of", facts_of)


def walked(address: str) -> dict[str, Finding]:
    return by_step(doctor_network._walk(locate("config") / "network", address))


def by_step(found: list[Finding]) -> dict[str, Finding]:
    return {finding.about.removeprefix("peer: "): finding for finding in found if finding.about.startswith("peer: ")}


def test_a_paired_machine_is_asked_what_it_does(pair: Nodes) -> None:
    vm = pair.nodes[1]
    found = by_step(doctor_network.network(probe=False, peer=vm.listening[0]))
    assert {about: finding.mark for about, finding in found.items()} == {
        "name": "ok", "control": "ok", "links": "ok", "trust": "ok", "hello": "ok",
    }  # fmt: skip
    assert found["trust"].text == "vm, with its paired certificate"
    assert found["hello"].text == f"vm answers, privatellm {vm.version}; lent, and free"


def test_a_greeting_does_not_tell_yet_to_whom_a_machine_is_lent() -> None:
    greeted = PeerFacts(node_id="a" * 64, state="ready", lends=True)
    assert not doctor_network._has_told(greeted)
    assert doctor_network._has_told(msgspec.structs.replace(greeted, memory_total=1))
    assert doctor_network._has_told(msgspec.structs.replace(greeted, state="refused"))


@pytest.mark.usefixtures("greeting")
def test_a_machine_that_is_lent_elsewhere_or_of_another_version_is_told_apart(pair: Nodes) -> None:
    vm = pair.nodes[1]
    vm.lent = lambda: LentState(head="ab" * 32)
    busy = walked(vm.listening[0])["hello"]
    assert (busy.mark, busy.text) == ("note", f"vm answers, privatellm {vm.version}; lent to abababab")
    vm.lent, vm.version = LentState, "0.0.1"
    other = walked(vm.listening[0])["hello"]
    assert other.mark == "problem" and other.way_out == "install the same version on both"
    assert other.text.startswith("vm has privatellm 0.0.1 and this machine has ")


@pytest.mark.usefixtures("greeting")
def test_a_machine_that_forgot_this_one_says_so(pair: Nodes) -> None:
    pair.peers[1].forget(pair.identities[0].node_id)
    found = walked(pair.nodes[1].listening[0])
    assert found["trust"].mark == "ok" and found["hello"].mark == "problem"
    assert found["hello"].text == "vm has forgotten this machine" and "pair the two again" in found["hello"].way_out


def test_a_machine_that_is_not_paired_is_named_by_its_words_and_asked_nothing(pair: Nodes) -> None:
    pair.peers[0].forget(pair.identities[1].node_id)
    address = pair.nodes[1].listening[0]
    found = walked(address)
    assert "hello" not in found and found["trust"].mark == "problem"
    assert found["trust"].text.startswith(pair.identities[1].node_id[:8])
    assert "is not paired" in found["trust"].text and found["trust"].way_out.endswith(f"peers pair {address}")


def test_another_certificate_at_a_known_address_is_told_from_a_stranger(tmp_path: Path, pair: Nodes) -> None:
    where = pair.nodes[1].listening[0]
    pair.nodes[1].close()
    other = Node(*make_identity(tmp_path / "other"), OpenNetwork(id=1, name="vm", listen=where, lend=True))
    try:
        trust = walked(where)["trust"]
    finally:
        other.close()
    assert trust.mark == "problem" and trust.text.startswith("vm was found here before, but")
    assert f"peers forget {pair.identities[1].node_id[:8]}" in trust.way_out


def test_what_is_no_privatellm_is_said(pair: Nodes) -> None:
    two = bind_pair("127.0.0.1", 0)
    with two.listener, socket.create_server(("127.0.0.1", two.control)):
        trust = walked(f"127.0.0.1:{two.control}")["trust"]
    assert trust.mark == "problem" and f"port {two.control} is not privatellm" in trust.text
