"""Words that another machine chose, from its process to this one's screen: they may be read, they may not act."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.commands.peers import as_text
from app.ring_words import away_lines, machine_name
from app.tui.lending import leaving_question, lending_view
from app.tui.render.ring_view import peer_lines, ring_lines
from discovery.peers import new_peer
from engine.ipc.messages import NetworkState
from engine.ipc.messages.ring import LendingFacts, LinkFacts, NodeShard, RingFacts
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202estudio\r\nPaired with nobody.\x00" + "\x1b[A" * 30


def acts(text: str) -> list[str]:
    """Characters of one line that a terminal would act on."""
    return [one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def hostile(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the second node says of itself is chosen with care."""
    node = nodes.nodes[1]
    greet, load = node.greeting, node.load
    greeting = msgspec.structs.replace(greet(), name=EVIL)
    monkeypatch.setattr(node, "greeting", lambda: greeting)
    monkeypatch.setattr(node.table, "_greet", lambda: greeting)
    said = msgspec.structs.replace(load(), runtime=EVIL, stage=EVIL, head=EVIL, epoch=EVIL)
    monkeypatch.setattr(node, "load", lambda: said)
    monkeypatch.setattr(node.table, "_load", lambda: said)


def test_what_a_peer_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, "Anna", "Bob", lend=True)
    try:
        hostile(nodes, monkeypatch)
        nodes.peers[0].add(new_peer(nodes.identities[1].certificate_der, EVIL))  # what pairing with it would store
        client = nodes.client(0, nodes.identities[1])
        greeting, load = nodes.nodes[1].greeting(), nodes.nodes[1].load()

        def known() -> bool:
            # Its own watch, which began before, may still have greeted by its first name.
            client.call("Hello", greeting, type(greeting))
            client.call("Beat", load, type(load))
            return any(peer.runtime and "studio" in peer.name for peer in nodes.nodes[0].table.facts())

        eventually(known)
        client.close()
        (peer,) = nodes.nodes[0].table.facts()
        assert "studio" in peer.name
        assert not acts(peer.name)
        assert not acts(nodes.nodes[0].table.views()[0].name)
        peer = msgspec.structs.replace(peer, link=LINK)
        state = NetworkState(id=0, me=nodes.nodes[0].me, open=True, peers=[peer])
        assert not acts(peer.lent_to)
        shown = [peer_lines(peer, 80).plain, as_text(state), machine_name(peer), lending_view(state, False, 80).plain]
        for text in shown:
            assert not acts(text), text
            assert "studio" in text
    finally:
        nodes.close()


def test_versions_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", EVIL])
    monkeypatch.setattr("engine.cluster.membership.node.privatellm_version", lambda: next(versions))
    nodes = Nodes(tmp_path, "Anna", "Bob")
    try:
        for node in nodes.nodes:
            eventually(lambda node=node: node.table.facts()[0].state == "refused")  # type: ignore[misc]
            (peer,) = node.table.facts()
            assert peer.problem
            assert not acts(peer.problem), peer.problem
            assert not acts(peer_lines(peer, 80).plain)
    finally:
        nodes.close()


LINK = LinkFacts(interface=EVIL, address=EVIL, latency_s=1e-4, bytes_per_s=1e9, others=[EVIL])


def ring_of(text: str) -> RingFacts:
    shares = [
        NodeShard(rank=rank, node_id=text, name=text, experts=1, expert_bytes=1, trunk_bytes=1, memory_free=1)
        for rank in range(2)
    ]
    return RingFacts(mode="exact", exchange="tls", loading="selected", epoch="e", nodes=shares, reason=text)


def test_facts_of_a_ring_and_of_a_head() -> None:
    ring = ring_of(EVIL)
    lines = [content.plain for content in ring_lines(ring, 100)]
    assert any("studio" in line for line in lines)
    facts = LendingFacts(
        head=EVIL, model=EVIL, rank=1, nodes=2, experts=1, expert_bytes=1, stage=EVIL, done=1, total=2, link=LINK
    )
    told = away_lines([machine_name(ring.nodes[0])], [])
    me = msgspec.structs.replace(_me(), name=EVIL, listening=[EVIL], key_storage=EVIL)
    state = NetworkState(id=0, me=me, open=True, peers=[], lending=facts, problems=[EVIL], code="1234 5678")
    for text in [*lines, *told, lending_view(state, False, 100).plain, leaving_question(facts)]:
        assert not acts(text), text


def _me() -> Any:
    from engine.ipc.messages.ring import NodeId

    return NodeId(node_id="a" * 64, name="me")


def test_the_name_of_a_head_on_a_lent_machine(tmp_path: Path) -> None:
    """Through the pairing, the file of peers, and the name that a person may type."""
    _, peers = make_identity(tmp_path / "me")
    other, _ = make_identity(tmp_path / "other")
    peers.add(new_peer(other.certificate_der, EVIL))
    (found,) = peers.all()
    assert not acts(found.name)
    assert peers.rename(other.node_id, "a\x1b[31mb")
    (found,) = peers.all()
    assert not acts(found.name)
    kept = (tmp_path / "me" / "peers.json").read_text(encoding="utf-8")
    assert "\x1b" not in kept
    assert "\\u001b" not in kept.lower()
