"""What the MoNDE paper's measurements rest on beside its device: what it identifies, and what has to be chosen.

The paper measured everything but the experts' computing on a PyTorch program with the models of Hugging Face. It prints
neither its routes nor its profile. ``NOMINAL`` takes the data sheets and counts kernels only. ``CHOSEN_INPUTS`` adds
what such a program does: host time per active expert, a link as fast as one was measured to be, sentences as long as
FLORES has them, rows of a decoder that resemble one another. Each of these is a choice, so each has a band (``BANDS``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.papers.near_data_device import Link, NearDevice, NearSystem
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_DECODER,
    SWITCH_ENCODER,
    HostCpu,
    Stack,
    Workflow,
    block_seconds,
    dense_seconds,
    routing_seconds,
    several_gpus,
    simulate,
)
from benchmarks.routes import skewed_layers

STACKS = (SWITCH_ENCODER, SWITCH_DECODER, NLLB_ENCODER, NLLB_DECODER)
BATCHES = (1, 4, 16)
SEQUENCE = 512
WORKFLOWS: tuple[Workflow, ...] = ("GPU+PM", "MD+AM", "MD+LB", "CPU+AM", "Ideal")
DECODED = 16
"""Steps of a decoder, to even out chance."""


@dataclass(frozen=True)
class Setting:
    """The inputs that the paper does not print."""

    host_s: float = 0.0
    """Host time per active expert in seconds."""
    link_rate: float = 32e9
    """Of copies to the GPU in bytes per second."""
    exponent: float = 1.5
    """The n-th most popular expert is n to the power of minus this as popular as the first."""
    block_s: Mapping[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """What the library takes per block on the host: of an encoder (True), of a decoder (False)."""
    sentence: Mapping[str, int] = field(default_factory=dict)
    """Routed tokens per sequence of an encoder, by its name; SEQUENCE for others."""
    correlated: bool = False
    """Whether a decoder's batch has only as many different rows as its square root."""
    cpu: HostCpu = field(default_factory=HostCpu)

    def rows(self, stack: Stack, batch: int) -> int:
        """Tokens of one pass."""
        return batch if stack.cross_attention else batch * self.sentence.get(stack.name, SEQUENCE)


NOMINAL = Setting()
NOMINAL_END = replace(NOMINAL, exponent=1.2)
CHOSEN_INPUTS = Setting(
    host_s=200e-6,
    link_rate=22.6e9,
    block_s={True: 0.5e-3, False: 2.5e-3},
    sentence={NLLB_ENCODER.name: 40},
    correlated=True,
    cpu=HostCpu(operations_rate=0.4e12),
)


def _blocks(factor: float) -> Setting:
    return replace(CHOSEN_INPUTS, block_s={kind: factor * each for kind, each in CHOSEN_INPUTS.block_s.items()})


BANDS: Mapping[str, tuple[Setting, Setting]] = {
    "host time per expert, 120–240 µs": (replace(CHOSEN_INPUTS, host_s=120e-6), replace(CHOSEN_INPUTS, host_s=240e-6)),
    "link, 20–25 GB/s": (replace(CHOSEN_INPUTS, link_rate=20e9), replace(CHOSEN_INPUTS, link_rate=25e9)),
    "exponent, 1.2–1.5": (replace(CHOSEN_INPUTS, exponent=1.2), CHOSEN_INPUTS),
    "library's time per block, ± 40 %": (_blocks(0.6), _blocks(1.4)),
    "routed tokens per sentence, 30–60": (
        replace(CHOSEN_INPUTS, sentence={NLLB_ENCODER.name: 30}),
        replace(CHOSEN_INPUTS, sentence={NLLB_ENCODER.name: 60}),
    ),
    "CPU, 0.15–1 TFLOP/s": (
        replace(CHOSEN_INPUTS, cpu=HostCpu(operations_rate=0.15e12)),
        replace(CHOSEN_INPUTS, cpu=HostCpu(operations_rate=1.0e12)),
    ),
}
"""Settings at the ends of each chosen input's band, the others as in CHOSEN_INPUTS."""


@dataclass(frozen=True)
class Point:
    """Seconds of the experts by workflow, and of everything else, for one pass of a batch."""

    stack: str
    batch: int
    seconds: dict[str, float]
    dense_s: float
    beside_experts_s: float
    """Of ``dense_s``, what belongs to the blocks with experts."""
    two_gpus_s: float
    """The experts, with all of them on two GPUs."""
    active: float
    few: float
    """Share of experts with 0 to 7 tokens."""
    alpha: float
    hot_share: float

    def speed(self, workflow: str) -> float:
        """End to end over GPU+PM."""
        return (self.dense_s + self.seconds["GPU+PM"]) / (self.dense_s + self.seconds[workflow])

    def moe_speed(self, workflow: str) -> float:
        """Of the blocks with experts over GPU+PM, their attention and routing included."""
        beside = self.beside_experts_s
        return (beside + self.seconds["GPU+PM"]) / (beside + self.seconds[workflow])

    def expert_speed(self, workflow: str) -> float:
        """Of the experts alone over GPU+PM."""
        return self.seconds["GPU+PM"] / self.seconds[workflow]


def measure(
    stack: Stack,
    batch: int,
    setting: Setting,
    bandwidth: float = 1.0,
    devices: int = 1,
    seed: int = 0,
) -> Point:
    """One point of figures 6 to 10. Raises ValueError for an empty batch."""
    if batch < 1:
        raise ValueError(f"a batch has at least one sequence, not {batch}")
    encoder = not stack.cross_attention
    rows = setting.rows(stack, batch)
    passes = 1 if encoder else DECODED
    layers = layers_of(stack, batch, setting, passes, seed)
    system = NearSystem(
        stack.hidden,
        stack.ffn,
        link=Link(rate=setting.link_rate),
        device=NearDevice(bandwidth_factor=bandwidth),
        devices=devices,
        host_s=setting.host_s,
    )
    done = {workflow: simulate(system, workflow, layers, cpu=setting.cpu) for workflow in WORKFLOWS}
    balanced = done["MD+LB"]
    moe_block_s = block_seconds(stack, system.gpu, rows, SEQUENCE, setting.block_s[encoder])
    moe_block_s += routing_seconds(stack, system.gpu, rows)
    few = [sum(1 for count in layer if count < 8) + stack.experts - len(layer) for layer in layers]
    return Point(
        stack=stack.name,
        batch=batch,
        seconds={workflow: each.seconds / passes for workflow, each in done.items()},
        dense_s=dense_seconds(stack, system.gpu, rows, SEQUENCE, setting.block_s[encoder]),
        beside_experts_s=stack.moe_blocks * moe_block_s,
        two_gpus_s=sum(several_gpus(system, layer, 2) for layer in layers) / passes,
        active=statistics.mean(map(len, layers)),
        few=statistics.mean(few) / stack.experts,
        alpha=balanced.alpha or 0.0,
        hot_share=balanced.hot_share or 0.0,
    )


def layers_of(stack: Stack, batch: int, setting: Setting, passes: int, seed: int) -> list[list[int]]:
    """Tokens of each active expert, for each MoE block of each pass."""
    generator = np.random.default_rng(seed)
    rows = setting.rows(stack, batch)
    different = math.isqrt(rows) if setting.correlated and stack.cross_attention else rows
    count = stack.moe_blocks * passes
    made = skewed_layers(generator, stack.experts, different, stack.experts_per_token, count, setting.exponent)
    alike = rows // different
    return [[tokens * alike for tokens in layer] for layer in made]


def points(setting: Setting, stacks: Sequence[Stack] = STACKS) -> dict[tuple[str, int], Point]:
    """Figure 6: every stack with every batch."""
    return {(stack.name, batch): measure(stack, batch, setting) for stack in stacks for batch in BATCHES}
