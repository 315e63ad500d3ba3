"""Run the attacks and print a table.

    python -m benchmarks.attacks [--part 1.0] [--seed 1] [--only WORDS] [--json]

``--part``: share of each attack's inputs; 1.0 takes an hour or two, 0.01 a minute. The exit status is 1 if anything
crashed, hung, or failed in another way than the one meant for refusals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.attacks import bombs, connections, contributions, exports, files, kernels, machines, pictures, screen
from benchmarks.attacks.campaign import Attack, Tally, run

ATTACKS: list[Attack] = [
    *bombs.ATTACKS,
    *connections.ATTACKS,
    *contributions.ATTACKS,
    *exports.ATTACKS,
    *files.ATTACKS,
    *kernels.ATTACKS,
    *machines.ATTACKS,
    *pictures.ATTACKS,
    *screen.ATTACKS,
]


def as_row(tally: Tally) -> str:
    unexpected = sum(tally.unexpected.values())
    peak = f"{tally.peak_bytes / 1e6:.0f} MB"
    cells = (tally.name, tally.inputs, tally.refused, tally.crashes, tally.hangs, unexpected, peak)
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(values)
    tallies = []
    print("| what | inputs | refused in words | crashes | hangs | unexpected | growth of memory |", file=sys.stderr)
    for attack in ATTACKS:
        if arguments.only not in attack.name:
            continue
        tallies.append(run(attack, arguments.seed, max(1, round(attack.inputs * arguments.part))))
        print(as_row(tallies[-1]), file=sys.stderr)
        for line in tallies[-1].found:
            print(f"    {line}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(tally) for tally in tallies]))
    else:
        print("| what | inputs | refused in words | crashes | hangs | unexpected | growth of memory |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(map(as_row, tallies)))
    return 0 if all(tally.clean for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
