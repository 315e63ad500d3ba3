"""Heartbeats: which silence is a machine's own, and which versions go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.cluster.membership import control_messages as messages
from engine.cluster.membership.control_messages import (
    Greeting,
    NodeLoad,
)
from engine.cluster.membership.heartbeat import BUSY_S, STALLED_S, PeerWatch, silence_allowed, version_problem
from engine.cluster.parts import TimeConstants

pytestmark = pytest.mark.usefixtures("no_keyring")


def test_a_heartbeat_that_arrives_late_does_not_displace_a_newer_one() -> None:
    """A heartbeat and the answer to another one cross: the older of the two may arrive last."""
    watch = watch_of(lambda: 0.0)
    older, newer = (NodeLoad(process="x", number=each, memory_total=1, memory_free=1) for each in (7, 8))
    watch.record_contact(newer)
    watch.record_contact(older)
    assert watch.view().load == newer
    another = replace(older, process="y", number=1)
    watch.record_contact(another)
    assert watch.view().load == another


def test_silence_while_this_process_was_stalled_is_not_the_others() -> None:
    """After a suspended machine wakes up, what the others sent meanwhile still waits to be read."""
    now = [100.0]
    watch = watch_of(lambda: now[0])
    watch.record_contact()
    now[0] += 600.0
    assert watch.view().alive
    alive = []
    for _ in range(50):
        now[0] += 0.1
        alive.append(watch.view().alive)
    silent = alive.index(False) / 10 + STALLED_S
    assert silent == pytest.approx(TimeConstants().lost_s, abs=0.2)
    assert not any(alive[alive.index(False) :])
    now[0] += 600.0
    watch.record_contact()
    assert watch.view().alive, "it called after this process woke up"
    assert not silent_for(watch, now, TimeConstants().lost_s + 2 * STALLED_S), "it died then"


def silent_for(watch: PeerWatch, now: list[float], seconds: float) -> bool:
    """Whether the machine still counts as alive after so many seconds, looked at ten times a second."""
    for _ in range(round(10 * seconds)):
        now[0] += 0.1
        watch.view()
    return watch.view().alive


def watch_of(clock: Callable[[], float]) -> PeerWatch:
    unused: Any = None
    return PeerWatch("a" * 64, "one", unused, unused, unused, lambda: None, clock=clock, times=TimeConstants())


def test_version_problem_names_the_protocol_too() -> None:
    ours = Greeting(
        protocol=messages.CONTROL_PROTOCOL,
        version="1",
        node_id="a",
        instance="i",
        process="p",
        name="us",
        port=1,
    )
    theirs = msgspec.structs.replace(ours, protocol=99, name="them")
    assert version_problem(ours, ours) == ""
    said = version_problem(theirs, ours)
    mine = messages.CONTROL_PROTOCOL
    assert said == f"It speaks ring protocol 99 and this machine {mine}; install the same version on both."
    odd = version_problem(msgspec.structs.replace(ours, version="2\x1b[31m"), ours)
    assert odd.startswith("It has privatellm 2") and "\x1b" not in odd


def test_silence_allowed() -> None:
    times = TimeConstants()
    assert silence_allowed(refused=False, tolerant=False) == times.lost_s <= 2.5
    assert silence_allowed(refused=True, tolerant=False) == times.refused_s < times.lost_s
    assert silence_allowed(refused=True, tolerant=True) == times.refused_s
    assert silence_allowed(refused=False, tolerant=True) == BUSY_S
