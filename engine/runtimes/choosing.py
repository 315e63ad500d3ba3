"""The choice of the runtime for a model on this machine. It collects the facts from which
:mod:`engine.planning.runtime_choice` decides."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine import runtimes
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.planning.runtime_choice import Runtime, RuntimeChoice, candidates, first_supported
from engine.runtimes.native.bindings import STEPS_TOGETHER


def choose_runtime(
    request: Load,
    folder: Path,
    on_gpu: bool | None = None,
    not_native: Callable[[], str | None] | None = None,
    progress: ProgressCallback | None = None,
) -> RuntimeChoice:
    """The runtime that loads the model in ``folder`` as ``request`` asks. Imports none.

    ``auto`` is mlx on Apple Silicon where it runs the model; elsewhere native where no GPU is used and it runs the
    model, else torch. ``on_gpu``: torch would use a GPU (None: look). ``not_native`` is asked instead of opening the
    model, of which ``progress`` is told otherwise. Raises ModelError if the model cannot be opened.
    """
    if request.runtime != "auto":
        return RuntimeChoice(request.runtime, "chosen by the settings")
    mac = on_apple_silicon()
    gpu = not mac and (runtimes.gpu_present() if on_gpu is None else on_gpu)

    def unsupported(name: Runtime) -> str | None:
        if name == "mlx":
            return _mlx_unsupported_reason(folder, request)
        if not_native is not None:
            return not_native()
        node = on_one_machine(request, "native") if request.partitioning == "ring" else request
        return native_unsupported_reason(folder, node, progress)

    names = candidates(apple_silicon=mac, gpu=gpu, partitioning=request.partitioning)
    return first_supported(names, unsupported)


def on_one_machine(request: Load, runtime: str) -> Load:
    """How a model is loaded with ``runtime`` on one machine's CPU; mlx has nothing but the GPU."""
    return msgspec.structs.replace(request, partitioning="auto" if runtime == "mlx" else "cpu")


def as_ring_node(request: Load, runtime: str) -> Load:
    """How a node of a ring loads its shard with ``runtime``: by torch, a GPU shares its experts with the CPU."""
    return msgspec.structs.replace(request, partitioning="cpu" if runtime == "native" else "auto")


def rows_together(runtime: str) -> int:
    """Maximum rows of several answers in one step of ``runtime``; see :attr:`LoadedModel.rows_together`."""
    return STEPS_TOGETHER if runtime == "native" else 1


def native_unsupported_reason(folder: Path, request: Load, progress: ProgressCallback | None = None) -> str | None:
    """Why the native trunk does not run the model in ``folder``, in a few words; None if it does.

    Raises ModelError if the model cannot be opened.
    """
    from engine.models.folders.opening import open_model
    from engine.runtimes.native.runtime import unsupported_reason

    files = open_model(folder, progress, as_whole=True)
    return unsupported_reason(files.config, files, request)


def refuse_download(config: Mapping[str, Any], nbytes: int) -> None:
    """Raises ModelError if no runtime of this machine would run a model with this ``config``, whose files of weights
    have ``nbytes``. What mlx alone reads must fit in the memory of a Mac's GPU."""
    from engine.models.architectures.quantisation import readable_quantised, refuse_quantized
    from engine.runtimes.mlx import eligible, families

    quantised = eligible.quantisation_of(config) is not None
    if not quantised or not mlx_installed() or eligible.unsupported_quantisation(config) is not None:
        refuse_quantized(config)
        return
    if readable_quantised(config):
        return
    problem = families.unsupported_config(dict(config))
    if problem is not None:
        raise ModelError(f"{problem}, and nothing else reads its quantised weights; choose a bfloat16 copy of it.")
    eligible.refuse_too_large(nbytes, eligible.working_set_bytes(), only_here=True)


def mlx_by_default() -> bool:
    """Whether ``auto`` is mlx on this machine, for models that it runs."""
    return on_apple_silicon() and mlx_installed()


def mlx_installed() -> bool:
    """Whether mlx-lm can be imported here."""
    return importlib.util.find_spec("mlx_lm") is not None


def on_apple_silicon() -> bool:
    """Whether this is a Mac with Apple Silicon, and a Python made for it."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _mlx_unsupported_reason(folder: Path, request: Load) -> str | None:
    if not mlx_installed():
        return "mlx-lm is not installed; `pip install mlx-lm` gives the faster runtime here"
    from engine.models.folders.weight_layout import is_library
    from engine.runtimes.mlx.eligible import unsupported_reason

    if is_library(folder) and not _others_read(folder):
        return None  # mlx's own reason is the one to show.
    return unsupported_reason(folder, request)


def _others_read(folder: Path) -> bool:
    """Whether a runtime besides mlx reads the model in ``folder``."""
    from engine.models.folders.opening import open_model

    try:
        open_model(folder, as_whole=True)
    except ModelError:
        return False
    return True
