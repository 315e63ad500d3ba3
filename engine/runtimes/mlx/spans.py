"""Times inside a step: mx.eval barriers around attention, router and experts, only while steps are measured.

mlx is lazy: without a barrier a span would time only the building of a graph. The barriers take time themselves, so the
timed modules are installed for a measured step and removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.moe.timing import Part, Recorder

Array = Any


class Spans:
    """The spans of one model's steps. ``active``: the current step is measured."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.active = False
        self.inside = 0.0
        """Seconds recorded since the current layer began."""

    @property
    def clock(self) -> Callable[[], float]:
        return self.recorder.clock

    def run(self, layer: int, part: Part, compute: Callable[[], Any]) -> Any:
        """``compute()``; while active, evaluated and timed as ``part`` of ``layer`` (its inputs must be evaluated)."""
        if not self.active:
            return compute()
        start = self.clock()
        result = compute()
        mx.eval(result)
        seconds = self.clock() - start
        self.recorder.add(layer, part, seconds)
        self.inside += seconds
        return result

    def routes(self, layer: int, indices: Array, experts: int) -> None:
        """Counts the routes of a step; ``indices`` [..., k]."""
        if self.active:
            counts = np.bincount(np.array(indices.astype(mx.int32)).ravel(), minlength=experts)
            self.recorder.add_routes(layer, counts.tolist())


class _Timed(nn.Module):  # type: ignore[misc]
    """Replaces ``inner`` and behaves like it."""

    def __init__(self, inner: Any, layer: int, spans: Spans) -> None:
        super().__init__()
        self.inner = inner
        self._layer = layer
        self._spans = spans

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if "inner" not in self:
            raise AttributeError(name)
        return getattr(self["inner"], name)


class TimedPart(_Timed):
    """Times ``part`` of a layer."""

    def __init__(self, inner: Any, layer: int, spans: Spans, part: Part) -> None:
        super().__init__(inner, layer, spans)
        self._part = part

    def __call__(self, hidden: Array, *args: Any, **options: Any) -> Any:
        mx.eval(hidden)
        return self._spans.run(self._layer, self._part, lambda: self.inner(hidden, *args, **options))


class TimedLayer(_Timed):
    """Times a whole layer. ``other`` is its time beyond the named parts."""

    def __call__(self, hidden: Array, *args: Any, **options: Any) -> Any:
        spans = self._spans
        mx.eval(hidden)
        spans.inside = 0.0
        start = spans.clock()
        result = self.inner(hidden, *args, **options)
        mx.eval(result)
        spans.recorder.add(self._layer, "other", max(0.0, spans.clock() - start - spans.inside))
        return result


def install(layers: list[Any], attentions: Sequence[str], spans: Spans) -> None:
    """Install timed modules in ``layers`` (a backbone's own list). ``attentions`` are the names of that attribute."""
    for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        for name, part in _parts(layer, attention):
            setattr(layer, name, TimedPart(getattr(layer, name), index, spans, part))
        layers[index] = TimedLayer(layer, index, spans)


def remove(layers: list[Any], attentions: Sequence[str]) -> None:
    """Remove the modules of :func:`install`."""
    for index, (timed, attention) in enumerate(zip(layers, attentions, strict=True)):
        layer = timed["inner"]
        for name, _ in _parts(layer, attention):
            setattr(layer, name, getattr(layer, name)["inner"])
        layers[index] = layer


def _parts(layer: Any, attention: str) -> list[tuple[str, Part]]:
    """The attributes of ``layer`` that are timed; Gemma's layers have their router themselves."""
    routers: list[tuple[str, Part]] = [("router", "router")] if "router" in layer else []
    return [(attention, "attention"), *routers]
