"""For how long a measured link is believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.head import survey as surveying
from engine.cluster.head.survey import LINK_AGE_S, KnownLinks, Survey, Surveyor, candidates
from engine.cluster.membership.rpc_fanout import Candidate
from engine.cluster.worker.lending import ClusterWorker
from engine.ipc.messages import Load
from engine.ipc.messages.ring import LinkFacts
from engine.planning.ring_nodes import NodeFacts
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.eventually import eventually
from tests.support.tiny_models import write_tiny_model

PAIR = ("head", "studio")
ENDS = ["10.0.0.1:1", "10.0.0.2:1", "process"]
LINK = LinkFacts(interface="lo", address="10.0.0.2:2", latency_s=1e-4, bytes_per_s=1e9)

pytestmark = pytest.mark.usefixtures("no_keyring")


def test_a_link_is_known_for_some_minutes_between_the_same_ends() -> None:
    now = [100.0]
    known = KnownLinks(lambda: now[0])
    assert known.get(PAIR, ENDS) is None
    known.put(PAIR, ENDS, LINK)
    assert known.get(PAIR, reversed(ENDS)) == LINK
    assert known.get(("head", "attic"), ENDS) is None
    assert known.get(PAIR, [*ENDS, "192.168.9.2:1"]) is None  # a cable was plugged in
    assert known.get(PAIR, [*ENDS[:2], "another process"], hurry=True) is None
    now[0] += LINK_AGE_S
    assert known.get(PAIR, ENDS) is None
    assert known.get(PAIR, ENDS, hurry=True) == LINK
    known.put(PAIR, ENDS, LINK)
    assert known.get(PAIR, ENDS) == LINK


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", "Carl", lend=True)
    lenders = [ClusterWorker(node) for node in nodes.nodes[1:]]
    eventually(lambda: nodes.ready() and len(candidates(nodes.nodes[0], ())) == 2)
    yield nodes
    for lender in lenders:
        lender.close()
    nodes.close()


def test_links_are_measured_again_when_an_address_is_new(
    three: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, ...]] = []
    there: dict[str, str] = {}

    def to(node: Any, one: Candidate, epoch: str) -> LinkFacts:
        measured.append((one.name,))
        return msgspec.structs.replace(LINK, address=there.get(one.name, one.listeners[0]))

    def between(node: Any, first: Candidate, second: Candidate, *_: Any) -> LinkFacts:
        measured.append((first.name, second.name))
        return msgspec.structs.replace(LINK, address=second.listeners[0])

    monkeypatch.setattr(surveying, "_to", to)
    monkeypatch.setattr(surveying, "_between", between)
    facts = NodeFacts(
        memory_total=1,
        memory_free=1,
        memory_read=1.0,
        disk_free=1,
        expert=None,
        instruction_set="x",
        runtimes=["native"],
        processor="",
        system="",
        threads=1,
    )
    monkeypatch.setattr(surveying, "_facts_of", lambda *_: facts)
    monkeypatch.setattr(surveying, "measure_node", lambda *_: facts)
    model = write_tiny_model(tmp_path / "tiny", "mixtral")
    head = three.nodes[0]
    surveyor = Surveyor(head.identity.node_id, model, Load(id=0, model="tiny"))

    def survey(there: list[Candidate], **options: bool) -> Survey:
        return surveyor.survey(head, there, "native", lambda *_: None, to_send=False, **options)

    machines = candidates(head, ())
    assert len(survey(machines).links) == 3
    assert len(measured) == 3
    assert len(survey(machines).links) == 3
    assert len(measured) == 3
    bob = next(one for one in machines if one.name == "Bob")
    moved = [replace(one, listeners=(*one.listeners, "10.9.9.9:1")) if one is bob else one for one in machines]
    assert len(survey(moved).links) == 3
    assert sorted(map(len, measured[3:])) == [1, 2]  # to Bob, and between Bob and Carl
    assert all("Bob" in names for names in measured[3:])
    monkeypatch.setattr("engine.cluster.head.survey.LINK_AGE_S", 0.0)
    survey(moved, hurry=True)
    assert len(measured) == 5
    there["Carl"] = "10.9.9.8:1"
    survey(moved)
    assert len(measured) == 8
    # Nobody answers there now, although both ends say what they said before.
    survey(moved, hurry=True)
    assert measured[8:] == [("Carl",)]
