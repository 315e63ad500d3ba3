"""The MoNDE paper's comparison, simulated: experts near the memory, on the GPU, or both, beside the paper's figures.

    python -m benchmarks.near_data --markdown
    python -m benchmarks.near_data --exponent 1.2 --json result.json

Switch-Large-128 and NLLB-MoE, 512 tokens per sequence in the encoder, one in the decoder, batches of 1, 4 and 16. The
paper's routes and its profile of the GPU are not published. Here the experts' popularity falls as a power of their
rank, so that most experts get 0 to 7 tokens as in its figure 3, and the GPU is a roofline. Two assumptions about the
rest decide what a decoder gains, so both are printed: ``kernels`` counts GPU kernels only, ``framework`` adds what a
library in Python takes per block on the host, which the paper measured on Hugging Face's models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.papers.near_data_device import NearDevice, NearSystem
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_DECODER,
    SWITCH_ENCODER,
    Stack,
    Workflow,
    dense_seconds,
    simulate,
)
from benchmarks.policies import table
from benchmarks.routes import skewed_layers

STACKS = (SWITCH_ENCODER, SWITCH_DECODER, NLLB_ENCODER, NLLB_DECODER)
CLAIMS = {
    "Switch-Large-128 encoder": 3.1,
    "Switch-Large-128 decoder": 1.1,
    "NLLB-MoE encoder": 6.7,
    "NLLB-MoE decoder": 1.9,
}
"""MD+LB over GPU+PM, end to end, mean over batches."""
BATCHES = (1, 4, 16)
SEQUENCE = 512
WORKFLOWS: tuple[Workflow, ...] = ("GPU+PM", "MD+AM", "MD+LB", "CPU+AM", "Ideal")
FRAMEWORK_S = 1.5e-3
"""Per block and pass. transformers takes about 1.15 ms for a decoder layer of this repository's models, and an
encoder-decoder's blocks with routing do more."""
DECODED = 16
"""Steps of a decoder, to even out chance."""


@dataclass(frozen=True)
class Point:
    """Seconds of the experts' blocks by workflow, and of everything else, for one pass."""

    stack: str
    batch: int
    seconds: dict[str, float]
    dense_s: float
    framework_s: float
    active: float
    few: float
    """Share of experts with 0 to 7 tokens."""
    alpha: float
    hot_share: float

    def speed(self, workflow: str, framework: bool) -> float:
        """End to end over GPU+PM."""
        rest = self.framework_s if framework else self.dense_s
        return (rest + self.seconds["GPU+PM"]) / (rest + self.seconds[workflow])


def measure(stack: Stack, batch: int, exponent: float, seed: int, bandwidth: float = 1.0, devices: int = 1) -> Point:
    """One point of the paper's figures 6, 7 or 9."""
    encoder = not stack.cross_attention
    rows = batch * SEQUENCE if encoder else batch
    passes = 1 if encoder else DECODED
    generator = np.random.default_rng(seed)
    layers = skewed_layers(generator, stack.experts, rows, stack.experts_per_token, stack.moe_blocks * passes, exponent)
    device = NearDevice(bandwidth_factor=bandwidth)
    system = NearSystem(stack.hidden, stack.ffn, device=device, devices=devices)
    done = {workflow: simulate(system, workflow, layers) for workflow in WORKFLOWS}
    balanced = done["MD+LB"]
    few = [sum(1 for count in layer if count < 8) + stack.experts - len(layer) for layer in layers]
    return Point(
        stack=stack.name,
        batch=batch,
        seconds={workflow: each.seconds / passes for workflow, each in done.items()},
        dense_s=dense_seconds(stack, system.gpu, rows, SEQUENCE),
        framework_s=dense_seconds(stack, system.gpu, rows, SEQUENCE, FRAMEWORK_S),
        active=statistics.mean(map(len, layers)),
        few=statistics.mean(few) / stack.experts,
        alpha=balanced.alpha or 0.0,
        hot_share=balanced.hot_share or 0.0,
    )


def speed_table(points: Sequence[Point]) -> list[list[str]]:
    """Figure 6: speed over GPU+PM."""
    rows = []
    for stack in STACKS:
        here = [point for point in points if point.stack == stack.name]
        for point in here:
            rows.append([stack.name, str(point.batch), *_cells(point)])
        means = [
            f"{statistics.mean(point.speed('MD+LB', framework) for point in here):.1f}" for framework in (False, True)
        ]
        rows.append([stack.name, "mean", "", "", "", "", *means, "", "", f"{CLAIMS[stack.name]}"])
    return rows


def _cells(point: Point) -> list[str]:
    return [
        f"{point.active:.0f}",
        f"{point.few:.0%}",
        f"{point.hot_share:.2f}",
        f"{point.speed('MD+AM', False):.1f}",
        f"{point.speed('MD+LB', False):.1f}",
        f"{point.speed('MD+LB', True):.1f}",
        f"{point.speed('Ideal', False):.1f}",
        f"{point.seconds['CPU+AM'] / point.seconds['MD+LB']:.1f}",
        "",
    ]


SPEED_COLUMNS = [
    "stack",
    "batch",
    "active",
    "0-7 tokens",
    "on the GPU",
    "MD+AM",
    "MD+LB (kernels)",
    "MD+LB (framework)",
    "Ideal",
    "over CPU+AM",
    "paper",
]


def trend_table(exponent: float, seed: int) -> list[list[str]]:
    """Figures 7(b) and 9: NLLB-MoE's encoder, batch 4, with other bandwidths and more devices."""
    rows = []
    for bandwidth in (0.5, 1.0, 1.5, 2.0):
        point = measure(NLLB_ENCODER, 4, exponent, seed, bandwidth)
        rows.append([f"bandwidth x{bandwidth:g}", *_trend(point)])
    for devices in (1, 2, 4):
        point = measure(NLLB_ENCODER, 4, exponent, seed, devices=devices)
        rows.append([f"{devices} device{'s' * (devices > 1)}", *_trend(point)])
    return rows


def _trend(point: Point) -> list[str]:
    return [
        f"{point.speed('MD+AM', False):.2f}",
        f"{point.speed('MD+LB', False):.2f}",
        f"{point.speed('MD+LB', False) / point.speed('MD+AM', False):.2f}",
        f"{point.hot_share:.3f}",
        f"{point.alpha:.2f}",
    ]


TREND_COLUMNS = ["NLLB-MoE encoder, batch 4", "MD+AM", "MD+LB", "MD+LB over MD+AM", "on the GPU", "alpha"]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.near_data", description=__doc__.splitlines()[0])
    parser.add_argument("--exponent", type=float, default=1.5, help="how fast popularity falls with rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args(argv)
    points = [measure(stack, batch, arguments.exponent, arguments.seed) for stack in STACKS for batch in BATCHES]
    print("Simulated. Speed over GPU+PM (experts copied to the GPU when used), end to end.\n")
    print(table(speed_table(points), SPEED_COLUMNS, arguments.markdown) + "\n")
    print(table(trend_table(arguments.exponent, arguments.seed), TREND_COLUMNS, arguments.markdown))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
