"""What a lent machine gives to paired ones that lack it: a model that they name, or the share that they sent."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

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
from engine.cluster.weights.given import Given, find_given
from engine.cluster.weights.transfer import Offer, decode_wanted, encode_offer
from engine.errors import Cancelled, ModelError

REPORT_S = 0.25
"""How far it has come is told at most so often."""


class Giving:
    """``allowed``: the person here agrees; else nothing is here for anybody. ``notice`` hears from any thread what the
    person should know."""

    def __init__(self, node: Node, allowed: bool, notice: Callable[[str], None]) -> None:
        self._node = node
        self._allowed = allowed
        self._notice = notice

    @property
    def answers(self) -> Mapping[str, Callable[..., object]]:
        """By method."""
        return {"ModelHere": self._here, "ModelOffer": self._offer, "ModelWeights": self._weights}

    def _find(self, caller: Caller, wanted: WantedModel) -> Given | None:
        return find_given(wanted.key, wanted.name, caller.node_id) if self._allowed else None

    def _here(self, caller: Caller, wanted: WantedModel) -> ModelHere:
        found = self._find(caller, wanted)
        return ModelHere() if found is None else ModelHere(whole=found.whole, part=not found.whole)

    def _offer(self, caller: Caller, wanted: WantedModel) -> Iterator[OfferPiece]:
        """The model may have to be read, in a thread of its own, so that it can be told how that goes."""
        found = self._find(caller, wanted)
        if found is None:
            return
        who, what = self._node.table.name_of(caller.node_id), plain_text(wanted.name, 100)
        self._notice(f"{who} copies {what} from this machine.")
        said: queue.SimpleQueue[OfferPiece | Offer | BaseException] = queue.SimpleQueue()

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if not caller.active():
                raise Cancelled("Nobody waits for the offer any more.")
            said.put(OfferPiece(done=done, total=total))

        def read() -> None:
            try:
                said.put(found.offer(progress))
            except BaseException as error:
                said.put(error)

        threading.Thread(target=read, name="offering a model", daemon=True).start()
        yield from _told(said)

    def _weights(self, caller: Caller, wanted: WantedWeights) -> Iterator[DataPiece]:
        found = self._find(caller, wanted.model)
        if found is None:
            raise ModelError(f"{self._node.name} has no such model any more.", kind="model")

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if not caller.active():
                raise Cancelled("Nobody waits for the weights any more.")

        items = decode_wanted(wanted.wanted)
        for chunk in found.chunks(wanted.layout, wanted.weights, items, progress):
            yield DataPiece(data=chunk)


def _told(said: queue.SimpleQueue[OfferPiece | Offer | BaseException]) -> Iterator[OfferPiece]:
    last = 0.0
    while True:
        match said.get():
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
