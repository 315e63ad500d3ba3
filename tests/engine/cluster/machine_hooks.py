"""What makes an engine's process another machine than it is; see :mod:`hooked_engine`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.cluster.commands import Answers
from engine.cluster.membership.measuring_node import libraries
from engine.cluster.parts import Effort, EngineParts, Moment
from engine.planning.calibration import Curve

QUICK = EngineParts(effort=Effort(link_s=0.01, exchange_rounds=5, rehearse=False))
"""Little is measured while a ring is formed: tests of what is said and answered ask for no speed."""


def quick() -> EngineParts:
    return QUICK


def with_runtimes(names: Sequence[str]) -> EngineParts:
    """Only these are installed."""
    versions = {name: version for name, version in libraries().items() if name in names}
    return replace(QUICK, figures={"runtimes": list(names), "libraries": versions})


def on_one_cpu() -> EngineParts:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    return QUICK


def saying(version: str | None = None, protocol: int | None = None) -> EngineParts:
    """Another version of the program, or of its protocol."""
    said = {name: value for name, value in (("version", version), ("protocol", protocol)) if value is not None}
    return replace(QUICK, greeting=said)


def slow() -> EngineParts:
    """A token takes seconds, as it measures itself."""
    figures = {"memory_read": 1e5, "expert": Curve((1, 512), (0.05, 20.0)), "layer_overhead_s": {}}
    return replace(QUICK, figures=figures)


def another(stopping: str | None = None) -> EngineParts:
    """Not the machine on which the others are. While the file ``slow`` is in the folder ``stopping``, its prompts stay
    at a layer until they are stopped: then it writes the files ``begun`` and ``stopped`` there."""
    parts = replace(QUICK, figures=dict.fromkeys(("machine", "processor", "disk"), "another"))
    if stopping is None:
        return parts
    folder = Path(stopping)

    def observe(moment: Moment, *subjects: object) -> None:
        if moment != "checked":
            return
        answers, ended = subjects
        assert isinstance(answers, Answers) and isinstance(ended, threading.Event)
        while (folder / "slow").exists() and not answers.stopped and not ended.is_set():
            (folder / "begun").touch()
            time.sleep(0.01)
        if answers.stopped:
            (folder / "stopped").touch()

    return replace(parts, observe=observe)


def counting(path: str) -> EngineParts:
    """The sizes of the pieces of weights that come to it are written to the file, a line each."""

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "piece":
            with Path(path).open("a") as file:
                print(*subjects, file=file)

    return replace(QUICK, observe=observe)
