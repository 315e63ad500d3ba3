"""The three papers, rerun: ``python -m benchmarks.papers``. ``make papers`` writes benchmarks/results/papers.md.

python -m benchmarks.papers --list
python -m benchmarks.papers --only cluster-model
python -m benchmarks.papers --untimed --out benchmarks/results/papers.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.findings import Findings
from benchmarks.papers.page import Done, page
from benchmarks.papers.registry import GROUPS
from engine.moe.kernels.pool import physical_cores
from engine.system.machine import processor

NOT_RUN = Findings(notes=["Not run for this page: it measures time, and wants a quiet machine."])
"""What stands for a group that was left out."""


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[group.name for group in GROUPS], help="only these rows")
    parser.add_argument("--list", action="store_true", help="print the names of the groups of rows")
    parser.add_argument("--untimed", action="store_true", help="leave out what measures time, and say so")
    parser.add_argument("--out", type=Path, help="write the page there instead of printing it")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for group in GROUPS:
            print(f"{group.name:<24} {group.paper}: {group.title}")
        return
    done = []
    for group in GROUPS:
        if arguments.only and group.name not in arguments.only:
            continue
        if arguments.untimed and group.quiet:
            done.append(Done(group, NOT_RUN, 0.0, left_out=True))
            continue
        print(f"{group.name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        findings = group.find()
        done.append(Done(group, findings, time.perf_counter() - began))
        print(f"{group.name}: {done[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    text = page(done, f"{processor()}, {physical_cores()} cores")
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
