"""Times per layer of each token, measured only while the timing panel is open.

While :attr:`Recorder.enabled` is true, a runtime calls :meth:`Recorder.begin_step`, :meth:`Recorder.add` and
:meth:`Recorder.end_step` around its work. The recorder makes the frames of :mod:`engine.ipc.messages`: it takes seconds
and returns milliseconds per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from engine.ipc.messages import ExpertMovement, LayerTimes, PhaseTimes, Timing

Part = Literal["attention", "router", "experts", "exchange", "wait", "other"]
PARTS: tuple[Part, ...] = ("attention", "router", "experts", "exchange", "wait", "other")
Phase = Literal["prefill", "decode"]


@dataclass
class MovementSums:
    """The running sums of :class:`engine.ipc.messages.ExpertMovement`."""

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
    """An executor that shares experts with another device. It always adds to :attr:`Recorder.movement`, which takes a
    few additions per layer."""

    def settle(self) -> None:
        """Wait for pending work and add it."""
        ...

    def resident(self) -> list[list[int]]:
        """The experts in the device's memory, by MoE layer."""
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
    """Adds up times per layer and phase, and the routes to each expert. Not thread-safe.

    ``layers`` is the number of decoder layers, ``moe_layers`` are those with routed experts, and ``experts`` is the
    number of experts in each of these.
    """

    def __init__(
        self, layers: int, moe_layers: Iterable[int], experts: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.enabled = False
        self.sampled = False
        """Whether measuring waits for a GPU after each part of each layer, so that only a few steps per second should
        be measured. Set by the runtime."""
        self.clock = clock
        self.on_routes: Callable[[int, Sequence[int]], None] | None = None
        """If set, called with the arguments of each :meth:`add_routes`."""
        self._layers = layers
        self._moe_layers = list(moe_layers)
        self._experts = experts
        self._shared: SharedExperts | None = None
        self._notices: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Discard all measurements, at the start of a turn."""
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
        """Set the executor that shares experts with a device (None: no longer). Frames then describe its movements."""
        self._shared = shared

    def notice(self, text: str) -> None:
        """Keep a line for the person until :meth:`take_notices`."""
        self._notices.append(text)

    def take_notices(self) -> list[str]:
        """The lines since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def begin_step(self, phase: Phase, tokens: int) -> None:
        """Begin a forward pass over ``tokens`` token positions."""
        self._current = self._phases[phase]
        self._current.tokens += tokens
        self._step_start = self.clock()

    def another_token(self) -> None:
        """Count one more token that came out of the last pass of decoding."""
        self._phases["decode"].tokens += 1

    def end_step(self) -> None:
        if self._current is not None:
            self._current.total += self.clock() - self._step_start
            self._current.steps += 1
            self._current = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Encloses other passes within a step, whose time is not the step's."""
        enabled, current, start, begun = self.enabled, self._current, self._step_start, self.clock()
        self._current = None
        try:
            yield
        finally:
            self.enabled, self._current = enabled, current
            self._step_start = start + self.clock() - begun

    def add(self, layer: int, part: Part, seconds: float) -> None:
        """Add ``seconds`` to ``part`` of ``layer`` in the current step. Ignored outside of a step."""
        if self._current is not None:
            self._current.parts[layer][part] += seconds

    def measured(self, layer: int) -> float:
        """Seconds added to ``layer`` so far, in the phase of the current step; 0 outside of a step."""
        return sum(self._current.parts[layer].values()) if self._current is not None else 0.0

    def add_routes(self, layer: int, counts: Iterable[int]) -> None:
        """Add ``counts[e]`` tokens that were sent to expert e of ``layer`` in the current step."""
        counts = list(counts)
        use = self._use[layer]
        for expert, count in enumerate(counts):
            use[expert] += count
        if self.on_routes is not None:
            self.on_routes(layer, counts)

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
