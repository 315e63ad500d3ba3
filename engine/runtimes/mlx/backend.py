"""Experts in mlx's memory: mlx-lm's ``SwitchGLU`` modules, and which of a layer's experts they contain.

In a ring, routes and results are copied to the host, where the exchange runs. With few routes the experts are started
before the host knows the routes, so that it waits for the GPU once per MoE layer. With many routes the host first
selects those that run here, and waits twice. The results of all machines are added up by the same expression as on one
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.backend import ExpertBackend, LayerCall
from engine.moe.expert_parallel import Floats, HostRows, Indices, Routes, Words
from engine.planning.placement import Placement

Array = Any

SORTED_FROM = 64
"""Minimum number of routes that mlx-lm's experts sort, which may choose another kernel."""
_WORDS: dict[Any, np.dtype[Any]] = {
    mx.float32: np.dtype(np.float32),
    mx.bfloat16: np.dtype(np.uint16),
    mx.float16: np.dtype(np.uint16),
}


@dataclass(slots=True)
class _MlxCall(LayerCall[Array]):
    """A call of the backend.

    ``dtype``: that of the experts' results. ``ready`` [tokens * k, width]: results of the experts that are here, if
    they were run together with the router; other rows are meaningless. They are float32 if the hidden states are wanted
    on the host, where results are sent as such.
    """

    dtype: Any = None
    ready: Words | None = None


class MlxBackend(ExpertBackend[Array]):
    """See :class:`engine.moe.backend.ExpertBackend`. :meth:`run` takes hidden states [..., width].

    ``experts[layer]``: a ``SwitchGLU`` of the experts of that layer that are here, ascending; layers without any are
    absent. ``slots[layer]``: the position of each expert in it; None: all are here.
    """

    popularity = None

    def __init__(
        self, experts: Mapping[int, Any], device: str, slots: Mapping[int, NDArray[np.int32]] | None = None
    ) -> None:
        self._experts = dict(experts)
        self._slots = slots or {}
        self._device = device
        self._dtypes: dict[Any, Any] = {}
        self._places: dict[int, Array] = {}
        """``slots`` of the layers in mlx's memory."""

    @property
    def description(self) -> str:
        return f"local (mlx, {self._device})"

    @property
    def held(self) -> int:
        return sum(int(tree_flatten(each.parameters())[0][1].shape[0]) for each in self._experts.values())

    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, scale_input: bool = False) -> Array:
        if scale_input:
            raise _scales()
        return _weighted_sum(self._experts[layer](hidden, indices), weights)

    def begin(
        self,
        layer: int,
        hidden: Array,
        indices: Array,
        weights: Array,
        scale_input: bool = False,
        rows_too: bool = False,
    ) -> _MlxCall:
        if scale_input:
            raise _scales()
        # Everything for the host is converted first, so that the GPU is waited for once here.
        routes, scales = indices.astype(mx.int32), weights.astype(mx.float32)
        floats = hidden.astype(mx.float32) if rows_too else hidden
        dtype = self._result_dtype(hidden.dtype)
        outputs = self._at_once(layer, hidden, routes.reshape(-1), mx.float32 if rows_too else dtype)
        mx.eval(hidden, routes, scales, floats, *outputs)
        chosen = np.array(routes).reshape(-1, indices.shape[-1])
        shares = np.array(scales).reshape(chosen.shape)
        rows = np.array(floats) if rows_too else None
        ready = np.array(outputs[0]) if outputs else None
        width, word = int(hidden.shape[1]), _WORDS[dtype]
        return _MlxCall(
            layer, hidden, weights, Routes(chosen, shares), width, word, rows=rows, dtype=dtype, ready=ready
        )

    def _at_once(self, layer: int, hidden: Array, routes: Array, dtype: Any) -> list[Array]:
        """Unevaluated results of the ``routes`` [tokens * k] whose experts are here, as words.

        Empty if there are too many routes, or no experts of the layer here. A route of another machine uses an expert
        of a route here, whose weights are read anyway.
        """
        if layer not in self._experts or routes.size >= SORTED_FROM:
            return []
        places = self._places.get(layer)
        if places is None:
            places = self._places[layer] = mx.array(self._slots[layer])
        slots = places[routes]
        slots = mx.where(slots < 0, mx.maximum(mx.max(slots), 0), slots)
        tokens = mx.array(np.repeat(np.arange(hidden.shape[0], dtype=np.int32), routes.size // hidden.shape[0]))
        found = self._experts[layer](hidden[tokens], slots[:, None])[:, 0].astype(dtype)
        return [found if dtype == mx.float32 else found.view(mx.uint16)]

    def begin_on_host(self, layer: int, hidden: HostRows, routes: Routes) -> _MlxCall:
        if hidden.scale_input:
            raise _scales()
        dtype = self._computes_in
        rows, weights = mx.array(hidden.rows).astype(dtype), mx.array(routes.weights)
        return _MlxCall(layer, rows, weights, routes, int(hidden.rows.shape[1]), _WORDS[dtype], dtype=dtype)

    def results(
        self, call: LayerCall[Array], mine: Indices, weights: Floats, extra: Sequence[int], word: np.dtype[Any]
    ) -> Words:
        dtype = _dtype_of(call)
        ready = self._ready(call, weights, extra)
        if ready is not None and ready.dtype == word:
            return ready
        found = self.arrays(call.layer, call.hidden, mine, dtype, extra)
        return _to_words(found if word == _WORDS[dtype] else found.astype(mx.float32))

    def _ready(self, call: LayerCall[Array], weights: Floats, extra: Sequence[int]) -> Words | None:
        """The results that were run with the router, unless the routes have changed. ``extra`` experts are then started
        apart."""
        assert isinstance(call, _MlxCall)
        if call.ready is None or weights is not call.routes.weights:
            return None
        if extra:
            self.arrays(call.layer, call.hidden, np.full_like(call.routes.indices, -1), call.dtype, extra)
        return call.ready

    def sums(self, call: LayerCall[Array], mine: Indices, weights: Floats, extra: Sequence[int]) -> Words:
        tokens, k = mine.shape
        ready = self._ready(call, weights, extra)
        if ready is not None:
            outputs = _floats(ready, _dtype_of(call)).reshape(tokens, k, -1)
            sums: Words = (np.where(mine[..., None] >= 0, outputs, np.float32(0)) * weights[..., None]).sum(axis=1)
            return sums
        results = self.arrays(call.layer, call.hidden, mine, _dtype_of(call), extra)
        shares = mx.array(np.where(mine >= 0, weights, np.float32(0)))
        return _to_words(_weighted_sum(results.reshape(tokens, k, -1).astype(mx.float32), shares))

    def joined(self, call: LayerCall[Array], outputs: Words, weights: Floats, word: np.dtype[Any]) -> Array:
        dtype = _dtype_of(call)
        shares = call.weights
        if weights is not call.routes.weights:
            shares = mx.array(weights).astype(shares.dtype).reshape(shares.shape)
        found = _from_words(outputs, dtype if word == _WORDS[dtype] else mx.float32).astype(dtype)
        return _weighted_sum(found.reshape(*shares.shape, -1), shares).reshape(call.hidden.shape)

    def added(self, call: LayerCall[Array], sums: Sequence[Words]) -> Array:
        total = mx.array(sums[0]) if sums else mx.zeros(call.hidden.shape, mx.float32)
        for other in sums[1:]:
            total = total + mx.array(other)
        return total.astype(_dtype_of(call))

    def run_here(self, layer: int, hidden: Array, indices: Array, weights: Array) -> Array:
        """Do this machine's share of a ring's layer, for measuring. The result is meaningless."""
        call = self.begin(layer, hidden, indices, weights)
        chosen = call.routes.indices
        held = np.where(self._slots[layer][chosen] >= 0, chosen, np.int32(-1))
        results = self.results(call, held, call.routes.weights, (), call.word)
        return self.joined(call, results, call.routes.weights, call.word)

    def wait(self, result: Array | None = None) -> None:
        if result is not None:
            mx.eval(result)

    def arrays(self, layer: int, rows: Array, indices: Indices, dtype: Any, extra: Sequence[int] = ()) -> Array:
        """The results [tokens * k, width] of the routes that are not -1, with zeros elsewhere."""
        chosen = indices.reshape(-1)
        routes = np.flatnonzero(chosen >= 0)
        slots = self._slots[layer]
        wanted = [slots[chosen[routes]], slots[list(extra)]]
        tokens = [routes // indices.shape[1], np.zeros(len(extra), np.intp)]
        out = mx.zeros((len(chosen), rows.shape[1]), dtype)
        number = len(routes) + len(extra)
        if not number:
            return out
        if len(chosen) >= SORTED_FROM > number:
            # One machine would have sorted these routes.
            wanted.append(np.full(SORTED_FROM - number, wanted[0][0] if len(routes) else wanted[1][0], np.int32))
            tokens.append(np.zeros(SORTED_FROM - number, np.intp))
        given = rows[mx.array(np.concatenate(tokens).astype(np.int32))]
        outputs = self._experts[layer](given, mx.array(np.concatenate(wanted).astype(np.int32))[:, None])[:, 0]
        if len(routes):
            out[mx.array(routes.astype(np.int32))] = outputs[: len(routes)]
        else:
            # The result is not used: the experts run so that their memory stays wired.
            mx.async_eval(outputs)  # type: ignore[no-untyped-call]
        return out

    def close(self) -> None:
        """Drop the experts."""
        self._experts.clear()

    @property
    def _computes_in(self) -> Any:
        """The dtype of the experts or, if they are quantised, of their scales."""
        for experts in self._experts.values():
            linear = experts.down_proj
            scales = linear.get("scales")
            kept = linear["weight"].dtype if scales is None else scales.dtype
            return kept if kept in _WORDS else mx.float32
        return mx.float32

    def _result_dtype(self, hidden: Any) -> Any:
        """The dtype of an expert's results for hidden states of that dtype, equal on all nodes with experts."""
        dtype = self._dtypes.get(hidden)
        if dtype is None:
            dtype = hidden
            for experts in self._experts.values():
                scales = experts.down_proj.get("scales")
                kept = experts.down_proj["weight"].dtype if scales is None else scales.dtype
                if kept in _WORDS:
                    dtype = mx.result_type(mx.zeros(1, hidden), mx.zeros(1, kept))
                break
            self._dtypes[hidden] = dtype
        return dtype


def _dtype_of(call: LayerCall[Array]) -> Any:
    assert isinstance(call, _MlxCall)
    return call.dtype


def _scales() -> ModelError:
    return ModelError("mlx runs no family that scales its experts' inputs; choose the torch runtime.")


def _weighted_sum(outputs: Array, weights: Array) -> Array:
    """The weighted sum [..., hidden] of ``outputs`` [..., k, hidden] of k experts with ``weights`` [..., k]."""
    return (outputs * weights[..., None]).sum(axis=-2).astype(outputs.dtype)


def slots_of(placement: Placement, rank: int, layer: int) -> NDArray[np.int32]:
    """The position of each expert of ``layer`` among those that ``rank`` holds; -1 for the others."""
    slots = np.full(placement.experts, -1, np.int32)
    held = list(placement.held(rank, layer))
    slots[held] = np.arange(len(held))
    return slots


def _to_words(array: Array) -> Words:
    words: Words = np.array(array if array.dtype == mx.float32 else array.view(mx.uint16))
    return words


def _floats(words: Words, dtype: Any) -> Floats:
    """The numbers of ``words``, which are of ``dtype`` or float32."""
    if words.dtype == np.float32:
        return words
    if dtype == mx.float16:
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _from_words(words: Words, dtype: Any) -> Array:
    array = mx.array(words)
    return array if dtype == mx.float32 else array.view(dtype)
