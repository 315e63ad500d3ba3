"""Copying a model that this machine lacks from paired machines that are lent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.cluster.head.model_sources import ModelSources, PeerSource, most_alike, version_of
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.model_receiver import ModelReceiver, NotWhole, Source
from engine.cluster.weights.own_shard import OwnShard
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store.local_models import ResolvedModel


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
