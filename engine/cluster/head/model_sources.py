"""Machines from which a model can be copied: which have it, what they offer, and the chunks that are requested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

from discovery.names import plain_text
from engine.cluster.head.survey import candidates
from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import DataPiece, ModelHere, OfferPiece, WantedModel, WantedWeights
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, ask, stopped_by, until_done
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.weights.transfer import OFFER_LIMIT, Offer, Wanted, decode_offer, encode_wanted
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store.local_models import ResolvedModel


class ModelSources:
    """The lent machines known to ``node`` that have ``model``."""

    def __init__(self, node: Node, model: ResolvedModel, progress: ProgressCallback) -> None:
        """``progress`` may raise Cancelled, which ends everything within a tenth of a second."""
        self._node = node
        self._wanted = WantedModel(key=model.plain_folder.name, name=model.name)
        self._progress = progress
        self.at: tuple[str, int, int, str] = ("asking the machines", 0, 0, "")
        """The arguments of the next call of ``progress``."""

    def look(self, tick: Callable[[], None] | None = None) -> tuple[list[Candidate], list[Candidate]]:
        """The machines that have the whole model, and those that have a part which this machine once sent.

        ``tick`` is called meanwhile instead of ``progress``. Raises what it raises.
        """
        machines = candidates(self._node, ())
        found = self._ask_all(machines, tick or self.tick) if machines else {}
        return (
            [one for one in machines if one.node_id in found and found[one.node_id].whole],
            [one for one in machines if one.node_id in found and found[one.node_id].part],
        )

    def offered_by(self, one: Candidate, tick: Callable[[], None] | None = None) -> PeerSource:
        """The offer of machine ``one``. ``tick`` is as in :meth:`look`. Raises NodeRefused, Cancelled."""
        data = bytearray()

        def take() -> Offer:
            call = client.stream("ModelOffer", self._wanted, OfferPiece)
            with stopped_by(tick or self.tick, call.cancel):
                for piece in call:
                    data.extend(piece.data)
                    if len(data) > OFFER_LIMIT:
                        raise RingProtocolError(f"an offer of over {OFFER_LIMIT} bytes is none")
                    if piece.total:
                        self.at = (f"{one.name} reads its copy", piece.done, piece.total, "bytes")
            if not data:
                raise ModelError("it has the model no longer.", kind="network")
            return decode_offer(bytes(data))

        self.at = (f"asking {one.name}", 0, 0, "")
        with contextlib.closing(self._node.table.apart(one.node_id, one.client)) as client:
            return PeerSource(self._node, one, self._wanted, ask(one, take), self.tick)

    def tick(self) -> None:
        """Report the current stage. Raises what ``progress`` raises."""
        self._progress(*self.at)

    def _ask_all(self, machines: Sequence[Candidate], tick: Callable[[], None]) -> dict[str, ModelHere]:
        """What each machine has, by node id, without those that fail to answer."""
        calls, found = CallGroup(), dict[str, ModelHere]()

        def ask_one(one: Candidate) -> None:
            try:
                found[one.node_id] = one.client.call("ModelHere", self._wanted, ModelHere, calls=calls)
            except (Unreachable, PeerLost, ModelError):
                return

        with ThreadPoolExecutor(len(machines), thread_name_prefix="asking for a model") as pool:
            asked = [pool.submit(ask_one, one) for one in machines]
            try:
                until_done(asked, tick)
            except BaseException:
                calls.end()
                raise
        return found


class PeerSource:
    """Implements :class:`engine.cluster.weights.model_receiver.Source`: the weights that one machine offers."""

    def __init__(
        self, node: Node, one: Candidate, wanted: WantedModel, offered: Offer, tick: Callable[[], None]
    ) -> None:
        self.offered = offered
        self._node = node
        self.node_id = one.node_id
        self._one = one
        self._wanted = wanted
        self._tick = tick

    @property
    def name(self) -> str:
        return plain_text(self._one.name, 100)

    def chunks(self, wanted: Sequence[Wanted], tick: Callable[[], None] | None = None) -> Generator[bytes]:
        """The ``wanted`` bytes as encoded chunks. ``tick`` is called meanwhile instead of the constructor's.

        Raises NodeRefused, and what ``tick`` raises.
        """
        asked = WantedWeights(
            model=self._wanted,
            layout=self.offered.layout,
            weights=self.offered.identity.weights,
            wanted=encode_wanted(wanted),
        )
        with contextlib.closing(self._node.table.apart(self.node_id, self._one.client)) as client:
            call = client.stream("ModelWeights", asked, DataPiece)
            with stopped_by(tick or self._tick, call.cancel):
                while (piece := ask(self._one, lambda: next(call, None))) is not None:
                    yield piece.data


def version_of(offered: Offer) -> tuple[object, ...]:
    """A key that is equal for all offers of the same version of a model."""
    return (offered.layout, offered.identity.weights, offered.files, offered.trunk_pieces)


def most_alike(sources: Sequence[PeerSource]) -> list[PeerSource]:
    """The sources of the version of which the most items are offered, where ``sources`` offer several versions."""
    versions: dict[tuple[object, ...], list[PeerSource]] = {}
    for one in sources:
        versions.setdefault(version_of(one.offered), []).append(one)
    return max(
        versions.values(), key=lambda each: len({item.key for one in each for item in one.offered.items}), default=[]
    )
