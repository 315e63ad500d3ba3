"""Where the weights of a ring's shares come from: the head's whole copy, or its own share and the machines that have
the rest."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.cluster.head.model_sources import ModelSources, PeerSource, version_of
from engine.cluster.head.waiting import TooFewError
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_share import OwnShare
from engine.cluster.weights.transfer import Chunk, Item, Offer, Wanted, decode_chunk, encode_chunk, offer, stream
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.planning.units import byte_size


class Supply(Protocol):
    """Of one model, while a ring is formed."""

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """What a node needs that holds the experts ``held``. Raises ModelError, and what ``progress`` raises."""
        ...

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tell: Callable[[], None]) -> Iterator[bytes]:
        """What is wanted of an :meth:`offer`, encoded, in this order. From any thread; ``tell`` is called from others
        meanwhile, and what it raises ends it.

        Raises ModelError if it cannot be had, SourceFailed if it can be had from somewhere else."""
        ...


class SourceFailed(Exception):
    """The machine that something came from failed; whoever wants the rest may ask for it again."""


class WholeCopy:
    """The model ``name`` is whole in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """See Supply."""
        return offer(self._folder, held, progress, trunk=trunk, name=self._name)

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tell: Callable[[], None]) -> Iterator[bytes]:
        """See Supply."""
        return stream(self._folder, offered, wanted)


class PartialCopy:
    """This machine has the share ``own`` of the model; the rest comes from ``sources``, who are asked when it is
    wanted."""

    def __init__(self, own: OwnShare, sources: ModelSources) -> None:
        self._own = own
        self._sources = sources
        self._lock = threading.Lock()
        self._unasked: list[Candidate] | None = None
        """Those that have something of it, and were not asked what; None: it is not known who does."""
        self._peers: list[PeerSource] = []
        self._failed: dict[str, str] = {}
        """By the names of machines, why."""

    def take(self, held: Mapping[int, Sequence[int]], progress: ProgressCallback) -> None:
        """Bring the trunk and the experts ``held`` here. Raises TooFewError if nobody has them, ModelError (disk),
        Cancelled; what came until then is kept."""
        part = self._own.part(held, trunk=True)
        at = ["taking this machine's share", 0, 0, ""]

        def note(_: str, done: int, total: int, unit: str) -> None:
            at[1:] = [done, total, unit]

        def tell() -> None:
            progress(*at)  # type: ignore[arg-type]

        while wanted := self._own.missing(part):
            try:
                with contextlib.closing(self.chunks(part, wanted, tell)) as chunks:
                    self._own.receive(part, wanted, chunks, note)
            except SourceFailed:
                continue
            except RingProtocolError:
                # What came of an item before does not go with the rest of it: it is taken anew.
                if not any(want.start for want in wanted):
                    raise

    def offer(self, held: Mapping[int, Sequence[int]], trunk: bool, progress: ProgressCallback) -> Offer:
        """See Supply."""
        return self._own.part(held, trunk)

    def chunks(self, offered: Offer, wanted: Sequence[Wanted], tell: Callable[[], None]) -> Generator[bytes]:
        """See Supply. Raises TooFewError before the first one if a part of it is nowhere."""
        sources = self._sources_of(offered, wanted, tell)
        # One call for all that comes from a machine: there the model is opened for each.
        with contextlib.ExitStack() as open_calls:
            streams: dict[PeerSource | None, Iterator[tuple[bytes, bool]]] = {}
            for source in dict.fromkeys(sources):
                wants = [want for want, other in zip(wanted, sources, strict=True) if other is source]
                given = self._stream(source, offered, wants, tell)
                streams[source] = open_calls.enter_context(contextlib.closing(given))
            for source in sources:
                is_whole = False
                while not is_whole:
                    data, is_whole = next(streams[source])
                    yield data
            for stream in streams.values():
                next(stream, None)

    def _stream(
        self, source: PeerSource | None, offered: Offer, wanted: Sequence[Wanted], tell: Callable[[], None]
    ) -> Generator[tuple[bytes, bool]]:
        """The chunks of all that ``source`` gives (None: the share here), and whether an item is whole with each."""
        if source is None:
            chunks: Iterator[bytes] = self._own.chunks(offered, wanted)
            try:
                yield from _checked(chunks, {want.item: want for want in wanted}, offered)
            except RingProtocolError as error:
                raise ModelError(f"{self._own.folder} is damaged ({error}); delete it, and ask again.") from error
            return
        there = {item.key: number for number, item in enumerate(source.offered.items)}
        wants = {there[offered.items[want.item].key]: want for want in wanted}
        asked = [Wanted(number, want.start) for number, want in wants.items()]
        with contextlib.closing(source.chunks(asked, tell)) as theirs:
            try:
                yield from _checked(theirs, wants, offered)
            except (NodeRefused, RingProtocolError) as error:
                self._fail(source, str(error))
                raise SourceFailed(source.name) from error

    def _sources_of(
        self, offered: Offer, wanted: Sequence[Wanted], tell: Callable[[], None]
    ) -> list[PeerSource | None]:
        """Who is asked for each of ``wanted``; None: it is here. Raises TooFewError, and what ``tell`` raises."""
        items = [offered.items[want.item] for want in wanted]
        with self._lock:
            here = self._own.here()
            has: dict[str, PeerSource | None] = {item.key: None for item in items if item.key in here}
            lacking = {item.key: item for item in items if item.key not in here}

            def count_on(peer: PeerSource) -> None:
                for item in peer.offered.items:
                    if lacking.get(item.key) == item:
                        has[item.key] = peer
                        del lacking[item.key]

            for peer in self._peers:
                count_on(peer)
            while lacking and (found := self._next(tell)) is not None:
                count_on(found)
        if lacking:
            raise self._nowhere(list(lacking.values()))
        return [has[item.key] for item in items]

    def _next(self, tell: Callable[[], None]) -> PeerSource | None:
        """One more machine that has something of it. Raises what ``tell`` raises."""
        if self._unasked is None:
            wholes, parts = self._sources.look(tell)
            self._unasked = [*wholes, *parts]
        mine = self._own.offered
        while self._unasked:
            one = self._unasked.pop(0)
            try:
                found = self._sources.offered_by(one, tell)
            except NodeRefused as error:
                self._failed[one.name] = str(error).rstrip(".")
                continue
            if version_of(found.offered) == version_of(mine):
                self._peers.append(found)
                return found
            self._failed[one.name] = (
                f"it has another version of it by now, which `privatellm models remove {self._own.folder.name}` makes "
                "this machine begin with"
            )
        return None

    def _fail(self, source: PeerSource, why: str) -> None:
        with self._lock:
            self._failed[source.name] = why.rstrip(".")
            self._peers = [peer for peer in self._peers if peer is not source]

    def nowhere(self) -> TooFewError:
        """That the whole model is wanted, and nobody has it."""
        here = self._own.here()
        return self._nowhere([item for item in self._own.offered.items if item.key not in here])

    def _nowhere(self, missing: Sequence[Item]) -> TooFewError:
        name, nbytes = self._own.offered.identity.name, sum(item.nbytes for item in missing)
        had = " and ".join(self._own.had)
        failed = "".join(f" ({name}: {why})" for name, why in self._failed.items())
        text = (
            f"{byte_size(nbytes)} of {name} are on no machine that is there now{failed}; {had} had all of it: start "
            f"`privatellm join` there, or fetch the model with `privatellm models pull {name}`."
        )
        return TooFewError(text, nbytes, [text])


def _checked(chunks: Iterator[bytes], wants: Mapping[int, Wanted], offered: Offer) -> Generator[tuple[bytes, bool]]:
    """``chunks`` under the numbers that their items have in ``offered``, and whether the item is whole with them;
    ``wants`` by the numbers that they have where they come from.

    Raises RingProtocolError for what was not asked for or has another checksum than was offered."""
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
