"""The base class of runtimes: the order in which a model is loaded, and the refusals that all of them share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.models.folders.model_folder import refuse_shard
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import Experts, ModelFiles
from engine.moe.expert_parallel import RankContext
from engine.runtimes.common.model import LocalModel
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.protocol import LoadedModel, RingPlace
from engine.system.free_memory import ran_out_of_memory


class Runtime(ABC):
    """A way to run models: ``native``, ``torch`` or ``mlx``."""

    name: str

    def load(
        self,
        folder: Path,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> LoadedModel:
        """Load the model in ``folder`` (prepared, or plain Hugging Face safetensors; in a ring also a shard of it).

        With ``ring`` only the experts of its rank context are used, and every MoE layer goes through its exchange.
        ``release`` frees the model that was loaded before: it is called once, after all that can be refused without
        its memory was refused, and before memory is taken.
        Raises :class:`engine.errors.ModelError` if the family is not supported, files are damaged or change meanwhile,
        the request cannot be met here, or the model does not fit.
        """
        started = time.perf_counter()
        build = self._checked(folder, request, progress, ring)
        release()
        model = build()
        model.facts = msgspec.structs.replace(model.facts, load_s=time.perf_counter() - started)
        return model

    @abstractmethod
    def _checked(
        self, folder: Path, request: Load, progress: ProgressCallback, ring: RingPlace | None
    ) -> Callable[[], LocalModel]:
        """Check all that can be refused before memory is taken. Returns the function that builds the model."""

    @abstractmethod
    def load_experts(
        self, folder: Path, request: Load, context: RankContext, progress: ProgressCallback
    ) -> NodeExperts:
        """The experts of ``context`` without a trunk, from the model, or a shard of it, in ``folder``.

        Raises ModelError if the family is not supported, experts are missing, cannot be run, or do not fit.
        """


def load_model(
    runtime: Runtime,
    name: str,
    folder: Path,
    request: Load,
    progress: ProgressCallback,
    ring: RingPlace | None = None,
    release: Callable[[], None] = lambda: None,
    known_whole: bool = False,
) -> LoadedModel:
    """Load the model in ``folder`` by ``runtime``. Raises ModelError (memory) if memory runs out.

    Outside of a ring, a shard is refused unless it is known to hold the whole model (``known_whole``).
    """
    if ring is None and not known_whole:
        refuse_shard(folder)
    try:
        return runtime.load(folder, request, progress, ring, release)
    except Exception as error:
        if isinstance(error, ModelError) or not ran_out_of_memory(error):
            raise
        raise ModelError(
            f"{name} does not fit in the memory that is free; choose a smaller model.", kind="memory"
        ) from error


def refuse_ring_alone(request: Load, context: RankContext | None) -> None:
    """Raises ModelError (bad-input) for partitioning ``ring`` outside a ring."""
    if request.partitioning == "ring" and context is None:
        raise ModelError(
            "Partitioning 'ring' needs a place in a ring, which this model was loaded without; choose auto.",
            kind="bad-input",
        )


def refuse_no_threads(request: Load) -> None:
    """Raises ModelError (bad-input) if no thread would run the model."""
    if request.cpu_threads is not None and request.cpu_threads < 1:
        raise ModelError(f"{request.cpu_threads} CPU threads cannot run a model; choose 1 or more.", kind="bad-input")


def files_with_experts(folder: Path, request: Load, progress: ProgressCallback) -> tuple[ModelFiles, Experts]:
    """The model in ``folder`` and its experts. Raises ModelError (bad-input) if it has none."""
    files = open_model(folder, progress)
    if files.experts is None:
        raise ModelError(f"{request.model} has no experts to share; it runs on one machine.", kind="bad-input")
    return files, files.experts
