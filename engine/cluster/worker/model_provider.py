"""Models that a lent machine provides to paired ones: a whole model that they name, or the shard that they sent."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from discovery.names import plain_text
from engine.cluster.membership.control_messages import (
    PIECE_BYTES,
    DataPiece,
    ModelHere,
    OfferPiece,
    WantedModel,
    WantedWeights,
)
from engine.cluster.membership.node import Node
from engine.cluster.membership.server import Caller
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.source import FolderSource
from engine.cluster.weights.transfer import Offer, decode_wanted, encode_offer, offer
from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders import model_folder
from engine.models.folders.shard_files import shards_in
from engine.models.store import local_models
from engine.system.locations import locate

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_NEVER = (model_folder.PARTIAL, model_folder.SHARD, model_folder.PREPARED)
_BORROWED = ("local--", "gguf--")
"""Beginnings of the names of folders that were made for a person's own folder or file elsewhere."""


@dataclass(frozen=True)
class ProvidedModel:
    """A folder that may be copied. ``name`` is the requesting machine's name of the model."""

    folder: Path
    name: str
    whole: bool
    """Whether it is a whole model and not a shard."""

    def source(self, progress: ProgressCallback) -> FolderSource:
        """Everything in the folder. The first time all of it is read; ``progress`` may raise Cancelled. Raises
        ModelError."""
        return FolderSource(self.name, self.folder, offer(self.folder, progress, self.name))


def find_provided(key: str, name: str, caller: str) -> ProvidedModel | None:
    """The model in the folder ``key`` of the models folder, its prepared copy if it has one.

    Otherwise the shard that the machine with the node id ``caller`` once sent of the model it calls ``name``. None if
    neither is here. Shards of other heads are not given: what a head sent is used with that head only.
    """
    if not _KEY.fullmatch(key) or key.endswith(_NEVER) or key.startswith(_BORROWED):
        return None
    found = local_models.resolve_installed(key)
    if found is not None and found.folder is not None:
        return ProvidedModel(found.folder, name, True)
    for path, manifest in shards_in(locate("models")):
        if manifest.head == caller and manifest.identity.name == name:
            return ProvidedModel(path, name, False)
    return None


REPORT_S = 0.25
"""Seconds between two reports of progress at least."""


class ModelProvider:
    """Answers requests for models. ``allowed`` is whether the person here agrees; if not, no model is found.

    ``notice`` is called from any thread with lines for the person.
    """

    def __init__(self, node: Node, allowed: bool, notice: Callable[[str], None]) -> None:
        self._node = node
        self._allowed = allowed
        self._notice = notice

    @property
    def answers(self) -> Mapping[str, Callable[..., object]]:
        """The answering function by method."""
        return {"ModelHere": self._here, "ModelOffer": self._offer, "ModelWeights": self._weights}

    def _find(self, caller: Caller, wanted: WantedModel) -> ProvidedModel | None:
        return find_provided(wanted.key, wanted.name, caller.node_id) if self._allowed else None

    def _here(self, caller: Caller, wanted: WantedModel) -> ModelHere:
        found = self._find(caller, wanted)
        return ModelHere() if found is None else ModelHere(whole=found.whole, part=not found.whole)

    def _offer(self, caller: Caller, wanted: WantedModel) -> Iterator[OfferPiece]:
        """Offer the model. It may have to be read, in a separate thread, so that progress can be reported."""
        copy = self._find(caller, wanted)
        if copy is None:
            return
        who, what = self._node.table.name_of(caller.node_id), plain_text(wanted.name, 100)
        self._notice(f"{who} copies {what} from this machine.")
        queued: queue.SimpleQueue[OfferPiece | Offer | BaseException] = queue.SimpleQueue()

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if not caller.active():
                raise Cancelled("Nobody waits for the offer any more.")
            queued.put(OfferPiece(done=done, total=total))

        def read() -> None:
            try:
                queued.put(copy.source(progress).offered)
            except BaseException as error:
                queued.put(error)

        threading.Thread(target=read, name="offering a model", daemon=True).start()
        yield from _pieces(queued)

    def _weights(self, caller: Caller, wanted: WantedWeights) -> Iterator[DataPiece]:
        copy = self._find(caller, wanted.model)
        if copy is None:
            raise ModelError(f"{self._node.name} has no such model any more.", kind="model")

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if not caller.active():
                raise Cancelled("Nobody waits for the weights any more.")

        items, source = decode_wanted(wanted.wanted), copy.source(progress)
        if (source.offered.layout, source.offered.identity.weights) != (wanted.layout, wanted.weights):
            raise RingProtocolError("weights of another model were wanted than are here")
        for chunk in source.chunks(source.offered, items, lambda: None):
            yield DataPiece(data=chunk)


def _pieces(queued: queue.SimpleQueue[OfferPiece | Offer | BaseException]) -> Iterator[OfferPiece]:
    last = 0.0
    while True:
        match queued.get():
            case OfferPiece() as news:
                if time.monotonic() - last > REPORT_S:
                    last = time.monotonic()
                    yield news
            case Offer() as offered:
                data = encode_offer(offered)
                for start in range(0, len(data), PIECE_BYTES):
                    yield OfferPiece(data=data[start : start + PIECE_BYTES])
                return
            case error:
                raise error
