"""A model of which the head of a ring has at most a shard. Its description comes from a machine that has it whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.cluster.head.model_sources import Copier, ModelSources, PeerSource, most_alike
from engine.cluster.head.supply import PartialCopy
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import NodeRefused
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.model_receiver import NotWhole
from engine.cluster.weights.own_shard import OwnShard
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.store import local_models
from engine.models.store.local_models import ResolvedModel


class LackedModel:
    """A model that is not whole on this machine. ``own`` is this machine's shard of ``model``."""

    def __init__(self, node: Node, model: ResolvedModel, own: OwnShard) -> None:
        self._node = node
        self._model = model
        self._own = own

    @property
    def name(self) -> str:
        """The model's name on the screen."""
        return self._model.name

    @property
    def folder(self) -> Path:
        """The shard's folder: configuration, tokenizer, headers, and the weights that are here."""
        return self._own.folder

    @property
    def fetched(self) -> Path | None:
        """The folder of the whole model, if it was fetched meanwhile."""
        return self._model.folder

    def supply(self, progress: ProgressCallback) -> PartialCopy:
        """The source of weights for one forming."""
        return PartialCopy(self._own, ModelSources(self._node, self._model, progress))

    def take_whole(self, progress: ProgressCallback) -> tuple[Path, str]:
        """Copy the whole model from the machines that have it, and remove this machine's shard.

        Returns the model's folder, and a line about where it came from. Raises ModelError, CapacityError if nobody has
        the model, Cancelled.
        """
        taken = Copier(self._node, self._model, progress, self._own).run()
        if taken is None:
            raise self.supply(progress).nowhere()
        with contextlib.suppress(ModelError):
            local_models.remove(self._own.folder.name)
        return taken


def find_lacked(node: Node, model: ResolvedModel, progress: ProgressCallback) -> LackedModel | None:
    """``model`` with this machine's shard of it, or with a new shard begun from the machines that have the model.

    Returns None if no machine has it whole, nor several of them together. ``progress`` may raise Cancelled, which ends
    everything within a tenth of a second. Raises ModelError for this machine's disk, for a model that cannot run here,
    and (network) if the machines that have it failed.
    """
    me = node.identity.node_id
    own = OwnShard.find(model.name, me)
    if own is not None:
        return LackedModel(node, model, own)
    sources = ModelSources(node, model, progress)
    wholes, parts = sources.look()
    failed: list[str] = []
    for group in filter(None, [*([machine] for machine in wholes), parts]):
        offering: list[PeerSource] = []
        for machine in group:
            try:
                offering.append(sources.offered_by(machine))
            except NodeRefused as refused:
                failed.append(f"{machine.name}: {str(refused).rstrip('.')}")
        try:
            if alike := most_alike(offering):
                return LackedModel(node, model, OwnShard.begin(alike, me, lambda *at: _note(sources, at)))
        except NotWhole:
            continue
        except (NodeRefused, RingProtocolError) as error:
            failed.append(f"{' and '.join(machine.name for machine in group)}: {str(error).rstrip('.')}")
    if failed:
        raise ModelError(
            f"{model.name} could not be taken from where it is ({'; '.join(failed)}). Ask again, or fetch it from the "
            f"Internet: privatellm models pull {model.name}",
            kind="network",
        )
    return None


def _note(sources: ModelSources, at: tuple[str, int, int, str]) -> None:
    sources.at = at
