"""``doctor --peer``, past the ports: whose certificate is shown there, and what that machine says to this one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from paired_nodes import Nodes, eventually, make_identity

from app.commands import doctor_network
from app.commands.doctor_network import Finding
from engine.cluster.membership.node import LentState, Node
from engine.ipc.messages import OpenNetwork


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """This home, whose node is closed, and the lent machine ``vm``, which is there."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    nodes = Nodes(tmp_path / "config", "network", "vm", lend=True)
    eventually(nodes.ready)
    nodes.nodes[0].close()
    yield nodes
    nodes.close()


def walked(address: str) -> dict[str, Finding]:
    found = doctor_network.network(probe=False, peer=address)
    return {finding.about.removeprefix("peer: "): finding for finding in found if finding.about.startswith("peer: ")}


def test_a_paired_machine_is_asked_what_it_does(pair: Nodes) -> None:
    vm = pair.nodes[1]
    found = walked(vm.listening[0])
    assert {about: finding.mark for about, finding in found.items()} == {
        "name": "ok", "control": "ok", "links": "ok", "trust": "ok", "hello": "ok",
    }  # fmt: skip
    assert found["trust"].text == "vm, with the certificate that was paired"
    assert found["hello"].text == f"vm answers, privatellm {vm.version}; lent, and free"


def test_a_machine_that_is_lent_elsewhere_or_of_another_version_is_told_apart(pair: Nodes) -> None:
    vm = pair.nodes[1]
    vm.lent = lambda: LentState(head="ab" * 32)
    busy = walked(vm.listening[0])["hello"]
    assert (busy.mark, busy.text) == ("note", f"vm answers, privatellm {vm.version}; lent to abababab")
    vm.lent, vm.version = LentState, "0.0.1"
    other = walked(vm.listening[0])["hello"]
    assert other.mark == "problem" and other.way_out == "install the same version on both"
    assert other.text.startswith("vm has privatellm 0.0.1 and this machine has ")


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
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with socket.create_server(("127.0.0.1", port + 1)):
            trust = walked(f"127.0.0.1:{port}")["trust"]
    assert trust.mark == "problem" and f"port {port} is no privatellm" in trust.text
