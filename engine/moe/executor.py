"""Executors: a trunk has them compute the weighted sum of a layer's routed experts, on this machine or in a ring.

An executor uses a backend, which knows where the experts are and how to run them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic

import numpy as np

from engine.errors import ModelError
from engine.moe.backend import Array, ExpertBackend, LayerCall
from engine.moe.expert_parallel import (
    FLOAT32,
    Floats,
    Gathered,
    HostRows,
    Indices,
    LayerExchange,
    RankContext,
    Words,
    run_calls,
)
from engine.moe.popularity import Popularity
from engine.moe.timing import Recorder

FEW_ROUTES = 64
"""Maximum number of routes that are counted in Python, which is faster than numpy for few of them."""


class Executor(ABC, Generic[Array]):
    """Turns hidden states and routes into the experts' weighted sum. Not thread-safe."""

    backend: ExpertBackend[Array]

    in_ring: bool
    """Whether other machines take part in every layer, so that it must be run even without tokens."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A short description of how the experts run."""

    @property
    @abstractmethod
    def popularity(self) -> Popularity | None:
        """The number of routes to each expert since the model was loaded, on any machine; None if not counted."""

    @abstractmethod
    def run(
        self,
        layer: int,
        hidden: Array,
        indices: Array,
        weights: Array,
        scale_input: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Array:
        """The weighted sum of the experts of ``layer``, [tokens, width] in the dtype of ``hidden`` [tokens, width].

        ``indices`` [tokens, k] are the experts of each token, distinct within a token; ``weights`` [tokens, k] are in
        the model's dtype or float32. ``scale_input``: the weights multiply an expert's input. ``meanwhile`` is work of
        the trunk that a ring's executor does while it waits for other machines; other executors do not call it.
        """


class LocalExecutor(Executor[Array]):
    """The executor of a machine that has all experts."""

    in_ring = False

    def __init__(self, backend: ExpertBackend[Array], recorder: Recorder) -> None:
        self.backend = backend
        self._recorder = recorder

    @property
    def description(self) -> str:
        return self.backend.description

    @property
    def popularity(self) -> Popularity | None:
        return self.backend.popularity

    def run(
        self,
        layer: int,
        hidden: Array,
        indices: Array,
        weights: Array,
        scale_input: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Array:
        backend, recorder, counted = self.backend, self._recorder, self.backend.popularity
        if not recorder.enabled:
            return backend.run(layer, hidden, indices, weights, scale_input)
        before = () if counted is None else counted.counts(layer)
        backend.wait()
        started = recorder.clock()
        out = backend.run(layer, hidden, indices, weights, scale_input)
        if backend.wait_part != "experts":
            begun = recorder.clock()
            recorder.add(layer, "experts", begun - started)
            started = begun
        backend.wait(out)
        recorder.add(layer, backend.wait_part, recorder.clock() - started)
        if counted is not None:
            after = counted.counts(layer)
            recorder.add_routes(layer, [new - old for new, old in zip(after, before, strict=True)])
        return out


class RingExecutor(Executor[Array]):
    """The executor of a node of a ring, which runs the experts of ``context`` and gets other results by ``exchange``.

    In exact mode unweighted results are exchanged in the backend's dtype, and the sum equals that of one machine to the
    bit. In central mode they are exchanged as float32. In fast mode every machine's weighted sum is exchanged.
    """

    in_ring = True

    def __init__(
        self,
        backend: ExpertBackend[Array],
        exchange: LayerExchange,
        context: RankContext,
        layers: Iterable[int],
        experts: int,
        recorder: Recorder,
    ) -> None:
        """``layers`` have ``experts`` routed experts each. The exchange gets ``recorder``, too."""
        self.backend = backend
        self._exchange = exchange
        self._context = context
        self._popularity = Popularity(layers, experts)
        self._experts = experts
        self._recorder = recorder
        exchange.recorder = recorder

    @property
    def description(self) -> str:
        context = self._context
        return f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}; {self.backend.description})"

    @property
    def popularity(self) -> Popularity:
        """The popularity of all routes, on any machine."""
        return self._popularity

    def run(
        self,
        layer: int,
        hidden: Array,
        indices: Array,
        weights: Array,
        scale_input: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Array:
        """See :class:`Executor`. Raises what the exchange raises, PeerLost above all.

        What ``meanwhile`` raises is raised after the exchange, so that the nodes stay in step.
        """
        backend, exchange, recorder = self.backend, self._exchange, self._recorder
        began = recorder.clock() if recorder.enabled else 0.0
        call = backend.begin(layer, hidden, indices, weights, scale_input, exchange.needs_hidden)
        if recorder.enabled:
            # A backend may have run the experts already.
            recorder.add(layer, "experts", recorder.clock() - began)
        rows = None if call.rows is None else HostRows(call.rows, scale_input, call.reads)
        problem: BaseException | None = None
        routes = call.routes
        while True:
            calls = exchange.assign(layer, routes, rows, mended=routes is not call.routes)
            try:
                mine = run_calls(calls, partial(self._contribution, call, routes.weights))
            except BaseException as error:
                exchange.leave(error)
                raise
            exchange.send(mine, call.width, self._word(call))
            if meanwhile is not None:
                try:
                    meanwhile()
                except BaseException as error:
                    problem = error
                meanwhile = None
            received = exchange.receive()
            if isinstance(received, Gathered):
                break
            routes = received
        if problem is not None:
            raise problem
        return self._summed(call, received)

    def _word(self, call: LayerCall[Array]) -> np.dtype[Any]:
        return call.word if self._context.mode == "exact" else FLOAT32

    def _contribution(self, call: LayerCall[Array], weights: Floats, mine: Indices, extra: tuple[int, ...]) -> Words:
        """This machine's contribution to a layer."""
        recorder, measured = self._recorder, self._recorder.enabled
        began = recorder.clock() if measured else 0.0
        if self._context.mode == "fast":
            out = self.backend.sums(call, mine, weights, extra)
        else:
            out = self.backend.results(call, mine, weights, extra, self._word(call))
        if measured:
            recorder.add(call.layer, "experts", recorder.clock() - began)
        return out

    def _summed(self, call: LayerCall[Array], gathered: Gathered) -> Array:
        began = self._recorder.clock()
        self._count(call.layer, gathered.indices)
        if gathered.outputs is None:
            out = self.backend.added(call, gathered.sums)
        else:
            out = self.backend.joined(call, gathered.outputs, gathered.weights, self._word(call))
        if self._recorder.enabled:
            self.backend.wait(out)
            self._recorder.add(call.layer, "experts", self._recorder.clock() - began)
        return out

    def _count(self, layer: int, indices: Indices) -> None:
        """Count all routes of a layer. Raises ModelError for an expert that no layer has."""
        if indices.size <= FEW_ROUTES:
            counts = dict.fromkeys(chosen := indices.reshape(-1).tolist(), 0)
            for expert in chosen:
                counts[expert] += 1
        else:
            numbers, sizes = np.unique(indices, return_counts=True)
            counts = dict(zip(numbers.tolist(), sizes.tolist(), strict=True))
        if counts and not 0 <= min(counts) <= max(counts) < self._experts:
            raise ModelError(f"The exchange gave routes to experts that layer {layer} does not have.", kind="internal")
        for expert, count in counts.items():
            self._popularity.add(layer, expert, count)
        if self._recorder.enabled:
            self._recorder.add_routes(layer, [counts.get(expert, 0) for expert in range(self._experts)])
