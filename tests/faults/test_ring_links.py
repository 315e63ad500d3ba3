"""Links of a ring that are slow, stall, are torn down, or carry nothing any more; nodes that are slow.

A proxy delays and holds back what the nodes send each other (:mod:`slow_wire`), and where network namespaces may be
made, an interface is set down, which is what a pulled cable looks like. For packets that are lost see test_ring_lossy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ring_faults import ENTER, OTHER_PROMPT, PATIENCE_S, PROMPT, Machine, Oracle, Ring, eventually

from engine.ipc.messages import Failed, Notice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = 400


def unplug(*machines: Machine) -> None:
    for machine in machines:
        assert machine.proxy is not None
        machine.proxy.unplug()


def plug_in(*machines: Machine) -> None:
    for machine in machines:
        assert machine.proxy is not None
        machine.proxy.plug_in()


def test_all_goes_by_way_of_the_proxies(model: Path, alone: Oracle) -> None:
    """Or the other tests would show nothing."""
    with Ring(2, proxied=True) as ring:
        ring.load(model)
        before = [machine.proxy.carried for machine in ring.followers]  # type: ignore[union-attr]
        assert ring.answer(100).token_ids == alone(100).token_ids
        after = [machine.proxy.carried for machine in ring.followers]  # type: ignore[union-attr]
        for was, now in zip(before, after, strict=True):
            assert now - was > 100 * 3 * 48 * 4


def test_unplugged_in_an_answer_and_plugged_in_again(model: Path, alone: Oracle) -> None:
    with Ring(1, proxied=True) as ring:
        ring.load(model)
        follower = ring.followers[0]
        since = ring.mark()
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 20)
        unplug(ring.head, follower)
        ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
        eventually(lambda: follower.lending() is None)
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        since = ring.mark()
        plug_in(ring.head, follower)
        eventually(lambda: ring.state_of(follower) == "ready")
        assert ring.answer(LONG, OTHER_PROMPT).token_ids == alone(LONG, OTHER_PROMPT).token_ids
        assert any("node 1 came back" in text for text in ring.notices(since))


def test_a_node_that_calls_and_cannot_be_called(model: Path, alone: Oracle) -> None:
    """What the others send it is lost on its way; its own heartbeats arrive. The others go on without it."""
    with Ring(2, proxied=True) as ring:
        ring.load(model)
        gone, left = ring.followers
        since = ring.mark()
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 20)
        unplug(gone)
        ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        eventually(lambda: (found := left.lending()) is not None and found.nodes == 2)
        eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
        since = ring.mark()
        plug_in(gone)
        eventually(lambda: ring.state_of(gone) == "ready")
        assert ring.answer(40, OTHER_PROMPT).token_ids == alone(40, OTHER_PROMPT).token_ids
        assert any("node 1 came back" in text for text in ring.notices(since))


def test_a_slow_link_changes_nothing_but_the_time(model: Path, alone: Oracle) -> None:
    with Ring(1, proxied=True) as ring:
        ring.load(model)
        for machine in ring.machines:
            machine.proxy.delay(0.02)  # type: ignore[union-attr]
        since = ring.mark()
        assert ring.answer(40).token_ids == alone(40).token_ids
        assert ring.answer(24, OTHER_PROMPT, beams=3).token_ids == alone(24, OTHER_PROMPT, beams=3).token_ids
        assert not [text for text in ring.notices(since) if "Lost" in text]


def test_a_link_that_stalls_now_and_then_is_no_loss(model: Path, alone: Oracle) -> None:
    with Ring(2, proxied=True) as ring:
        ring.load(model)
        for seed, machine in enumerate(ring.machines):
            machine.proxy.stall(seed)  # type: ignore[union-attr]
        since = ring.mark()
        for prompt in (PROMPT, OTHER_PROMPT):
            assert ring.answer(120, prompt).token_ids == alone(120, prompt).token_ids
        assert not [text for text in ring.notices(since) if "Lost" in text]


def test_links_that_are_torn_down(model: Path, alone: Oracle) -> None:
    """The ring forms again over the same wires; the machine is not counted as lost."""
    with Ring(2, proxied=True) as ring:
        ring.load(model)
        for _ in range(3):
            asked = ring.ask(LONG)
            ring.until_tokens(asked, 20)
            ring.followers[0].proxy.reset()  # type: ignore[union-attr]
            assert ring.finished(asked).token_ids == alone(LONG).token_ids
            eventually(lambda: set(ring.states().values()) <= {"ready", "ring"})
        assert ring.answered_by_all(8) == alone(8).token_ids


def test_torn_down_while_the_ring_is_formed(model: Path, alone: Oracle) -> None:
    with Ring(1, proxied=True) as ring:
        stop = threading.Event()

        def tear() -> None:
            for _ in range(3):
                stop.wait(0.15)
                ring.followers[0].proxy.reset()  # type: ignore[union-attr]

        tearing = threading.Thread(target=tear)
        tearing.start()
        ring.load(model)
        tearing.join()
        assert ring.answer(24).token_ids == alone(24).token_ids
        eventually(lambda: set(ring.states().values()) <= {"ready", "ring"})
        assert ring.answered_by_all(8) == alone(8).token_ids
        assert ring.answer(24).token_ids == alone(24).token_ids


@pytest.mark.parametrize("mode", ["exact", "central"])
def test_a_slow_node_is_no_lost_node(model: Path, alone: Oracle, mode: str) -> None:
    """One that is stopped for 0.3 s again and again: its ring waits for it."""
    from msgspec.structs import replace
    from ring_faults import EXACT

    with Ring(2) as ring:
        ring.load(model, replace(EXACT, mode=mode))  # type: ignore[arg-type]
        slow = ring.followers[0]
        stop = threading.Event()

        def pulse() -> None:
            while not stop.is_set():
                slow.signal(signal.SIGSTOP)
                stop.wait(0.3)
                slow.signal(signal.SIGCONT)
                stop.wait(0.3)

        pulsing = threading.Thread(target=pulse)
        since = ring.mark()
        pulsing.start()
        try:
            found = [ring.answer(300, prompt).token_ids for prompt in (PROMPT, OTHER_PROMPT)]
        finally:
            stop.set()
            pulsing.join()
        assert found == [alone(300, prompt).token_ids for prompt in (PROMPT, OTHER_PROMPT)]
        assert not [text for text in ring.notices(since) if "Lost" in text]


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


def test_a_pulled_cable(cable: Cable, model: Path, alone: Oracle) -> None:
    with Ring(1, codes={1: ENTER.format(space=cable.space)}, hosts=(cable.here, cable.there)) as ring:
        ring.load(model)
        follower = ring.followers[0]
        since = ring.mark()
        asked = ring.ask(LONG)
        ring.until_tokens(asked, 20)
        cable.pull()
        ring.engine.wait(lambda event: isinstance(event, Notice) and "Lost node 1" in event.text, PATIENCE_S, since)
        eventually(lambda: follower.lending() is None)
        assert ring.finished(asked).token_ids == alone(LONG).token_ids
        since = ring.mark()
        cable.put_in()
        eventually(lambda: ring.state_of(follower) == "ready")
        found = ring.last(ring.ask(LONG, OTHER_PROMPT))
        assert not isinstance(found, Failed)
        assert found.token_ids == alone(LONG, OTHER_PROMPT).token_ids  # type: ignore[attr-defined]
        assert any("node 1 came back" in text for text in ring.notices(since))
