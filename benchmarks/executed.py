"""Every system the papers compare, executed: the hybrid executor runs real experts on the stand-in device.

    python -m benchmarks.executed --markdown

Routes, machines and their assumed costs are those of benchmarks.policies. Here nothing is simulated but time: the same
executor that drives a GPU decides, copies, evicts and computes, with experts of Mixtral's number and a small size, and
its own counters tell what was moved and who was at work when. The seconds are those of the stand-in's virtual clock,
which runs as the machine's costs say; the bytes are those of Mixtral's slabs. A policy whose sums differ from the
others' by one bit ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.papers.replay import replay
from benchmarks.policies import ENVIRONMENTS, MIXTRAL, MIXTRAL_SHAPE, POLICIES, REPEAT, Environment, table
from benchmarks.routes import Floats, counted, mixtral_popularity, popular_order, routed_steps
from benchmarks.stand_in_device import CalibratedSpeeds, StandInDevice, TimedCpu
from engine.ipc.messages import ExpertMovement, ExpertPolicy
from engine.models.formats.byte_map import ExpertPlace, FileSpan, MatrixPlace
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.moe.timing import Recorder
from engine.planning.calibration import Calibration, estimated
from engine.planning.policy import policy_named
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend

HIDDEN, FFN = 32, 48
"""Of the experts that are run. What they cost is not theirs but the machine's."""

SCENARIOS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("one answer, 32 in, 64 out", (32, *[1] * 64)),
    ("long prompt, 512 in", (512,)),
    ("8 beams, 32 in, 32 out", (32, *[8] * 32)),
)

Routed = list[list[npt.NDArray[np.intp]]]


class SmallExperts:
    """Random experts in this process's memory. See :class:`engine.models.formats.model_files.Experts`."""

    dtype = "F32"

    def __init__(self, layers: int, count: int, seed: int) -> None:
        self.layers = tuple(range(layers))
        self.count = count
        numbers = np.random.default_rng(seed).normal(0.0, 0.2, (layers, count, 3, HIDDEN * FFN))
        self._words = numbers.astype(np.float32).view(np.uint32)
        self.nbytes = int(self._words.nbytes)

    def held(self, layer: int) -> range:
        return range(self.count)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        gate, up, down = self._words[layer, expert]
        shapes = ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
        return ExpertWeights(
            *(StoredTensor(self.dtype, part.reshape(s)) for part, s in zip((gate, up, down), shapes, strict=True))
        )

    def place(self, layer: int, expert: int) -> ExpertPlace:
        memory = InMemory(Path("memory"), self.nbytes, self._words.ctypes.data)
        each = 3 * HIDDEN * FFN * 4
        start = (layer * self.count + expert) * each
        shapes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
        matrices = {
            name: MatrixPlace(self.dtype, 0, at * HIDDEN * FFN * 4, HIDDEN * FFN * 4, shape, (shape[1], 1))
            for at, (name, shape) in enumerate(shapes.items())
        }
        return ExpertPlace((FileSpan(memory, start, start + each),), matrices)

    def check_unchanged(self, layer: int | None = None) -> None:
        """Nobody else can reach them."""


@dataclass(frozen=True)
class InMemory:
    """Memory of this process in the place of a mapped file. See
    :class:`engine.models.formats.model_files.FileMapping`."""

    path: Path
    size: int
    address: int

    def check_unchanged(self) -> None:
        """Nobody else can reach it."""


@dataclass(frozen=True)
class Executed:
    """A policy in a scenario. Seconds are virtual, of the MoE layers alone; shares are of them; bytes are Mixtral's."""

    environment: str
    scenario: str
    policy: ExpertPolicy
    tokens: int
    seconds: float
    predicted_s: float
    """The same from benchmarks.policies' replay: later of both sides, nothing for what travels between layers."""
    hit_rate: float
    predicted_hit_rate: float
    bytes_per_token: float
    """Of weights."""
    cpu_share: float
    gpu_share: float
    both_share: float
    learned: int


def execute(
    name: ExpertPolicy,
    calibration: Calibration,
    slots: int,
    order: Sequence[tuple[int, int]],
    routed: Routed,
    seed: int,
) -> tuple[ExpertMovement, torch.Tensor]:
    """Run the layers of ``routed`` one after the other; what was moved, and all that came out."""
    experts = SmallExperts(MIXTRAL.moe_layers, MIXTRAL.experts, seed)
    recorder = Recorder(len(experts.layers), experts.layers, experts.count)
    silu = Activation("silu")
    gates = dict.fromkeys(experts.layers, FamilyGate(silu, silu))
    cpu, _ = make_cpu_backend(experts, gates, torch.float32, cpu_threads=1)
    device = StandInDevice(speeds=CalibratedSpeeds.of(calibration))
    host = HostExperts(experts)
    policy = policy_named(name, experts.count)
    timed = TimedCpu(cpu, device)
    executor = HybridBackend(
        host, device, timed, gates, policy, calibration, torch.float32, recorder, MIXTRAL.experts_per_token
    )
    executor.open_cache(slots * host.slot_bytes, order, reserve=0)
    recorder.reset()
    sums = run_layers(executor, routed, HIDDEN, torch.float32, seed)
    movement = recorder.frame(0).movement
    assert movement is not None
    copied = movement.weight_bytes / host.slot_bytes
    executor.close()
    return _of_mixtral(movement, copied), sums


def run_layers(
    executor: HybridBackend,
    routed: Routed,
    hidden_size: int,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Run the layers of ``routed`` one after the other on random activations; all that came out, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for step in routed:
        for layer, routes in zip(executor.experts.layers, step, strict=True):
            hidden = torch.randn(len(routes), hidden_size, generator=generator).to(device, dtype)
            weights = torch.full(routes.shape, 1.0 / routes.shape[1], device=device)
            chosen = torch.from_numpy(routes).to(device)
            outputs.append(executor.run(layer, hidden, chosen, weights))
    executor.settle()
    return torch.cat(outputs).cpu()


def _of_mixtral(movement: ExpertMovement, copied: float) -> ExpertMovement:
    fields = {name: getattr(movement, name) for name in movement.__struct_fields__}
    return ExpertMovement(**fields | {"weight_bytes": round(copied * MIXTRAL_SHAPE.expert_bytes)})


def compare(environment: Environment, seed: int) -> list[Executed]:
    """All policies over all scenarios on ``environment``, on the same routes. Raises SystemExit if sums differ."""
    calibration = estimated(
        MIXTRAL_SHAPE,
        cpu=environment.cpu,
        gpu=environment.gpu,
        pcie_rate=environment.pcie_rate,
        machine=environment.name,
    )
    generator = np.random.default_rng(seed)
    popularity: Floats = mixtral_popularity(generator)
    order = popular_order(popularity)
    found = []
    for scenario, rows in SCENARIOS:
        routed = routed_steps(generator, popularity, rows, MIXTRAL.experts_per_token, REPEAT)
        trace = [counted(step, MIXTRAL.experts) for step in routed]
        reference: torch.Tensor | None = None
        for name in POLICIES:
            slots = environment.slots[name]
            movement, sums = execute(name, calibration, slots, order, routed, seed)
            reference = sums if reference is None else reference
            if not torch.equal(sums, reference):
                raise SystemExit(f"{name} gives other sums than {POLICIES[0]} in {scenario!r}: that is a bug.")
            planned = replay(trace, policy_named(name, MIXTRAL.experts), calibration, slots, MIXTRAL.experts, order)
            active = movement.hits + movement.misses
            found.append(
                Executed(
                    environment=environment.name,
                    scenario=scenario,
                    policy=name,
                    tokens=movement.tokens,
                    seconds=movement.total_s,
                    predicted_s=planned.total_s,
                    hit_rate=movement.hits / active if active else 0.0,
                    predicted_hit_rate=planned.hit_rate,
                    bytes_per_token=movement.weight_bytes / movement.tokens,
                    cpu_share=movement.cpu_s / movement.total_s,
                    gpu_share=movement.gpu_s / movement.total_s,
                    both_share=movement.both_s / movement.total_s,
                    learned=movement.learned,
                )
            )
    return found


COLUMNS = ["machine", "scenario", "policy", "time", "predicted", "hits", "GB copied per token", "CPU", "GPU", "both"]


def lines(results: Sequence[Executed]) -> list[list[str]]:
    """The table's rows: times relative to balanced's in the same scenario."""
    base = {(r.environment, r.scenario): r for r in results if r.policy == "balanced"}
    rows = []
    for result in results:
        one = base[result.environment, result.scenario]
        rows.append(
            [
                result.environment.split(" (", maxsplit=1)[0],
                result.scenario,
                result.policy,
                f"{result.seconds / one.seconds:.2f}",
                f"{result.predicted_s / one.predicted_s:.2f}",
                f"{result.hit_rate:.0%}",
                f"{result.bytes_per_token / 1e9:.2f}",
                f"{result.cpu_share:.0%}",
                f"{result.gpu_share:.0%}",
                f"{result.both_share:.0%}",
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executed", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args(argv)
    results = [result for environment in ENVIRONMENTS for result in compare(environment, arguments.seed)]
    print(
        "Executed on the stand-in device, in virtual time, with assumed rates of CPU and GPU; MoE layers only. Times\n"
        "relative to `balanced`; `predicted`: the same by the simulation. All policies gave the same sums to the bit.\n"
    )
    print(table(lines(results), COLUMNS, arguments.markdown))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
