"""Rings whose machines get little of the processor: the same answers come, and no machine that lives is called lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.cluster.parts import TimeConstants
from engine.ipc.messages import Progress
from engine.moe.kernels.pool import usable_cpus
from tests.faults import hooks
from tests.faults import test_ring_lost_nodes as lost_nodes
from tests.faults.ring_faults import OTHER_PROMPT, Oracle, Ring
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here"),
]

LONG = lost_nodes.LONG
SHORT_SILENCE_S = 0.4 * TimeConstants().lost_s
"""The last heartbeat before it and the first one after it need the rest."""
LOAD = """
import os, sys, time
parent, seconds, *cores = map(int, sys.argv[1:])
if cores:
    os.sched_setaffinity(0, cores)
end = time.monotonic() + seconds
while os.getppid() == parent and time.monotonic() < end:
    sum(range(10_000))
"""
"""Keeps one core busy until it is killed, its parent is gone, or the time is over."""
MOST_S = 900


@contextlib.contextmanager
def loaded(processes: int, *cores: int) -> Iterator[None]:
    """So many processes compute all the time, on ``cores`` if any are given."""
    arguments = [str(number) for number in (os.getpid(), MOST_S, *cores)]
    loads = [subprocess.Popen([sys.executable, "-I", "-S", "-c", LOAD, *arguments]) for _ in range(processes)]
    try:
        for load in loads:
            eventually(lambda load=load: psutil.Process(load.pid).cpu_times().user > 0)  # type: ignore[misc]
        yield
        assert [load.poll() for load in loads] == [None] * processes, "the cores were not busy to the end"
    finally:
        for load in loads:
            load.kill()
            load.wait()


@pytest.fixture(scope="module", params=["busy cores", "one core", "one busy core"])
def ring_of_three(request: pytest.FixtureRequest) -> Iterator[Ring]:
    core = min(os.sched_getaffinity(0))
    arguments = {} if request.param == "busy cores" else dict.fromkeys(range(3), hooked(hooks.on_one_core, core=core))
    with contextlib.ExitStack() as opened:
        if request.param == "busy cores":
            opened.enter_context(loaded(usable_cpus()))
        elif request.param == "one busy core":
            opened.enter_context(loaded(1, core))
        ring = opened.enter_context(Ring(2, arguments))
        if arguments:
            bound = [psutil.Process(machine.engine.process.pid).cpu_affinity() for machine in ring.machines]
            assert bound == [[core]] * 3
        yield ring


def called_lost(ring: Ring, since: int) -> list[str]:
    """Names of the machines of whose loss was told."""
    return [text.removeprefix("Lost ").split(":")[0] for text in ring.notices(since) if text.startswith("Lost ")]


def test_killed_in_an_answer(three: Ring, model: Path, alone: Oracle) -> None:
    since = three.mark()
    lost_nodes.test_lost_in_an_answer(three, model, alone, signal.SIGKILL)
    assert called_lost(three, since) == [three.followers[0].name]


def test_killed_in_a_prompt(three: Ring, model: Path, alone: Oracle) -> None:
    since = three.mark()
    lost_nodes.test_killed_in_a_prompt(three, model, alone)
    assert called_lost(three, since) == [three.followers[1].name]


def test_silent_for_a_moment(three: Ring, model: Path, alone: Oracle) -> None:
    since = three.mark()
    asked = three.ask(LONG)
    three.until_tokens(asked, 8)
    silent = three.followers[0]
    silent.signal(signal.SIGSTOP)
    time.sleep(SHORT_SILENCE_S)
    silent.signal(signal.SIGCONT)
    assert three.finished(asked).token_ids == alone(LONG).token_ids
    assert three.notices(since) == []
    assert set(three.states().values()) == {"ring"}


def test_formed(three: Ring, model: Path, alone: Oracle) -> None:
    """With all weights sent."""
    for follower in three.followers:
        lost_nodes.empty_disk(follower)
    since = three.mark()
    three.load(model)
    said = [event.stage for event in three.engine.events[since:] if isinstance(event, Progress)]
    assert [stage for stage in said if stage.startswith("sending weights")]
    assert three.answered_by_all(LONG, OTHER_PROMPT) == alone(LONG, OTHER_PROMPT).token_ids
    assert called_lost(three, since) == []
