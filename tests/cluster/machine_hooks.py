"""What makes an engine's process another machine than it is; see :mod:`hooked_engine`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import engine.cluster.membership.measuring_node as measuring
import engine.cluster.worker.follower_work as work
from engine.cluster.answers import Answers
from engine.cluster.membership.control_messages import DataPiece, Received
from engine.cluster.membership.server import Caller
from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.cluster.worker.lending import ClusterWorker
from engine.planning.calibration import Curve


def with_runtimes(names: Sequence[str]) -> EngineParts:
    """Only these are installed."""
    measuring.runtimes = work.runtimes = lambda: list(names)  # type: ignore[attr-defined]
    return THE_PRODUCT


def on_one_cpu() -> EngineParts:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    return THE_PRODUCT


def saying(version: str | None = None, protocol: int | None = None) -> EngineParts:
    """Another version of the program, or of its protocol."""
    said = {name: value for name, value in (("version", version), ("protocol", protocol)) if value is not None}
    return replace(THE_PRODUCT, greeting=said)


def slow() -> EngineParts:
    """A token takes seconds, as it measures itself."""
    measuring.load_speed = lambda *_: None  # type: ignore[attr-defined,assignment]
    measuring.memory_rate = lambda *_: 1e5  # type: ignore[attr-defined,assignment]
    measuring.expert_curve = lambda *_: Curve((1, 512), (0.05, 20.0))  # type: ignore[assignment]
    return THE_PRODUCT


def another(stopping: str | None = None) -> EngineParts:
    """Not the machine on which the others are. While the file ``slow`` is in the folder ``stopping``, its prompts stay
    at a layer until they are stopped: then it writes the files ``begun`` and ``stopped`` there."""
    measuring.this_machine = measuring.processor = lambda: "another"  # type: ignore[attr-defined,assignment]
    if stopping is not None:
        folder, check = Path(stopping), Answers.check

        def slowly(self: Answers) -> None:
            while (folder / "slow").exists() and self._stop != self._number:
                (folder / "begun").touch()
                time.sleep(0.01)
            if self._stop == self._number:
                (folder / "stopped").touch()
            check(self)

        Answers.check = slowly  # type: ignore[method-assign]
    return THE_PRODUCT


def counting(path: str) -> EngineParts:
    """The sizes of the pieces of weights that come to it are written to the file, a line each."""
    receive = ClusterWorker._receive

    def counted(self: ClusterWorker, caller: Caller, pieces: Iterator[DataPiece]) -> Received:
        def each() -> Iterator[DataPiece]:
            for piece in pieces:
                with Path(path).open("a") as file:
                    print(len(piece.data), file=file)
                yield piece

        return receive(self, caller, each())

    ClusterWorker._receive = counted  # type: ignore[method-assign]
    return THE_PRODUCT
