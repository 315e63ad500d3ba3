"""Every policy for sharing experts, on this machine's GPU and CPU: the same routes, real experts, real time.

    python -m benchmarks.on_gpu --markdown

The costs of one expert are measured first, as `privatellm bench experts` does. Then the hybrid executor runs each
policy over the scenarios of benchmarks.executed, beside what the replay of benchmarks.policies predicts from those
costs. There is no trunk. What travels between layers and what each layer costs the executor counts, but the replay does
not know it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.executed import SCENARIOS, Routed, run_layers
from benchmarks.papers.replay import replay
from benchmarks.policies import POLICIES, REPEAT, table
from benchmarks.routes import counted, mixtral_popularity, popular_order, routed_steps
from benchmarks.shapes import MixtralShape, Qwen3MoeShape
from benchmarks.subjects import PACKED, packed_subject
from benchmarks.synthetic import write_synthetic
from engine import process_life
from engine.calibration.calibration_file import shape_of
from engine.calibration.expert_cost import calibration_of, measure
from engine.calibration.memory_rate import StreamingRead
from engine.ipc.messages import ExpertMovement, ExpertPolicy
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import Experts
from engine.moe.timing import Recorder
from engine.planning.calibration import Calibration
from engine.planning.policy import policy_named
from engine.runtimes.torch.offload.cuda_device import find_gpu
from engine.runtimes.torch.offload.devices import ExpertDevice
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, open_gpu_side

MOST_APART = 0.02
"""Root mean square difference of two policies' results, relative to them: GPU and CPU round in other places."""
MEASURING_S = 10.0


@dataclass(frozen=True)
class Measured:
    """A policy in a scenario. Seconds are of the MoE layers alone; shares are of them."""

    model: str
    kept: float
    """Share of the experts that the GPU has room for."""
    scenario: str
    policy: ExpertPolicy
    tokens: int
    seconds: float
    predicted_s: float
    hit_rate: float
    bytes_per_token: float
    """Of weights."""
    cpu_share: float
    gpu_share: float
    both_share: float


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """A progress callback that nobody watches."""


def measured_costs(device: ExpertDevice, experts: Experts, per_token: int) -> Calibration:
    """What one of ``experts`` costs on both sides of this machine. Raises DeviceError."""
    gpu, lines = open_gpu_side(device, experts, "bfloat16", per_token, silent)
    cpu = LocalCpuSide(experts, "bfloat16", per_token, None)
    memory = StreamingRead(psutil.cpu_count(logical=False) or 1)
    try:
        figures = measure(cpu, gpu, memory.rate, time.perf_counter, budget_s=MEASURING_S)
    finally:
        gpu.close()
    for line in lines:
        print(line, file=sys.stderr)
    return calibration_of(figures, device.name, shape_of(experts))


def execute(
    name: ExpertPolicy,
    device: ExpertDevice,
    experts: Experts,
    calibration: Calibration,
    slots: int,
    order: Sequence[tuple[int, int]],
    routed: Routed,
    seed: int,
) -> tuple[ExpertMovement, torch.Tensor]:
    """Run the layers of ``routed`` once to warm up and once more; what was moved, and all that came out."""
    recorder = Recorder(len(experts.layers), experts.layers, experts.count)
    silu = Activation("silu")
    gates = dict.fromkeys(experts.layers, FamilyGate(silu, silu))
    cpu, _ = make_cpu_backend(experts, gates, torch.bfloat16, None)
    host = HostExperts(experts)
    per_token = routed[0][0].shape[1]
    policy = policy_named(name, experts.count)
    executor = HybridBackend(host, device, cpu, gates, policy, calibration, torch.bfloat16, recorder, per_token)
    executor.prepare_device()
    executor.lock_pages(silent)
    executor.open_cache(slots * host.slot_bytes, order, reserve=0)
    hidden = calibration.shape.hidden
    run_layers(executor, routed[:2], hidden, torch.bfloat16, seed, device.torch_device)
    recorder.reset()
    sums = run_layers(executor, routed, hidden, torch.bfloat16, seed, device.torch_device)
    movement = recorder.frame(0).movement
    assert movement is not None
    executor.close()
    return movement, sums


def compare(
    title: str, device: ExpertDevice, experts: Experts, per_token: int, kept: Sequence[float], seed: int
) -> list[Measured]:
    """All policies over all scenarios, on the same routes. Raises SystemExit if their results are too far apart."""
    calibration = measured_costs(device, experts, per_token)
    print(costs(title, calibration), file=sys.stderr)
    generator = np.random.default_rng(seed)
    layers = len(experts.layers)
    popularity = mixtral_popularity(generator, layers, experts.count)
    order = popular_order(popularity)
    found = []
    for scenario, rows in SCENARIOS:
        routed = routed_steps(generator, popularity, rows, per_token, REPEAT)
        trace = [counted(step, experts.count) for step in routed]
        reference: torch.Tensor | None = None
        for share in kept:
            for name in POLICIES:
                slots = math.floor(share * layers * experts.count) if name not in ("monde", "stream") else 0
                if name == "layers":
                    slots -= slots % experts.count
                movement, sums = execute(name, device, experts, calibration, slots, order, routed, seed)
                sums = sums.float()
                reference = sums if reference is None else reference
                apart = float((sums - reference).square().mean().sqrt() / reference.square().mean().sqrt())
                if not apart <= MOST_APART:
                    raise SystemExit(f"{name} is {apart:.1%} from {POLICIES[0]} in {scenario!r}: that is a bug.")
                planned = replay(trace, policy_named(name, experts.count), calibration, slots, experts.count, order)
                active = movement.hits + movement.misses
                found.append(
                    Measured(
                        model=title,
                        kept=share,
                        scenario=scenario,
                        policy=name,
                        tokens=movement.tokens,
                        seconds=movement.total_s,
                        predicted_s=planned.total_s,
                        hit_rate=movement.hits / active if active else 0.0,
                        bytes_per_token=movement.weight_bytes / movement.tokens,
                        cpu_share=movement.cpu_s / movement.total_s,
                        gpu_share=movement.gpu_s / movement.total_s,
                        both_share=movement.both_s / movement.total_s,
                    )
                )
    return found


def costs(title: str, calibration: Calibration) -> str:
    """One expert's costs in a line, microseconds."""
    assert calibration.gpu is not None
    points = [tokens for tokens in (1, 8, 32, 128) if tokens <= calibration.cpu.tokens[-1]]
    sides = {"CPU": calibration.cpu, "GPU": calibration.gpu}
    curves = "; ".join(
        f"{side} {', '.join(f'{1e6 * curve.at(tokens):.0f}' for tokens in points)}" for side, curve in sides.items()
    )
    copy = f"a copy {1e6 * calibration.weight_copy:.0f}"
    return f"{title}: one expert on {', '.join(map(str, points))} tokens, µs: {curves}; {copy}."


COLUMNS = ["experts kept", "scenario", "policy", "ms/token", "predicted", "hits", "GB/token", "CPU", "GPU", "both"]


def lines(results: Sequence[Measured]) -> list[list[str]]:
    """The table's rows."""
    return [
        [
            f"{result.kept:.0%}",
            result.scenario,
            result.policy,
            f"{1e3 * result.seconds / result.tokens:.2f}",
            f"{1e3 * result.predicted_s / result.tokens:.2f}",
            f"{result.hit_rate:.0%}",
            f"{result.bytes_per_token / 1e9:.2f}",
            f"{result.cpu_share:.0%}",
            f"{result.gpu_share:.0%}",
            f"{result.both_share:.0%}",
        ]
        for result in results
    ]


def model_named(name: str, layers: int, work: Path) -> tuple[str, Path, int]:
    """A synthetic model: its title, its folder, and the experts of a token."""
    if name in PACKED:
        subject = packed_subject(work, name)
        return subject.title, subject.folder, int(subject.config["num_experts_per_tok"])
    shape = MixtralShape(layers) if name == "mixtral" else Qwen3MoeShape(layers)
    folder = work / f"{shape.name}-{layers}"
    write_synthetic(folder, shape)
    return f"{shape.title}, {layers} layers, bfloat16", folder, shape.experts_per_token


def main(values: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__.splitlines()[0])
    named = ["mixtral", "qwen3-moe", *PACKED]
    parser.add_argument("--models", nargs="+", choices=named, default=["mixtral"], metavar="MODEL")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models that are not packed")
    parser.add_argument("--kept", nargs="+", type=float, default=[0.25, 0.5], help="parts of the experts on the GPU")
    parser.add_argument("--work", type=Path, required=True, help="folder for the synthetic models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args(values)
    device = find_gpu()
    if device is None:
        print("No GPU that torch can use was found; benchmarks.executed runs the policies without one.")
        return 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: list[Measured] = []
    for name in arguments.models:
        title, folder, per_token = model_named(name, arguments.layers, arguments.work)
        experts = open_model(folder).experts
        assert experts is not None
        found = compare(title, device, experts, per_token, arguments.kept, arguments.seed)
        print(f"\n{title}, on {device.name}\n\n{table(lines(found), COLUMNS, arguments.markdown)}", flush=True)
        results += found
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    # As under the chat, where idle threads of torch leave the cores to the kernels: read as torch is imported.
    settings = process_life.environment(psutil.cpu_count(logical=False) or 1)
    if any(os.environ.get(name) != value for name, value in settings.items()):
        command = [sys.executable, "-m", "benchmarks.on_gpu", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})
    sys.exit(main())
