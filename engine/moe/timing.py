"""Spans per layer: where each token's time goes. Measured only while somebody looks.

A runtime calls :meth:`Recorder.begin_step`, :meth:`Recorder.add` and :meth:`Recorder.end_step` around what it does, and
only if :attr:`Recorder.enabled` is true; the recorder turns that into the frames of :mod:`engine.ipc.messages`.
Seconds go in, milliseconds per token come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from engine.ipc.messages import ExpertMovement, LayerTimes, PhaseTimes, Timing

Part = Literal["attention", "router", "experts", "exchange", "wait", "other"]
PARTS: tuple[Part, ...] = ("attention", "router", "experts", "exchange", "wait", "other")
Phase = Literal["prefill", "decode"]


@dataclass
class MovementSums:
    """What :class:`engine.ipc.messages.ExpertMovement` tells, while it is added up."""

    tokens: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    hits: int = 0
    misses: int = 0
    moved: int = 0
    learned: int = 0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    both_s: float = 0.0
    total_s: float = 0.0

    def frame(self) -> ExpertMovement:
        return ExpertMovement(**asdict(self))


class SharedExperts(Protocol):
    """An executor that shares experts with another device. It adds to :attr:`Recorder.movement` all the time, whether
    or not somebody looks: a few additions per layer."""

    def settle(self) -> None:
        """Add what is still on its way; waits for it."""
        ...

    def resident(self) -> list[list[int]]:
        """Per MoE layer, the experts that are in the device's memory."""
        ...


class _PhaseSums:
    def __init__(self, layers: int) -> None:
        self.parts = [dict.fromkeys(PARTS, 0.0) for _ in range(layers)]
        self.total = 0.0
        self.steps = 0
        self.tokens = 0

    def frame(self) -> PhaseTimes:
        """Per-token milliseconds; empty if nothing was measured."""
        if not self.tokens:
            return PhaseTimes()
        scale = 1000.0 / self.tokens
        layers = [LayerTimes(**{part: seconds * scale for part, seconds in parts.items()}) for parts in self.parts]
        inside = sum(sum(parts.values()) for parts in self.parts)
        return PhaseTimes(
            layers=layers,
            outside_layers=max(0.0, self.total - inside) * scale,
            per_token=self.total * scale,
            steps=self.steps,
            tokens=self.tokens,
        )


class Recorder:
    """Adds up spans per layer and phase, and how often each expert was used.

    One thread at a time. ``layers`` is the number of decoder layers, ``moe_layers`` which of them have routed experts,
    ``experts`` how many each of those has.
    """

    def __init__(
        self, layers: int, moe_layers: Iterable[int], experts: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.enabled = False
        self.sampled = False
        """Measuring waits for a GPU after each part of each layer: whoever switches it on does so for a few steps a
        second only. Set by the runtime."""
        self.clock = clock
        self._layers = layers
        self._moe_layers = list(moe_layers)
        self._experts = experts
        self._shared: SharedExperts | None = None
        self._notices: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything measured (at the start of a turn)."""
        if self._shared is not None:
            self._shared.settle()
        self.movement = MovementSums()
        self._phases: dict[Phase, _PhaseSums] = {
            "prefill": _PhaseSums(self._layers),
            "decode": _PhaseSums(self._layers),
        }
        self._current: _PhaseSums | None = None
        self._step_start = 0.0
        self._use = {layer: [0] * self._experts for layer in self._moe_layers}

    def share(self, shared: SharedExperts | None) -> None:
        """Experts are shared with a device from now on (or no longer): frames tell what is moved and what is there."""
        self._shared = shared

    def notice(self, text: str) -> None:
        """Something the person should see, as one line: it is kept until :meth:`take_notices`."""
        self._notices.append(text)

    def take_notices(self) -> list[str]:
        """The lines that came since this was last asked."""
        taken, self._notices = self._notices, []
        return taken

    def begin_step(self, phase: Phase, tokens: int) -> None:
        """A forward pass over ``tokens`` token positions begins."""
        self._current = self._phases[phase]
        self._current.tokens += tokens
        self._step_start = self.clock()

    def end_step(self) -> None:
        if self._current is not None:
            self._current.total += self.clock() - self._step_start
            self._current.steps += 1
            self._current = None

    def add(self, layer: int, part: Part, seconds: float) -> None:
        """``part`` of ``layer`` took ``seconds`` in the current step; ignored outside a step."""
        if self._current is not None:
            self._current.parts[layer][part] += seconds

    def measured(self, layer: int) -> float:
        """Seconds added to ``layer`` so far, in the phase of the current step; 0 outside a step."""
        return sum(self._current.parts[layer].values()) if self._current is not None else 0.0

    def add_routes(self, layer: int, counts: Iterable[int]) -> None:
        """``counts[e]`` tokens were sent to expert e of ``layer`` in the current step."""
        use = self._use[layer]
        for expert, count in enumerate(counts):
            use[expert] += count

    def frame(self, request_id: int) -> Timing:
        if self._shared is not None:
            self._shared.settle()
        return Timing(
            id=request_id,
            prefill=self._phases["prefill"].frame(),
            decode=self._phases["decode"].frame(),
            moe_layers=self._moe_layers,
            expert_use=[list(self._use[layer]) for layer in self._moe_layers],
            movement=self.movement.frame() if self._shared is not None else None,
            resident=self._shared.resident() if self._shared is not None else [],
            sampled=self.sampled,
        )
