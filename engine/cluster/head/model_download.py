"""A model that this machine lacks and a paired one that is lent has: it is copied from there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from discovery.names import plain_text
from engine.cluster.head.survey import candidates
from engine.cluster.membership.client import Calls, Unreachable
from engine.cluster.membership.control_messages import ModelHere, OfferPiece, Piece, WantedModel, WantedWeights
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, stopped_by, until_done
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.weights.taking import NotWhole, Taking
from engine.cluster.weights.transfer import OFFER_LIMIT, Offer, Wanted, decode_offer, encode_wanted
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store import ResolvedModel


class Copier:
    """Looks for ``model``, which is not on this machine, on those that ``node`` knows."""

    def __init__(self, node: Node, model: ResolvedModel, progress: ProgressCallback) -> None:
        """``progress`` may raise Cancelled: within a tenth of a second everything ends, and what has come is kept."""
        self._node = node
        self._model = model
        self._wanted = WantedModel(key=model.plain_folder.name, name=model.name)
        self._progress = progress
        self._at: tuple[str, int, int, str] = ("asking the machines", 0, 0, "")

    def run(self) -> tuple[Path, str] | None:
        """The folder, and from where the model came, in words; None if no machine that is lent has it whole, nor
        several of them together.

        Raises Cancelled, and ModelError: of this machine's disk; network, if all that have it failed; and for a model
        that cannot run here.
        """
        there = candidates(self._node, ())
        found = self._ask_all(there) if there else {}
        groups = [[one] for one in there if one.node_id in found and found[one.node_id].whole]
        groups.append([one for one in there if one.node_id in found and found[one.node_id].part])
        failed: list[str] = []
        for group in filter(None, groups):
            try:
                return self._copy(group), f"Copied from {' and '.join(one.name for one in group)}."
            except NodeRefused as refused:
                failed.append(f"{self._node.table.name_of(refused.node_id)}: {str(refused).rstrip('.')}")
            except NotWhole:
                continue
        if failed:
            name = self._model.name
            raise ModelError(
                f"{name} could not be copied from where it is ({'; '.join(failed)}). Ask for it again to go on where "
                f"that ended, or fetch it from the Internet: privatellm models pull {name}",
                kind="network",
            )
        return None

    def _ask_all(self, there: Sequence[Candidate]) -> dict[str, ModelHere]:
        """What each of them has, by node id; those that do not answer, or not so, are left out."""
        calls, found = Calls(), dict[str, ModelHere]()

        def ask_one(one: Candidate) -> None:
            try:
                found[one.node_id] = one.client.call("ModelHere", self._wanted, ModelHere, calls=calls)
            except (Unreachable, PeerLost, ModelError):
                return

        with ThreadPoolExecutor(len(there), thread_name_prefix="asking for a model") as pool:
            asked = [pool.submit(ask_one, one) for one in there]
            try:
                until_done(asked, self._tell)
            except BaseException:
                calls.end()
                raise
        return found

    def _copy(self, machines: Sequence[Candidate]) -> Path:
        """Raises NodeRefused of the machine that failed, NotWhole, ModelError, Cancelled."""
        alike: dict[tuple[object, ...], list[_Source]] = {}
        refused: NodeRefused | None = None
        for one in machines:
            try:
                offered = self._offer(one)
            except NodeRefused as error:
                refused = error
                continue
            same = (offered.layout, offered.identity.weights, offered.files, offered.trunk_pieces)
            alike.setdefault(same, []).append(_Source(one, self._wanted, offered, self._tell))
        if not alike:
            raise refused or NotWhole
        # Of shares of two versions of a model, those are taken of which there are more.
        sources = max(alike.values(), key=lambda group: len({item.key for one in group for item in one.offered.items}))

        def note(stage: str, done: int, total: int, unit: str) -> None:
            self._at = (stage, done, total, unit)
            if stage.startswith("checking"):
                self._tell()

        try:
            return Taking(self._model, self._node.identity.node_id, sources, note).run()
        except RingProtocolError as error:
            raise NodeRefused(machines[0].node_id, f"{error}.") from error

    def _offer(self, one: Candidate) -> Offer:
        data = bytearray()

        def take() -> Offer:
            call = one.client.stream("ModelOffer", self._wanted, OfferPiece)
            with stopped_by(self._tell, call.cancel):
                for piece in call:
                    data.extend(piece.data)
                    if len(data) > OFFER_LIMIT:
                        raise RingProtocolError(f"an offer of over {OFFER_LIMIT} bytes is none")
                    if piece.total:
                        self._at = (f"{one.name} reads its copy", piece.done, piece.total, "bytes")
            if not data:
                raise ModelError("it has the model no longer.", kind="network")
            return decode_offer(bytes(data))

        self._at = (f"asking {one.name}", 0, 0, "")
        return ask(one, take)

    def _tell(self) -> None:
        self._progress(*self._at)


class _Source:
    """See :class:`engine.cluster.weights.taking.Source`."""

    def __init__(self, one: Candidate, wanted: WantedModel, offered: Offer, tell: Callable[[], None]) -> None:
        self.offered = offered
        self._one = one
        self._wanted = wanted
        self._tell = tell

    @property
    def name(self) -> str:
        return plain_text(self._one.name, 100)

    def chunks(self, wanted: Sequence[Wanted]) -> Generator[bytes]:
        """Raises NodeRefused, and what is raised when it is told how far it is."""
        asked = WantedWeights(
            model=self._wanted,
            layout=self.offered.layout,
            weights=self.offered.identity.weights,
            wanted=encode_wanted(wanted),
        )
        call = self._one.client.stream("ModelWeights", asked, Piece)
        try:
            with stopped_by(self._tell, call.cancel):
                while (piece := ask(self._one, lambda: next(call, None))) is not None:
                    yield piece.data
        finally:
            call.cancel()
