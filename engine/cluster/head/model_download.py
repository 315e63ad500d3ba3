"""A model that this machine lacks and a paired one that is lent has: it is copied from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.cluster.head.model_sources import ModelSources, PeerSource, most_alike, version_of
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_share import OwnShare
from engine.cluster.weights.taking import NotWhole, Source, Taking
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store import ResolvedModel


class Copier:
    """Looks for ``model``, which is not on this machine, on those that ``node`` knows."""

    def __init__(
        self, node: Node, model: ResolvedModel, progress: ProgressCallback, own: OwnShare | None = None
    ) -> None:
        """``progress`` may raise Cancelled: within a tenth of a second everything ends, and what has come is kept.
        ``own``: what is here of it as a share, which is not sent again."""
        self._node = node
        self._model = model
        self._own = own
        self._sources = ModelSources(node, model, progress)

    def run(self) -> tuple[Path, str] | None:
        """The folder, and from where the model came, in words; None if no machine that is lent has it whole, nor
        several of them together.

        Raises Cancelled, and ModelError: of this machine's disk; network, if all that have it failed; and for a model
        that cannot run here.
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
        """Raises NodeRefused of the machine that failed, NotWhole, ModelError, Cancelled."""
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
            if stage.startswith("checking"):
                self._sources.tell()

        try:
            return Taking(self._model, self._node.identity.node_id, [*self._here(sources[0]), *sources], note).run()
        except RingProtocolError as error:
            raise NodeRefused(machines[0].node_id, f"{error}.") from error

    def _here(self, source: PeerSource) -> list[Source]:
        """What the own share has of what ``source`` offers."""
        share = None if self._own is None else self._own.as_source()
        if share is None or version_of(share.offered) != version_of(source.offered):
            return []
        return [share]
