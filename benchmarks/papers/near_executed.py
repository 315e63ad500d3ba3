"""Blocks of Switch Transformers and NLLB-MoE, run by the expert backend on the stand-in device, in virtual time.

The product's hybrid backend decides, copies and computes, with the models' numbers of experts and a small size; what a
copy and an expert take is what the simulation of the device says. Experts of these models have two matrices and a ReLU:
the backend's third is there and ignored. Attention runs beside, outside of the clock. Every workflow must give what a
plain reference gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from benchmarks.executed import FFN, HIDDEN, SmallExperts
from benchmarks.papers.findings import Findings, Input, Row, Table
from benchmarks.papers.near_blocks import Blocks, Numbers, reference
from benchmarks.papers.near_data_device import Link, NearSystem
from benchmarks.papers.near_settings import BATCHES, CHOSEN_INPUTS, Setting
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_DECODER,
    SWITCH_ENCODER,
    Stack,
    Workflow,
    simulate,
)
from benchmarks.routes import chosen
from benchmarks.stand_in_device import CalibratedSpeeds, StandInDevice, TimedCpu
from engine.ipc.messages import ExpertPolicy
from engine.moe.timing import Recorder
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape
from engine.planning.policy import policy_named
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend

LAYERS = 2
PASSES = 4
"""Passes of a decoder; an encoder has one."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
RUN_AS: dict[Workflow, ExpertPolicy] = {
    "GPU+PM": "on-demand",
    "MD+AM": "layers",
    "MD+LB": "monde",
    "CPU+AM": "layers",
    "Ideal": "lru-offload",
}
"""The policy by which the backend runs a workflow: ``layers`` without a slot leaves every expert beside the memory."""
TOLERANCE = 1e-4

Chosen = npt.NDArray[np.intp]


def relu_of_first(first: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """The gate of an expert of two matrices."""
    return functional.relu(first)


def costs(stack: Stack, setting: Setting, workflow: Workflow) -> Calibration:
    """What one expert takes on the GPU, and beside the memory: on the near-data device, or on the CPU for CPU+AM."""
    system = NearSystem(stack.hidden, stack.ffn, link=Link(rate=setting.link_rate), host_s=setting.host_s)

    def near(tokens: int) -> float:
        if workflow == "CPU+AM":
            return setting.cpu.expert(tokens, stack.hidden, stack.ffn)
        return system.near_expert(tokens)

    copies = tuple(2 * system.activations(tokens) for tokens in TOKENS)
    return Calibration(
        version=CALIBRATION_VERSION,
        machine=workflow,
        shape=ExpertShape(hidden=stack.hidden, ffn=stack.ffn, dtype="BF16", expert_bytes=system.expert_bytes),
        cpu=Curve(TOKENS, tuple(setting.host_s + near(tokens) for tokens in TOKENS)),
        memory_read=system.device.stream_rate,
        gpu=Curve(TOKENS, tuple(system.gpu_expert(tokens) for tokens in TOKENS)),
        weight_copy=system.link.seconds(system.expert_bytes),
        activation_copy=Curve(TOKENS, copies),
    )


@dataclass(frozen=True)
class BlockRun:
    """A workflow over all layers and passes: virtual seconds, and the simulation's."""

    seconds: float
    simulated_s: float
    error: float
    """Largest difference from the plain reference after the last block, relative to its largest number."""


def plain(experts: SmallExperts, layer: int, hidden: Numbers, routes: Chosen, weight: float) -> Numbers:
    """The weighted sum of the routed experts, as a loop over tokens."""
    sums = np.zeros_like(hidden)
    for token, chosen_experts in enumerate(routes):
        for expert in chosen_experts:
            matrices = experts.expert(layer, int(expert))
            first, second = (stored.words.view(np.float32) for stored in (matrices.gate, matrices.down))
            sums[token] += weight * (second @ np.maximum(first @ hidden[token], 0.0))
    return sums


def run_block(
    stack: Stack, batch: int, workflow: Workflow, setting: Setting = CHOSEN_INPUTS, seed: int = 0
) -> BlockRun:
    """Run LAYERS blocks of ``stack`` with experts by ``workflow``, on given routes."""
    calibration = costs(stack, setting, workflow)
    experts = SmallExperts(LAYERS, stack.experts, seed)
    recorder = Recorder(LAYERS, experts.layers, experts.count)
    gates = dict.fromkeys(experts.layers, FamilyGate(relu_of_first, None))
    cpu, _ = make_cpu_backend(experts, gates, torch.float32, cpu_threads=1)
    device = StandInDevice(speeds=CalibratedSpeeds.of(calibration))
    host = HostExperts(experts)
    executor = HybridBackend(
        host,
        device,
        TimedCpu(cpu, device),
        gates,
        policy_named(RUN_AS[workflow], experts.count),
        calibration,
        torch.float32,
        recorder,
        stack.experts_per_token,
    )
    slots = LAYERS * stack.experts if workflow == "Ideal" else 0
    order = [(layer, expert) for layer in range(LAYERS) for expert in range(stack.experts)]
    executor.open_cache(slots * host.slot_bytes, order, reserve=0)
    recorder.reset()
    generator, chance = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    popularity = np.arange(1, stack.experts + 1, dtype=np.float64) ** -setting.exponent
    blocks = Blocks(stack, LAYERS, HIDDEN, seed)
    weight = 1.0 / stack.experts_per_token
    rows = setting.rows(stack, batch)
    given: list[list[Chosen]] = []
    inputs, outputs = [], []
    for _ in range(PASSES if stack.cross_attention else 1):
        given.append([chosen(chance, popularity, rows, stack.experts_per_token) for _ in range(LAYERS)])
        states = torch.randn(rows, HIDDEN, generator=generator)
        inputs.append(states.double().numpy())
        for layer, routes in enumerate(given[-1]):
            states, hidden = blocks.attend(layer, states)
            weights = torch.full(routes.shape, weight)
            states = states + executor.run(layer, hidden, torch.from_numpy(routes), weights)
        outputs.append(states.double().numpy())

    def summed(number: int, layer: int, hidden: Numbers) -> Numbers:
        return plain(experts, layer, hidden, given[number][layer], weight)

    expected = reference(blocks, inputs, summed)
    worst = max(
        float(np.abs(found - each).max() / np.abs(each).max()) for found, each in zip(outputs, expected, strict=True)
    )
    counted = [
        [int(count) for count in np.bincount(routes.ravel(), minlength=stack.experts) if count]
        for layers in given
        for routes in layers
    ]
    movement = recorder.frame(0).movement
    assert movement is not None
    executor.close()
    system = NearSystem(stack.hidden, stack.ffn, link=Link(rate=setting.link_rate), host_s=setting.host_s)
    simulated = simulate(system, workflow, counted, cpu=setting.cpu).seconds
    return BlockRun(movement.total_s, simulated, worst)


def block_rows() -> Findings:
    """All workflows on both models, encoder and decoder. Raises RuntimeError if one differs from the plain
    reference."""
    lines = []
    worst = 0.0
    for stack in (SWITCH_ENCODER, SWITCH_DECODER, NLLB_ENCODER, NLLB_DECODER):
        batch = 1 if not stack.cross_attention else BATCHES[-1]
        found = {workflow: run_block(stack, batch, workflow) for workflow in RUN_AS}
        base = found["GPU+PM"]
        for workflow, run in found.items():
            worst = max(worst, run.error)
            lines.append(
                [
                    stack.name,
                    str(batch),
                    workflow,
                    RUN_AS[workflow],
                    f"{base.seconds / run.seconds:.2f}",
                    f"{base.simulated_s / run.simulated_s:.2f}",
                ]
            )
    if worst > TOLERANCE:
        raise RuntimeError(f"a workflow differs by {worst:.1e} from the plain reference: that is a bug")
    row = Row(
        where="figure 5",
        what="largest relative difference from a plain reference",
        tag="executed",
        ours=worst,
        digits=2,
        note="two blocks with experts of each encoder and decoder, attention included, position encodings left out, "
        f"random weights, given routes; {HIDDEN} × {FFN} numbers a matrix",
    )
    columns = ["stack", "batch", "workflow", "policy", "over GPU+PM, executed", "simulated"]
    caption = """The five workflows executed by the hybrid backend on the stand-in device: times of the experts. The
        live policy `monde` tunes its factor while it runs, and experts wait for their activations one by one."""
    return Findings(rows=[row], inputs=INPUTS, tables=[Table(caption, columns, lines)])


INPUTS = (Input("times of experts and copies", "as simulated above", "chosen", "its chosen inputs"),)
