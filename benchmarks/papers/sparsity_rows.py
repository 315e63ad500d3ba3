"""Appendix B of the Twiddler paper: how many values after SiLU are near zero, on the starter beside Mixtral."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.papers.beam_rows import prompts_of
from benchmarks.papers.findings import Findings, Input, Row
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.store.catalogue import STARTER
from engine.moe.kernels.bindings import VARIABLE
from engine.runtimes import runtime_named
from engine.runtimes.choosing import on_one_machine
from engine.runtimes.common.loading import load_model
from engine.runtimes.protocol import LoadedModel
from engine.session.loading import find_folder

THRESHOLDS = (0.001, 0.01, 0.1, 1.0)
# fmt: off
PAPER_LAYERS = (
    (1.75, 17.17, 93.89, 100.00), (1.21, 11.95, 85.08, 100.00), (0.92, 9.10, 74.80, 99.99), (0.71, 7.06, 63.69, 99.99),
    (0.50, 5.00, 49.67, 99.95), (0.41, 4.08, 41.60, 99.93), (0.36, 3.56, 36.66, 99.91), (0.30, 2.97, 31.04, 99.88),
    (0.29, 2.90, 29.96, 99.86), (0.27, 2.73, 28.25, 99.80), (0.24, 2.37, 24.65, 99.74), (0.24, 2.43, 25.15, 99.69),
    (0.24, 2.36, 24.55, 99.65), (0.22, 2.22, 23.05, 99.53), (0.20, 2.02, 21.03, 99.32), (0.18, 1.78, 18.61, 99.14),
    (0.15, 1.53, 16.14, 98.91), (0.15, 1.50, 15.86, 98.58), (0.13, 1.33, 14.24, 98.15), (0.12, 1.19, 12.94, 97.95),
    (0.11, 1.09, 12.04, 97.86), (0.10, 0.97, 11.09, 97.96), (0.10, 1.02, 11.58, 97.61), (0.10, 1.02, 11.72, 97.36),
    (0.09, 0.95, 11.55, 97.34), (0.10, 0.95, 11.91, 97.05), (0.09, 0.95, 12.19, 96.72), (0.09, 0.89, 12.28, 96.76),
    (0.08, 0.86, 13.89, 95.86), (0.09, 1.03, 15.16, 94.02), (0.12, 1.37, 16.65, 92.12), (0.36, 2.73, 20.27, 89.64),
)
# fmt: on
"""Percent of values below each threshold, by layer of Mixtral-8x7B: table 2."""
PROMPTS = 8

Shares = dict[int, list[float]]
"""By layer, the percent of values below each threshold."""


def sparsity_rows() -> Findings:
    """Table 2's text, and the same on the starter if it is on this machine."""
    try:
        _, folder = find_folder(STARTER, lambda *_: None, None)
    except ModelError as error:
        absent = Row(where="table 2", what="values near zero", tag="not possible here", note=str(error))
        return Findings(rows=[*counted_in_the_paper(), absent])
    with without_kernels():
        load = Load(id=0, model=STARTER, runtime="torch", keep_resident=False)
        model = load_model(runtime_named("torch"), STARTER, folder, on_one_machine(load, "torch"), lambda *_: None)
    try:
        return Findings(
            rows=[*counted_in_the_paper(), *means_of(shares_of(model, prompts_of(folder, PROMPTS)))],
            inputs=INPUTS,
            notes=NOTES,
        )
    finally:
        model.close()


def counted_in_the_paper() -> list[Row]:
    """The text's counts of layers, taken from its own table."""
    given = (
        ("layers with fewer than 1 % of values below 0.001", "30", 1.0, ""),
        ("layers with fewer than 5 % below 0.01", "28", 5.0, "the table has 5.00 in layer 5"),
        ("layers with fewer than 30 % below 0.1", "24", 30.0, ""),
    )
    return [
        Row(
            where="appendix B",
            what=what,
            tag="exact",
            paper=paper,
            ours=sum(layer[place] < most for layer in PAPER_LAYERS),
            note=note,
        )
        for place, (what, paper, most, note) in enumerate(given)
    ]


def means_of(shares: Shares) -> list[Row]:
    """Means over layers, and in brackets the layers' least and most."""
    rows = []
    for place, threshold in enumerate(THRESHOLDS):
        paper = sum(layer[place] for layer in PAPER_LAYERS) / len(PAPER_LAYERS)
        values = [each[place] for each in shares.values()]
        rows.append(
            Row(
                where="table 2",
                what=f"percent of values after SiLU below {threshold:g}, mean of layers",
                tag="executed",
                ours=sum(values) / len(values),
                note=f"Mixtral-8x7B {paper:.2f}; here layers from {min(values):.2f} to {max(values):.2f}",
            )
        )
    return rows


@contextmanager
def without_kernels() -> Iterator[None]:
    """A model that is loaded within it computes its experts in torch, where their activations can be seen."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


class WatchedSilu(TorchFunctionMode):  # type: ignore[misc]
    """Collects the absolute values of what every SiLU within it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(
        self, called: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = called(*arguments, **(options or {}))
        if called is functional.silu:
            self.seen.append(found.detach().float().abs())
        return found


def shares_of(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> Shares:
    """Run ``prompts`` and look at what every SiLU of the experts returns, by layer."""
    below: dict[int, list[int]] = {}
    total: dict[int, int] = {}
    recorder = model.recorder
    before = recorder.enabled

    with WatchedSilu() as watched:

        def layer_done(layer: int, counts: Sequence[int]) -> None:
            counted = below.setdefault(layer, [0] * len(THRESHOLDS))
            for values in watched.seen:
                for place, threshold in enumerate(THRESHOLDS):
                    counted[place] += int((values < threshold).sum())
                total[layer] = total.get(layer, 0) + values.numel()
            watched.seen.clear()

        recorder.on_routes, recorder.enabled = layer_done, True
        try:
            for prompt in prompts:
                model.start().extend(prompt)
        finally:
            recorder.on_routes, recorder.enabled = None, before
    return {
        layer: [100.0 * each / total[layer] for each in counted] for layer, counted in below.items() if total.get(layer)
    }


INPUTS = (Input("prompts", f"{PROMPTS} of 32 tokens", "chosen", "the paper: 100 samples of ShareGPT"),)
NOTES = (
    """Most values are not near zero in either model. The starter, which is another and much smaller one, has a tenth of
    its values below 0.001, which Mixtral has not; so its figures stand beside the paper's and are not compared.""",
)
