"""What `plan` predicts of packed models beside what is measured: tokens per second, and memory.

    python -m benchmarks.predictions --models mixtral-q4 qwen3-q4 --work FOLDER [--rounds 3]

In each round every model is calibrated (`privatellm bench experts`, of a dense model `bench decode`), planned and
measured, one right after the other, because the rate of memory may change from minute to minute. The calibration is
kept in a folder of the benchmark's own. `from another` is the plan of a model that was not calibrated itself, with the
machine's figures from the model before it in the list.

Memory is that of a process that has touched all weights and read a prompt as long as the context, in chunks as a
conversation has them: its highest resident size, less what the interpreter and libraries have before the model is
loaded. `second process` is what another process over the same file has for itself at its end, interpreter included: its
pages that are in no other process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import OURS, table
from benchmarks.processes import Worker, run_privatellm
from benchmarks.subjects import Subject, add_arguments, check_arguments, say, subject_named, work_folder
from engine.calibration.samples import Spread

DECODE_CONTEXT = 512
"""Tokens before those that are timed, as the plan assumes."""


def is_moe(subject: Subject) -> bool:
    return bool(subject.config.get("num_experts") or subject.config.get("num_local_experts"))


def calibrate(subject: Subject, home: Path, arguments: argparse.Namespace) -> None:
    what = ["experts"] if is_moe(subject) else ["decode", "--rounds", "3"]
    flags = ["--threads", str(arguments.threads), "--even-if-busy"]
    run_privatellm(["bench", what[0], str(subject.folder), *what[1:], *flags], str(home))


def planned(subject: Subject, home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    flags = ["--threads", str(arguments.threads), "--context", str(arguments.context), "--partitioning", "cpu"]
    return run_privatellm(["plan", str(subject.folder), *flags], str(home))


def decoded(subject: Subject, arguments: argparse.Namespace) -> float:
    """Measured tokens per second of one row."""
    with Worker(OURS, subject.folder, arguments.threads, arguments.work / "workers.log") as worker:
        worker.ask("populate", folder=str(subject.folder))
        seconds: list[float] = worker.ask(
            "steps",
            variant=OURS,
            rows=1,
            context=DECODE_CONTEXT,
            count=arguments.tokens,
            vocabulary=subject.config["vocab_size"],
        )
    return 1.0 / statistics.median(seconds)


def memory_of(subject: Subject, arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes: at the ``highest`` moment, ``loaded`` of no file once it is loaded, and of a ``second`` process alone."""
    log = arguments.work / "workers.log"
    request = {"variant": OURS, "vocabulary": subject.config["vocab_size"], "folder": str(subject.folder)}
    with Worker(OURS, subject.folder, arguments.threads, log) as first:
        loaded = first.ask("anonymous")
        highest = first.ask("memory", context=arguments.context, **request)
        with Worker(OURS, subject.folder, arguments.threads, log) as second:
            second.ask("memory", context=arguments.context, **request)
            return {"loaded": loaded, "highest": highest, "second": second.ask("own")}


def ratio(predicted: list[float], measured: list[float]) -> str:
    """Of the rounds' own: ``1.05 (0.98–1.10)``."""
    found = Spread.of([one / other for one, other in zip(predicted, measured, strict=True)])
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def speed_row(title: str, rounds: list[dict[str, float]]) -> list[str]:
    columns = {key: [each[key] for each in rounds] for key in ("predicted", "another", "measured")}
    return [
        title,
        f"{statistics.median(columns['predicted']):.1f}",
        f"{statistics.median(columns['measured']):.1f}",
        ratio(columns["predicted"], columns["measured"]),
        ratio(columns["another"], columns["measured"]),
    ]


def memory_row(title: str, plan: dict[str, Any], found: dict[str, float]) -> list[str]:
    """``plan``: of the device, its parts in bytes."""
    parts = {part: plan[part] for part in ("trunk", "experts", "key_values", "workspace")}
    predicted = sum(parts.values())
    return [
        title,
        f"{predicted / 1e6:.0f}",
        f"{found['highest'] / 1e6:.0f}",
        f"{predicted / found['highest']:.3f}",
        f"{parts['key_values'] / 1e6:.0f}",
        f"{found['loaded'] / 1e6:.0f}",
        f"{found['second'] / 1e6:.0f}",
    ]


SPEED_HEADER = ["model", "predicted, tokens/s", "measured, tokens/s", "predicted / measured", "from another / measured"]
MEMORY_HEADER = [
    "model",
    "predicted, MB",
    "measured, MB",
    "predicted / measured",
    "of it keys and values, MB",
    "own memory once loaded, MB",
    "second process, MB",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["mixtral-q4", "qwen3-q4", "dense-q4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are timed in a round")
    parser.add_argument("--context", type=int, default=4096, help="tokens whose memory is predicted and measured")
    parser.add_argument("--only", choices=["speed", "memory"])
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    arguments.work = work_folder(arguments)
    subjects = {name: subject_named(name, arguments) for name in arguments.models}
    everything: dict[str, Any] = {"speed": {name: [] for name in subjects}, "memory": {}}
    with tempfile.TemporaryDirectory() as folder:
        homes = {name: Path(folder) / name for name in subjects}
        for home in homes.values():
            home.mkdir()
        for number in range(arguments.rounds if arguments.only != "memory" else 0):
            for name, subject in subjects.items():
                before = decoded(subject, arguments)
                calibrate(subject, homes[name], arguments)
                found = {"predicted": planned(subject, homes[name], arguments)["tokens_per_s"]}
                found["measured"] = statistics.mean([before, decoded(subject, arguments)])
                everything["speed"][name].append(found)
                say(f"{subject.title}, round {number + 1}: {found}")
            for place, name in enumerate(subjects):
                other = homes[list(subjects)[place - 1]]
                everything["speed"][name][-1]["another"] = planned(subjects[name], other, arguments)["tokens_per_s"]
        for name, subject in subjects.items() if arguments.only != "speed" else ():
            device = planned(subject, homes[name], arguments)["memory"][0]
            everything["memory"][name] = (device, memory_of(subject, arguments))
    if arguments.only != "memory":
        rows = [speed_row(subjects[name].title, rounds) for name, rounds in everything["speed"].items()]
        print("\n".join(table(SPEED_HEADER, rows)), end="\n\n")
    if arguments.only != "speed":
        rows = [memory_row(subjects[name].title, *found) for name, found in everything["memory"].items()]
        print("\n".join(table(MEMORY_HEADER, rows)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
