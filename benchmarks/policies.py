"""Every system the papers compare, as a policy over the same routes: simulated, with measured or assumed costs.

    python -m benchmarks.policies --markdown
    python -m benchmarks.policies --calibration FILE --slots 64 --json result.json

The setting is Mixtral-8x7B in 16 bits on the two machines of the Twiddler paper. What CPU and GPU take for one expert
is assumed (``ENVIRONMENTS``): rates of PCIe as the paper's table 1 has them, and kernels that read a weight once for
all tokens, as ours do. The routes are made up with the popularity of the paper's appendix C. What the papers themselves
claim, with their baselines as they were, is in benchmarks.papers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.papers.replay import Step, replay
from benchmarks.routes import Floats, mixtral_popularity, popular_order, steps
from engine.ipc.messages import ExpertPolicy
from engine.planning.calibration import Calibration, ExpertShape, Processor, estimated
from engine.planning.memory import ModelSizes
from engine.planning.policy import Policy, policy_named

MIXTRAL_SHAPE = ExpertShape(hidden=4096, ffn=14336, dtype="BF16", expert_bytes=3 * 4096 * 14336 * 2)
MIXTRAL = ModelSizes(
    layers=32,
    moe_layers=32,
    experts=8,
    experts_per_token=2,
    hidden=4096,
    trunk_bytes=3_210_000_000,
    expert_bytes=256 * MIXTRAL_SHAPE.expert_bytes,
    key_value_bytes_per_token=2 * 32 * 1024 * 2,
)
REPEAT = 0.15
"""How often a layer's experts are those of the token before, beyond chance: about what the Mixtral paper saw."""


@dataclass(frozen=True)
class Environment:
    """A machine of the paper. ``slots``: experts on the GPU, of 256, for each policy."""

    name: str
    pcie_rate: float
    cpu: Processor
    gpu: Processor
    slots: dict[ExpertPolicy, int]


ENVIRONMENTS = (
    Environment(
        "environment 1 (Quadro RTX 6000, PCIe 32 GB/s, Xeon 6126)",
        32e9,
        cpu=Processor(memory_rate=50e9, operations_rate=1.5e12),
        gpu=Processor(memory_rate=0.8 * 672e9, operations_rate=50e12, fixed_s=30e-6),
        slots={"balanced": 56, "twiddler": 56, "monde": 0, "layers": 8 * 8, "lru-offload": 32 * 1, "stream": 0},
    ),
    Environment(
        "environment 2 (RTX 6000 Ada, PCIe 64 GB/s, Xeon 8480+)",
        64e9,
        cpu=Processor(memory_rate=120e9, operations_rate=5e12),
        gpu=Processor(memory_rate=0.8 * 960e9, operations_rate=150e12, fixed_s=30e-6),
        slots={"balanced": 125, "twiddler": 125, "monde": 0, "layers": 16 * 8, "lru-offload": 32 * 3, "stream": 0},
    ),
)
POLICIES: tuple[ExpertPolicy, ...] = ("balanced", "twiddler", "monde", "layers", "lru-offload", "stream")


@dataclass(frozen=True)
class Scenario:
    """``rows`` of each forward pass; ``variants`` of it are averaged as the paper averages."""

    name: str
    variants: tuple[tuple[str, tuple[int, ...]], ...]


SCENARIOS = (
    Scenario(
        "one answer",
        tuple((f"{prompt} in, {new} out", (prompt, *[1] * new)) for prompt, new in ((32, 64), (128, 128), (256, 256))),
    ),
    Scenario("long prompt", tuple((f"{prompt} in", (prompt,)) for prompt in (512, 1024, 2048, 4096))),
    Scenario("beams", tuple((f"{width} beams, 64 out", (32, *[width] * 64)) for width in (4, 8, 12))),
)


@dataclass(frozen=True)
class Result:
    """``ratio`` is the time of a policy over that of ``balanced``; over ``twiddler`` in ``to_twiddler``."""

    environment: str
    scenario: str
    variant: str
    policy: ExpertPolicy
    seconds: float
    hit_rate: float
    gigabytes_copied: float
    to_balanced: float = 0.0
    to_twiddler: float = 0.0


def trunk_seconds(rows: Sequence[int], gpu: Processor) -> float:
    """Everything but the experts, on the GPU."""
    operations = 2.0 * MIXTRAL.trunk_bytes / MIXTRAL.width
    return sum(max(MIXTRAL.trunk_bytes / gpu.memory_rate, operations * n / gpu.operations_rate) for n in rows)


def compare(
    name: str, calibration: Calibration, gpu: Processor, slots: dict[ExpertPolicy, int], seed: int
) -> list[Result]:
    """All policies over all scenarios on one machine, on the same routes."""
    generator = np.random.default_rng(seed)
    popularity = mixtral_popularity(generator)
    found = []
    for scenario in SCENARIOS:
        for variant, rows in scenario.variants:
            trace = steps(generator, popularity, rows, MIXTRAL.experts_per_token, REPEAT)
            row = [
                _one(name, scenario.name, variant, policy, trace, calibration, slots[policy], popularity)
                for policy in POLICIES
            ]
            base = trunk_seconds(rows, gpu)
            row = [replace(result, seconds=result.seconds + base) for result in row]
            times = {result.policy: result.seconds for result in row}
            found += [
                replace(
                    result,
                    to_balanced=result.seconds / times["balanced"],
                    to_twiddler=result.seconds / times["twiddler"],
                )
                for result in row
            ]
    return found


def _one(
    environment: str,
    scenario: str,
    variant: str,
    name: ExpertPolicy,
    trace: Sequence[Step],
    calibration: Calibration,
    slots: int,
    popularity: Floats,
) -> Result:
    policy: Policy = policy_named(name, MIXTRAL.experts)
    done = replay(trace, policy, calibration, slots, MIXTRAL.experts, popular_order(popularity))
    return Result(environment, scenario, variant, name, done.total_s, done.hit_rate, round(done.weight_bytes / 1e9, 1))


def summary(results: Sequence[Result]) -> list[list[str]]:
    """Per machine and scenario: each policy's time relative to balanced."""
    rows = []
    keys = list(dict.fromkeys((r.environment, r.scenario) for r in results))
    for environment, scenario in keys:
        here = [r for r in results if (r.environment, r.scenario) == (environment, scenario)]
        cells = [environment.split(" (", maxsplit=1)[0], scenario]
        for policy in POLICIES:
            cells.append(f"{statistics.mean(r.to_balanced for r in here if r.policy == policy):.2f}")
        rows.append(cells)
    return rows


COLUMNS = ["machine", "scenario", *POLICIES]


def table(rows: Sequence[Sequence[str]], columns: Sequence[str], markdown: bool) -> str:
    """Aligned, or as Markdown."""
    if markdown:
        lines = [columns, ["---"] * len(columns), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[place]) for line in [columns, *rows]) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [columns, *rows]
    )


def run(arguments: argparse.Namespace) -> list[Result]:
    """All machines asked for."""
    if arguments.calibration is not None:
        calibration = msgspec.json.decode(arguments.calibration.read_bytes(), type=Calibration)
        if calibration.gpu is None:
            raise SystemExit(f"{arguments.calibration} has no GPU: nothing can be shared on that machine.")
        one = calibration.gpu.at(1)
        largest = calibration.gpu.tokens[-1]
        gpu = Processor(
            calibration.shape.expert_bytes / one,
            calibration.shape.expert_bytes * largest / calibration.gpu.at(largest),
        )
        slots: dict[ExpertPolicy, int] = dict.fromkeys(POLICIES, arguments.slots)
        return compare(calibration.machine, calibration, gpu, slots, arguments.seed)
    found = []
    for environment in ENVIRONMENTS:
        costs = estimated(
            MIXTRAL_SHAPE,
            cpu=environment.cpu,
            gpu=environment.gpu,
            pcie_rate=environment.pcie_rate,
            machine=environment.name,
        )
        found += compare(environment.name, costs, environment.gpu, environment.slots, arguments.seed)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, help="a file of `privatellm bench experts`, instead of the paper's")
    parser.add_argument("--slots", type=int, default=64, help="experts on the GPU, of 256, with --calibration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args(argv)
    results = run(arguments)
    print(
        "Simulated, with assumed rates of CPU and GPU. Times relative to `balanced`, mean of the scenario's variants.\n"
    )
    print(table(summary(results), COLUMNS, arguments.markdown))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
