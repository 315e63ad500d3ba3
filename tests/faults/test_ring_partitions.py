"""Rings whose machines cannot all reach one another, in network namespaces with cables that are cut and blocked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.ipc.messages import Notice
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, EXPERT_BYTES, OTHER_PROMPT, Oracle, Ring
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked
from tests.support.network_namespaces import Network, network

pytestmark = pytest.mark.slow

LONG = 30


class Wired:
    """A ring of the head and two others, each in a namespace of its own; the head is machine 0."""

    def __init__(self, net: Network, ring: Ring) -> None:
        self.net = net
        self.ring = ring

    def listener(self, machine: int) -> int:
        return self.ring.machines[machine].port + 1

    def heard(self, text: str, since: int) -> str:
        found = self.ring.engine.wait(lambda event: isinstance(event, Notice) and text in event.text, PATIENCE_S, since)
        assert isinstance(found, Notice)
        return found.text


@contextlib.contextmanager
def wired(machines: int) -> Iterator[Wired]:
    with network(machines) as net:
        arguments = {number: hooked(hooks.in_namespace, name=space.name) for number, space in enumerate(net.spaces)}
        with Ring(machines - 1, arguments=arguments, hosts=[space.address() for space in net.spaces]) as ring:
            yield Wired(net, ring)


@pytest.fixture(scope="module")
def wired_three() -> Iterator[Wired]:
    with wired(3) as made:
        yield made


@pytest.fixture
def three(wired_three: Wired, model: Path) -> Iterator[Wired]:
    """All cables are whole, before and after."""
    wired_three.ring.whole(model)
    yield wired_three
    wired_three.net.mend(1, 2)


def test_two_followers_that_cannot_reach_each_other(three: Wired, model: Path, alone: Oracle) -> None:
    """The ring goes on with the head and one of the two; no machine is called lost, and none is once all is well."""
    ring = three.ring
    since = ring.mark()
    asked = ring.ask(LONG)
    ring.until_tokens(asked, 8)
    three.net.cut(1, 2)
    assert ring.finished(asked).token_ids == alone(LONG).token_ids
    said = ring.notices(since)
    between = ("The link between node 1 and node 2 ", "The link between node 2 and node 1 ")
    assert said[0] in [f"{each}broke; forming the ring again." for each in between]
    assert [text for text in said if text.startswith(between) and "is left out of the ring" in text]
    assert "Going on with 2 machines." in said
    assert not [text for text in said if "Lost" in text]
    assert set(ring.states().values()) == {"ring", "ready"}
    three.net.mend(1, 2)
    since = ring.mark()
    assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
    assert any("came back; going on with 3 machines." in text for text in ring.notices(since))


def test_the_data_port_alone_is_blocked_between_the_head_and_one(three: Wired, model: Path, alone: Oracle) -> None:
    ring = three.ring
    since = ring.mark()
    asked = ring.ask(LONG)
    ring.until_tokens(asked, 8)
    three.net.block(three.listener(1), 0, 1)
    assert ring.finished(asked).token_ids == alone(LONG).token_ids
    said = ring.notices(since)
    assert said[0] == "The link to node 1 broke; forming the ring again."
    assert [text for text in said if text.startswith("The link to node 1 cannot be made (")]
    assert not [text for text in said if "Lost" in text]
    assert "Going on with 2 machines." in said
    eventually(lambda: [ring.state_of(each) for each in ring.followers] == ["ready", "ring"])
    three.net.unblock(three.listener(1), 0, 1)


def test_the_head_cut_off_from_all_and_back(model: Path, alone: Oracle) -> None:
    """The model does not fit on it alone: the answer waits, and goes on when the cable is whole again."""
    with wired(2) as two:
        ring = two.ring
        shares = {ring.head.identity.node_id: EXPERT_BYTES * 5 // 8}
        ring.load(model, replace(EXACT, shares=shares, overlap=False))
        since = ring.mark()
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 8)
        two.net.cut(0, 1)
        two.heard("The answer waits for node 1: ", since)
        two.net.mend(0, 1)
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        assert "node 1 came back; going on with 2 machines." in ring.notices(since)


def test_a_ring_is_formed_of_those_who_reach_one_another(three: Wired, model: Path, alone: Oracle) -> None:
    ring = three.ring
    three.net.cut(1, 2)
    loaded = ring.load(model)
    assert loaded.facts.ring is not None
    assert [node.name for node in loaded.facts.ring.nodes] in (["head", "node 1"], ["head", "node 2"])
    eventually(lambda: [text for text in ring.notices() if text.startswith("The link between node ")])
    assert ring.answer(12).token_ids == alone(12).token_ids
