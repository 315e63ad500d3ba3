"""A forward pass whose routed experts are run by a ring. It is interrupted at every MoE layer for the ring's
executor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import Floats, Indices
from engine.moe.kernel_backend import KernelBackend
from engine.runtimes.native.bindings import MEANING, Cut, Pass, native
from engine.runtimes.native.shape import Shape

KEPT_PLACES = 16
"""Maximum cached arrays over the trunk's workspace. Making an array takes longer than reading it."""

_FLOATS, _NUMBERS = np.dtype(np.float32), np.dtype(np.int32)


class RingTrunk:
    """Runs passes of a trunk whose routed experts are in a ring. Not thread-safe."""

    def __init__(
        self,
        executor: RingExecutor[NDArray[Any]],
        backend: KernelBackend,
        layers: tuple[int, ...],
        shape: Shape,
        logits: bool,
    ) -> None:
        """``executor`` runs the experts of ``layers`` on ``backend``.

        ``logits``: whether passes compute the requested logits, or only the states that lead to them.
        """
        self.logits = logits
        self._executor = executor
        self._backend = backend
        self._layers = layers
        self._top_k = shape.top_k
        self._width = shape.latents or shape.hidden
        self._scales_input = shape.routing.scales_input
        self._native = native()
        self._cut = Cut()
        self._places: dict[tuple[int, int, int], NDArray[Any]] = {}

    def run(
        self,
        pool: int,
        trunk: int,
        call: Pass,
        shared: Container[int],
        check: Callable[[], None] | None,
        begins: bool,
    ) -> None:
        """Run one pass of the trunk at the address ``trunk`` on the pool at the address ``pool``, with logits if they
        are wanted.

        Without :attr:`logits` it ends after the last layer with experts. ``shared``: layers with a shared expert.
        ``check`` may raise to end the pass. It is called where the other nodes can be notified: between the exchanges,
        and before the first one if the operation ``begins`` with this pass. Raises ModelError, and what the exchange
        raises.
        """
        address, cut, layers = ctypes.addressof(call), self._cut, int(call.last_layer)
        expected, done, first = self._layers, 0, 0
        while True:
            call.first_layer, call.last_layer = first, layers
            if check is not None and (done > 0 or begins) and done < len(expected):
                check()
                call.last_layer = min(first + 1, layers)
            _checked(self._native.pllm_trunk_to_routes(pool, trunk, address, ctypes.addressof(cut)))
            if cut.layer < 0:
                first = int(call.last_layer)
                if first == layers:
                    break
                continue
            layer = int(cut.layer)
            meanwhile = None
            if layer in shared:
                meanwhile = partial(self._run_shared, pool, trunk, address, layer)
            self._run_experts(layer, int(cut.rows), meanwhile)
            done, first = done + 1, layer + 1
            if first == layers and not self.logits:
                break
        for layer in expected[done:]:
            # No node needs the result of this layer, and all of them omit it, so they stay in step.
            self._run_experts(layer, 0, None)
        self._backend.end_pass()

    def _run_experts(self, layer: int, rows: int, meanwhile: Callable[[], None] | None) -> None:
        """Run a layer's experts, and write their weighted sum where the trunk expects it."""
        cut, k, width = self._cut, self._top_k, self._width
        self._backend.reads = bool(cut.reads)
        hidden = self._at(cut.hidden, rows, width, _FLOATS)
        # Copies: the exchange keeps them while the shared expert is run.
        indices: Indices = self._at(cut.indices, rows, k, _NUMBERS).copy()
        weights: Floats = self._at(cut.weights, rows, k, _FLOATS).copy()
        summed = self._executor.run(layer, hidden, indices, weights, self._scales_input, meanwhile)
        if rows:
            self._at(cut.sum, rows, width, _FLOATS)[:] = summed

    def _at(self, address: int | None, rows: int, width: int, kind: np.dtype[Any]) -> NDArray[Any]:
        """The array [rows, width] at ``address``, in place. Cached: the trunk uses few addresses again and again."""
        if not rows or not address:
            return np.empty((0, width), kind)
        place = (address, rows, width)
        array = self._places.get(place)
        if array is None:
            if len(self._places) >= KEPT_PLACES:
                self._places.clear()
            words = memoryview((ctypes.c_uint32 * (rows * width)).from_address(address))
            array = self._places[place] = np.frombuffer(words, kind).reshape(rows, width)
        return array

    def _run_shared(self, pool: int, trunk: int, call: int, layer: int) -> None:
        _checked(self._native.pllm_trunk_shared(pool, trunk, call, layer))


def _checked(code: int) -> None:
    if code:
        raise ModelError(f"The native trunk could not run: {MEANING.get(code, code)}.", kind="internal")
