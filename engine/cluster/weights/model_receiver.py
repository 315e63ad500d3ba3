"""Copying a whole model from other machines into the models folder, resumed where it stopped, and checked.

The copy is in ``X.received.partial``, with the manifest of a shard, until it is complete; then it gets its name. It is
checked as shards are. Besides, its family and configuration must be able to run, and each file beside the weights must
be of a kind that models have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.shard_store import missing_in, receive_into
from engine.cluster.weights.transfer import Item, Offer, Wanted, places_of_items
from engine.cluster.weights.weight_fingerprint import identity_of
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.families import check_supported
from engine.models.folders import model_folder
from engine.models.folders.opening import read_config
from engine.models.folders.prepare import SETTING_LIMIT, is_setting_name
from engine.models.folders.weight_layout import layout_of
from engine.models.store import local_models
from engine.models.store.local_models import ResolvedModel
from engine.runtimes.choosing import refuse_download
from engine.system.durable_files import flush_folder
from engine.system.locations import ensure


class Source(Protocol):
    """A machine that has the model, or a part of it."""

    @property
    def name(self) -> str: ...

    @property
    def offered(self) -> Offer: ...

    def chunks(self, wanted: Sequence[Wanted]) -> Generator[bytes]:
        """The ``wanted`` items of :attr:`offered`, as encoded chunks. What it raises ends the copy, which can be
        resumed."""
        ...


class NotWhole(Exception):
    """The machines together do not have the whole model."""


class ModelReceiver:
    """Copies ``model`` from ``sources``, which offer parts of the same model.

    ``me`` is this machine's node id. ``progress`` is called while bytes are received, ``checking`` (by default the
    same) while the complete copy is checked.
    """

    def __init__(
        self,
        model: ResolvedModel,
        me: str,
        sources: Sequence[Source],
        progress: ProgressCallback,
        checking: ProgressCallback | None = None,
    ) -> None:
        self._model = model
        self._me = me
        self._sources = sources
        self._progress = progress
        self._checking = checking or progress
        self.folder = model.plain_folder
        self._partial = self.folder.with_name(f"{self.folder.name}{model_folder.RECEIVED}{model_folder.PARTIAL}")

    def run(self) -> Path:
        """Copy the model. Returns its folder.

        Received bytes are kept in any case. Raises NotWhole before anything large is received, ModelError (disk; model:
        one that cannot run), and RingProtocolError for what no machine of this version sends.
        """
        ensure("models")
        with model_folder.exclusive(self.folder):
            if model_folder.is_complete(self.folder):
                return self.folder
            local_models.check_name_is_free(self.folder)
            for source in self._sources:
                check_settings(source.offered)
            first = self._sources[0]
            self._receive(first, is_small)
            refuse_unfit(self._partial)
            self._check_whole()
            missing = sum(nbytes for source in self._sources for nbytes in self._missing(source).values())
            names = " and ".join(source.name for source in self._sources)
            # Items that several sources have are counted more than once, and received once.
            largest = min(missing, sum(size for _, size in first.offered.files))
            model_folder.check_space(self._partial, largest, f"Copying {self._model.name} from {names}")
            for source in self._sources:
                self._receive(source, lambda item: True)
            self._finish()
        return self.folder

    def _missing(self, source: Source) -> dict[Wanted, int]:
        """The missing items that ``source`` offers, with the bytes of each."""
        wanted = missing_in(self._partial, source.offered, self._me)
        return {want: source.offered.items[want.item].nbytes - want.start for want in wanted}

    def _receive(self, source: Source, chosen: Callable[[Item], bool]) -> None:
        offered = source.offered
        wanted = [want for want in self._missing(source) if chosen(offered.items[want.item])]
        if not wanted:
            return
        present = offered.nbytes - sum(self._missing(source).values())

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            self._progress(f"copying from {source.name}", present + done, offered.nbytes, "bytes")

        with contextlib.closing(source.chunks(wanted)) as chunks:
            receive_into(self._partial, offered, self._me, wanted, chunks, progress)

    def _check_whole(self) -> None:
        """Raises NotWhole if no source offers an item of the model. Headers and configuration must be here."""
        layout = layout_of(self._partial)
        offered = {item.key for source in self._sources for item in source.offered.items}
        if not places_of_items(layout).keys() <= offered:
            raise NotWhole

    def _finish(self) -> None:
        """Check the copy and give it its name. Raises RingProtocolError if it is another model than was offered."""
        offered = self._sources[0].offered
        kept = {name for name, _ in offered.files}
        kept |= {item.key.partition("/")[2] for item in offered.items if not item.runs}
        for path in [path for path in self._partial.rglob("*") if path.is_file()]:
            # The file belongs to another model whose copy was begun under this name.
            if str(path.relative_to(self._partial)) not in {*kept, model_folder.SHARD_MANIFEST}:
                path.unlink()
        found = identity_of(self._partial, self._checking)
        (self._partial / model_folder.SHARD_MANIFEST).unlink()
        if msgspec.structs.replace(found, name="") != msgspec.structs.replace(offered.identity, name=""):
            raise RingProtocolError(f"another model arrived than {offered.identity.name}, which was offered")
        self._partial.rename(self.folder)
        flush_folder(self.folder.parent)


def refuse_unfit(folder: Path) -> None:
    """Raises ModelError if the model whose configuration is in ``folder`` cannot run here."""
    config = read_config(folder)
    check_supported(config)
    # The size is not checked, as this machine may hold only a shard.
    refuse_download(config, 0)


def is_small(item: Item) -> bool:
    """Whether the item is configuration, tokenizer or header: these show the model's size and whether it can run."""
    return not item.runs or item.key.startswith("header/")


def check_settings(offered: Offer) -> None:
    """Raises RingProtocolError for a file beside the weights that belongs to no model."""
    for item in offered.items:
        name = item.key.removeprefix("setting/")
        if not item.runs and not (is_setting_name(name) and item.nbytes <= SETTING_LIMIT):
            raise RingProtocolError(f"an offer has the file {name[:100]!r}, which belongs to no model")
