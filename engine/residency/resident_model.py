"""A loaded model that is kept in fast memory: its page warmer, and the probe of the cost of idling."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.ipc.messages import AnyEvent, Finished, Load, Notice, WarmUp
from engine.moe.expert_parallel import RankContext
from engine.planning.residency import lets_go
from engine.residency.mapped import MappedWeights
from engine.residency.page_warmer import IdleProbe, PageWarmer
from engine.runtimes.protocol import LoadedModel, LoadedWeights
from engine.system.free_memory import available_bytes, memory_in_use
from engine.system.machine import on_battery

Held = Mapping[int, Sequence[int]]
"""The experts that this node runs, by decoder layer."""


class ResidentModel:
    """Keeps ``model``, which was loaded from ``folder``, in fast memory until it is closed.

    ``trunk`` is False for a model of experts only. ``held`` are the experts that it runs in a ring; None: all of them.
    ``on_progress(done, total)`` is called with the warm-up's progress in bytes, ``notice(text)`` with lines for the
    person, both in the warmer's thread. If ``request`` switches this off, or the files cannot be opened, only the probe
    works.
    """

    def __init__(
        self,
        model: LoadedWeights,
        folder: Path,
        request: Load,
        held: Held | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        notice: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        trunk: bool = True,
    ) -> None:
        self._clock = clock
        self._pass_began = clock()
        self.probe = IdleProbe(clock)
        self.warmer: PageWarmer | None = None
        if not request.keep_resident:
            return
        try:
            weights = model.kept_weights()
            if weights is not None:
                # All nodes of a ring wait for the slowest one, so a node's weights are never released.
                resting = None if held is not None else _lets_go
                self.warmer = PageWarmer(
                    weights, on_progress, wired=model.weights_are_wired, lets_go=resting, hold=model.hold_weights
                )
            else:
                mapped = MappedWeights(folder, held, trunk, model.mapped_files, model.experts_on_gpu)
                if request.lock_memory and mapped.computed_bytes:
                    notice(
                        f"{mapped.computed_bytes / 1e9:.1f} GB of weights are not locked in memory: they were computed "
                        "when the model was loaded."
                    )
                lock = (lambda: _lock(mapped, notice)) if request.lock_memory else None
                self.warmer = PageWarmer(mapped, on_progress, after_warm_up=lock)
        except (ModelError, OSError) as error:
            notice(f"The weights are not kept in memory: {error}")
            return
        self.warmer.start()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Encloses an answer, during which no weights are touched."""
        self.probe.begin()
        with self._busy():
            yield

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Encloses one pass that a follower runs for the head. The first one after idling is the probe."""
        with self.answering():
            begun = self._clock()
            yield
            self.probe.first_token(self._clock() - begun)

    @contextlib.contextmanager
    def part_of_pass(self, first: bool, last: bool) -> Iterator[None]:
        """Encloses one part of a pass that arrives in parts; see :meth:`passing`.

        The warmer may work between two parts, because the last one may never arrive.
        """
        if first:
            self.probe.begin()
            self._pass_began = self._clock()
        with self._busy():
            yield
        if last:
            self.probe.first_token(self._clock() - self._pass_began)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        try:
            with self.warmer.answering() if self.warmer is not None else contextlib.nullcontext():
                yield
        finally:
            self.probe.end()

    def probed(self, finished: Finished, first_pass_s: float | None) -> Finished:
        """``finished``, with the seconds of its first pass if this was the first answer after idling.

        Must be called within :meth:`answering`. A long prompt does not change the time of the first pass.
        """
        if first_pass_s is None:
            return finished
        found = self.probe.first_token(first_pass_s)
        return finished if found is None else msgspec.structs.replace(finished, probe_s=found)

    @property
    def probe_s(self) -> float | None:
        """Seconds of the last first pass after more than ten seconds of idling."""
        return self.probe.probe_s

    def close(self) -> None:
        """Stop. Must be called before the model is closed. May be called twice."""
        if self.warmer is not None:
            self.warmer.close()


class Residency:
    """Keeps the engine's loaded model in fast memory; in a ring, the experts of its current rank."""

    def __init__(self, send: Callable[[AnyEvent], None]) -> None:
        self._send = send
        self._ready: ResidentModel | None = None
        self._made: tuple[LoadedModel, Callable[[], Path], Load] | None = None
        self._context: RankContext | None = None
        self._warming = 0
        """Total bytes of the running warm-up; 0 if none is running."""

    def loaded(self, model: LoadedModel, folder: Callable[[], Path], request: Load) -> None:
        """Keep ``model`` from now on. ``folder`` returns the folder of its weights, which a new ring may change."""
        self.release()
        self._made = (model, folder, request)
        self._context = model.context
        self._ready = ResidentModel(
            model,
            folder(),
            request,
            None if self._context is None else held_in(self._context),
            self._on_progress,
            lambda text: self._send(Notice(text=text)),
        )

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Encloses an answer or a measurement. If the ring is formed again inside, its new experts are kept."""
        try:
            with self._ready.answering() if self._ready is not None else contextlib.nullcontext():
                yield
        finally:
            if self._made is not None and self._made[0].context is not self._context:
                self.loaded(*self._made)

    def probed(self, finished: Finished, first_pass_s: float | None) -> Finished:
        """See :meth:`ResidentModel.probed`. A ring that was formed again meanwhile has loaded its weights, so there is
        no probe."""
        if self._ready is None or self._made is None or self._made[0].context is not self._context:
            return finished
        return self._ready.probed(finished, first_pass_s)

    def release(self) -> None:
        """Stop keeping the model. Must be called before it is closed."""
        ready, self._ready, self._made = self._ready, None, None
        if ready is not None:
            ready.close()
        total, self._warming = self._warming, 0
        if total:
            # The warm-up ended early, and the screen must not wait for the rest.
            self._send(WarmUp(done=total, total=total))

    def _on_progress(self, done: int, total: int) -> None:
        self._warming = total if done < total else 0
        self._send(WarmUp(done=done, total=total, memory=None if self._warming else memory_in_use()))


def held_in(context: RankContext) -> dict[int, Sequence[int]]:
    """The experts of a rank, by layer."""
    return {layer: context.placement.held(context.rank, layer) for layer in context.placement.layers}


def _lock(weights: MappedWeights, notice: Callable[[str], None]) -> None:
    locked = weights.lock(available_bytes())
    if locked.reason:
        notice(f"{locked}.")


def _lets_go(idle_s: float) -> bool:
    return lets_go(idle_s, on_battery())
