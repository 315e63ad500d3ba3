"""Experts of the torch runtime in torch's own operations on the CPU, straight from the mapped file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from engine.models.formats.model_files import Experts, ExpertWeights
from engine.runtimes.torch.offload.gates import Gate
from engine.runtimes.torch.offload.tensor_backend import ReadAhead, TensorBackend, weighted_sum
from engine.runtimes.torch.offload.torch_tensors import DTYPES, NAMES, kernels_for, numbers, padded_rows

FEW_ROUTES = 64
"""Maximum routes that are sorted in Python; more are sorted by torch. Python is faster for few."""


@dataclass(frozen=True)
class ExpertTensors:
    """One expert as tensors: gate, up [ffn, hidden] or both in one ``gate_up`` [2*ffn, hidden]; down [hidden, ffn].

    Of an expert without a gate ``up`` is ``gate``."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_up: torch.Tensor | None
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def expert_tensors(part: Callable[[str], torch.Tensor | None]) -> ExpertTensors:
    """The expert whose matrices and biases ``part`` gives by name, or None for a missing one.

    ``gate`` and ``up`` are asked for only if they do not lie together. An expert without a gate has no ``up``.
    """
    gate_up = part("gate_up")
    gate, up = (part("gate"), part("up")) if gate_up is None else gate_up.chunk(2)
    down = part("down")
    assert gate is not None and down is not None
    up = gate if up is None else up
    return ExpertTensors(gate, up, down, gate_up, part("gate_bias"), part("up_bias"), part("down_bias"))


def run_expert(weights: ExpertTensors, gate: Gate, hidden: torch.Tensor) -> torch.Tensor:
    """Run one expert on its tokens: [tokens, hidden] to [tokens, hidden].

    Each matrix is read once, whatever the number of tokens. Biases are added after the product is rounded, as
    transformers does.
    """
    if weights.gate_up is not None:
        gate_out, up_out = linear(hidden, weights.gate_up).chunk(2, dim=-1)
    else:
        gate_out = linear(hidden, weights.gate)
        up_out = gate_out if weights.up is weights.gate else linear(hidden, weights.up)
    if weights.gate_bias is not None and weights.up_bias is not None:
        gate_out, up_out = gate_out + weights.gate_bias, up_out + weights.up_bias
    out = linear(gate(gate_out, up_out), weights.down)
    return out if weights.down_bias is None else out + weights.down_bias


class TorchBackend(TensorBackend):
    """Runs experts with torch. The weights stay views of the mapped file.

    Weights that are packed, or of another dtype than is computed with, are converted each time an expert is used and
    dropped afterwards, so that memory is bounded by one expert. ``gates[layer]``: the family's activation, from the
    library module that this backend replaces.
    """

    def __init__(
        self,
        experts: Experts,
        gates: Mapping[int, Gate],
        dtype: torch.dtype,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(experts, dtype)
        self._gates = gates
        self._read_ahead = read_ahead
        self._count = experts.count
        self._views: dict[tuple[int, int], ExpertTensors] = {}
        self._stored: dict[tuple[int, int], ExpertWeights] = {}
        self._pads = dtype == torch.bfloat16

    @property
    def description(self) -> str:
        in_place = DTYPES.get(self.experts.dtype) == self.dtype
        converted = "" if in_place else f", converted to {NAMES[self.dtype]}"
        return f"local (torch, cpu{converted})"

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`.

        The rounding of a row depends on the number of rows in the product, because oneDNN chooses its kernel by that.
        """
        k = indices.shape[1]
        if self._read_ahead is not None:
            self._read_ahead.will_need(layer, indices)
        flat = indices.reshape(-1).long()
        routes = (flat >= 0).nonzero()[:, 0]
        out = torch.zeros(len(flat), hidden.shape[1], dtype=torch.float32)
        if not len(routes):
            return out
        order, _, sizes = self._by_expert(flat.index_select(0, routes)[:, None])
        chosen = routes.index_select(0, order)
        rows = hidden.index_select(0, chosen // k).to(self.dtype)
        if input_weights is not None:
            rows = rows * input_weights.reshape(-1).index_select(0, chosen)[:, None].to(self.dtype)
        parts = rows.split(list(sizes.values()))
        results = [self._expert(layer, expert, part) for expert, part in zip(sizes, parts, strict=True)]
        out[chosen] = torch.cat(results).float()
        return out

    @property
    def result_dtype(self) -> torch.dtype:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""
        return self.dtype

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""
        if tokens > 1:
            return weighted_sum(routed, tokens, weights, self.dtype)
        out = torch.zeros(1, routed.shape[1], dtype=torch.float32)
        for position in range(routed.shape[0]):
            result = routed[position : position + 1]
            out += result if weights is None else result * weights[:, position, None]
        return out

    def run(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool = False,
    ) -> torch.Tensor:
        """The sum, made in float32 and rounded once, as in the library's own grouped and batched implementations."""
        tokens, k = indices.shape
        if self._read_ahead is not None:
            self._read_ahead.will_need(layer, indices)
        if tokens == 1:
            out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
            for position, expert in enumerate(indices[0].tolist()):
                weight = weights[:, position, None]
                result = self._expert(layer, expert, hidden * weight if scale_input else hidden)
                out += result if scale_input else result * weight
            return out.to(hidden.dtype)
        order, back, sizes = self._by_expert(indices)
        rows = hidden.index_select(0, order // k)
        weight = weights.reshape(-1).index_select(0, order)[:, None]
        parts = (rows * weight if scale_input else rows).split(list(sizes.values()))
        results = torch.cat([self._expert(layer, expert, part) for expert, part in zip(sizes, parts, strict=True)])
        weighted = results if scale_input else results * weight
        return weighted.index_select(0, back).view(tokens, k, -1).sum(dim=1, dtype=torch.float32).to(hidden.dtype)

    def _expert(self, layer: int, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """One expert on the tokens sent to it, [tokens, hidden]."""
        rows = hidden.shape[0]
        self.popularity.add(layer, expert, rows)
        more = padded_rows(rows) - rows if self._pads else 0
        with kernels_for(rows):
            given = pad(hidden, (0, 0, 0, more)) if more else hidden
            return run_expert(self._tensors(layer, expert), self._gates[layer], given)[:rows]

    def _by_expert(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]]:
        """The routes of ``indices`` [tokens, k], counted row by row, sorted by expert.

        Returns the sorted routes, the position of each route among them, and the number of each expert's routes, by
        ascending expert.
        """
        flat = indices.reshape(-1)
        if len(flat) > FEW_ROUTES:
            order = flat.argsort(stable=True)
            counts = flat.bincount(minlength=self._count).tolist()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            return order, back, {expert: count for expert, count in enumerate(counts) if count}
        experts: list[int] = flat.tolist()
        ordered = sorted(range(len(experts)), key=experts.__getitem__)
        places = [0] * len(ordered)
        sizes: dict[int, int] = {}
        for place, route in enumerate(ordered):
            places[route] = place
            sizes[experts[route]] = sizes.get(experts[route], 0) + 1
        return torch.tensor(ordered, device=flat.device), torch.tensor(places, device=flat.device), sizes

    def _tensors(self, layer: int, expert: int) -> ExpertTensors:
        key = layer, expert
        if key in self._views:
            return self._views[key]
        if key not in self._stored:
            self._stored[key] = self.experts.expert(layer, expert)
        stored = self._stored[key]

        def part(name: str) -> torch.Tensor | None:
            there = None if name == "up" and stored.up is stored.gate else getattr(stored, name)
            return None if there is None else numbers(there, self.dtype)

        tensors = expert_tensors(part)
        if all(DTYPES.get(part.dtype) == self.dtype for part in stored.parts):
            self._views[key] = tensors
        return tensors
