"""Loading a model by whatever runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.models.folders.model_folder import refuse_shard
from engine.runtimes.protocol import LoadedModel, RingPlace, Runtime
from engine.system.free_memory import ran_out_of_memory


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
