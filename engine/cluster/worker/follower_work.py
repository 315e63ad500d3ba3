"""A follower's work between forming and the end of its epoch: it runs a model with the head, or experts for it."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from engine.cluster.central import CentralNode
from engine.cluster.commands import Answers, MoveLinks
from engine.cluster.epoch_links import EpochLinks, rank_context_of
from engine.cluster.expert_runners import layers_for, load_experts
from engine.cluster.formation import PassControl
from engine.cluster.membership.control_messages import EpochSpec, Forming
from engine.cluster.parts import Moment, Observer, nobody_observes
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.exchange import Buffer, Exchange, Link, PeerLost
from engine.cluster.worker.follower import BEAMS_LIMIT, Follower
from engine.errors import ModelError
from engine.ipc.messages import LENT_GPU_SHARE, ExchangeName, LendTerms, Load, MachineOptions, ModelOptions, values_of
from engine.ipc.progress import ProgressCallback
from engine.models.folders.weight_layout import layout_of
from engine.moe.expert_parallel import HEAD
from engine.moe.kernels.pool import within_this_machine
from engine.planning.ring_nodes import GpuFacts
from engine.planning.runtime_choice import experts_runtime
from engine.residency.resident_model import ResidentModel, held_in
from engine.runtimes import runtime_named
from engine.runtimes.common.loading import load_model
from engine.runtimes.model_headers import read_headers
from engine.runtimes.protocol import LoadedModel, RingPlace

WINDOW_S = 5.0
"""Seconds over which :class:`Busy` averages."""


def lent_threads(terms: LendTerms, wanted: int | None) -> int | None:
    """Number of threads: the smaller of what a head wants and what is lent; None: one per physical core."""
    return min((each for each in (wanted, terms.cpu_threads) if each is not None), default=None)


def lent_gpu(gpu: GpuFacts | None, terms: LendTerms) -> GpuFacts | None:
    """``gpu`` with what is lent of it; None if that is nothing."""
    if gpu is None or terms.lend_gpu_memory == 0:
        return None
    lent = terms.lend_gpu_memory
    return msgspec.structs.replace(gpu, memory_lent=round(LENT_GPU_SHARE * gpu.memory_total) if lent is None else lent)


def load_of(spec: EpochSpec, terms: LendTerms) -> Load:
    """The load request for the shard: like the head's for its own, on this machine's ``terms``."""
    own = values_of(MachineOptions, terms) | {"cpu_threads": lent_threads(terms, spec.options.cpu_threads)}
    # mlx has nothing but the GPU, whose memory is the machine's.
    on_cpu = spec.options.runtime == "native" or (spec.options.runtime == "torch" and terms.lend_gpu_memory == 0)
    wanted = Load(
        id=0,
        partitioning="cpu" if on_cpu else "auto",
        most_memory=terms.lend_memory,
        most_gpu_memory=terms.lend_gpu_memory,
        most_gpu_share=LENT_GPU_SHARE if terms.lend_gpu_memory is None else 1.0,
        **values_of(ModelOptions, spec.options) | own,
    )
    return within_this_machine(wanted)[0]


def shard_bytes(folder: Path, spec: EpochSpec) -> int:
    """Bytes of memory for the weights of this node's shard. ``folder`` has the shard, or the whole model."""
    experts = layout_of(folder).expert_bytes * spec.placement.count_of(spec.rank)
    if spec.mode == "central":
        return experts
    load = Load(id=0, **values_of(ModelOptions, spec.options))
    return experts + read_headers(folder, load).sizes.for_runtime(spec.options.runtime).trunk_bytes


def gpu_shard_bytes(
    folder: Path, spec: EpochSpec, gpu: GpuFacts | None, terms: LendTerms, installed: Sequence[str]
) -> int:
    """Bytes of this node's experts that ``gpu`` may keep on ``terms``, so that they need no other memory.

    ``folder`` as in :func:`shard_bytes`. ``installed``: the runtimes that this machine has. Raises ModelError if the
    folder cannot be read.
    """
    lent = lent_gpu(gpu, terms)
    if lent is None or experts_runtime(spec.options.runtime, installed) != "torch":
        return 0
    load = load_of(spec, terms)
    sizes = read_headers(folder, load).sizes.as_loaded(load, "torch")
    free = min(lent.memory_free, lent.memory_lent or 0)
    slabs = msgspec.structs.replace(lent, memory_free=free).slabs(sizes.experts_only()) or 0
    return min(slabs, spec.placement.count_of(spec.rank)) * layout_of(folder).expert_bytes


class Work(Protocol):
    """A follower's work until its epoch ends."""

    @property
    def executor(self) -> str: ...

    @property
    def notices(self) -> list[str]: ...

    @property
    def probe_s(self) -> float | None:
        """Seconds of the first pass after idling, as last measured."""
        ...

    def run(self) -> None:
        """Work until the epoch ends, which raises PeerLost. Raises ModelError if it failed here; the others were
        notified."""
        ...

    def close(self) -> None:
        """Free the memory. :meth:`run` must have ended."""
        ...


@dataclass(frozen=True)
class FollowerTask:
    """A follower's task in an epoch: the head's ``spec``, with the shard in ``folder``, on this machine's ``terms``, by
    one of its ``installed`` runtimes.

    Called from any thread: ``ran`` with the tokens of each pass, ``warm`` with the bytes brought into memory and their
    total, ``notice`` with lines for the person here.
    """

    spec: EpochSpec
    folder: Path
    terms: LendTerms
    installed: Sequence[str]
    progress: ProgressCallback
    ran: Callable[[int], None]
    warm: Callable[[int, int], None]
    notice: Callable[[str], None]
    observe: Observer = nobody_observes


class _ModelFollowing:
    """A model of this node, kept in memory, on which the head's commands from ``link`` run."""

    def __init__(
        self,
        task: FollowerTask,
        model: LoadedModel,
        passes: PassControl | Answers,
        link: Link,
        move: Callable[[MoveLinks], Link] | None = None,
    ) -> None:
        spec, folder, lent = task.spec, task.folder, task.terms.lend_memory
        held = held_in(rank_context_of(spec))
        self._model = model
        self._ready = ResidentModel(model, folder, load_of(spec, task.terms), held, task.warm, task.notice)
        memory = None if lent is None else max(0, lent + model.facts.gpu_expert_bytes - shard_bytes(folder, spec))
        self._follower = Follower(model, passes, task.ran, self._ready.passing, memory, task.observe, move)
        self._link = link

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


class ModelWork(_ModelFollowing):
    """Work in decentralised modes: this node runs the trunk and its experts, with rows of its own."""

    def __init__(self, task: FollowerTask, exchange: Exchange, link: Link, move: Callable[[MoveLinks], Link]) -> None:
        spec = task.spec
        context, load = rank_context_of(spec), load_of(spec, task.terms)
        layers = layers_for(context, exchange)
        place = RingPlace(context, layers, logits=False)
        model = load_model(runtime_named(load.runtime), load.model, task.folder, load, task.progress, place)
        super().__init__(task, model, layers, link, move)

    @property
    def executor(self) -> str:
        return self._model.facts.executor


class WholeWork(_ModelFollowing):
    """This machine runs the whole model alone and sends the logits to the head."""

    def __init__(self, task: FollowerTask, link: Link) -> None:
        spec = task.spec
        load, runtime = load_of(spec, task.terms), runtime_named(spec.options.runtime)
        model = load_model(runtime, spec.options.model, task.folder, load, task.progress, known_whole=True)
        self.answers = Answers(link, task.observe)
        model.between_layers = self.answers.check
        super().__init__(task, model, self.answers, link)

    @property
    def executor(self) -> str:
        return self._model.facts.trunk or self._model.facts.executor

    @property
    def can_truncate(self) -> bool:
        return self._model.start().can_truncate

    @property
    def steps_together(self) -> int:
        return self._model.start().steps_together

    @property
    def rows_together(self) -> int:
        return self._model.rows_together


class CentralWork:
    """Central: this node's experts only, run on the head's rows, by the head's runtime if it is installed here."""

    def __init__(self, task: FollowerTask, exchange: Exchange) -> None:
        spec, folder = task.spec, task.folder
        # The head's runtime, if it is installed here, gives the bits of one machine.
        own = experts_runtime(spec.options.runtime, task.installed)
        context = rank_context_of(spec)
        load = load_of(spec, task.terms)
        self._experts = load_experts(own, folder, load, context, task.progress)
        self._ready = ResidentModel(self._experts, folder, load, held_in(context), task.warm, task.notice, trunk=False)
        self._layers = context.placement.layers
        self._at: int | None = None
        """Last requested layer."""
        self._begins = False
        """Whether that layer was the first one of a pass."""
        self._ran = task.ran
        self._observe = task.observe
        most = max(BEAMS_LIMIT, spec.options.prefill_chunk)
        self._node = CentralNode(context, exchange, self._experts, self._ran_layer, spec.one_by_one, self._around, most)

    @property
    def notices(self) -> list[str]:
        return list(self._experts.notices)

    @property
    def probe_s(self) -> float | None:
        return self._ready.probe_s

    @property
    def executor(self) -> str:
        return self._experts.description

    def run(self) -> None:
        self._node.serve()

    def _ran_layer(self, tokens: int) -> None:
        """Count tokens at the first layer, as the last one has only those whose logits are wanted."""
        if self._begins:
            self._ran(tokens)

    def _around(self, layer: int) -> AbstractContextManager[None]:
        """A context for running a layer. Layers are requested in order; an earlier one belongs to the next pass."""
        self._observe("layer", layer)
        self._begins = self._at is None or layer <= self._at
        self._at = layer
        return self._ready.part_of_pass(self._begins, layer == self._layers[-1])

    def close(self) -> None:
        self._ready.close()
        self._experts.close()


class Busy:
    """Fraction of the last seconds spent working. One thread works; any may ask."""

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
        """Fraction of the last WINDOW_S seconds, between 0 and 1."""
        now, since = self._clock(), self._since
        work = [*self._work, *([(since, now)] if since is not None else [])]
        spent = sum(max(0.0, end - max(start, now - WINDOW_S)) for start, end in work)
        return min(1.0, spent / WINDOW_S)


class TimedLink:
    """A link whose waiting for the other end does not count as work."""

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
    """An exchange whose waiting for the head's next request does not count as work."""

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

    @property
    def idle_s(self) -> float:
        return self._exchange.idle_s

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._exchange.send(parts, capacity)

    def receive(self) -> list[memoryview]:
        self._busy.end()
        found = self._exchange.receive()
        self._busy.begin()
        return found

    def missing(self) -> Sequence[int]:
        return self._exchange.missing()

    def close(self) -> None:
        self._exchange.close()


# --- the thread that does it -----------------------------------------------------------------------------------------

JOIN_S = 3.0


class Following:
    """A follower's task in its own thread. Loads during its construction.

    Raises ModelError, Cancelled from ``progress``, PeerLost.
    """

    def __init__(
        self,
        spec: EpochSpec,
        node_links: Links,
        links: EpochLinks,
        exchange: ExchangeName,
        folder: Path,
        progress: ProgressCallback,
        terms: LendTerms,
        installed: Sequence[str],
        notice: Callable[[str], None],
        observe: Observer = nobody_observes,
    ) -> None:
        """``node_links`` make and accept links. ``notice`` is called from any thread with lines for the person here."""
        self.link = spec.link
        """The head's measurement of its link to this node."""
        self.ended: str | None = None
        """The reason of the end; None while it goes on."""
        self.failed_here = False
        """Whether it ended because of this machine, of which the others were notified."""
        self.broken: list[str] = []
        """Node ids of the links whose break ended it."""
        self.tokens = 0
        self.warming: tuple[int, int] | None = None
        """Bytes of the weights that were brought into memory, and their total; None before and after."""
        self.expert_bytes = layout_of(folder).expert_bytes * spec.placement.count_of(spec.rank)
        self._members = spec.members
        self._node_links = node_links
        self._links = links
        self._busy = Busy()

        def of_epoch(moment: Moment, *subjects: object) -> None:
            observe(moment, *subjects, links.epoch.given_up)

        task = FollowerTask(spec, folder, terms, installed, progress, self._ran, self._warm, notice, of_epoch)
        self._work: Work
        self._whole: WholeWork | None = None
        if spec.whole:
            self._work = self._whole = WholeWork(task, TimedLink(links.commands[HEAD], self._busy))
        elif spec.mode == "central":
            central = TimedExchange(links.keep(exchange), self._busy)
            self._work = CentralWork(task, central)
        else:
            link = TimedLink(links.commands[HEAD], self._busy)
            self._work = ModelWork(task, links.keep(exchange), link, self._move)
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)

    def ready(self) -> Forming:
        return Forming(
            stage="ready",
            ready=True,
            executor=self._work.executor,
            can_truncate=self._whole is None or self._whole.can_truncate,
            steps_together=0 if self._whole is None else self._whole.steps_together,
            rows_together=1 if self._whole is None else self._whole.rows_together,
            notices=self._work.notices,
        )

    def stop_pass(self, number: int) -> None:
        """Cancel pass ``number`` of a model that runs here as a whole, for the head. Thread-safe."""
        if self._whole is not None:
            self._whole.answers.stop(number)

    def start(self) -> None:
        self._thread.start()

    @property
    def probe_s(self) -> float | None:
        """Seconds of the first pass after idling, as last measured."""
        return self._work.probe_s

    def busy(self) -> float:
        """Fraction of the last seconds in which it worked for the head."""
        return self._busy.share()

    def close(self) -> None:
        """End the links and the thread, and free the model."""
        self._links.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._work.close()
        # Reference cycles would keep the files mapped until the next collection.
        gc.collect()

    def _run(self) -> None:
        try:
            self._work.run()
        except PeerLost as error:
            self.broken = [one.node_id for one in self._members if one.rank in error.ranks]
            self.ended = str(error)
        except ModelError as error:
            self.failed_here = True
            self.ended = str(error)
        except BaseException as error:
            self.ended = f"this machine failed with {type(error).__name__}"
            traceback.print_exc()
        finally:
            self._links.close()

    def _move(self, command: MoveLinks) -> Link:
        """Make the links anew. Returns the one to the head. Raises ModelError, PeerLost."""
        self._links.move(self._node_links, command.addresses)
        self.link = command.link or self.link
        return TimedLink(self._links.commands[HEAD], self._busy)

    def _warm(self, done: int, total: int) -> None:
        self.warming = (done, total) if done < total else None

    def _ran(self, tokens: int) -> None:
        self.tokens += tokens
