"""One model in several forms (bfloat16, packed, FP8), stepped in turns by the native runtime in one process.

    python -m benchmarks.forms FOLDER FOLDER ... [--rows 1 4] [--rounds 25]

Each round has a few steps of every form, in another order each time, and gives one ratio to the first form. The ratios
hold on a busy machine, too, where times do not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measuring import table
from engine.ipc.messages import Load
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, TokenRows

STEPS = 6
"""Steps of a form in a round."""
CONTEXT = 64
"""Tokens in the cache before the steps."""


@dataclass(frozen=True)
class FormFigure:
    """Milliseconds of a step: the median of the rounds' medians, and the fastest. ``speed``: that of the first form's
    time in the same round, median, lowest and highest tenth."""

    name: str
    rows: int
    milliseconds: float
    fastest: float
    speed: tuple[float, float, float]


def compare(models: Sequence[tuple[str, LoadedModel]], rows: int, rounds: int) -> list[FormFigure]:
    """The figures of ``models``, by their names, with ``rows`` rows."""
    generator = np.random.default_rng(rows)
    vocabulary = models[0][1].facts.vocabulary
    prompt = generator.integers(0, vocabulary, CONTEXT).tolist()
    started = [_rows_of(model, prompt, rows) for _, model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(rounds):
        order = range(len(models)) if number % 2 == 0 else reversed(range(len(models)))
        for place in order:
            seconds[place].append(_step_seconds(started[place], generator, vocabulary, rows))
    found = []
    for (name, _), own in zip(models, seconds, strict=True):
        ratios = sorted(first / mine for first, mine in zip(seconds[0], own, strict=True))
        tenth = len(ratios) // 10
        speed = (statistics.median(ratios), ratios[tenth], ratios[-1 - tenth])
        found.append(FormFigure(name, rows, 1e3 * statistics.median(own), 1e3 * min(own), speed))
    return found


def _rows_of(model: LoadedModel, prompt: list[int], rows: int) -> TokenRows:
    started = model.start()
    started.extend(prompt)
    return started.fan_out(rows)


def _step_seconds(rows: TokenRows, generator: np.random.Generator, vocabulary: int, count: int) -> float:
    seconds = []
    for _ in range(STEPS):
        tokens = generator.integers(0, vocabulary, count).tolist()
        start = time.perf_counter()
        rows.step(tokens)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args(values)
    if min(*given.rows, given.rounds) < 1:
        parser.error("--rows and --rounds take numbers from 1 on")
    models = []
    for folder in given.folders:
        load = Load(id=1, model=folder.name, partitioning="cpu", cpu_threads=given.threads)
        models.append((folder.name, runtime_named("native").load(folder, load, lambda *progress: None)))
    figures = [figure for rows in given.rows for figure in compare(models, rows, given.rounds)]
    cells = [
        [each.name, str(each.rows), f"{each.milliseconds:.2f}", f"{each.fastest:.2f}",
         "{:.2f} ({:.2f}–{:.2f})".format(*each.speed)]
        for each in figures
    ]  # fmt: skip
    print("\n".join(table(["form", "rows", "ms", "fastest", "speed relative to the first"], cells)))
    for _, model in models:
        model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
