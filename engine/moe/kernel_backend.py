"""Experts run by the native CPU kernels, straight from the mapped files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.formats.model_files import Experts
from engine.moe.backend import ExpertBackend, LayerCall
from engine.moe.expert_parallel import FLOAT32, Floats, HostRows, Indices, Routes, Words
from engine.moe.kernels.bindings import FORMATS, KernelChoice, load
from engine.moe.kernels.layers import Gate, LayerExperts, layer_experts
from engine.moe.kernels.pool import Pool

KEPT_ROWS = 1024
"""Maximum rows of a results buffer that is kept for the next pass. The buffer of a long prefill is freed."""


class KernelExperts:
    """The experts of a model, or those of them that ``experts`` holds, as functions of addresses.

    ``gates(layer)`` is the activation of a layer's experts; ``choice`` names the instruction set.
    """

    def __init__(self, experts: Experts, gates: Callable[[int], Gate], choice: KernelChoice, pool: Pool) -> None:
        self.experts = experts
        self._gates = gates
        self._choice = choice
        self._pool = pool
        self._native = load()
        self._layers: dict[int, LayerExperts | None] = {}

    @property
    def description(self) -> str:
        """``native avx512_bf16, 2 threads``."""
        threads = "1 thread" if self._pool.threads == 1 else f"{self._pool.threads} threads"
        return f"native {self._choice.name}, {threads}"

    def open(self) -> None:
        """Prepare all layers now instead of when they are first run. Raises ModelError for what cannot be read."""
        for layer in self.experts.layers:
            self._layer(layer)

    def run(
        self,
        layer: int,
        hidden: int,
        indices: int,
        weights: int,
        tokens: int,
        k: int,
        width: int,
        outputs_to: int | None = None,
        sum_to: int | None = None,
        counts_to: int | None = None,
        *,
        scale_input: bool = False,
        extra: Sequence[int] = (),
        reads: bool = False,
    ) -> None:
        """See :meth:`engine.moe.kernels.layers.LayerExperts.run`: all arguments but sizes are addresses.

        ``extra`` experts are run on the first token if no route needs them, for nothing.
        Raises ModelError if an expert is not held here, or memory runs out.
        """
        experts = self._layers[layer] if layer in self._layers else self._layer(layer)
        if experts is None:
            self._run_nothing(layer, indices, tokens * k, extra)
            for address, rows in ((outputs_to, tokens * k), (sum_to, tokens)):
                if address:
                    ctypes.memset(address, 0, rows * width * 4)
            return
        numbers = (ctypes.c_int32 * len(extra))(*extra) if extra else None
        experts.run(
            self._pool,
            hidden,
            indices,
            weights,
            tokens,
            k,
            sum_to=sum_to,
            outputs_to=outputs_to,
            counts_to=counts_to,
            scale_input=scale_input,
            extra=None if numbers is None else ctypes.addressof(numbers),
            extra_count=len(extra),
            reads=reads,
        )

    def weighted_sum(self, outputs: int, weights: int, tokens: int, k: int, width: int, sum_to: int) -> None:
        """The sum [tokens, width] of results [tokens * k, width] and weights [tokens, k], to the bit what :meth:`run`
        adds up. All are addresses of float32."""
        dtype = FORMATS[self.experts.dtype]
        self._native.pllm_weighted_sum(
            self._pool.handle, self._choice.number, dtype, outputs, weights, tokens, k, width, sum_to
        )

    def _layer(self, layer: int) -> LayerExperts | None:
        held = self.experts.held(layer)
        found = layer_experts(self.experts, layer, self._gates(layer), self._choice, held) if len(held) else None
        self._layers[layer] = found
        return found

    def _run_nothing(self, layer: int, indices: int, routes: int, extra: Sequence[int]) -> None:
        numbers = np.frombuffer(ctypes.string_at(indices, routes * 4), np.int32)
        if extra or (numbers >= 0).any():
            raise ModelError(f"This node has no experts of layer {layer}, but is asked to run some.")


class KernelBackend(ExpertBackend[NDArray[Any]]):
    """See :class:`engine.moe.backend.ExpertBackend`. All arrays are numpy's, hidden states and weights float32.

    Routes that :meth:`run` ran are not counted: a machine without others has the native trunk call the kernels itself.
    """

    popularity = None

    def __init__(self, kernels: KernelExperts) -> None:
        self._kernels = kernels
        self.reads = False
        """Whether the tokens of the layers that :meth:`begin` takes are read, not written."""
        self._out: Floats = np.empty((0, 0), np.float32)

    @property
    def description(self) -> str:
        return f"local ({self._kernels.description})"

    @property
    def held(self) -> int:
        experts = self._kernels.experts
        return sum(len(experts.held(layer)) for layer in experts.layers)

    def run(self, layer: int, hidden: Floats, indices: Indices, weights: Floats, scale_input: bool = False) -> Floats:
        return self.sums(self.begin(layer, hidden, indices, weights, scale_input), indices, weights, ())

    def begin(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        scale_input: bool = False,
        rows_too: bool = False,
    ) -> LayerCall[NDArray[Any]]:
        routes, width = Routes(indices, weights), hidden.shape[1]
        rows = hidden if rows_too else None
        return LayerCall(layer, hidden, weights, routes, width, FLOAT32, scale_input, rows, self.reads)

    def begin_on_host(self, layer: int, hidden: HostRows, routes: Routes) -> LayerCall[NDArray[Any]]:
        rows, weights = np.ascontiguousarray(hidden.rows, np.float32), np.ascontiguousarray(routes.weights, np.float32)
        self.reads = hidden.reads
        return self.begin(layer, rows, routes.indices, weights, hidden.scale_input)

    def results(
        self,
        call: LayerCall[NDArray[Any]],
        mine: Indices,
        weights: Floats,
        extra: Sequence[int],
        word: np.dtype[Any] = FLOAT32,
    ) -> Words:
        return self._run(call, mine, weights, extra, self._room(mine.size, call.width), None)

    def sums(self, call: LayerCall[NDArray[Any]], mine: Indices, weights: Floats, extra: Sequence[int]) -> Words:
        return self._run(call, mine, weights, extra, None, np.empty((len(mine), call.width), np.float32))

    def joined(
        self, call: LayerCall[NDArray[Any]], outputs: Words, weights: Floats, word: np.dtype[Any] = FLOAT32
    ) -> Floats:
        tokens, k = weights.shape
        if (
            outputs.shape != (tokens * k, call.width)
            or tokens != len(call.hidden)
            or weights.shape != call.routes.weights.shape
        ):
            raise ModelError(
                f"The exchange gave results {outputs.shape} for {len(call.hidden)} tokens.", kind="internal"
            )
        out = np.empty((tokens, call.width), np.float32)
        shares = np.ones_like(weights) if call.scale_input else weights
        if tokens:
            self._kernels.weighted_sum(
                _address(outputs, np.float32), _address(shares, np.float32), tokens, k, call.width, out.ctypes.data
            )
        return out

    def added(self, call: LayerCall[NDArray[Any]], sums: Sequence[Words]) -> Floats:
        total: Floats = np.array(sums[0]) if sums else np.zeros((len(call.hidden), call.width), np.float32)
        for other in sums[1:]:
            total += other
        return total

    def end_pass(self) -> None:
        """Give the buffer of a long prefill back."""
        if len(self._out) > KEPT_ROWS:
            self._out = np.empty((0, 0), np.float32)

    def close(self) -> None:
        self._out = np.empty((0, 0), np.float32)

    def _run(
        self,
        call: LayerCall[NDArray[Any]],
        mine: Indices,
        weights: Floats,
        extra: Sequence[int],
        outputs: Floats | None,
        sums: Floats | None,
    ) -> Floats:
        tokens, k = mine.shape
        made = outputs if outputs is not None else sums
        assert made is not None
        if tokens:
            routes = np.ascontiguousarray(mine, np.int32)
            self._kernels.run(
                call.layer,
                _address(call.hidden, np.float32),
                _address(routes, np.int32),
                _address(weights, np.float32),
                tokens,
                k,
                call.width,
                outputs_to=None if outputs is None else _address(outputs, np.float32),
                sum_to=None if sums is None else _address(sums, np.float32),
                scale_input=call.scale_input,
                extra=extra,
                reads=call.reads,
            )
        return made

    def _room(self, rows: int, width: int) -> Floats:
        """The buffer of results, which the next layer overwrites."""
        if self._out.shape != (rows, width):
            self._out = np.empty((rows, width), np.float32)
        return self._out


def _address(array: NDArray[Any], kind: type[np.float32] | type[np.int32]) -> int:
    """Address of the numbers of ``array``. Raises ModelError if they are not of ``kind`` or not contiguous."""
    if array.dtype != kind or not array.flags.c_contiguous:
        raise ModelError(f"An exchange hands out {array.dtype} where {np.dtype(kind)} is expected.", kind="internal")
    return int(array.ctypes.data)
