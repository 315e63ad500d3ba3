"""Sources of the weights that a ring's nodes receive: the head's whole copy of the model, or its shard and the machines
that have the rest."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from engine.cluster.head.capacity_wait import CapacityError
from engine.cluster.head.model_sources import ModelSources, PeerSource, version_of
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import PIECE_BYTES, DataPiece, Received, Wants
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, until_done
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_shard import OwnShard
from engine.cluster.weights.transfer import (
    Chunk,
    Item,
    Offer,
    Wanted,
    decode_chunk,
    decode_wanted,
    encode_chunk,
    encode_offer,
    offer,
    stream,
)
from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders.weight_layout import WeightLayout, layout_of
from engine.planning.ring_plan import RingDecision
from engine.planning.units import byte_size


class Supply(Protocol):
    """The source of one model's weights while a ring is formed."""

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """The items that a node with the experts ``held`` needs. Raises ModelError, and what ``progress`` raises."""
        ...

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tick: Callable[[], None]) -> Iterator[bytes]:
        """The ``wanted`` items of an :meth:`offer` as encoded chunks, in this order. From any thread.

        ``tick`` is called from other threads meanwhile; what it raises ends the stream. Raises ModelError if an item is
        not available, SourceFailed if another source has it.
        """
        ...


class SourceFailed(Exception):
    """Raised if the machine that sent an item failed. The rest may be requested again."""


class WholeCopy:
    """The whole model ``name`` in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._layout: WeightLayout | None = None

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """See Supply."""
        self._layout = self._layout or layout_of(self._folder)
        return offer(self._folder, held, progress, trunk=trunk, name=self._name, layout=self._layout)

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tick: Callable[[], None]) -> Iterator[bytes]:
        """See Supply."""
        return stream(self._folder, offered, wanted)


class PartialCopy:
    """This machine's shard ``own`` of the model. The rest is requested from ``sources`` when it is needed."""

    def __init__(self, own: OwnShard, sources: ModelSources) -> None:
        self._own = own
        self._sources = sources
        self._lock = threading.Lock()
        self._unasked: list[Candidate] | None = None
        """Machines that have parts of the model and were not asked for an offer yet; None before they are looked
        for."""
        self._peers: list[PeerSource] = []
        self._failed: dict[str, str] = {}
        """Reasons of failure, by machine name."""

    def take(self, held: Mapping[int, Sequence[int]], progress: ProgressCallback) -> None:
        """Fetch the trunk and the experts ``held``. Received items are kept even if this fails.

        Raises CapacityError if nobody has them, ModelError (disk), Cancelled.
        """
        part = self._own.part(held, trunk=True)
        at = ["taking this machine's share", 0, 0, ""]

        def note(_: str, done: int, total: int, unit: str) -> None:
            at[1:] = [done, total, unit]

        def tick() -> None:
            progress(*at)  # type: ignore[arg-type]

        while wanted := self._own.missing(part):
            try:
                with contextlib.closing(self.chunks(part, wanted, tick)) as chunks:
                    self._own.receive(part, wanted, chunks, note)
            except SourceFailed:
                continue
            except RingProtocolError:
                # The part of an item that was received before does not match the rest, so the item is fetched anew.
                if not any(want.start for want in wanted):
                    raise

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """See Supply."""
        return self._own.part(held, trunk)

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tick: Callable[[], None]) -> Generator[bytes]:
        """See Supply. Raises CapacityError before the first chunk if no machine has an item."""
        sources = self._sources_of(offered, wanted, tick)
        # One call per machine, as each call opens the model there.
        with contextlib.ExitStack() as open_calls:
            streams: dict[PeerSource | None, Iterator[tuple[bytes, bool]]] = {}
            for source in dict.fromkeys(sources):
                wants = [want for want, other in zip(wanted, sources, strict=True) if other is source]
                given = self._stream(source, offered, wants, tick)
                streams[source] = open_calls.enter_context(contextlib.closing(given))
            for source in sources:
                is_whole = False
                while not is_whole:
                    data, is_whole = next(streams[source])
                    yield data
            for stream in streams.values():
                next(stream, None)

    def _stream(
        self, source: PeerSource | None, offered: Offer, wanted: Sequence[Wanted], tick: Callable[[], None]
    ) -> Generator[tuple[bytes, bool]]:
        """The chunks from ``source`` (None: this machine's shard), and whether each one completes its item."""
        if source is None:
            chunks: Iterator[bytes] = self._own.chunks(offered, wanted)
            try:
                yield from _checked(chunks, {want.item: want for want in wanted}, offered)
            except RingProtocolError as error:
                raise ModelError(f"{self._own.folder} is damaged ({error}); delete it, and ask again.") from error
            return
        numbers = {item.key: number for number, item in enumerate(source.offered.items)}
        wants = {numbers[offered.items[want.item].key]: want for want in wanted}
        asked = [Wanted(number, want.start) for number, want in wants.items()]
        with contextlib.closing(source.chunks(asked, tick)) as theirs:
            try:
                yield from _checked(theirs, wants, offered)
            except (NodeRefused, RingProtocolError) as error:
                self._fail(source, str(error))
                raise SourceFailed(source.name) from error

    def _sources_of(
        self, offered: Offer, wanted: Sequence[Wanted], tick: Callable[[], None]
    ) -> list[PeerSource | None]:
        """The source of each of ``wanted``; None: this machine's shard. Raises CapacityError, and what ``tick``
        raises."""
        items = [offered.items[want.item] for want in wanted]
        with self._lock:
            here = self._own.here()
            has: dict[str, PeerSource | None] = {item.key: None for item in items if item.key in here}
            lacking = {item.key: item for item in items if item.key not in here}

            def use(peer: PeerSource) -> None:
                for item in peer.offered.items:
                    if lacking.get(item.key) == item:
                        has[item.key] = peer
                        del lacking[item.key]

            for peer in self._peers:
                use(peer)
            while lacking and (found := self._next(tick)) is not None:
                use(found)
        if lacking:
            raise self._nowhere(list(lacking.values()))
        return [has[item.key] for item in items]

    def _next(self, tick: Callable[[], None]) -> PeerSource | None:
        """Another machine that has parts of the model, or None. Raises what ``tick`` raises."""
        if self._unasked is None:
            wholes, parts = self._sources.look(tick)
            self._unasked = [*wholes, *parts]
        mine = self._own.offered
        while self._unasked:
            machine = self._unasked.pop(0)
            try:
                source = self._sources.offered_by(machine, tick)
            except NodeRefused as error:
                self._failed[machine.name] = str(error).rstrip(".")
                continue
            if version_of(source.offered) == version_of(mine):
                self._peers.append(source)
                return source
            self._failed[machine.name] = (
                f"it has another version of it by now, which `privatellm models remove {self._own.folder.name}` makes "
                "this machine begin with"
            )
        return None

    def _fail(self, source: PeerSource, why: str) -> None:
        with self._lock:
            self._failed[source.name] = why.rstrip(".")
            self._peers = [peer for peer in self._peers if peer is not source]

    def nowhere(self) -> CapacityError:
        """The error for a whole model that no machine has."""
        here = self._own.here()
        return self._nowhere([item for item in self._own.offered.items if item.key not in here])

    def _nowhere(self, missing: Sequence[Item]) -> CapacityError:
        name, nbytes = self._own.offered.identity.name, sum(item.nbytes for item in missing)
        had = " and ".join(self._own.had)
        failed = "".join(f" ({name}: {why})" for name, why in self._failed.items())
        text = (
            f"{byte_size(nbytes)} of {name} are on no machine that is there now{failed}; {had} had all of it: start "
            f"`privatellm join` there, or fetch the model with `privatellm models pull {name}`."
        )
        return CapacityError(text, nbytes, [text])


def _checked(chunks: Iterator[bytes], wants: Mapping[int, Wanted], offered: Offer) -> Generator[tuple[bytes, bool]]:
    """``chunks`` with the item numbers of ``offered``, and whether each one completes its item.

    ``wants`` are by the item numbers of the source. Raises RingProtocolError for a chunk that was not requested, and
    for an item whose checksum differs from the offered one.
    """
    expected = iter(wants.items())
    number, want = next(expected)
    done, checksum = want.start, 0
    for data in chunks:
        chunk = decode_chunk(data)
        item = offered.items[want.item]
        if done == item.nbytes:
            number, want = next(expected, (-1, want))
            done, checksum, item = want.start, 0, offered.items[want.item]
        if (chunk.item, chunk.offset) != (number, done):
            raise RingProtocolError(f"byte {chunk.offset} of item {chunk.item} came, not byte {done} of {number}")
        done += len(chunk.data)
        checksum = zlib.crc32(chunk.data, checksum)
        if done == item.nbytes and not want.start and checksum != item.checksum:
            raise RingProtocolError(f"{item.key} arrived with another checksum than was offered")
        yield encode_chunk(Chunk(want.item, chunk.offset, chunk.checksum, chunk.data)), done == item.nbytes
    if done != offered.items[want.item].nbytes or next(expected, None) is not None:
        raise RingProtocolError("it stopped sending before the end.")


# --- sending the shards ----------------------------------------------------------------------------------------------


OFFER_S = 600.0
"""Timeout in seconds for the answer to an offer. A node with a whole copy of the model reads it once to compare."""
SURE_S = 3.0
"""Seconds of sending after which the remaining time is estimated."""


class ShardUpload:
    """Sends the shards that ``decision`` assigns to ``followers`` (by rank), from ``supply``."""

    def __init__(self, supply: Supply, decision: RingDecision, followers: Mapping[int, Candidate]) -> None:
        assert decision.placement is not None
        self._supply = supply
        self._placement = decision.placement
        self._trunk = decision.mode != "central"
        self._followers = followers
        self._calls = CallGroup()
        self._lock = threading.Lock()
        self._sent = self._to_send = 0
        self._began = 0.0

    def send(self, progress: ProgressCallback) -> dict[int, int]:
        """Send everything that is missing. Returns, per rank, the bytes that the node already had.

        A node keeps what it received, which is not sent again. Raises NodeRefused, ModelError, and Cancelled from
        ``progress``.
        """
        offers = {rank: self._offer(rank, progress) for rank in self._followers}
        with ThreadPoolExecutor(len(self._followers), thread_name_prefix="sending weights") as pool:
            try:
                wants = {rank: pool.submit(self._compare, rank, offers[rank]) for rank in self._followers}
                until_done(wants.values(), lambda: progress("comparing weights", 0, 0, ""))
                wants_by_rank = {rank: future.result() for rank, future in wants.items()}
                self._to_send = sum(want.nbytes for want in wants_by_rank.values())
                sending = [
                    pool.submit(self._deliver, rank, offers[rank], wants_by_rank[rank]) for rank in self._followers
                ]
                until_done(sending, lambda: progress(self._doing(wants_by_rank), self._sent, self._to_send, "bytes"))
            except BaseException:
                self._calls.end()
                raise
        return {rank: want.has_bytes for rank, want in wants_by_rank.items()}

    def _doing(self, wants: Mapping[int, Wants]) -> str:
        """The stage as shown, such as ``sending weights to studio, attic · 40 s left``."""
        names = [one.name for rank, one in self._followers.items() if wants[rank].nbytes]
        text = f"sending weights to {', '.join(names)}" if names else "sending weights"
        if not self._sent:
            self._began = time.monotonic()
            return text
        took = time.monotonic() - self._began
        left = took * (self._to_send - self._sent) / self._sent
        if took < SURE_S or left < 1:
            return text
        return f"{text} · {round(left)} s left" if left < 90 else f"{text} · {round(left / 60)} min left"

    def _offer(self, rank: int, progress: ProgressCallback) -> Offer:
        held = {layer: self._placement.held(rank, layer) for layer in self._placement.layers}
        return self._supply.offer(held, self._trunk, progress)

    def _compare(self, rank: int, offered: Offer) -> Wants:
        one = self._followers[rank]
        data = encode_offer(offered)
        pieces = [DataPiece(data=data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES)]
        return ask(one, lambda: one.client.upload("Offer", pieces, Wants, self._calls, OFFER_S))

    def _deliver(self, rank: int, offered: Offer, wants: Wants) -> None:
        """Send a node the items it wants. Raises NodeRefused, and ModelError if an item is not available."""
        machine = self._followers[rank]
        failed: list[ModelError | SourceFailed] = []

        def pieces() -> Iterator[DataPiece]:
            try:
                for chunk in self._supply.chunks(offered, decode_wanted(wants.wanted), self._check):
                    yield DataPiece(data=chunk)
                    with self._lock:
                        self._sent += len(chunk)
            except (ModelError, SourceFailed) as error:
                failed.append(error)
                raise

        while wants.nbytes:
            try:
                ask(machine, lambda: machine.client.upload("Receive", pieces(), Received, self._calls))
                return
            except SourceFailed:
                # The node kept what it received; another source has the rest.
                wants = self._compare(rank, offered)
            except NodeRefused:
                if failed and not isinstance(failed[0], RingProtocolError):
                    # The source failed, not that machine.
                    raise failed[0] from None
                raise

    def _check(self) -> None:
        """Raises Cancelled once sending was stopped."""
        if self._calls.ended.is_set():
            raise Cancelled("Sending weights was stopped.")
