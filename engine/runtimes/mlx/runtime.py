"""The mlx runtime, importable anywhere: mlx itself is imported when a model is loaded."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import RankContext
from engine.runtimes.common.loading import Runtime
from engine.runtimes.common.model import LocalModel
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.protocol import RingPlace


def available() -> str | None:
    """A sentence on what is missing and what to do; None if mlx and mlx-lm are installed."""
    missing = [name for name, module in (("mlx", "mlx"), ("mlx-lm", "mlx_lm")) if not importlib.util.find_spec(module)]
    if not missing:
        return None
    return (
        f"the mlx runtime needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
        "on a Mac with Apple Silicon run pip install 'mlx>=0.32,<0.33' 'mlx-lm>=0.32,<0.33', "
        "elsewhere choose the torch runtime"
    )


@contextmanager
def open_files_kept() -> Iterator[None]:
    """Within it mlx-lm is imported, which would otherwise lower how many files and sockets this process may open, for
    good. It may raise the number."""
    real = resource.setrlimit

    def raised(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_NOFILE:
            soft, hard = resource.getrlimit(kind)
            if soft == resource.RLIM_INFINITY or soft >= limits[0]:
                return
            limits = (limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard), hard)
        real(kind, limits)

    resource.setrlimit = raised
    try:
        yield
    finally:
        resource.setrlimit = real


class MlxRuntime(Runtime):
    """Runs models by mlx-lm: prepared, plain Hugging Face safetensors, or quantised by mlx-lm."""

    name = "mlx"

    def _checked(
        self, folder: Path, request: Load, progress: ProgressCallback, ring: RingPlace | None
    ) -> Callable[[], LocalModel]:
        plan = _library().plan_loading(folder, request, None if ring is None else ring.context)
        return partial(_library().build, plan, request, progress, ring)

    def load_experts(
        self, folder: Path, request: Load, context: RankContext, progress: ProgressCallback
    ) -> NodeExperts:
        experts: NodeExperts = _library().load_experts(folder, request, progress, context)
        return experts


def _library() -> ModuleType:
    """The module that loads models, with mlx imported. Raises ModelError if mlx is missing, or cannot be used here."""
    problem = available()
    if problem is not None:
        raise ModelError(problem)
    try:
        with open_files_kept():
            from engine.runtimes.mlx import loading
    except Exception as error:  # native libraries and mlx-lm's own set-up fail in more ways than ImportError
        raise ModelError(f"mlx is installed and cannot be used here ({error}): choose the torch runtime") from error
    return loading
