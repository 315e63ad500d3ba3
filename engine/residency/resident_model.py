"""A loaded model kept in fast memory: its page warmer, and the probe that measures what idling costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.ipc.messages import AnyEvent, Finished, Load, Notice, WarmUp
from engine.moe.rank_context import RankContext
from engine.planning.residency import lets_go
from engine.residency.mapped import MappedWeights
from engine.residency.page_warmer import IdleProbe, PageWarmer
from engine.runtimes.protocol import LoadedModel, LoadedWeights
from engine.system.free_memory import available_bytes
from engine.system.machine import on_battery

Held = Mapping[int, Sequence[int]]
"""Decoder layer to the experts that this node runs."""


class ResidentModel:
    """Keeps ``model``, which was loaded from ``folder``, in fast memory until it is closed.

    ``trunk``: False for a model of experts only. ``held``: the experts it runs in a ring; None: all of them.
    ``on_progress(done, total)`` gets the warm-up's progress in bytes, ``notice(text)`` what a person should know. Both
    are called in the warmer's thread. If ``request`` switches keeping off, or the files cannot be opened, only the
    probe works.
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
                # The others of a ring wait for the slowest: a node of it is kept ready as long as it is one.
                resting = None if held is not None else _lets_go
                self.warmer = PageWarmer(
                    weights, on_progress, wired=model.weights_are_wired, lets_go=resting, hold=model.hold_weights
                )
            else:
                mapped = MappedWeights(folder, held, trunk, model.mapped_files)
                lock = (lambda: _lock(mapped, notice)) if request.lock_memory else None
                self.warmer = PageWarmer(mapped, on_progress, after_warm_up=lock)
        except (ModelError, OSError) as error:
            notice(f"The weights are not kept in memory: {error}")
            return
        self.warmer.start()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around an answer: within it no weights are touched."""
        self.probe.begin()
        with self._busy():
            yield

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around one pass that a follower runs for the head; the first one after idling is the probe."""
        with self.answering():
            begun = self._clock()
            yield
            self.probe.first_token(self._clock() - begun)

    @contextlib.contextmanager
    def part_of_pass(self, first: bool, last: bool) -> Iterator[None]:
        """As :meth:`passing`, around one part of a pass that arrives in parts. Between two parts the warmer may work,
        as the last part may never arrive."""
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
        """``finished``, within :meth:`answering`, with the probe's figure if this was the first answer after idling:
        the time of its first pass, which a long prompt does not change."""
        if first_pass_s is None:
            return finished
        found = self.probe.first_token(first_pass_s)
        return finished if found is None else msgspec.structs.replace(finished, probe_s=found)

    @property
    def probe_s(self) -> float | None:
        """Seconds of the first pass after more than ten seconds of idling, as last measured."""
        return self.probe.probe_s

    def close(self) -> None:
        """Stop; call it before the model is closed. May be called twice."""
        if self.warmer is not None:
            self.warmer.close()


class Residency:
    """The loaded model of a host, kept in fast memory; in a ring, the experts of its present place in it."""

    def __init__(self, send: Callable[[AnyEvent], None]) -> None:
        self._send = send
        self._ready: ResidentModel | None = None
        self._made: tuple[LoadedModel, Callable[[], Path], Load] | None = None
        self._context: RankContext | None = None
        self._warming = 0
        """Total bytes of a warm-up that is running; 0: none is."""

    def loaded(self, model: LoadedModel, folder: Callable[[], Path], request: Load) -> None:
        """Keep ``model`` from now on; ``folder`` tells where its weights are, which a ring formed anew may change."""
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
        """Around an answer or a measurement. If the ring was formed anew within it, its new experts are kept."""
        try:
            with self._ready.answering() if self._ready is not None else contextlib.nullcontext():
                yield
        finally:
            if self._made is not None and self._made[0].context is not self._context:
                self.loaded(*self._made)

    def probed(self, finished: Finished, first_pass_s: float | None) -> Finished:
        """See :meth:`ResidentModel.probed`. A ring that was formed anew meanwhile loaded its weights, which is no
        idling."""
        if self._ready is None or self._made is None or self._made[0].context is not self._context:
            return finished
        return self._ready.probed(finished, first_pass_s)

    def release(self) -> None:
        """Stop keeping the model; to be called before it is closed."""
        ready, self._ready, self._made = self._ready, None, None
        if ready is not None:
            ready.close()
        total, self._warming = self._warming, 0
        if total:
            # The warm-up has ended early: the screen must not wait for the rest.
            self._send(WarmUp(done=total, total=total))

    def _on_progress(self, done: int, total: int) -> None:
        self._warming = total if done < total else 0
        self._send(WarmUp(done=done, total=total))


def held_in(context: RankContext) -> dict[int, Sequence[int]]:
    """The experts of a place in a ring, by layer."""
    return {layer: context.placement.held(context.rank, layer) for layer in context.placement.layers}


def _lock(weights: MappedWeights, notice: Callable[[str], None]) -> None:
    locked = weights.lock(available_bytes())
    if locked.reason:
        notice(f"{locked}.")


def _lets_go(idle_s: float) -> bool:
    return lets_go(idle_s, on_battery())
