"""Machines from which a model can be copied: which have it, what they offer, and the chunks that are requested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from discovery.names import plain_text
from engine.cluster.head.survey import candidates
from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import DataPiece, ModelHere, OfferPiece, WantedModel, WantedWeights
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, stopped_by, until_done
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.weights.model_receiver import ModelReceiver, NotWhole, Source
from engine.cluster.weights.own_shard import OwnShard
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
        """Arguments of the next call of ``progress``."""

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

    def offered_by(self, machine: Candidate, tick: Callable[[], None] | None = None) -> PeerSource:
        """The offer of machine ``machine``. ``tick`` is as in :meth:`look`. Raises NodeRefused, Cancelled."""
        data = bytearray()

        def take() -> Offer:
            call = client.stream("ModelOffer", self._wanted, OfferPiece)
            with stopped_by(tick or self.tick, call.cancel):
                for piece in call:
                    data.extend(piece.data)
                    if len(data) > OFFER_LIMIT:
                        raise RingProtocolError(f"an offer of over {OFFER_LIMIT} bytes is none")
                    if piece.total:
                        self.at = (f"{machine.name} reads its copy", piece.done, piece.total, "bytes")
            if not data:
                raise ModelError("it has the model no longer.", kind="network")
            return decode_offer(bytes(data))

        self.at = (f"asking {machine.name}", 0, 0, "")
        with contextlib.closing(self._node.table.apart(machine.node_id, machine.client)) as client:
            return PeerSource(self._node, machine, self._wanted, ask(machine, take), self.tick)

    def tick(self) -> None:
        """Report the current stage. Raises what ``progress`` raises."""
        self._progress(*self.at)

    def _ask_all(self, machines: Sequence[Candidate], tick: Callable[[], None]) -> dict[str, ModelHere]:
        """What each machine has of the model, by node id. Machines that fail to answer are left out."""
        calls, answers = CallGroup(), dict[str, ModelHere]()

        def ask_one(machine: Candidate) -> None:
            try:
                answers[machine.node_id] = machine.client.call("ModelHere", self._wanted, ModelHere, calls=calls)
            except (Unreachable, PeerLost, ModelError):
                return

        with ThreadPoolExecutor(len(machines), thread_name_prefix="asking for a model") as pool:
            asked = [pool.submit(ask_one, machine) for machine in machines]
            try:
                until_done(asked, tick)
            except BaseException:
                calls.end()
                raise
        return answers


class PeerSource:
    """Implements :class:`engine.cluster.weights.model_receiver.Source`: the weights that one machine offers."""

    def __init__(
        self, node: Node, machine: Candidate, wanted: WantedModel, offered: Offer, tick: Callable[[], None]
    ) -> None:
        self.offered = offered
        self._node = node
        self.node_id = machine.node_id
        self._one = machine
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
    """The sources of the version with the most items offered, if ``sources`` offer several versions."""
    versions: dict[tuple[object, ...], list[PeerSource]] = {}
    for one in sources:
        versions.setdefault(version_of(one.offered), []).append(one)
    return max(
        versions.values(), key=lambda each: len({item.key for one in each for item in one.offered.items}), default=[]
    )


# --- copying a whole model -------------------------------------------------------------------------------------------


class Copier:
    """Copies ``model`` from machines that ``node`` knows."""

    def __init__(
        self, node: Node, model: ResolvedModel, progress: ProgressCallback, own: OwnShard | None = None
    ) -> None:
        """``progress`` may raise Cancelled, which ends the copy within a tenth of a second; received bytes are kept.
        ``own`` is this machine's shard of the model, which is not sent again."""
        self._node = node
        self._model = model
        self._own = own
        self._sources = ModelSources(node, model, progress)

    def run(self) -> tuple[Path, str] | None:
        """The model's folder and a line about where it came from; None if no lent machine has the model whole, nor
        several of them together.

        Raises Cancelled. Raises ModelError for this machine's disk, for a model that cannot run here, and (network) if
        all machines that have it failed.
        """
        wholes, parts = self._sources.look()
        failed: list[str] = []
        for group in filter(None, [*([one] for one in wholes), parts]):
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

    def _copy(self, machines: Sequence[Candidate]) -> Path:
        """Copy the model from ``machines`` together. Raises NodeRefused of the machine that failed, NotWhole,
        ModelError, Cancelled."""
        offering: list[PeerSource] = []
        refused: NodeRefused | None = None
        for one in machines:
            try:
                offering.append(self._sources.offered_by(one))
            except NodeRefused as error:
                refused = error
        sources = most_alike(offering)
        if not sources:
            raise refused or NotWhole

        def note(stage: str, done: int, total: int, unit: str) -> None:
            self._sources.at = (stage, done, total, unit)

        def check(stage: str, done: int, total: int, unit: str) -> None:
            # Nothing is streamed while the copy is checked, so the sources do not report the stage.
            note(stage, done, total, unit)
            self._sources.tick()

        every = [*self._here(sources[0]), *sources]
        try:
            return ModelReceiver(self._model, self._node.identity.node_id, every, note, check).run()
        except RingProtocolError as error:
            raise NodeRefused(machines[0].node_id, f"{error}.") from error

    def _here(self, source: PeerSource) -> list[Source]:
        """This machine's shard as a source, if it is of the version that ``source`` offers."""
        shard = None if self._own is None else self._own.as_source()
        if shard is None or version_of(shard.offered) != version_of(source.offered):
            return []
        return [shard]
