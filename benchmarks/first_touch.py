"""The first answer over a mapped model: nothing of the file in memory, all of it, and after the page warmer.

    python -m benchmarks.first_touch --models mixtral-q4 qwen3-q4 --work FOLDER [--rounds 3]

Each figure is of a process of its own, and the processes run one after the other, because a page that any process maps
stays in memory. ``cold``: the system's cache was told to drop the file. ``warm``: the process before has read it.
``warmed``: the page warmer has also populated the process's mapping, as behind a person's first keystrokes. ``steady``:
the second prompt and the tokens after it in the process that was warm. ``own memory`` is what no file backs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.engines import KINDS
from benchmarks.measuring import table
from benchmarks.processes import Worker
from benchmarks.subjects import Subject, add_arguments, check_arguments, say, subject_named, work_folder
from engine.calibration.samples import Spread

STATES = ("cold", "warm", "warmed", "steady")
ENGINES = ("privatellm", "llama.cpp, in place")
"""llama.cpp with repacking copies the weights, which is not a first touch of a mapping."""


def evict(path: Path) -> None:
    """Ask the system to drop the file's pages, which it does for pages that no process maps."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(subject: Subject, engine: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of ``load``, ``prompt`` and ``tokens`` by state, and of ``populating`` for ``warmed``; bytes of memory
    that no file backs once it is ``loaded`` and once it has ``answered``."""
    found: dict[str, dict[str, float]] = {}
    path = subject.path_for(engine)
    request = {
        "variant": KINDS[engine].variants[0],
        "vocabulary": subject.config["vocab_size"],
        "tokens": arguments.prompt,
        "count": arguments.tokens,
    }
    for state in ("cold", "warm", "warmed"):
        if state == "warmed" and engine != "privatellm":
            continue
        if state == "cold":
            evict(subject.gguf)
        with Worker(engine, path, arguments.threads, arguments.work / "workers.log") as worker:
            assert worker.load_s is not None
            populating = worker.ask("populate", folder=str(path)) if state == "warmed" else 0.0
            loaded = worker.ask("anonymous")
            measured = worker.ask("first", seed=1, **request)
            found[state] = {"load": worker.load_s, "populating": populating, **measured, "loaded": loaded}
            found[state]["answered"] = worker.ask("anonymous")
            if state == "warm":
                found["steady"] = worker.ask("first", seed=2, **request)
    return found


def seconds(measured: dict[str, float]) -> float:
    """From the beginning of loading to the last token."""
    return sum(measured.get(part, 0.0) for part in ("load", "prompt", "tokens"))


def report(title: str, samples: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """Markdown: per engine and state the medians over the rounds in milliseconds, and their range."""
    rows = []
    for engine, rounds in samples.items():
        for state in STATES:
            if state not in rounds[0]:
                continue
            cells = []
            for part in ("load", "populating", "prompt", "tokens"):
                values = [1000 * each[state].get(part, 0.0) for each in rounds]
                spread = Spread.of(values)
                cells.append(f"{spread.median:.0f} ({spread.low:.0f}–{spread.high:.0f})" if any(values) else "–")
            for part in ("loaded", "answered"):
                values = [each[state].get(part, 0.0) for each in rounds]
                cells.append(f"{statistics.median(values) / 1e6:.0f}" if any(values) else "–")
            rows.append([engine, state, *cells])
    header = ["engine", "state", "load, ms", "populating, ms", "prompt, ms", "tokens after it, ms"]
    header += ["own memory, MB", "after the answer, MB"]
    return "\n".join([f"### {title}", "", *table(header, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["mixtral-q4", "qwen3-q4"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that are decoded after it")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    arguments.work = work_folder(arguments)
    everything: dict[str, Any] = {}
    for name in arguments.models:
        subject = subject_named(name, arguments)
        if not subject.packed:
            parser.error(f"--models {name}: only packed models are one file that every engine maps")
        samples: dict[str, list[dict[str, dict[str, float]]]] = {engine: [] for engine in arguments.engines}
        for number in range(arguments.rounds):
            for engine in arguments.engines[:: 1 if number % 2 else -1]:
                say(f"{subject.title}, round {number + 1}, {engine}")
                samples[engine].append(measure(subject, engine, arguments))
        everything[name] = samples
        print(report(subject.title, samples), flush=True)
        if len(arguments.engines) > 1:
            ours, theirs = (samples[engine] for engine in ENGINES)
            for state in ("cold", "warm", "steady"):
                pairs = zip(ours, theirs, strict=True)
                ratios = [seconds(a[state]) / seconds(b[state]) for a, b in pairs]
                print(f"\n{state}: our time is {statistics.median(ratios):.2f} of theirs", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
