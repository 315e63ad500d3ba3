"""A model of which this machine has at most a shard. Its description comes from a machine that has it whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.cluster.head.capacity_wait import CapacityError
from engine.cluster.head.joined_source import JoinedSource
from engine.cluster.head.model_sources import ModelSources, PeerSource
from engine.cluster.membership.node import Node
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.own_shard import NotWhole, OwnShard
from engine.cluster.weights.source import SourceFailed
from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders import model_folder
from engine.models.folders.model_folder import PARTIAL, RECEIVED
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

    def take(self, held: Mapping[int, Sequence[int]] | None, progress: ProgressCallback) -> JoinedSource:
        """Fetch the trunk and the experts ``held`` into the shard; None: nothing. Returns the source of the rest.

        Raises CapacityError if nobody has them, ModelError (disk), Cancelled.
        """
        source = JoinedSource(self._own, ModelSources(self._node, self._model, progress))
        if held is not None:
            source.take(held, "taking this machine's share")
        return source

    def take_whole(self, progress: ProgressCallback) -> tuple[Path, str]:
        """Fetch the rest of the model from the machines that have it. The shard becomes the model.

        Returns the model's folder, and a line about where it came from. Raises ModelError, CapacityError if nobody has
        the model, Cancelled.
        """
        sources = ModelSources(self._node, self._model, progress)
        source = JoinedSource(self._own, sources)
        with _only_here(self._model):
            try:
                return _complete(self._own, source, self._model, sources)
            except CapacityError as error:
                if not source.other_versions:
                    raise (_not_copied(self._model, sources) if sources.failed else error) from error
            copied = _copy(self._node.identity.node_id, self._model, ModelSources(self._node, self._model, progress))
        if copied is None:
            raise source.nowhere()
        with contextlib.suppress(ModelError):
            local_models.remove(self._own.folder.name)
        return copied


def find_lacked(node: Node, model: ResolvedModel, progress: ProgressCallback) -> LackedModel | None:
    """``model`` with this machine's shard of it, or with a new shard begun from the machines that have the model.

    Returns None if no machine has it whole, nor several of them together. ``progress`` may raise Cancelled, which ends
    everything within a tenth of a second. Raises ModelError for this machine's disk, for a model that cannot run here,
    and (network) if the machines that have it failed.
    """
    me = node.identity.node_id
    own = OwnShard.find(model.name, me)
    if own is None:
        sources = ModelSources(node, model, progress)
        own, _ = _begin(me, sources)
        if own is None and sources.failed:
            raise ModelError(
                f"{model.name} could not be taken from where it is ({_reasons(sources)}). Ask again, or fetch it from "
                f"the Internet: privatellm models pull {model.name}",
                kind="network",
            )
    return None if own is None else LackedModel(node, model, own)


def copy_model(node: Node, model: ResolvedModel, progress: ProgressCallback) -> tuple[Path, str] | None:
    """Copy ``model`` from machines that ``node`` knows; what was received before is not sent again.

    Returns the model's folder and a line about where it came from; None if no lent machine has the model whole, nor
    several of them together. ``progress`` may raise Cancelled, which ends the copy within a tenth of a second; received
    bytes are kept. Raises ModelError for this machine's disk, for a model that cannot run here, and (network) if all
    machines that have it failed.
    """
    with _only_here(model):
        return _copy(node.identity.node_id, model, ModelSources(node, model, progress))


@contextlib.contextmanager
def _only_here(model: ResolvedModel) -> Iterator[None]:
    """The exclusive right to make the model's folder. Raises ModelError if something else is there."""
    with model_folder.exclusive(model.plain_folder):
        if not model_folder.is_complete(model.plain_folder):
            local_models.check_name_is_free(model.plain_folder)
        yield


def _copy(me: str, model: ResolvedModel, sources: ModelSources) -> tuple[Path, str] | None:
    """See :func:`copy_model`."""
    plain = model.plain_folder
    while True:
        own, peers = _begin(me, sources, plain.with_name(f"{plain.name}{RECEIVED}{PARTIAL}"))
        if own is None:
            break
        try:
            return _complete(own, JoinedSource(own, sources, peers), model, sources)
        except RingProtocolError as error:
            sources.failed[" and ".join(own.had)] = str(error).rstrip(".")
        except CapacityError:
            # The machines that failed have their reasons in `failed`.
            continue
    if sources.failed:
        raise _not_copied(model, sources)
    return None


def _begin(me: str, sources: ModelSources, folder: Path | None = None) -> tuple[OwnShard | None, Sequence[PeerSource]]:
    """A shard begun from the first machines that were not asked yet and have the whole model, and these machines."""
    for names, peers in sources.groups():
        try:
            return OwnShard.begin(peers, me, sources.note, sources.tick, folder), peers
        except NotWhole:
            continue
        except (SourceFailed, RingProtocolError) as error:
            sources.failed[names] = str(error).rstrip(".")
    return None, ()


def _complete(own: OwnShard, source: JoinedSource, model: ResolvedModel, sources: ModelSources) -> tuple[Path, str]:
    """Fetch everything that ``own`` lacks, and make it the whole model.

    Returns the model's folder and a line about where it came from. Raises as :meth:`LackedModel.take_whole`, and
    RingProtocolError if another model arrived than was offered.
    """
    folder, names = model.plain_folder, " and ".join(own.had)
    if not model_folder.is_complete(folder):
        missing = sum(own.offered.items[want.item].nbytes - want.start for want in own.missing(own.offered))
        model_folder.check_space(own.folder, missing, f"Copying {model.name} from {names}")
        source.take(own.offered.held, f"copying from {names}")

        def check(stage: str, done: int, total: int, unit: str) -> None:
            # Nothing is streamed while the copy is checked, so nobody else reports the stage.
            sources.note(stage, done, total, unit)
            sources.tick()

        own.become_whole(folder, check)
    return folder, f"Copied from {' and '.join(source.gave) or names}."


def _not_copied(model: ResolvedModel, sources: ModelSources) -> ModelError:
    return ModelError(
        f"{model.name} could not be copied from where it is ({_reasons(sources)}). Ask for it again to go on where "
        f"that ended, or fetch it from the Internet: privatellm models pull {model.name}",
        kind="network",
    )


def _reasons(sources: ModelSources) -> str:
    return "; ".join(f"{machine}: {why}" for machine, why in sources.failed.items())
