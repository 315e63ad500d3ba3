"""What a follower does between forming and the end of its epoch: run a model with the head, or experts for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from engine.cpu_threads import within_this_machine
from engine.exchange.exchange import Buffer, Exchange, Link
from engine.exchange.seat import Seat
from engine.messages import Load
from engine.progress import ProgressCallback
from engine.residency.ready import Ready, held_in
from engine.ring.control.control_messages import EpochSpec
from engine.ring.control.measuring_node import runtimes
from engine.ring.running.central import CentralNode
from engine.ring.running.expert_runners import layers_for, load_experts
from engine.ring.running.follower import Follower
from engine.runtimes import runtime_named
from engine.runtimes.loading import load_model
from engine.runtimes.protocol import LoadedModel, RingPlace

WINDOW_S = 5.0
"""What :class:`Busy` looks back on."""


def seat_of(spec: EpochSpec) -> Seat:
    """The place in the epoch that the head gave to this node."""
    return Seat(spec.epoch, spec.rank, spec.placement, spec.mode, spec.loading, tuple(spec.weights))


def load_of(spec: EpochSpec) -> Load:
    """How the share is loaded: as the head loads its own. Ring nodes run their experts on the CPU or by mlx."""
    wanted = Load(
        id=0,
        model=spec.model,
        runtime=spec.runtime,
        dtype=spec.dtype,
        partitioning="cpu",
        cpu_threads=spec.cpu_threads,
        context_limit=spec.context_limit,
        prefill_chunk=spec.prefill_chunk,
    )
    return within_this_machine(wanted)[0]


class Work(Protocol):
    """What a follower does until its epoch ends."""

    @property
    def executor(self) -> str: ...

    @property
    def notices(self) -> list[str]: ...

    @property
    def probe_s(self) -> float | None:
        """Seconds of the first pass after idling, as last measured."""
        ...

    def run(self) -> None:
        """Ends with PeerLost; raises ModelError if it failed here, the others having been told."""
        ...

    def close(self) -> None:
        """Free the memory; :meth:`run` has ended."""
        ...


class ModelWork:
    """Decentralised: the trunk and this node's experts. The head's commands are done on rows of its own."""

    def __init__(
        self,
        spec: EpochSpec,
        exchange: Exchange,
        link: Link,
        folder: Path,
        progress: ProgressCallback,
        ran: Callable[[int], None],
        warm: Callable[[int, int], None],
    ) -> None:
        seat = seat_of(spec)
        layers = layers_for(seat, exchange)
        place = RingPlace(seat, layers, logits=False)
        self._model: LoadedModel = load_model(
            runtime_named(spec.runtime), spec.model, folder, load_of(spec), progress, place
        )
        self._ready = Ready(self._model, folder, load_of(spec), held_in(seat), warm)
        self._follower = Follower(self._model, layers, ran, self._ready.passing)
        self._link = link

    @property
    def executor(self) -> str:
        return self._model.facts.executor

    @property
    def notices(self) -> list[str]:
        return list(self._model.facts.notices)

    @property
    def probe_s(self) -> float | None:
        return self._ready.probe_s

    def run(self) -> None:
        self._follower.follow(self._link)

    def close(self) -> None:
        self._ready.close()
        self._model.close()


class CentralWork:
    """Central: this node's experts only, run on what the head sends, by the head's runtime if it is installed here."""

    def __init__(
        self,
        spec: EpochSpec,
        exchange: Exchange,
        folder: Path,
        progress: ProgressCallback,
        ran: Callable[[int], None],
    ) -> None:
        here = runtimes()
        # The head's, where it is installed: then the bits are those of one machine.
        own = spec.runtime if spec.runtime in here else "mlx" if here[:1] == ["mlx"] else "torch"
        seat = seat_of(spec)
        self._experts = load_experts(own, folder, load_of(spec), seat, progress)
        self._layers = len(seat.placement.layers)
        self._rows = 0
        self._ran = ran
        self._node = CentralNode(seat, exchange, self._experts, self._ran_layer, one_by_one=spec.one_by_one)
        self.notices: list[str] = []
        self.probe_s: float | None = None

    @property
    def executor(self) -> str:
        return self._experts.description

    def run(self) -> None:
        self._node.serve()

    def _ran_layer(self, tokens: int) -> None:
        """It is asked once per layer: a token is one that went through all of them."""
        before = self._rows // self._layers
        self._rows += tokens
        self._ran(self._rows // self._layers - before)

    def close(self) -> None:
        self._experts.close()


class Busy:
    """How much of the last seconds was work. One thread works, any may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: deque[tuple[float, float]] = deque(maxlen=4096)
        self._since: float | None = None

    def begin(self) -> None:
        self._since = self._clock()

    def end(self) -> None:
        if self._since is not None:
            self._work.append((self._since, self._clock()))
            self._since = None

    def share(self) -> float:
        """Of the last WINDOW_S seconds, between 0 and 1."""
        now, since = self._clock(), self._since
        work = [*self._work, *([(since, now)] if since is not None else [])]
        spent = sum(max(0.0, end - max(start, now - WINDOW_S)) for start, end in work)
        return min(1.0, spent / WINDOW_S)


class TimedLink:
    """A link whose waiting for the other end is no work."""

    def __init__(self, link: Link, busy: Busy) -> None:
        self._link = link
        self._busy = busy

    def send(self, *parts: Buffer) -> None:
        self._link.send(*parts)

    def receive(self, limit: int) -> memoryview:
        self._busy.end()
        frame = self._link.receive(limit)
        self._busy.begin()
        return frame

    def close(self) -> None:
        self._link.close()


class TimedExchange:
    """The same of an exchange: :meth:`receive` of what the head asks next is no work."""

    def __init__(self, exchange: Exchange, busy: Busy) -> None:
        self._exchange = exchange
        self._busy = busy

    @property
    def name(self) -> str:
        return self._exchange.name

    @property
    def rank(self) -> int:
        return self._exchange.rank

    @property
    def size(self) -> int:
        return self._exchange.size

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._exchange.send(parts, capacity)

    def receive(self) -> list[memoryview]:
        self._busy.end()
        found = self._exchange.receive()
        self._busy.begin()
        return found

    def close(self) -> None:
        self._exchange.close()
