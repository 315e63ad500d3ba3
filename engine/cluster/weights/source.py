"""Sources of a model's weights, and the plan which item is fetched from which of them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.transfer import Chunk, Item, Offer, Wanted, decode_chunk, encode_chunk, stream

Tick = Callable[[], None]
"""A function that is called while somebody waits; what it raises ends the wait."""


class Source(Protocol):
    """A place that has the items ``offered`` of a model: a folder here, another machine, or several places together."""

    @property
    def name(self) -> str:
        """Name in sentences."""
        ...

    @property
    def offered(self) -> Offer: ...

    def chunks(self, part: Offer, wanted: Sequence[Wanted], tick: Tick) -> Generator[bytes]:
        """The ``wanted`` items of ``part`` as encoded chunks, in this order. From any thread.

        ``part`` is an offer of the same version of the model whose wanted items are all in :attr:`offered`. ``tick`` is
        called from other threads meanwhile; what it raises ends the stream. Raises ModelError if an item is not
        available, SourceFailed if another source may have it.
        """
        ...


class SourceFailed(Exception):
    """Raised if the machine ``name`` did not send what it offered. The rest may be requested from another one."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


@dataclass(frozen=True)
class FolderSource:
    """The items ``offered`` of the model in ``folder``."""

    name: str
    folder: Path
    offered: Offer

    def chunks(self, part: Offer, wanted: Sequence[Wanted], tick: Tick) -> Generator[bytes]:
        """See Source. ``tick`` is not called, as a disk is not waited for."""
        yield from stream(self.folder, part, wanted)


@dataclass(frozen=True)
class FetchPlan:
    """The source of each item. ``missing`` are the items that no source has."""

    sources: tuple[int | None, ...]
    """Number of the source by item; None for a missing item."""
    missing: tuple[Item, ...]


def plan_fetch(items: Sequence[Item], offers: Sequence[Iterable[Item]]) -> FetchPlan:
    """The plan to fetch each of ``items`` from the first of ``offers`` that has exactly this item.

    The earlier an offer, the cheaper its source: this machine comes first, and a later machine is called only for what
    all earlier ones lack.
    """
    first: dict[Item, int] = {}
    for number, offered in reversed(list(enumerate(offers))):
        first.update(dict.fromkeys(offered, number))
    sources = tuple(first.get(item) for item in items)
    return FetchPlan(sources, tuple(item for item, source in zip(items, sources, strict=True) if source is None))


class RemoteSource(ABC):
    """A machine ``name`` that has the items ``offered``. What it sends is checked before it is passed on."""

    def __init__(self, name: str, offered: Offer) -> None:
        self.name = name
        self.offered = offered

    @abstractmethod
    def sent(self, wanted: Sequence[Wanted], tick: Tick) -> Iterator[bytes]:
        """The chunks of the ``wanted`` items of :attr:`offered` as they arrive.

        Raises SourceFailed, and what ``tick`` raises.
        """

    def chunks(self, part: Offer, wanted: Sequence[Wanted], tick: Tick) -> Generator[bytes]:
        """See Source. The machine is called once, because each call opens the model there."""
        if not wanted:
            return
        numbers = {item.key: number for number, item in enumerate(self.offered.items)}
        wants = {numbers[part.items[want.item].key]: want for want in wanted}
        arriving = self.sent([Wanted(number, want.start) for number, want in wants.items()], tick)
        try:
            yield from checked(arriving, wants, part)
        except RingProtocolError as error:
            raise SourceFailed(self.name, str(error)) from error


def checked(chunks: Iterator[bytes], wants: Mapping[int, Wanted], offered: Offer) -> Generator[bytes]:
    """``chunks`` with the item numbers of ``offered``.

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
        yield encode_chunk(Chunk(want.item, chunk.offset, chunk.checksum, chunk.data))
    if done != offered.items[want.item].nbytes or next(expected, None) is not None:
        raise RingProtocolError("it stopped sending before the end.")
