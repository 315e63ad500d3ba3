"""The source of a model of which this machine has a shard: the shard, and the machines that have the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Protocol

from engine.cluster.head.capacity_wait import CapacityError
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_shard import OwnShard
from engine.cluster.weights.source import FolderSource, Source, SourceFailed, Tick, checked, plan_fetch
from engine.cluster.weights.transfer import Item, Offer, Wanted, decode_chunk
from engine.errors import ModelError
from engine.planning.units import byte_size


class Others(Protocol):
    """The other machines that have the model; see :class:`engine.cluster.head.model_sources.ModelSources`."""

    failed: dict[str, str]

    def next(self, tick: Tick) -> Source | None: ...

    def tick(self) -> None: ...

    def note(self, stage: str, done: int, total: int, unit: str) -> None: ...


class JoinedSource:
    """Implements :class:`engine.cluster.weights.source.Source` for the whole model of which ``own`` is a part.

    Each of ``others`` is asked when an item is needed that this machine and those asked before lack. ``peers`` were
    asked before.
    """

    def __init__(self, own: OwnShard, others: Others, peers: Iterable[Source] = ()) -> None:
        self.name = own.offered.identity.name
        self.offered = own.offered
        self.gave: list[str] = []
        """Names of the machines that sent something."""
        self.other_versions = False
        """Whether a machine has another version of the model by now."""
        self._own = own
        self._others = others
        self._peers = list(peers)
        self._lock = threading.Lock()

    def take(self, held: Mapping[int, Sequence[int]], stage: str) -> None:
        """Fetch the trunk and the experts ``held`` into the shard. Received items are kept even if this fails.

        Raises CapacityError if nobody has them, ModelError (disk), Cancelled.
        """
        part = self.offered.part(held, trunk=True)
        while wanted := self._own.missing(part):
            present = part.nbytes - sum(part.items[want.item].nbytes - want.start for want in wanted)

            def note(_: str, done: int, total: int, unit: str, present: int = present) -> None:
                self._others.note(stage, present + done, part.nbytes, "bytes")

            self._others.note(stage, present, part.nbytes, "bytes")
            try:
                with contextlib.closing(self.chunks(part, wanted, self._others.tick)) as chunks:
                    self._own.receive(part, wanted, chunks, note)
            except SourceFailed:
                continue
            except RingProtocolError:
                # The part of an item that was received before does not match the rest, so the item is fetched anew.
                if not any(want.start for want in wanted):
                    raise

    def chunks(self, part: Offer, wanted: Sequence[Wanted], tick: Tick) -> Generator[bytes]:
        """See Source. Raises CapacityError before the first chunk if no machine has an item."""
        sources, plan = self._plan([part.items[want.item] for want in wanted], tick)
        # One call per machine, as each call opens the model there.
        with contextlib.ExitStack() as open_calls:
            streams: dict[int, Generator[bytes]] = {}
            for number in dict.fromkeys(plan):
                wants = [want for want, chosen in zip(wanted, plan, strict=True) if chosen == number]
                stream = self._sent_by(sources[number], part, wants, tick)
                streams[number] = open_calls.enter_context(contextlib.closing(stream))
            if len(streams) == 1:
                for stream in streams.values():
                    yield from stream
                return
            for number in plan:
                is_whole = False
                while not is_whole:
                    data = next(streams[number])
                    chunk = decode_chunk(data)
                    is_whole = chunk.offset + len(chunk.data) == part.items[chunk.item].nbytes
                    yield data
            for stream in streams.values():
                next(stream, None)

    def nowhere(self) -> CapacityError:
        """The error for a whole model that no machine has."""
        return self._nowhere(plan_fetch(self.offered.items, [self._own.here().offered.items]).missing)

    def _plan(self, items: Sequence[Item], tick: Tick) -> tuple[list[Source], list[int]]:
        """The sources, this machine first, and the number of the one for each item.

        Raises CapacityError, and what ``tick`` raises.
        """
        with self._lock:
            here = self._own.here()
            while True:
                sources: list[Source] = [here, *self._peers]
                plan = plan_fetch(items, [source.offered.items for source in sources])
                if not plan.missing:
                    return sources, [number for number in plan.sources if number is not None]
                if not self._ask_another(tick):
                    raise self._nowhere(plan.missing)

    def _ask_another(self, tick: Tick) -> bool:
        """Ask a machine that was not asked yet; False if there is none. Raises what ``tick`` raises."""
        source = self._others.next(tick)
        if source is None:
            return False
        if source.offered.version == self.offered.version:
            self._peers.append(source)
        else:
            self.other_versions = True
            self._others.failed[source.name] = (
                f"it has another version of it by now, which `privatellm models remove {self._own.folder.name}` makes "
                "this machine begin with"
            )
        return True

    def _sent_by(self, source: Source, part: Offer, wanted: Sequence[Wanted], tick: Tick) -> Generator[bytes]:
        """The chunks from one source, compared with their checksums before they are passed on."""
        chunks = source.chunks(part, wanted, tick)
        if isinstance(source, FolderSource):
            try:
                yield from checked(chunks, {want.item: want for want in wanted}, part)
            except RingProtocolError as error:
                raise ModelError(f"{source.folder} is damaged ({error}); delete it, and ask again.") from error
            return
        if source.name not in self.gave:
            self.gave.append(source.name)
        with contextlib.closing(chunks):
            try:
                yield from chunks
            except SourceFailed as failed:
                with self._lock:
                    self._others.failed[source.name] = str(failed).rstrip(".")
                    self._peers = [peer for peer in self._peers if peer is not source]
                raise

    def _nowhere(self, missing: Sequence[Item]) -> CapacityError:
        name, nbytes = self.name, sum(item.nbytes for item in missing)
        had = " and ".join(self._own.had)
        failed = "".join(f" ({machine}: {why})" for machine, why in self._others.failed.items())
        text = (
            f"{byte_size(nbytes)} of {name} are on no machine that is there now{failed}; {had} had all of it: start "
            f"`privatellm join` there, or fetch the model with `privatellm models pull {name}`."
        )
        return CapacityError(text, nbytes, [text])
