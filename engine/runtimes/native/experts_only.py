"""The routed experts that one node of a ring runs. A node in central mode is no more than these; in the other modes its
trunk asks them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.files import Experts, FileMapping, ModelFiles
from engine.models.opening import open_model
from engine.moe.expert_parallel import Indices
from engine.moe.kernels.bindings import WEIGHT_DTYPES, KernelChoice, choose, load
from engine.moe.kernels.file_guard import FileGuard
from engine.moe.kernels.layers import Gate, LayerExperts, layer_experts
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.moe.rank_context import RankContext
from engine.runtimes.native.dtypes import compute_dtype
from engine.runtimes.native.shape import ACTIVATIONS, Activation, why_not_shape
from engine.runtimes.protocol import LoadedExperts

Rows = NDArray[np.float32]


class HeldExperts:
    """The experts of a rank context, ready to be run. The weights stay in the mapped files."""

    def __init__(
        self,
        experts: Experts,
        context: RankContext,
        activation: Activation,
        choice: KernelChoice,
        pool: Pool,
        width: int,
    ) -> None:
        """``width`` numbers are a token's hidden state.

        Raises ModelError if the rank context's placement is of another model, or an expert of this node is missing."""
        check_placement(experts, context)
        self._native = load()
        self._pool = pool
        self._choice = choice
        self.width = width
        self._dtype = WEIGHT_DTYPES[experts.dtype]
        self.layers = tuple(experts.layers)
        self.count = experts.count
        self._by_layer: dict[int, LayerExperts] = {}
        for layer in self.layers:
            held = context.placement.held(context.rank, layer)
            if held:
                self._by_layer[layer] = layer_experts(experts, layer, Gate(activation), choice, held)

    @property
    def held(self) -> int:
        """(layer, expert) pairs."""
        return sum(layer.held for layer in self._by_layer.values())

    def run(
        self,
        layer: int,
        hidden: int,
        indices: Indices,
        weights: int,
        extra: Sequence[int],
        outputs_to: int = 0,
        sum_to: int = 0,
        scale_input: bool = False,
    ) -> None:
        """Run the routes ``indices`` [tokens, k] that are not -1: un-weighted results [tokens * k, width], 0 for -1, to
        the address ``outputs_to``, or their weighted sum [tokens, width] to ``sum_to``.

        ``hidden`` is the address of float32 [tokens, width], ``weights`` that of float32 [tokens, k]. ``extra`` experts
        are run on the first token, for nothing. ``scale_input``: the weights multiply the experts' inputs.
        Raises ModelError if an expert is not held here.
        """
        tokens, k = indices.shape
        found = self._by_layer.get(layer)
        if found is None:
            self._run_nothing(layer, indices, extra, (outputs_to, tokens * k), (sum_to, tokens))
            return
        numbers = (ctypes.c_int32 * len(extra))(*extra) if extra else None
        routes = np.ascontiguousarray(indices, np.int32)
        found.run(
            self._pool,
            hidden,
            routes.ctypes.data,
            weights,
            tokens,
            k,
            sum_to=sum_to or None,
            outputs_to=outputs_to or None,
            scale_input=scale_input,
            extra=None if numbers is None else ctypes.addressof(numbers),
            extra_count=len(extra),
        )

    def _run_nothing(self, layer: int, indices: Indices, extra: Sequence[int], *results: tuple[int, int]) -> None:
        if extra or (indices >= 0).any():
            raise ModelError(f"This node has no experts of layer {layer}, but is asked to run some.")
        for address, rows in results:
            if address:
                ctypes.memset(address, 0, rows * self.width * 4)

    def weighted_sum(self, outputs: int, weights: int, tokens: int, k: int, width: int, sum_to: int) -> None:
        """The sum [tokens, width] of results [tokens * k, width] and weights [tokens, k], to the bit what one machine
        adds up. All are addresses of float32."""
        self._native.pllm_weighted_sum(
            self._pool.handle, self._choice.number, self._dtype, outputs, weights, tokens, k, width, sum_to
        )


def check_placement(experts: Experts, context: RankContext) -> None:
    """Raises ModelError if ``context``'s placement does not fit ``experts``, or they lack what it gives this node."""
    placement = context.placement
    if placement.layers != tuple(experts.layers) or placement.experts != experts.count:
        raise ModelError(
            f"The ring's plan is for {len(placement.layers)} layers of {placement.experts} experts, and the model here "
            f"has {len(experts.layers)} of {experts.count}; the machines have different models."
        )
    for layer in placement.layers:
        missing = set(placement.held(context.rank, layer)) - set(experts.held(layer))
        if missing:
            raise ModelError(
                f"Expert {min(missing)} of layer {layer} is this node's by the ring's plan, but is not in its files; "
                "form the ring again."
            )


class ExpertsOnly(LoadedExperts):
    """A node's experts without a trunk. One thread at a time."""

    def __init__(self, files: ModelFiles, held: HeldExperts, width: int, description: str) -> None:
        """``width`` numbers are a token's hidden state."""
        self._files: ModelFiles | None = files
        self._held: HeldExperts | None = held
        self._guard = FileGuard(files.mapped_files)
        self.width = width
        self.description = description

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        return () if self._files is None else self._files.mapped_files

    @property
    def count(self) -> int:
        """(layer, expert) pairs held."""
        return 0 if self._held is None else self._held.held

    def run_experts(
        self,
        layer: int,
        hidden: Rows,
        indices: Indices,
        weights: Rows,
        extra: Sequence[int] = (),
        scale: bool = False,
    ) -> Rows:
        """Every route's un-weighted result [tokens * k, width], 0 for routes of -1.

        ``hidden`` [tokens, width]; ``indices``, ``weights`` [tokens, k]; ``scale``: the inputs are multiplied by the
        weights. ``extra`` experts are run on the first token as well, for nothing.
        Raises ModelError if the shapes do not fit together, an expert is not held here, or the files were changed.
        """
        if self._held is None or self._files is None:
            raise ModelError("The experts are closed; load them again.", kind="internal")
        if hidden.ndim != 2 or indices.shape != weights.shape or indices.ndim != 2:
            raise ModelError(f"Hidden states {hidden.shape} and routes {indices.shape} do not fit together.")
        if hidden.shape != (len(indices), self.width):
            raise ModelError(f"Hidden states {hidden.shape} came for {len(indices)} tokens of {self.width} numbers.")
        rows = np.ascontiguousarray(hidden, np.float32)
        outputs = np.empty((indices.size, self.width), np.float32)
        shares = np.ascontiguousarray(weights, np.float32)
        if len(rows):
            address, to = rows.ctypes.data, outputs.ctypes.data
            self._held.run(layer, address, indices, shares.ctypes.data, extra, outputs_to=to, scale_input=scale)
        if self._files.experts is not None:
            self._files.experts.check_unchanged(layer)
        self._guard.check()
        return outputs

    def close(self) -> None:
        """Drop the weights. Nothing runs afterwards."""
        self._held = None
        self._guard.close()
        self._files = None


def load_experts(folder: Path, request: Load, context: RankContext) -> ExpertsOnly:
    """The experts of ``context`` from the model, or the share of one, in ``folder``.

    Raises ModelError if the kernels cannot run them, saying why, or the rank context's plan does not fit.
    """
    files = open_model(folder)
    experts = files.experts
    if experts is None:
        raise ModelError(f"{request.model} has no experts to share; it runs on one machine.", kind="bad-input")
    reason = why_not_shape(files.config)
    if reason is None and experts.dtype not in WEIGHT_DTYPES:
        reason = f"the experts are stored as {experts.dtype}"
    if reason is not None:
        raise ModelError(
            f"The native runtime cannot run the experts of {request.model}: {reason}; choose the runtime torch.",
            kind="bad-input",
        )
    choice = choose(compute_dtype(files, request))
    if not choice.native:
        raise ModelError(f"The native kernels cannot be used: {choice.reason}; choose the runtime torch.")
    pool = shared_pool(physical_cores() if request.cpu_threads is None else request.cpu_threads)
    width = int(files.config["hidden_size"])
    activation = ACTIVATIONS[files.config.get("hidden_act", "silu")]
    held = HeldExperts(experts, context, activation, choice, pool, width)
    description = f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}, native {choice.name}, cpu)"
    return ExpertsOnly(files, held, width, description)
