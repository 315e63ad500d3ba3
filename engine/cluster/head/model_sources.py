"""Machines that have a model which this one lacks: who they are, what they offer, and what is wanted of that."""

from __future__ import annotations

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
from engine.models.store import ResolvedModel


class ModelSources:
    """Those that ``node`` knows, that are lent, and that have ``model``."""

    def __init__(self, node: Node, model: ResolvedModel, progress: ProgressCallback) -> None:
        """``progress`` may raise Cancelled: within a tenth of a second everything ends."""
        self._node = node
        self._wanted = WantedModel(key=model.plain_folder.name, name=model.name)
        self._progress = progress
        self.at: tuple[str, int, int, str] = ("asking the machines", 0, 0, "")
        """What ``progress`` is told, again and again."""

    def look(self, tell: Callable[[], None] | None = None) -> tuple[list[Candidate], list[Candidate]]:
        """Who has it whole, and who has a part of it that this machine once sent. ``tell`` is called meanwhile in place
        of ``progress``. Raises what that raises."""
        there = candidates(self._node, ())
        found = self._ask_all(there, tell or self.tell) if there else {}
        return (
            [one for one in there if one.node_id in found and found[one.node_id].whole],
            [one for one in there if one.node_id in found and found[one.node_id].part],
        )

    def offered_by(self, one: Candidate, tell: Callable[[], None] | None = None) -> PeerSource:
        """``tell``: see :meth:`look`. Raises NodeRefused, Cancelled."""
        data = bytearray()

        def take() -> Offer:
            call = one.client.stream("ModelOffer", self._wanted, OfferPiece)
            with stopped_by(tell or self.tell, call.cancel):
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
        return PeerSource(one, self._wanted, ask(one, take), self.tell)

    def tell(self) -> None:
        self._progress(*self.at)

    def _ask_all(self, there: Sequence[Candidate], tell: Callable[[], None]) -> dict[str, ModelHere]:
        """What each of them has, by node id; those that do not answer, or not so, are left out."""
        calls, found = CallGroup(), dict[str, ModelHere]()

        def ask_one(one: Candidate) -> None:
            try:
                found[one.node_id] = one.client.call("ModelHere", self._wanted, ModelHere, calls=calls)
            except (Unreachable, PeerLost, ModelError):
                return

        with ThreadPoolExecutor(len(there), thread_name_prefix="asking for a model") as pool:
            asked = [pool.submit(ask_one, one) for one in there]
            try:
                until_done(asked, tell)
            except BaseException:
                calls.end()
                raise
        return found


class PeerSource:
    """See :class:`engine.cluster.weights.taking.Source`."""

    def __init__(self, one: Candidate, wanted: WantedModel, offered: Offer, tell: Callable[[], None]) -> None:
        self.offered = offered
        self.node_id = one.node_id
        self._one = one
        self._wanted = wanted
        self._tell = tell

    @property
    def name(self) -> str:
        return plain_text(self._one.name, 100)

    def chunks(self, wanted: Sequence[Wanted], tell: Callable[[], None] | None = None) -> Generator[bytes]:
        """Raises NodeRefused, and what ``tell`` raises, which is called meanwhile in place of the one given before."""
        asked = WantedWeights(
            model=self._wanted,
            layout=self.offered.layout,
            weights=self.offered.identity.weights,
            wanted=encode_wanted(wanted),
        )
        call = self._one.client.stream("ModelWeights", asked, DataPiece)
        try:
            with stopped_by(tell or self._tell, call.cancel):
                while (piece := ask(self._one, lambda: next(call, None))) is not None:
                    yield piece.data
        finally:
            call.cancel()


def version_of(offered: Offer) -> tuple[object, ...]:
    """The same for all that is offered of one version of a model."""
    return (offered.layout, offered.identity.weights, offered.files, offered.trunk_pieces)


def most_alike(sources: Sequence[PeerSource]) -> list[PeerSource]:
    """Of shares of two versions of a model, those of the version of which there is more."""
    versions: dict[tuple[object, ...], list[PeerSource]] = {}
    for one in sources:
        versions.setdefault(version_of(one.offered), []).append(one)
    return max(
        versions.values(), key=lambda each: len({item.key for one in each for item in one.offered.items}), default=[]
    )
