"""Trying all links of a ring at once: which can be made, who finds out, and what follows for the ring."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from discovery.peers import new_peer
from engine.cluster.head import survey as surveying
from engine.cluster.head.epoch_specs import Ring, _best_first
from engine.cluster.head.formed import what_broke
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.missing_links import LinkRetry, plan_connected
from engine.cluster.head.survey import Survey, Surveyor, candidates
from engine.cluster.membership import links
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.links import LinkTrial, Tried, Way, all_ways
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.parts import EngineParts, TimeConstants
from engine.cluster.transport import connecting
from engine.cluster.transport.addresses import listener_address
from engine.cluster.transport.connecting import connect_commands
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import LinkLost, ModelError, PeerLost
from engine.ipc.messages import Load
from engine.ipc.messages.ring import LinkFacts, RingChoice
from engine.planning.reaching import Pair
from engine.planning.ring_change import Rerun
from engine.runtimes import runtime_named
from tests.engine.cluster.paired_nodes import Nodes
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")


class Three:
    """A head and two lent machines that are paired with it only."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder, "Anna", "Bob", "Carl", lend=True)
        self.head, *followers = self.nodes.nodes
        self.lenders = [ClusterWorker(node) for node in followers]
        self.anna, self.bob, self.carl = (identity.node_id for identity in self.nodes.identities)
        eventually(self.nodes.ready)

    def forgets(self, who: int, whom: int) -> None:
        """The person at ``who`` wants nothing to do with ``whom`` any more."""
        self.nodes.pair(who, whom, ("Anna", "Bob", "Carl"))
        self.nodes.nodes[who].table.refresh()
        self.nodes.peers[who].forget(self.nodes.identities[whom].node_id)
        self.nodes.nodes[who].forget(self.nodes.identities[whom].node_id)

    def tried(self, best: dict[Way, str] | None = None) -> Tried:
        there = candidates(self.head, [])
        trial = LinkTrial(self.head, there, all_ways(self.anna, there), "an epoch", best or {})
        with ThreadPoolExecutor(4) as pool:
            return trial.result(trial.begin(pool, CallGroup()))

    def pair(self, one: str, other: str) -> Pair:
        return frozenset((one, other))

    def close(self) -> None:
        for lender in self.lenders:
            lender.close()
        self.nodes.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    made = Three(tmp_path / "nodes")
    yield made
    made.close()


def test_all_links_of_machines_that_reach_one_another(three: Three) -> None:
    found = three.tried()
    assert found.broken == {}
    listeners = {node.identity.node_id: listener_address(node.listening[0]) for node in three.nodes.nodes}
    first, second = sorted((three.bob, three.carl))
    assert found.reached == {
        (three.anna, three.bob): listeners[three.bob],
        (three.anna, three.carl): listeners[three.carl],
        (first, second): listeners[second],
    }


def test_every_pair_that_cannot_is_found_at_once(three: Three) -> None:
    three.nodes.nodes[2].listener.close()
    first, second = sorted((three.bob, three.carl))
    broken = three.tried().broken
    assert "refused" in broken[three.pair(three.anna, three.carl)]
    # Of the other two the one with the lower id dials.
    assert (three.pair(first, second) in broken) == (second == three.carl)
    assert three.pair(three.anna, three.bob) not in broken


def test_a_machine_whose_person_has_forgotten_another_one(three: Three) -> None:
    three.forgets(2, 1)
    found = three.tried()
    assert list(found.broken) == [three.pair(three.bob, three.carl)]
    assert "Carl has forgotten" in found.broken[three.pair(three.bob, three.carl)]


def test_an_address_that_leads_nowhere_does_not_count(three: Three) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
        found = three.tried({(three.anna, three.bob): nowhere, (three.anna, three.carl): "127.0.0.1:9"})
    assert found.broken == {}
    assert found.reached[three.anna, three.bob] == listener_address(three.nodes.nodes[1].listening[0])


def test_a_machine_that_does_not_answer_is_gone_and_no_link_is_blamed(three: Three) -> None:
    there = candidates(three.head, [])
    three.nodes.nodes[2].close()
    trial = LinkTrial(three.head, there, all_ways(three.anna, there), "an epoch", {})
    with ThreadPoolExecutor(4) as pool:
        asked = trial.begin(pool, CallGroup())
        with pytest.raises(NodeRefused) as refused:
            trial.result(asked)
    assert (refused.value.node_id, refused.value.gone) == (three.carl, True)


def test_a_ring_is_planned_with_those_who_reach_one_another(
    three: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the sound links may take longer than people would wait.
    monkeypatch.setattr(links, "PROBE_S", 60.0)
    monkeypatch.setattr(links, "ANSWER_S", 60.0)
    monkeypatch.setattr(links, "TRIED_S", 60.0)
    folder = tiny_mixtral(tmp_path / "model")
    load = Load(
        id=0, model="tiny", runtime="native", ring=RingChoice(even_if_slower=True, overlap=False, exchange="tls")
    )
    surveyor = Surveyor(three.anna, folder, load)
    order = [(three.anna, "Anna"), *((one.node_id, one.name) for one in candidates(three.head, []))]
    three.forgets(2, 1)
    survey = surveyor.survey(three.head, candidates(three.head, []), "native", lambda *_: None, to_send=False)
    found = plan_connected(surveyor.headers, "tiny", load, order, survey)
    assert list(survey.tried.broken) == [three.pair(three.bob, three.carl)], survey.tried.broken
    ((left, pairs),) = found.without_links.items()
    assert pairs == {three.pair(three.bob, three.carl)}
    name, other = ("Bob", "Carl") if left == three.bob else ("Carl", "Bob")
    (line,) = found.lines
    assert line.startswith(f"The link between {name} and {other} cannot be made (")
    assert line.endswith(f"; {name} is left out of the ring.")
    assert len(found.decision.ranks) == 2 and left not in found.decision.ranks
    # The head's own link: the one that has it is in the ring, although the other two reach each other.
    survey.tried.broken.clear()
    survey.tried.broken[three.pair(three.anna, three.bob)] = "timed out"
    found = plan_connected(surveyor.headers, "tiny", load, order, survey)
    assert found.decision.ranks == (three.anna, three.carl)
    assert found.lines == ["The link to Bob cannot be made (timed out); Bob is left out of the ring."]


def test_a_machine_is_wanted_again_when_its_link_works(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(three.head, "parts", EngineParts(times=TimeConstants(links_again_s=0.02)))
    three.forgets(2, 1)
    between = three.pair(three.bob, three.carl)
    tries: list[int] = []

    def there():  # type: ignore[no-untyped-def]
        tries.append(0)
        return candidates(three.head, [])

    watched = LinkRetry(three.head, {three.carl: frozenset({between})}, there)
    try:
        eventually(lambda: len(tries) > 1)
        assert not watched.restored.is_set()
        three.nodes.peers[2].add(new_peer(three.nodes.identities[1].certificate_der, "Bob"))
        eventually(watched.restored.is_set)
    finally:
        watched.close()


def test_a_link_that_breaks_while_the_ring_is_formed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be made when it was tried: what is left forms a ring without it, and says which link it was."""
    monkeypatch.setattr(connecting, "UNREACHED_S", 0.2)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    folder = tiny_mixtral(tmp_path / "model")
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    lender = ClusterWorker(nodes.nodes[1])
    choice = RingChoice(even_if_slower=True, overlap=False, exchange="tls")
    load = Load(id=0, model="tiny", runtime="native", partitioning="cpu", ring=choice)
    surveyor = Surveyor(nodes.identities[0].node_id, folder, load)
    former = RingFormer(nodes.nodes[0], "tiny", folder, runtime_named("native"), load, surveyor)
    stages: list[str] = []

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        stages.append(stage)
        if stage.startswith("connecting to Bob"):
            nodes.nodes[1].listener.close()

    try:
        eventually(nodes.ready)
        formed = former.form(progress)
        assert [stage for stage in stages if stage.startswith("connecting to Bob")]
        assert formed.names == {0: "Anna"}
        assert formed.without_links == {"Bob"}
        assert [line for line in formed.notices if line.startswith("The link to Bob cannot be made (")]
        assert not former.changed(progress, lambda text: None, Rerun())
        eventually(lambda: lender.facts() is None)
    finally:
        former.close()
        lender.close()
        nodes.close()


# --- who is to blame ------------------------------------------------------------------------------------------------


def blamed(three: Three, lost: PeerLost) -> PeerLost:
    nodes = {0: three.anna, 1: three.bob, 2: three.carl}
    return what_broke(three.head.table, nodes, {0: "Anna", 1: "Bob", 2: "Carl"}, lost)


def test_a_link_that_broke_is_nobodys_loss(three: Three) -> None:
    found = blamed(three, PeerLost("Carl is gone: its link ended (Connection timed out).", [2]))
    assert isinstance(found, LinkLost) and found.ranks == ()
    assert str(found) == "The link to Carl broke"
    three.lenders[0]._broken = [three.carl]
    found = blamed(three, PeerLost("Bob left the ring."))
    assert str(found) == "The link between Bob and Carl broke"


def test_who_is_gone_is_blamed_whatever_broke_with_it(three: Three) -> None:
    three.lenders[0]._broken = [three.carl]
    three.nodes.nodes[2].close()
    eventually(lambda: (view := three.head.table.view(three.carl)) is not None and view.client is None)
    found = blamed(three, PeerLost("Bob left the ring."))
    assert not isinstance(found, LinkLost)
    assert (str(found), found.ranks) == ("Carl does not answer any more", (2,))
    lost = PeerLost("Carl is gone: its link ended.", [2])
    assert blamed(three, lost) is lost


def test_who_left_by_itself_is_blamed(three: Three) -> None:
    lost = PeerLost("Bob left the ring.")
    assert blamed(three, lost) is lost


# --- making links ---------------------------------------------------------------------------------------------------


def test_a_link_that_nobody_takes_is_given_up_long_before_its_time(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "UNREACHED_S", 0.2)
    three.nodes.nodes[1].listener.close()
    bob = three.nodes.nodes[1]
    members = (
        Member(0, three.anna, three.head.identity.certificate_pem),
        Member(1, three.bob, bob.identity.certificate_pem, (listener_address(bob.listening[0]),), "Bob"),
    )
    with pytest.raises(ModelError, match="The link to Bob cannot be made"):
        connect_commands(three.head.links, Epoch("an epoch", 0, members, bytes(32)), seconds=250)


def test_no_scope_of_this_machine_is_sent_to_another_one(three: Three) -> None:
    """What a machine found itself comes back to it as it said it."""
    listeners = ("[fe80::1%here]:1", "10.0.0.1:1")
    bob, carl = sorted((replace(one, listeners=listeners) for one in candidates(three.head, [])), key=carl_last(three))
    way = (three.bob, three.carl)
    trial = LinkTrial(three.head, [bob, carl], [(three.anna, three.bob), way], "e", {way: "[fe80::1%there]:1"})
    assert [one.addresses for one in trial._wanted[three.anna]] == [list(listeners)]
    assert [one.addresses for one in trial._wanted[three.bob]] == [["[fe80::1%there]:1", "[fe80::1]:1", "10.0.0.1:1"]]
    ring = Ring("e", None, None, Survey(), {1: bob, 2: carl}, b"")  # type: ignore[arg-type]
    assert _best_first(ring, three.head, three.anna, three.bob, 1) == list(listeners)
    assert _best_first(ring, three.head, three.bob, three.carl, 2) == ["[fe80::1]:1", "10.0.0.1:1"]


def carl_last(three: Three) -> Callable[[Candidate], bool]:
    return lambda one: one.node_id == three.carl


def test_links_between_others_are_measured_at_addresses_without_scope(
    three: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, ...]] = []

    def measured(node: object, first: Candidate, second: Candidate, *_: object) -> LinkFacts:
        sent.append(second.listeners)
        return LinkFacts(interface="eth0", address="10.0.0.1:1", latency_s=1e-4, bytes_per_s=1e8)

    monkeypatch.setattr(surveying, "_between", measured)
    monkeypatch.setattr(surveying, "_to", lambda *_: measured(None, *[replace(bob, listeners=())] * 2))
    bob, carl = (replace(one, listeners=("[fe80::1%here]:1",)) for one in candidates(three.head, []))
    surveyor = Surveyor(three.anna, tiny_mixtral(tmp_path), Load(id=0, model="tiny", runtime="native"))
    surveyor._measure_links(three.head, [bob, carl], Survey(), lambda *_: None, False)
    assert sent == [(), (), ("[fe80::1]:1",)]
