"""The shard of a model that this machine keeps as the head of a ring, if it has no whole copy.

It has the same form as a follower's shard, with this machine as its head. The offer of the whole model is stored beside
it, so that the head can plan and make offers to followers without the machines that sent it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.model_receiver import NotWhole, Source, check_settings, is_small, refuse_unfit
from engine.cluster.weights.shard_store import ShardStore, missing_in, receive_into
from engine.cluster.weights.transfer import (
    OFFER_LIMIT,
    Offer,
    Wanted,
    decode_offer,
    encode_offer,
    expert_of,
    part_of_offer,
    places_of_items,
    stream,
)
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders import model_folder
from engine.models.folders.shard_files import read_shard
from engine.models.folders.weight_layout import config_fingerprint, layout_of
from engine.system.durable_files import new_file
from engine.system.locations import ensure, locate

KEPT = "whole.offer"
"""Name of the file in a shard that contains the offer of the whole model."""
_KEPT_LIMIT = OFFER_LIMIT + 1024 * 1024


class _KeptOffer(msgspec.Struct, frozen=True):
    """``offered`` is the encoded offer. ``had`` are the names of the machines that made it."""

    offered: bytes
    had: tuple[str, ...]


class OwnShard:
    """This machine's own shard in ``folder``.

    ``offered`` is the offer of the whole model. ``had`` are the names of the machines that made it. ``me`` is this
    machine's node id.
    """

    def __init__(self, folder: Path, offered: Offer, had: Sequence[str], me: str) -> None:
        self.folder = folder
        self.offered = offered
        self.had = tuple(had)
        self._me = me

    @classmethod
    def find(cls, name: str, me: str) -> OwnShard | None:
        """This machine's shard of the model that it calls ``name``, or None."""
        for path in sorted(locate("models").glob(f"*{model_folder.SHARD}")):
            with contextlib.suppress(ModelError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                manifest = read_shard(path)
                if manifest.head != me or manifest.identity.name != name:
                    continue
                if (path / KEPT).stat().st_size > _KEPT_LIMIT:
                    continue
                kept = msgspec.msgpack.decode((path / KEPT).read_bytes(), type=_KeptOffer)
                found = cls(path, decode_offer(kept.offered), kept.had, me)
                of_it = (found.offered.layout, found.offered.identity) == (manifest.layout, manifest.identity)
                if of_it and not any(is_small(found.offered.items[want.item]) for want in found._missing()):
                    return found
        return None

    @classmethod
    def begin(cls, sources: Sequence[Source], me: str, progress: ProgressCallback) -> OwnShard:
        """Begin a shard of the model of which ``sources`` offer parts: fetch its configuration, tokenizer and headers.

        Raises NotWhole if the sources together do not have everything, ModelError (disk; model: one that cannot run
        here), RingProtocolError for an offer that is no model, and what ``sources`` raise.
        """
        items = {item.key: item for source in reversed(sources) for item in source.offered.items}
        for source in sources:
            check_settings(source.offered)
        first = sources[0]
        ensure("models")
        folder = ShardStore(locate("models"), me).folder(first.offered)
        wanted = [want for want in missing_in(folder, first.offered, me) if is_small(first.offered.items[want.item])]
        with contextlib.closing(first.chunks(wanted)) as chunks:
            receive_into(folder, first.offered, me, wanted, chunks, progress)
        try:
            offered = _checked(folder, msgspec.structs.replace(first.offered, items=tuple(items.values())))
        except (ModelError, NotWhole):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        found = cls(folder, offered, [source.name for source in sources], me)
        with new_file(folder / KEPT) as file:
            file.write(msgspec.msgpack.encode(_KeptOffer(encode_offer(offered), found.had)))
        return found

    def chunks(self, part: Offer, wanted: Sequence[Wanted]) -> Iterator[bytes]:
        """See :func:`engine.cluster.weights.transfer.stream`."""
        return stream(self.folder, part, wanted)

    def as_source(self) -> Source:
        """This shard as a source for a copy of the whole model."""
        here = self.here()
        items = tuple(item for item in self.offered.items if item.key in here)
        return _OwnShardSource(self.folder, msgspec.structs.replace(self.offered, items=items))

    def part(self, held: Mapping[int, Sequence[int]], trunk: bool) -> Offer:
        """The offer for a node with the experts ``held``, and with the trunk if ``trunk``."""
        return part_of_offer(self.offered, held, trunk)

    def here(self) -> frozenset[str]:
        """The keys of the items that are here."""
        gone = {self.offered.items[want.item].key for want in self._missing()}
        return frozenset(item.key for item in self.offered.items if item.key not in gone)

    def missing(self, part: Offer) -> tuple[Wanted, ...]:
        """The items of ``part`` that are not here."""
        return missing_in(self.folder, part, self._me)

    def receive(
        self, part: Offer, wanted: Sequence[Wanted], chunks: Iterable[bytes], progress: ProgressCallback
    ) -> None:
        """See :meth:`engine.cluster.weights.shard_store.ShardStore.receive`."""
        receive_into(self.folder, part, self._me, wanted, chunks, progress, may_give_up=True)

    def _missing(self) -> tuple[Wanted, ...]:
        return missing_in(self.folder, self.offered, self._me)


class _OwnShardSource:
    """Implements :class:`engine.cluster.weights.model_receiver.Source` for this machine's shard."""

    name = "this machine's share"

    def __init__(self, folder: Path, offered: Offer) -> None:
        self.offered = offered
        self._folder = folder

    def chunks(self, wanted: Sequence[Wanted]) -> Generator[bytes]:
        yield from stream(self._folder, self.offered, wanted)


def _checked(folder: Path, offered: Offer) -> Offer:
    """``offered``, sorted, if it is the whole of the model whose headers are in ``folder`` and that can run here.

    Raises ModelError, RingProtocolError, NotWhole.
    """
    refuse_unfit(folder)
    layout = layout_of(folder)
    named = (layout.fingerprint, layout.files, len(layout.trunk), config_fingerprint(layout.config))
    if named != (offered.layout, offered.files, offered.trunk_pieces, offered.identity.config):
        raise RingProtocolError(f"another model arrived than {offered.identity.name}, which was offered")
    places = places_of_items(layout)
    if any(item.runs != places.get(item.key) for item in offered.items if item.runs):
        raise RingProtocolError(f"{offered.identity.name} was offered with weights in places where it has none")
    if not places.keys() <= {item.key for item in offered.items}:
        raise NotWhole
    order = {key: number for number, key in enumerate(places)}
    items = sorted(offered.items, key=lambda item: (expert_of(item.key) or (-1, 0), order.get(item.key, -1)))
    return msgspec.structs.replace(offered, items=tuple(items))
