"""Figure 7 of the Twiddler paper, its CPU's side: one expert of Mixtral's size on this processor, in two ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from benchmarks.papers.findings import Findings, Input, Row, Table
from engine.bench.synthetic_moe import MoeShape, write_moe
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import Experts
from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide
from engine.system.temporary_folders import temporary_folder

TOKENS = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
EXPERT = MoeShape(
    layers=1, hidden=4096, ffn=14336, experts=2, experts_per_token=1, heads=32, key_value_heads=8, vocabulary=64
)
"""Two experts, so that neither is in the caches when its turn comes."""

Times = dict[int, list[float]]
"""Seconds of each round, by tokens."""


def expert_rows(shape: MoeShape = EXPERT, tokens: Sequence[int] = TOKENS) -> Findings:
    """Measure on one thread: about half a minute. Raises ModelError (disk)."""
    with temporary_folder("papers-expert-") as folder:
        experts = open_model(write_moe(folder / "model", shape, lambda *_: None)).experts
        assert experts is not None
        ours = LocalCpuSide(experts, "bfloat16", 1, 1)
        library = LibraryExpert(experts)
        for count in tokens:
            ours.prepare(count)
            library.prepare(count)
        our_times, library_times = in_turns((ours.run, library.run), tokens)
        description = ours.description
        del ours, library, experts  # the file is mapped until then
    return findings(our_times, library_times, shape, description)


class LibraryExpert:
    """The same experts by torch's own products, in bfloat16."""

    def __init__(self, experts: Experts) -> None:
        self._experts = [
            [
                torch.from_numpy(part.words.view("int16")).view(torch.bfloat16)
                for part in experts.expert(0, number).parts
            ]
            for number in range(experts.count)
        ]
        self._inputs: dict[int, torch.Tensor] = {}
        self._next = 0

    def prepare(self, tokens: int) -> None:
        self._inputs[tokens] = torch.randn(tokens, self._experts[0][0].shape[1]).to(torch.bfloat16)

    def run(self, tokens: int) -> torch.Tensor:
        gate, up, down = self._experts[self._next]
        self._next = (self._next + 1) % len(self._experts)
        hidden = self._inputs[tokens]
        with torch.inference_mode():
            return functional.linear(
                functional.silu(functional.linear(hidden, gate)) * functional.linear(hidden, up), down
            )


def in_turns(ways: Sequence[Callable[[int], object]], tokens: Sequence[int]) -> list[Times]:
    """Times of each way, after one run of each that is not counted."""
    found: list[Times] = [{count: [] for count in tokens} for _ in ways]
    for number in range(ROUNDS + 1):
        for count in tokens:
            for way, times in zip(ways, found, strict=True):
                began = time.perf_counter()
                way(count)
                if number:
                    times[count].append(time.perf_counter() - began)
    return found


def findings(ours: Times, library: Times, shape: MoeShape, description: str) -> Findings:
    """The row, and the table of both ways."""
    both = [{count: statistics.median(seconds) for count, seconds in times.items()} for times in (ours, library)]
    last = max(ours)
    row = Row(
        where="figure 7",
        what=f"CPU {last} over CPU 1, time, torch's products",
        tag="executed",
        paper="linear",
        ours=both[1][last] / both[1][1],
        note=f"linear would be {last}; our kernels: {both[0][last] / both[0][1]:.1f}",
    )
    lines = [
        [
            str(count),
            *(cell for times in both for cell in (f"{1e3 * times[count]:.1f}", f"{times[count] / times[1]:.2f}")),
        ]
        for count in ours
    ]
    columns = ["tokens", "ours, ms", "over one token", "torch, ms", "over one token"]
    caption = f"""Figure 7, CPU N: one expert of {shape.hidden} × {shape.ffn} in bfloat16, one thread, medians of
        {ROUNDS} rounds. Ours: {description}."""
    return Findings(rows=[row], inputs=INPUTS, tables=[Table(caption, columns, lines)], notes=NOTES)


INPUTS = (Input("an expert of Mixtral-8x7B", "4096 × 14336, bfloat16", "published", "its configuration"),)
NOTES = (
    """Appendix A: on the CPU the time "generally increases linearly", so the paper's model is a line through zero; its
    bars have no numbers. It depends on kernels and processor. One with instructions for bfloat16 computes many tokens
    while it reads the weights, which a kernel reads once for all its tokens; the threshold from which a copy to the GPU
    pays then lies at many more tokens.""",
)
