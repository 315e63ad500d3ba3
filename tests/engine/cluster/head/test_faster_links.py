"""When another way between two machines of a ring is tried, measured and taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replace_parts
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.ring_words import link_words
from engine.cluster.commands import MoveLinks, decode_command, encode
from engine.cluster.epoch_links import EpochLinks, connect_epoch
from engine.cluster.head.faster_links import SELDOM, FasterLinks, moved_line, slower_lines, worth_trying
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.head_model import RingModel
from engine.cluster.head.survey import KnownLinks, Surveyor, candidates
from engine.cluster.membership.links import Way, is_clearly_faster, was_measured, with_gone
from engine.cluster.parts import Effort, EngineParts, TimeConstants
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import Cancelled
from engine.ipc.messages import Load
from engine.ipc.messages.ring import LinkFacts, RingChoice
from engine.runtimes import runtime_named
from tests.engine.cluster.linked_nodes import LinkedNode, LinkedNodes
from tests.engine.cluster.machine_hooks import QUICK
from tests.engine.cluster.paired_nodes import Nodes
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually

CABLE = LinkFacts(interface="eth0", address="10.0.0.2:2", latency_s=8e-5, bytes_per_s=1e8)
WIFI = LinkFacts(interface="wlan0", address="10.0.9.2:2", latency_s=3e-3, bytes_per_s=1e7)
BOTH = replace(CABLE, others=["wlan0 10.0.9.2:2: 3000 µs"])
NEW = "10.0.5.2:2"


def test_a_cable_that_is_gone_is_shown_until_it_is_back() -> None:
    gone = with_gone(WIFI, BOTH)
    assert link_words(gone) == "wlan0, 3 ms, 10 MB/s until eth0 (80 µs) is back"
    assert with_gone(replace(gone, others=["eth0 10.0.0.2:2: 5000 µs"]), BOTH).gone == ""
    assert with_gone(BOTH, BOTH).gone == with_gone(WIFI, None).gone == ""
    assert with_gone(WIFI, replace(CABLE, latency_s=2e-3)).gone == ""  # hardly faster
    names = {"b": "Bob", "c": "Carl"}
    links = {("a", "b"): gone, ("b", "c"): BOTH}
    assert slower_lines(links, "a", names.__getitem__) == [
        "The link to Bob goes over wlan0 (3,000 µs) until eth0 (80 µs) is back."
    ]
    assert moved_line({("b", "c"): CABLE}, "a", names.__getitem__) == (
        "The link from Bob to Carl goes over eth0 (80 µs) now."
    )


def test_a_cable_whose_end_has_a_new_address_is_back() -> None:
    # It is measured while the machines are busy, and is not the fastest measurement.
    moved = replace(CABLE, address="10.0.0.7:2", latency_s=4e-4)
    assert with_gone(moved, BOTH).gone == ""
    assert with_gone(replace(WIFI, others=["eth0 10.0.0.7:2: 2500 µs"]), BOTH).gone == ""
    # An address that was there beside the cable's is another way, though it leaves by the same interface.
    bridged = replace(moved, address="10.0.0.8:2")
    assert with_gone(bridged, replace(BOTH, others=[*BOTH.others, "eth0 10.0.0.8:2: 900 µs"])).gone == "eth0 (80 µs)"
    assert with_gone(replace(moved, interface=""), replace(CABLE, interface="")).gone
    known, way = KnownLinks(), ("a", "b")
    for link in (BOTH, moved):
        known.put(way, [], link)
    assert known.fastest(way) == moved, "nobody looks for the address that is gone"
    known.put(way, [], WIFI)
    assert known.fastest(way) == moved


def test_only_what_may_be_faster_is_tried() -> None:
    all_known = [CABLE.address, WIFI.address]
    assert worth_trying(BOTH, BOTH, all_known) == []
    assert worth_trying(BOTH, BOTH, [*all_known, NEW]) == [NEW]
    assert worth_trying(BOTH, BOTH, [*all_known, NEW], everything=False) == []
    assert worth_trying(WIFI, BOTH, [WIFI.address, NEW], everything=False) == [CABLE.address]
    # It was measured again while the machines were busy: not at every moment.
    busy = replace(WIFI, others=["eth0 10.0.0.2:2: 2500 µs"])
    assert worth_trying(busy, BOTH, all_known, everything=False) == []
    assert worth_trying(busy, BOTH, all_known) == [CABLE.address]


def test_clearly_faster_is_at_most_half_the_time() -> None:
    assert is_clearly_faster(CABLE, WIFI) and not is_clearly_faster(WIFI, CABLE)
    assert not is_clearly_faster(replace(CABLE, latency_s=5e-5), CABLE)
    assert was_measured(BOTH, WIFI.address) and not was_measured(BOTH, "10.0.9.2:21")


def test_the_fastest_is_remembered_and_believed_as_last_measured() -> None:
    known, way = KnownLinks(), ("a", "b")
    known.put(way, ["x"], CABLE)
    known.put(way, ["y"], WIFI)
    assert (known.fastest(way), known.last(way)) == (CABLE, WIFI)
    slower = replace(CABLE, latency_s=1e-4)
    known.replace(way, slower)
    assert known.fastest(way) == slower
    assert known.get(way, ["x"]) is known.get(way, ["y"]) is None


# --- looking for them ----------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    lender = ClusterWorker(nodes.nodes[1])
    eventually(lambda: nodes.ready() and len(candidates(nodes.nodes[0], ())) == 1)
    yield nodes
    lender.close()
    nodes.close()


class Measured:
    """A surveyor that has measured the cable at another time, and measures now what the test says."""

    def __init__(self, fastest: LinkFacts) -> None:
        self.fastest = fastest
        self.now: dict[str, LinkFacts] = {}
        self.asked: list[list[str]] = []

    def fastest_link(self, way: Way) -> LinkFacts:
        return self.fastest

    def measure_addresses(self, node: Any, machines: Any, wanted: dict[Way, list[str]], progress: Any) -> Any:
        self.asked += wanted.values()
        progress("measuring the links", 0, 0, "")
        return {way: [self.now[address] for address in addresses] for way, addresses in wanted.items()}


def stopped(*_: object) -> None:
    raise Cancelled("stopped")


@pytest.mark.usefixtures("no_keyring")
def test_a_way_that_works_again_is_measured_and_taken_if_it_is_faster(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, bob = pair.nodes
    monkeypatch.setattr(head, "parts", EngineParts(times=TimeConstants(links_again_s=0.02)))
    (there,) = candidates(head, ())
    (address,) = there.listeners
    way = (head.identity.node_id, bob.identity.node_id)
    cable = replace(CABLE, address=address)
    surveyor = Measured(cable)
    looking = FasterLinks(head, surveyor, {way: WIFI}, lambda: candidates(head, ()))  # type: ignore[arg-type]
    try:
        eventually(looking.found.is_set)
        with pytest.raises(Cancelled):
            looking.take(stopped)
        assert looking.found.is_set(), "the next question measures"
        surveyor.now = {address: replace(cable, latency_s=2e-3), WIFI.address: WIFI}
        assert looking.take(lambda *_: None) == {}
        assert looking._seldom == 2 * SELDOM
        assert was_measured(looking.in_use[way], address) and looking.in_use[way].address == WIFI.address
        eventually(looking.found.is_set)
        surveyor.now[address] = cable
        (taken,) = looking.take(lambda *_: None).values()
        assert taken.address == looking.in_use[way].address == address
        assert was_measured(taken, WIFI.address)
        assert surveyor.asked == [[address, WIFI.address]] * 3 and looking._seldom == SELDOM
    finally:
        looking.close()


# --- moving the links of a running epoch ---------------------------------------------------------------------------


def exchanged(found: list[EpochLinks], linked: LinkedNodes, text: str) -> list[list[bytes]]:
    def one(node: LinkedNode) -> list[bytes]:
        exchange = found[node.epoch.rank].keep("tls")
        exchange.send((f"{text} {node.epoch.rank}".encode(),), 100)
        return [bytes(part) for part in exchange.receive()]

    return linked.everywhere(one)


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkedNodes]:
    made = LinkedNodes(3)
    for node in made.nodes:
        monkeypatch.setattr(node.links, "parts", EngineParts(effort=Effort(exchange_rounds=2)))
    yield made
    made.close()


def test_an_epoch_goes_on_over_other_links(linked: LinkedNodes) -> None:
    found = [EpochLinks(node.epoch) for node in linked.nodes]
    linked.everywhere(lambda node: connect_epoch(node.links, found[node.epoch.rank], ["tls"], commands=True))
    exchanges = [one.keep("tls") for one in found]
    before = [dict(one.commands) for one in found]
    assert exchanged(found, linked, "before") == [[b"before 0", b"before 1", b"before 2"]] * 3
    (_, one, _) = linked.members
    # The head's first address for node 1 leads nowhere any more; the others have it as they had it.
    nowhere = linked.nodes[0].epoch.dialling({1: "127.0.0.1:9"})
    assert nowhere.members[1].addresses == ("127.0.0.1:9", *one.addresses)
    seconds = linked.everywhere(
        lambda node: found[node.epoch.rank].move(node.links, {1: "127.0.0.1:9"} if node.epoch.rank == 0 else {})
    )
    assert all(one > 0 for one in seconds)
    assert [one.keep("tls") for one in found] == exchanges
    assert exchanged(found, linked, "after") == [[b"after 0", b"after 1", b"after 2"]] * 3
    found[0].commands[2].send(encode(MoveLinks({3: "10.0.0.1:1"}, CABLE)))
    assert decode_command(found[2].commands[0].receive(1000)) == MoveLinks({3: "10.0.0.1:1"}, CABLE)
    with pytest.raises(PeerLost):
        before[0][2].send(b"the former links are closed")
    for each in found:
        each.close()


def test_an_epoch_that_ends_while_it_moves_keeps_nobody(linked: LinkedNodes) -> None:
    found = [EpochLinks(node.epoch) for node in linked.nodes]
    linked.everywhere(lambda node: connect_epoch(node.links, found[node.epoch.rank], ["tls"], commands=True))
    found[1].close()
    found[2].close()

    def move(node: LinkedNode) -> None:
        if node.epoch.rank == 0:
            # The others do not come.
            node.epoch.given_up.set()
        with pytest.raises(PeerLost):
            found[node.epoch.rank].move(node.links, {})

    linked.everywhere(move)
    found[0].close()


@pytest.mark.usefixtures("no_keyring")
def test_a_ring_takes_the_faster_way_and_keeps_its_conversation(
    pair: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    head, _ = pair.nodes
    monkeypatch.setattr(head, "parts", replace_parts(QUICK, times=TimeConstants(links_again_s=0.02)))
    folder = tiny_mixtral(tmp_path / "model")
    choice = RingChoice(even_if_slower=True, overlap=False, exchange="tls")
    load = Load(id=0, model="tiny", runtime="native", partitioning="cpu", ring=choice)
    surveyor = Surveyor(head.identity.node_id, folder, load)
    former = RingFormer(head, "tiny", folder, runtime_named("native"), load, surveyor)
    model = RingModel("tiny", former, lambda *_: None)
    try:
        rows = model.start()
        before = rows.extend([5, 6, 7])
        formed = former._formed
        assert formed is not None and formed.moves
        ((way, link),) = former._faster_links.in_use.items()
        former._faster_links.close()
        slow = with_gone(WIFI, link)
        former._faster_links = FasterLinks(head, surveyor, {way: slow}, former._present_machines)
        eventually(former._faster_links.found.is_set)
        monkeypatch.setattr(surveyor, "measure_addresses", lambda *_: {way: [link, replace(WIFI, latency_s=60.0)]})
        notices: list[str] = []
        with monkeypatch.context() as changing:
            changing.setattr(former, "changed", stopped)
            assert not model.between_turns(lambda *_: None, notices.append), "a stopped question keeps what was read"
        assert not model.between_turns(lambda *_: None, notices.append)
        assert notices == [moved_line({way: link}, way[0], head.table.name_of)]
        (shown,) = [one.link for one in head.table.facts()]
        assert shown is not None and shown.address == link.address and not shown.gone
        # The rows on both nodes go on where they were.
        rows.truncate(1)
        again = rows.extend([6, 7])
        assert before is not None and again is not None and (before == again).all()
        assert former._formed is formed and model.facts.ring == formed.facts
    finally:
        model.close()
