"""Links of a ring that are slow, stall, are torn down, or carry nothing any more; nodes that are slow.

A proxy delays and holds back what the nodes send each other (:mod:`slow_wire`), and where network namespaces may be
made, an interface is set down, which is what a pulled cable looks like. For packets that are lost see test_ring_lossy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.ipc.messages import Failed, ListPeers, Loaded, NetworkState, Notice, Progress, RingChanged
from engine.ipc.messages.ring import LinkFacts, RingMode
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, LAYERS, OTHER_PROMPT, READY, Machine, Oracle, Ring, write_large_model
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked
from tests.support.network_namespaces import network

pytestmark = pytest.mark.slow

LONG = 30


def unplug(*machines: Machine) -> None:
    for machine in machines:
        assert machine.proxy is not None
        machine.proxy.unplug()


def plug_in(*machines: Machine) -> None:
    for machine in machines:
        assert machine.proxy is not None
        machine.proxy.plug_in()


@pytest.fixture(scope="module")
def proxied() -> Iterator[Ring]:
    with Ring(2, proxied=True) as ring:
        yield ring


@pytest.fixture(scope="module")
def proxied_pair() -> Iterator[Ring]:
    with Ring(1, proxied=True) as ring:
        yield ring


def test_all_goes_by_way_of_the_proxies(proxied: Ring, model: Path, alone: Oracle) -> None:
    """Or the other tests would show nothing."""
    proxied.whole(model)
    before = [machine.proxy.carried for machine in proxied.followers]  # type: ignore[union-attr]
    assert proxied.answer(40).token_ids == alone(40).token_ids
    after = [machine.proxy.carried for machine in proxied.followers]  # type: ignore[union-attr]
    for was, now in zip(before, after, strict=True):
        assert now - was > 40 * LAYERS * 48 * 4


def test_unplugged_in_an_answer_and_plugged_in_again(proxied_pair: Ring, model: Path, alone: Oracle) -> None:
    ring = proxied_pair.whole(model)
    follower = ring.followers[0]
    since = ring.mark()
    asked = ring.ask(LONG)
    ring.until_tokens(asked, 8)
    unplug(ring.head, follower)
    ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
    eventually(lambda: follower.lending() is None)
    assert ring.finished(asked).token_ids == alone(LONG).token_ids
    since = ring.mark()
    plug_in(ring.head, follower)
    eventually(lambda: ring.state_of(follower) == "ready")
    assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
    assert any("node 1 came back" in text for text in ring.notices(since))


def test_a_node_that_calls_and_cannot_be_called(proxied: Ring, model: Path, alone: Oracle) -> None:
    """What the others send it is lost on its way; its own heartbeats arrive. The others go on without it."""
    ring = proxied.whole(model)
    gone, left = ring.followers
    since = ring.mark()
    asked = ring.ask(LONG)
    ring.until_tokens(asked, 8)
    unplug(gone)
    ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
    assert ring.finished(asked).token_ids == alone(LONG).token_ids
    eventually(lambda: (found := left.lending()) is not None and found.nodes == 2)
    eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
    since = ring.mark()
    plug_in(gone)
    eventually(lambda: ring.state_of(gone) == "ready")
    assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
    assert any("node 1 came back" in text for text in ring.notices(since))


def test_a_slow_link_that_stalls_now_and_then_changes_nothing_but_the_time(
    proxied: Ring, model: Path, alone: Oracle
) -> None:
    ring = proxied.whole(model)
    for seed, machine in enumerate(ring.machines):
        assert machine.proxy is not None
        machine.proxy.delay(0.01)
        machine.proxy.stall(seed)
    since = ring.mark()
    assert ring.answer(40).token_ids == alone(40).token_ids
    assert ring.answer(12, OTHER_PROMPT, beams=3).token_ids == alone(12, OTHER_PROMPT, beams=3).token_ids
    assert not [text for text in ring.notices(since) if "Lost" in text]


def test_links_that_are_torn_down(proxied: Ring, model: Path, alone: Oracle) -> None:
    """The ring forms again over the same wires; the machine is not counted as lost."""
    ring = proxied.whole(model)
    for _ in range(2):
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 8)
        ring.followers[0].proxy.reset()  # type: ignore[union-attr]
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        eventually(lambda: set(ring.states().values()) <= READY)
    assert ring.answered_by_all(8) == alone(8).token_ids


def test_torn_down_while_the_ring_is_formed(proxied_pair: Ring, model: Path, alone: Oracle) -> None:
    ring = proxied_pair.whole(model)
    stop = threading.Event()

    def tear() -> None:
        for _ in range(3):
            stop.wait(0.15)
            ring.followers[0].proxy.reset()  # type: ignore[union-attr]

    tearing = threading.Thread(target=tear)
    tearing.start()
    ring.load(model)
    tearing.join()
    assert ring.answer(12).token_ids == alone(12).token_ids
    eventually(lambda: set(ring.states().values()) <= READY)
    assert ring.answered_by_all(12) == alone(12).token_ids


@pytest.mark.parametrize("mode", ["exact", pytest.param("central", marks=pytest.mark.soak)])
def test_a_slow_node_is_no_lost_node(three: Ring, model: Path, alone: Oracle, mode: RingMode) -> None:
    """One that is stopped for 0.3 s again and again: its ring waits for it."""
    three.whole(model, replace(EXACT, mode=mode))
    slow = three.followers[0]
    over = threading.Event()
    pulses: list[float] = []

    def pulse() -> None:
        while not over.is_set():
            slow.signal(signal.SIGSTOP)
            over.wait(0.3)
            slow.signal(signal.SIGCONT)
            pulses.append(0.3)
            over.wait(0.1)

    pulsing = threading.Thread(target=pulse)
    since = three.mark()
    found = []
    pulsing.start()
    try:
        while len(pulses) < 4:
            found.append(three.answer(20).token_ids)
    finally:
        over.set()
        pulsing.join()
    assert found == [alone(20).token_ids] * len(found)
    assert not [text for text in three.notices(since) if "Lost" in text]


@pytest.mark.soak
def test_a_ring_that_measures_slower_than_this_machine_alone_is_not_kept(model: Path, alone: Oracle) -> None:
    """Two slow machines are faster together, as their links are measured; once they measure together, these are not."""
    asked = replace(EXACT, even_if_slower=False)
    with Ring(1, proxied=True, slow=True) as ring:
        formed = ring.load(model, asked).facts.ring
        assert formed is not None and len(formed.nodes) == 2
        assert formed.tokens_per_s is not None and formed.alone_tokens_per_s is not None
        assert formed.tokens_per_s > formed.alone_tokens_per_s
        since = ring.mark()
        request = ring.begin_load(model, asked)
        ring.engine.wait(
            lambda event: isinstance(event, Progress) and event.stage == "comparing weights", PATIENCE_S, since
        )
        for machine in ring.machines:
            machine.proxy.delay(0.3)  # type: ignore[union-attr]
        loaded = ring.last_of_load(request, since)
        assert isinstance(loaded, Loaded), loaded
        assert loaded.facts.ring is not None
        assert [node.name for node in loaded.facts.ring.nodes] == ["head"]
        said = [text for text in ring.notices(since) if "alone is predicted to be faster" in text]
        assert len(said) == 1 and said[0].startswith("This machine alone")
        assert ring.answer(8).token_ids == alone(8).token_ids


# --- a pulled cable -----------------------------------------------------------------------------------------------


class Cable:
    """A network namespace with one cable to this one. Made by ``ip``, which needs the right to."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.space = f"privatellm-{os.getpid()}"
        self.near, self.far = f"pvl{os.getpid() % 10000}a", f"pvl{os.getpid() % 10000}b"
        self.here, self.there = f"10.211.{number}.1", f"10.211.{number}.2"

    def make(self) -> None:
        for command in (
            f"netns add {self.space}",
            f"link add {self.near} type veth peer name {self.far} netns {self.space}",
            f"addr add {self.here}/30 dev {self.near}",
            f"link set {self.near} up",
            f"-n {self.space} addr add {self.there}/30 dev {self.far}",
            f"-n {self.space} link set {self.far} up",
            f"-n {self.space} link set lo up",
        ):
            run_ip(command)

    def pull(self) -> None:
        run_ip(f"-n {self.space} link set {self.far} down")

    def put_in(self) -> None:
        run_ip(f"-n {self.space} link set {self.far} up")

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            run_ip(f"link del {self.near}")
        with contextlib.suppress(subprocess.CalledProcessError):
            run_ip(f"netns del {self.space}")


def run_ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"no network namespace can be made here: {error}")
    yield made
    made.remove()


@pytest.mark.soak
def test_a_pulled_cable(cable: Cable, model: Path, alone: Oracle) -> None:
    there = hooked(hooks.in_namespace, name=cable.space)
    with Ring(1, arguments={1: there}, hosts=(cable.here, cable.there)) as ring:
        ring.load(model)
        follower = ring.followers[0]
        since = ring.mark()
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 8)
        cable.pull()
        ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
        eventually(lambda: follower.lending() is None)
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        since = ring.mark()
        cable.put_in()
        eventually(lambda: ring.state_of(follower) == "ready")
        assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
        assert any("node 1 came back" in text for text in ring.notices(since))


@pytest.mark.soak
def test_a_cable_that_is_out_while_weights_are_sent(cable: Cable, tmp_path: Path) -> None:
    """Nothing is acknowledged by any system meanwhile, and other connections to the machine fail."""
    large = write_large_model(tmp_path / "large", hidden_size=144, intermediate_size=704)
    there = hooked(hooks.in_namespace, name=cable.space, piece_s=0.03)
    with Ring(1, arguments={1: there}, hosts=(cable.here, cable.there)) as ring:
        request = ring.begin_load(large)
        ring.engine.wait(
            lambda event: isinstance(event, Progress) and event.stage.startswith("sending weights") and event.done > 0,
            PATIENCE_S,
        )
        cable.pull()
        time.sleep(8.0)
        cable.put_in()
        loaded = ring.last_of_load(request)
        assert isinstance(loaded, Loaded), loaded
        assert loaded.facts.ring is not None and len(loaded.facts.ring.nodes) == 2
        stages = [event.stage for event in ring.engine.events if isinstance(event, Progress)]
        assert "measuring the machines" not in stages[stages.index("comparing weights") :]


def test_a_silence_while_weights_are_sent_ends_neither_the_forming_nor_the_transfer(
    proxied_pair: Ring, model: Path, tmp_path: Path
) -> None:
    """It is longer than what counts as a loss in an answer. Nothing begins anew."""
    ring, large = proxied_pair, write_large_model(tmp_path / "large", hidden_size=96, intermediate_size=480)
    ring.whole(model)
    for follower in ring.followers:
        shutil.rmtree(follower.home / "models")
        (follower.home / "models").mkdir()
    for machine in ring.machines:
        # Or all is sent before the silence begins. To connect takes half a second, too, as on a busy machine.
        machine.proxy.delay(0.1)  # type: ignore[union-attr]
    since = ring.mark()
    request = ring.begin_load(large)
    ring.engine.wait(
        lambda event: isinstance(event, Progress) and event.stage.startswith("sending weights") and event.done > 0,
        PATIENCE_S,
        since,
    )
    unplug(*ring.machines)
    time.sleep(4.0)
    assert not [event for event in ring.engine.events[since:] if isinstance(event, (Loaded, Failed))]
    for machine in ring.machines:
        machine.proxy.delay(0.0)  # type: ignore[union-attr]
    plug_in(*ring.machines)
    loaded = ring.last_of_load(request, since)
    assert isinstance(loaded, Loaded), loaded
    assert loaded.facts.ring is not None and len(loaded.facts.ring.nodes) == 2
    assert not [text for text in ring.notices(since) if "left out" in text]
    stages = [event.stage for event in ring.engine.events[since:] if isinstance(event, Progress)]
    begun = stages.index("comparing weights")
    assert not {"measuring the machines", "measuring the links"} & set(stages[begun:])
    assert len(ring.answer(4).token_ids) == 4


# --- two cables ------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_cable_pulled_beside_another_one_is_a_broken_link_and_no_lost_machine(model: Path, alone: Oracle) -> None:
    """Also though the heartbeats went over it."""
    with network(2, lans=2) as cables:
        places = {rank: hooked(hooks.in_namespace, name=space.name) for rank, space in enumerate(cables.spaces)}
        with Ring(1, arguments=places, hosts=("0.0.0.0", "0.0.0.0")) as ring:
            ring.load(model)

            def link_and_path() -> tuple[str, str]:
                state = ring.engine.ask(ListPeers(id=ring.engine.new_id()))
                assert isinstance(state, NetworkState)
                (peer,) = [peer for peer in state.peers if peer.state == "ring"]
                assert peer.link is not None
                return peer.link.address.partition(":")[0], peer.addresses[0].partition(":")[0]

            eventually(lambda: len(set(link_and_path())) == 1)
            address, _ = link_and_path()
            (lan,) = [lan for lan in (0, 1) if cables.spaces[1].address(lan) == address]
            since = ring.mark()
            asked = ring.ask(LONG)
            ring.until_tokens(asked, 8)
            cables.pull(1, lan=lan)
            assert ring.finished(asked).token_ids == alone(LONG).token_ids

            def is_said() -> bool:
                # On a busy machine the answer may have ended before the cable was out.
                assert ring.answer(8).token_ids == alone(8).token_ids
                said = ring.notices(since)
                assert not [text for text in said if "Lost" in text]
                return any(text.startswith("The link to node 1 broke; forming the ring again") for text in said)

            eventually(is_said)
            eventually(lambda: link_and_path() == (cables.spaces[1].address(1 - lan),) * 2)


@pytest.mark.soak
def test_the_fast_way_is_taken_again_when_it_is_back(model: Path, alone: Oracle) -> None:
    """Nothing of the conversation is run again for it."""
    with network(2, lans=2) as cables:
        for space in cables.spaces:
            slow = f"-n {space.name} qdisc add dev lan0 root tbf rate 5mbit burst 4000 latency 400ms"
            if subprocess.run(["tc", *slow.split()], capture_output=True, check=False).returncode:
                pytest.skip("no slow cable can be made here")
        places = {rank: hooked(hooks.in_namespace, name=space.name) for rank, space in enumerate(cables.spaces)}
        with Ring(1, arguments=places, hosts=("0.0.0.0", "0.0.0.0")) as ring:
            found = ring.load(model).facts.ring

            def link() -> LinkFacts:
                state = ring.engine.ask(ListPeers(id=ring.engine.new_id()))
                assert isinstance(state, NetworkState)
                (link,) = [peer.link for peer in state.peers if peer.state == "ring"]
                assert link is not None
                return link

            def epochs(since: int) -> list[str]:
                changes = [event.ring for event in ring.engine.events[since:] if isinstance(event, RingChanged)]
                return [ring.epoch for ring in changes if ring is not None]

            assert found is not None and link().interface == "lan1"
            assert ring.answer(8).token_ids == alone(8).token_ids
            since = ring.mark()
            cables.pull(1, lan=1)
            eventually(lambda: ring.answer(8).token_ids and link().interface == "lan0")
            assert link().gone.startswith("lan1 (")
            assert any("over lan0" in text and "until lan1" in text for text in ring.notices(since))
            before, since = ring.answer(12, OTHER_PROMPT), ring.mark()
            assert before.token_ids == alone(12, OTHER_PROMPT).token_ids
            cables.plug(1, lan=1)
            prompt = [*OTHER_PROMPT, *before.token_ids]

            def moved() -> bool:
                assert ring.answer(1, prompt).prefilled_tokens <= 1
                return link().interface == "lan1"

            eventually(moved)
            assert any("over lan1" in text and "now" in text for text in ring.notices(since))
            assert not [text for text in ring.notices(since) if "forming" in text]
            assert len(set(epochs(since))) <= 1
            assert ring.answer(8, prompt).token_ids == alone(8, prompt).token_ids
