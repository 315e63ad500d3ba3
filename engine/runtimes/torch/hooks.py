"""Hooks that measure where a layer's time goes; installed only while somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.moe.timing import Part, Recorder
from engine.runtimes.torch.experts_module import RoutedExperts, ScaledInputBlock


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer that are measured."""

    layer: nn.Module
    attention: nn.Module | None
    router: nn.Module | None


def layer_parts(layers: nn.ModuleList) -> list[LayerParts]:
    """The measured modules of each decoder layer. A router is a module of that name in a layer with routed experts."""
    parts = []
    for layer in layers:
        modules = list(layer.modules())
        has_experts = any(isinstance(module, RoutedExperts | ScaledInputBlock) for module in modules)
        parts.append(
            LayerParts(
                layer=layer,
                attention=_first(modules, lambda name: name.endswith("Attention")),
                router=_first(modules, lambda name: name.endswith("Router")) if has_experts else None,
            )
        )
    return parts


def _first(modules: list[nn.Module], fits: Callable[[str], bool]) -> nn.Module | None:
    return next((module for module in modules if fits(type(module).__name__)), None)


@dataclass
class TimingHooks:
    """Measures the layers of ``parts`` into ``recorder``. :meth:`match` follows ``recorder.enabled``."""

    parts: list[LayerParts]
    recorder: Recorder
    device: torch.device
    handles: list[RemovableHandle] = field(default_factory=list)

    def match(self) -> None:
        """Install or remove the hooks so that they are there exactly while the recorder is enabled."""
        if self.recorder.enabled and not self.handles:
            for index, parts in enumerate(self.parts):
                self._install(index, parts)
        elif self.handles and not self.recorder.enabled:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()

    def _install(self, index: int, parts: LayerParts) -> None:
        if parts.attention is not None:
            self._measure(parts.attention, index, "attention")
        if parts.router is not None:
            self._measure(parts.router, index, "router")
        recorder = self.recorder
        start = inside = 0.0

        def before(module: nn.Module, inputs: Any) -> None:
            nonlocal start, inside
            inside = recorder.measured(index)
            start = self._now()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            total = self._now() - start
            recorder.add(index, "other", max(0.0, total - (recorder.measured(index) - inside)))

        self.handles.append(parts.layer.register_forward_pre_hook(before))
        self.handles.append(parts.layer.register_forward_hook(after))

    def _measure(self, module: nn.Module, index: int, part: Part) -> None:
        start = 0.0

        def before(module: nn.Module, inputs: Any) -> None:
            nonlocal start
            start = self._now()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self.recorder.add(index, part, self._now() - start)

        self.handles.append(module.register_forward_pre_hook(before))
        self.handles.append(module.register_forward_hook(after))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.recorder.clock()
