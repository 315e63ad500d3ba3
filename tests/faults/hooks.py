"""Parts of engines that let a fault happen; see :mod:`hooked_engine`.

Each function runs in the engine's process, before the engine.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from engine.cluster import commands
from engine.cluster.parts import Effort, EngineParts, Moment, TimeConstants
from engine.cluster.worker.follower import Follower
from engine.errors import ModelError
from engine.planning.calibration import Curve
from tests.support.network_space import enter

STEP_S = 0.01
"""Least seconds that a follower takes for a token, so that an answer of few tokens can be disturbed."""
BYTES_A_SECOND = 10e6
"""At which a follower takes weights, so that sending a few megabytes can be disturbed."""
AFTER = 15
"""Commands, or layers of experts, that a node which falls silent runs before."""


def unhurried(moment: Moment, *subjects: object) -> None:
    """The observer of a follower that takes its time for every token, and for weights."""
    match subjects:
        case [int() as nbytes] if moment == "piece":
            time.sleep(nbytes / BYTES_A_SECOND)
        case [Follower(), commands.Step() | commands.Choose(), _]:
            time.sleep(STEP_S)


QUICK = EngineParts(
    TimeConstants(refused_s=0.3, retry_s=0.2, links_again_s=0.5),
    Effort(link_s=0.01, exchange_rounds=5, rehearse=False),
    observe=unhurried,
)
"""Little is measured while a ring is formed, as the tests of faults ask for no speed. A machine whose port is closed is
soon lost, and soon looked for again. One that is silent may only be busy: that takes as long as it does for people."""


def quick() -> EngineParts:
    return QUICK


def in_namespace(name: str, piece_s: float = 0.0) -> EngineParts:
    """In the network namespace ``name``. A piece of weights takes ``piece_s`` seconds at least."""
    enter(name)

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "piece":
            time.sleep(piece_s)
        unhurried(moment, *subjects)

    return replace(QUICK, observe=observe)


def on_one_core(core: int) -> EngineParts:
    """Its threads share the hardware thread ``core``."""
    os.sched_setaffinity(0, {core})
    return QUICK


def small_files(limit: int) -> EngineParts:
    """It may write no file of more than ``limit`` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return QUICK


def behind_proxy(port: int, slow_as: str = "") -> EngineParts:
    """Others are told to come by way of a proxy. ``slow_as``: the node says that it is the machine of this name, on
    which an expert takes a tenth of a second."""
    found = replace(QUICK, greeting={"port": port, "listening": [f"127.0.0.1:{port}"]})
    if not slow_as:
        return found
    figures = dict.fromkeys(("machine", "processor", "disk"), slow_as)
    curve = Curve((1, 512), (0.1, 20.0))
    return replace(found, figures={**figures, "memory_read": 1e6, "expert": curve, "layer_overhead_s": {}})


def impatient() -> EngineParts:
    """Waits for the contributions of others for 1.5 s instead of half a minute."""
    return replace(QUICK, times=replace(QUICK.times, patience=0.05))


def stale_cache(length: int) -> EngineParts:
    """Once, as its rows are ``length`` tokens long, its keys and values count as those of other tokens than the
    head's."""
    once: list[bool] = []

    def observe(moment: Moment, *subjects: object) -> None:
        match subjects:
            case [Follower() as follower, (commands.Step() | commands.Choose()) as command, _] if not once:
                rows, prefixes = follower._rows[command.rows]
                if rows.length == length:
                    once.append(True)
                    follower._rows[command.rows] = (rows, prefixes.truncated(length - 2).extended([5, 6]))

    return replace(QUICK, observe=observe)


def falls_silent() -> EngineParts:
    """After some commands, or layers, of each epoch it answers heartbeats and contributes nothing until the epoch ends.
    Then the file ``silent`` is in its home."""
    ran: dict[int, int] = {}

    def observe(moment: Moment, *subjects: object) -> None:
        if moment in ("command", "layer"):
            ended = subjects[-1]
            assert isinstance(ended, threading.Event)
            ran[id(ended)] = ran.get(id(ended), 0) + 1
            if ran[id(ended)] > AFTER:
                Path(os.environ["PRIVATELLM_HOME"], "silent").touch()
                ended.wait()

    return replace(QUICK, observe=observe)


def writes_slowly(seconds: float) -> EngineParts:
    """Its disk takes its time after weights came, or stopped coming."""

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "received":
            time.sleep(seconds)

    return replace(QUICK, observe=observe)


def refuses(path: str) -> EngineParts:
    """It refuses weights as often as the first number in the file says; the second one counts how often it was
    offered some."""
    asked = Path(path)

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "offered":
            left, count = map(int, asked.read_text().split())
            # Replaced as a whole, as the test reads it meanwhile.
            changed = asked.with_suffix(".new")
            changed.write_text(f"{left - 1} {count + 1}")
            changed.replace(asked)
            if left > 0:
                raise ModelError("It is still busy.", kind="disk")

    return replace(QUICK, observe=observe)


def dies_before_a_group(number: int) -> EngineParts:
    """Signal ``number`` comes when it has told the others where it listens, before they connect."""

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "addresses told":
            os.kill(os.getpid(), number)

    return replace(QUICK, observe=observe)
