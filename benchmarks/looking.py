"""What it costs to look: decoding with the timing panel open against decoding with it closed.

    python -m benchmarks.looking

The two are measured in alternating blocks of steps of one process, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.compare import machine
from benchmarks.processes import Worker, WorkerFailed
from benchmarks.subjects import add_arguments, check_arguments, say, subject_named, work_folder
from benchmarks.worker import BLOCK
from engine.calibration.samples import Spread


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["starter"])
    parser.add_argument("--blocks", type=int, default=20, help=f"pairs of blocks of {BLOCK} steps")
    arguments = parser.parse_args(values)
    check_arguments(parser, arguments)
    arguments.work = work_folder(arguments)
    results: dict[str, Any] = {"machine": machine(arguments.threads), "models": []}
    try:
        for name in arguments.models:
            subject = subject_named(name, arguments)
            say(subject.title)
            log = arguments.work / "workers.log"
            with Worker("privatellm", subject.path_for("privatellm"), arguments.threads, log) as worker:
                medians = worker.ask(
                    "looking", variant="privatellm", context=64, count=arguments.blocks,
                    vocabulary=subject.config["vocab_size"],
                )  # fmt: skip
            results["models"].append({"title": subject.title, **medians})
    except WorkerFailed as error:
        say(str(error))
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    print(report(results["models"]))
    return 0


def report(models: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown: milliseconds per decoded token, and the ratio of on to off."""
    lines = ["| | off, ms | on, ms | on / off (range over blocks) |", "| --- | --- | --- | --- |"]
    for model in models:
        off, on = Spread.of(model["off"]), Spread.of(model["on"])
        ratios = [looked / closed for closed, looked in zip(model["off"], model["on"], strict=True)]
        lines.append(
            f"| {model['title']} | {off.median * 1000:.2f} | {on.median * 1000:.2f} | "
            f"{on.median / off.median:.3f} ({min(ratios):.3f}–{max(ratios):.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
