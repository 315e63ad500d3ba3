"""The shard of a model that this machine keeps as the head of a ring, if it has no whole copy.

It has the same form as a follower's shard, with this machine as its head. The offer of the whole model is stored beside
it, so that the head can plan and make offers to followers without the machines that sent it. A shard that holds
everything becomes the whole model.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.shard_store import ShardStore, missing_in, receive_into
from engine.cluster.weights.source import FolderSource, Source, Tick
from engine.cluster.weights.transfer import (
    OFFER_LIMIT,
    Offer,
    Wanted,
    decode_offer,
    encode_offer,
    expert_of,
    places_of_items,
)
from engine.cluster.weights.weight_fingerprint import identity_of
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.families import check_supported
from engine.models.folders import model_folder
from engine.models.folders.opening import read_config
from engine.models.folders.prepare import SETTING_LIMIT, is_setting_name
from engine.models.folders.shard_files import shards_in
from engine.models.folders.weight_layout import config_fingerprint, layout_of
from engine.runtimes.choosing import refuse_download
from engine.system.durable_files import flush_folder, new_file
from engine.system.locations import ensure, locate

KEPT = "whole.offer"
"""Name of the file in a shard that contains the offer of the whole model."""
_KEPT_LIMIT = OFFER_LIMIT + 1024 * 1024


class NotWhole(Exception):
    """The machines together do not have the whole model."""


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
        for path, manifest in shards_in(locate("models")):
            with contextlib.suppress(ModelError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if manifest.head != me or manifest.identity.name != name:
                    continue
                if (path / KEPT).stat().st_size > _KEPT_LIMIT:
                    continue
                kept = msgspec.msgpack.decode((path / KEPT).read_bytes(), type=_KeptOffer)
                shard = cls(path, decode_offer(kept.offered), kept.had, me)
                of_it = (shard.offered.layout, shard.offered.identity) == (manifest.layout, manifest.identity)
                if of_it and not any(shard.offered.items[want.item].is_small for want in shard.missing(shard.offered)):
                    return shard
        return None

    @classmethod
    def begin(
        cls, sources: Sequence[Source], me: str, progress: ProgressCallback, tick: Tick, folder: Path | None = None
    ) -> OwnShard:
        """Begin a shard of the model of which ``sources`` offer parts: fetch its configuration, tokenizer and headers.

        ``folder`` is not given for a shard of a ring. Items that are in it are not fetched again.

        Raises NotWhole if the sources together do not have everything, ModelError (disk; model: one that cannot run
        here), RingProtocolError for an offer that is no model, and what ``sources`` raise.
        """
        items = {item.key: item for source in reversed(sources) for item in source.offered.items}
        for source in sources:
            _check_settings(source.offered)
        first = sources[0]
        ensure("models")
        folder = folder or ShardStore(locate("models"), me).folder(first.offered)
        was_begun = folder.exists()
        wanted = [want for want in missing_in(folder, first.offered, me) if first.offered.items[want.item].is_small]
        with contextlib.closing(first.chunks(first.offered, wanted, tick)) as chunks:
            receive_into(folder, first.offered, me, wanted, chunks, progress)
        try:
            _remove_others(folder, [source.offered for source in sources])
            offered = _checked_offer(folder, msgspec.structs.replace(first.offered, items=tuple(items.values())))
        except (ModelError, NotWhole):
            if not was_begun:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shard = cls(folder, offered, [source.name for source in sources], me)
        with new_file(folder / KEPT) as file:
            file.write(msgspec.msgpack.encode(_KeptOffer(encode_offer(offered), shard.had)))
        return shard

    def here(self) -> FolderSource:
        """The items that are here."""
        gone = {want.item for want in self.missing(self.offered)}
        items = tuple(item for number, item in enumerate(self.offered.items) if number not in gone)
        return FolderSource("this machine", self.folder, msgspec.structs.replace(self.offered, items=items))

    def missing(self, part: Offer) -> tuple[Wanted, ...]:
        """The items of ``part`` that are not here."""
        return missing_in(self.folder, part, self._me)

    def receive(
        self, part: Offer, wanted: Sequence[Wanted], chunks: Iterable[bytes], progress: ProgressCallback
    ) -> None:
        """See :meth:`engine.cluster.weights.shard_store.ShardStore.receive`."""
        receive_into(self.folder, part, self._me, wanted, chunks, progress, may_give_up=True)

    def become_whole(self, folder: Path, progress: ProgressCallback) -> None:
        """Check the shard, which has everything, and move it to ``folder``, where it is a model like any other.

        Raises RingProtocolError if it is another model than was offered, Cancelled from ``progress``.
        """
        _remove_others(self.folder, [self.offered])
        identity = identity_of(self.folder, progress)
        (self.folder / model_folder.SHARD_MANIFEST).unlink()
        if msgspec.structs.replace(identity, name="") != msgspec.structs.replace(self.offered.identity, name=""):
            raise RingProtocolError(f"another model arrived than {self.offered.identity.name}, which was offered")
        self.folder.rename(folder)
        flush_folder(folder.parent)


def _check_settings(offered: Offer) -> None:
    """Raises RingProtocolError for a file beside the weights that belongs to no model."""
    for item in offered.items:
        name = item.key.removeprefix("setting/")
        if not item.runs and not (is_setting_name(name) and item.nbytes <= SETTING_LIMIT):
            raise RingProtocolError(f"an offer has the file {name[:100]!r}, which belongs to no model")


def _remove_others(folder: Path, offers: Sequence[Offer]) -> None:
    """Remove files that belong to another model whose copy was begun in this folder."""
    names = {name for offered in offers for name, _ in offered.files} | {model_folder.SHARD_MANIFEST}
    names |= {item.key.partition("/")[2] for offered in offers for item in offered.items if not item.runs}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in names:
            path.unlink()


def _checked_offer(folder: Path, offered: Offer) -> Offer:
    """``offered``, sorted, if it is the whole of the model whose headers are in ``folder`` and that can run here.

    Raises ModelError, RingProtocolError, NotWhole.
    """
    config = read_config(folder)
    check_supported(config)
    # The size is not checked, as this machine may hold only a shard.
    refuse_download(config, 0)
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
