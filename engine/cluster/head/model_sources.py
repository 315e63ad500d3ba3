"""Machines from which a model can be copied: which have it, what they offer, and the chunks that are requested."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from discovery.names import plain_text
from engine.cluster.head.survey import candidates
from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import DataPiece, ModelHere, OfferPiece, WantedModel, WantedWeights
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, stopped_by, until_done
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.weights.source import RemoteSource, SourceFailed, Tick
from engine.cluster.weights.transfer import OFFER_LIMIT, Offer, Wanted, decode_offer, encode_wanted
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store.local_models import ResolvedModel


class ModelSources:
    """The lent machines known to ``node`` that have ``model``. Each is asked once for its offer."""

    def __init__(self, node: Node, model: ResolvedModel, progress: ProgressCallback) -> None:
        """``progress`` may raise Cancelled, which ends everything within a tenth of a second."""
        self.failed: dict[str, str] = {}
        """Reasons of failure, by machine name."""
        self._node = node
        self._wanted = WantedModel(key=model.plain_folder.name, name=model.name)
        self._progress = progress
        self._machines: tuple[list[Candidate], list[Candidate]] | None = None
        self._asked: set[str] = set()
        """Node ids of the machines that were asked for an offer."""
        self.at: tuple[str, int, int, str] = ("asking the machines", 0, 0, "")
        """Arguments of the next call of ``progress``."""

    def tick(self) -> None:
        """Report the current stage. Raises what ``progress`` raises."""
        self._progress(*self.at)

    def note(self, stage: str, done: int, total: int, unit: str) -> None:
        """Set the stage that :meth:`tick` reports."""
        self.at = (stage, done, total, unit)

    def groups(self) -> Iterator[tuple[str, list[PeerSource]]]:
        """The machines not asked yet from which a copy can be begun, by their names: each that has the whole model, and
        then those together that have parts which this machine once sent. Each group offers one version of the model."""
        wholes, parts = self._look(self.tick)
        for group in [*([machine] for machine in wholes), parts]:
            asked = [machine for machine in group if machine.node_id not in self._asked]
            offering = [source for machine in asked if (source := self._offered_by(machine, self.tick)) is not None]
            if sources := _most_alike(offering):
                yield " and ".join(machine.name for machine in group), sources

    def next(self, tick: Tick) -> PeerSource | None:
        """A machine that was not asked yet, or None. ``tick`` is called meanwhile. Raises what it raises."""
        for machine in itertools.chain(*self._look(tick)):
            if machine.node_id not in self._asked and (source := self._offered_by(machine, tick)) is not None:
                return source
        return None

    def _look(self, tick: Tick) -> tuple[list[Candidate], list[Candidate]]:
        """The machines that have the whole model, and those that have a part which this machine once sent."""
        if self._machines is None:
            machines = candidates(self._node, ())
            found = self._ask_all(machines, tick) if machines else {}
            have = [(machine, found[machine.node_id]) for machine in machines if machine.node_id in found]
            self._machines = [one for one, has in have if has.whole], [one for one, has in have if has.part]
        return self._machines

    def _offered_by(self, machine: Candidate, tick: Tick) -> PeerSource | None:
        """The offer of the machine; None if it failed."""
        data = bytearray()

        def take() -> Offer:
            call = client.stream("ModelOffer", self._wanted, OfferPiece)
            with stopped_by(tick, call.cancel):
                for piece in call:
                    data.extend(piece.data)
                    if len(data) > OFFER_LIMIT:
                        raise RingProtocolError(f"an offer of over {OFFER_LIMIT} bytes is none")
                    if piece.total:
                        self.note(f"{machine.name} reads its copy", piece.done, piece.total, "bytes")
            if not data:
                raise ModelError("it has the model no longer.", kind="network")
            return decode_offer(bytes(data))

        self._asked.add(machine.node_id)
        self.note(f"asking {machine.name}", 0, 0, "")
        with contextlib.closing(self._node.table.apart(machine.node_id, machine.client)) as client:
            try:
                return PeerSource(self._node, machine, self._wanted, ask(machine, take))
            except NodeRefused as refused:
                self.failed[machine.name] = str(refused).rstrip(".")
                return None

    def _ask_all(self, machines: Sequence[Candidate], tick: Tick) -> dict[str, ModelHere]:
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


class PeerSource(RemoteSource):
    """The weights that one machine offers."""

    def __init__(self, node: Node, machine: Candidate, wanted: WantedModel, offered: Offer) -> None:
        super().__init__(plain_text(machine.name, 100), offered)
        self._node = node
        self._machine = machine
        self._wanted = wanted

    def sent(self, wanted: Sequence[Wanted], tick: Tick) -> Iterator[bytes]:
        """See RemoteSource."""
        asked = WantedWeights(
            model=self._wanted,
            layout=self.offered.layout,
            weights=self.offered.identity.weights,
            wanted=encode_wanted(wanted),
        )
        machine = self._machine
        with contextlib.closing(self._node.table.apart(machine.node_id, machine.client)) as client:
            call = client.stream("ModelWeights", asked, DataPiece)
            try:
                with stopped_by(tick, call.cancel):
                    while (piece := ask(machine, lambda: next(call, None))) is not None:
                        yield piece.data
            except NodeRefused as refused:
                raise SourceFailed(self.name, str(refused)) from refused


def _most_alike(sources: Sequence[PeerSource]) -> list[PeerSource]:
    """The sources of the version with the most items offered, if ``sources`` offer several versions."""
    versions: dict[tuple[object, ...], list[PeerSource]] = {}
    for one in sources:
        versions.setdefault(one.offered.version, []).append(one)
    return max(
        versions.values(), key=lambda each: len({item.key for one in each for item in one.offered.items}), default=[]
    )
