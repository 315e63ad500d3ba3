"""A model that the head of a ring has not whole: it begins with what a machine that has it says of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.cluster.head.model_download import Copier
from engine.cluster.head.model_sources import ModelSources, PeerSource, most_alike
from engine.cluster.head.supply import PartialCopy
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import NodeRefused
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_share import OwnShare
from engine.cluster.weights.taking import NotWhole
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models import store
from engine.models.store import ResolvedModel


class LackedModel:
    """``own`` is what is here of ``model``."""

    def __init__(self, node: Node, model: ResolvedModel, own: OwnShare) -> None:
        self._node = node
        self._model = model
        self._own = own

    @property
    def name(self) -> str:
        """For the screen."""
        return self._model.name

    @property
    def folder(self) -> Path:
        """Configuration, tokenizer and headers are there, and what was taken of the weights."""
        return self._own.folder

    @property
    def fetched(self) -> Path | None:
        """The folder of the whole model, if it is here by now."""
        return self._model.folder

    def supply(self, progress: ProgressCallback) -> PartialCopy:
        """For one forming."""
        return PartialCopy(self._own, ModelSources(self._node, self._model, progress))

    def take_whole(self, progress: ProgressCallback) -> tuple[Path, str]:
        """The folder of the whole model, copied from the machines that have it, and a line that says from where; this
        machine's share is given up. Raises ModelError, TooFewError if nobody has it, Cancelled."""
        taken = Copier(self._node, self._model, progress, self._own).run()
        if taken is None:
            raise self.supply(progress).nowhere()
        with contextlib.suppress(ModelError):
            store.remove(self._own.folder.name)
        return taken


def find_lacked(node: Node, model: ResolvedModel, progress: ProgressCallback) -> LackedModel | None:
    """What this machine kept of ``model`` as a head, or what the machines that have it say of it; None if none has it
    whole, nor several of them together.

    ``progress`` may raise Cancelled: within a tenth of a second everything ends. Raises ModelError: of this machine's
    disk; network, if those that have it failed; for a model that cannot run here.
    """
    me = node.identity.node_id
    own = OwnShare.find(model.name, me)
    if own is not None:
        return LackedModel(node, model, own)
    sources = ModelSources(node, model, progress)
    wholes, parts = sources.look()
    failed: list[str] = []
    for group in filter(None, [*([one] for one in wholes), parts]):
        offering: list[PeerSource] = []
        for one in group:
            try:
                offering.append(sources.offered_by(one))
            except NodeRefused as refused:
                failed.append(f"{one.name}: {str(refused).rstrip('.')}")
        try:
            if alike := most_alike(offering):
                return LackedModel(node, model, OwnShare.begin(alike, me, lambda *at: _note(sources, at)))
        except NotWhole:
            continue
        except (NodeRefused, RingProtocolError) as error:
            failed.append(f"{' and '.join(one.name for one in group)}: {str(error).rstrip('.')}")
    if failed:
        raise ModelError(
            f"{model.name} could not be taken from where it is ({'; '.join(failed)}). Ask again, or fetch it from the "
            f"Internet: privatellm models pull {model.name}",
            kind="network",
        )
    return None


def _note(sources: ModelSources, at: tuple[str, int, int, str]) -> None:
    sources.at = at
