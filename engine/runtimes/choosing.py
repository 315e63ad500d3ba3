"""Which runtime ``auto`` is, for a model on this machine: decided once, for loading, for plans and for doctor."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine import runtimes
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback

Name = Literal["native", "torch", "mlx"]


@dataclass(frozen=True)
class Choice:
    """A runtime, and in a few words why it is this one. ``is_fallback``: it stands in for the machine's default."""

    name: Name
    reason: str
    is_fallback: bool = False


def choose_runtime(
    request: Load,
    folder: Path,
    on_gpu: bool | None = None,
    why_not_native: Callable[[], str | None] | None = None,
    progress: ProgressCallback | None = None,
) -> Choice:
    """The runtime that loads the model in ``folder`` as ``request`` asks. Imports none.

    ``auto`` is mlx on Apple Silicon where it runs the model; elsewhere native where no GPU is used and it runs the
    model, else torch. ``on_gpu``: torch would use a GPU (None: look). ``why_not_native`` is asked instead of opening
    the model, of which ``progress`` is told otherwise. Raises ModelError if the model cannot be opened.
    """
    if request.runtime != "auto":
        return Choice(request.runtime, "chosen by the settings")
    if on_apple_silicon() and request.partitioning != "cpu":
        not_mlx = _why_not_mlx(folder, request)
        if not_mlx is None:
            return Choice("mlx", "the default on Apple Silicon")
        return _elsewhere(request, folder, False, why_not_native, not_mlx, progress)
    gpu = runtimes.gpu_present() if on_gpu is None else on_gpu
    return _elsewhere(request, folder, gpu, why_not_native, None, progress)


def on_one_machine(request: Load, runtime: str) -> Load:
    """How a node of a ring loads its own share with ``runtime``: mlx on the GPU it always has, others on the CPU.

    The node that is left alone loads the whole model in the same way.
    """
    return msgspec.structs.replace(request, partitioning="auto" if runtime == "mlx" else "cpu")


def why_not_native(folder: Path, request: Load, progress: ProgressCallback | None = None) -> str | None:
    """Why the native trunk does not run the model in ``folder``, in a few words; None if it does.

    Raises ModelError if the model cannot be opened.
    """
    from engine.models.opening import open_model
    from engine.runtimes.native.runtime import why_not

    files = open_model(folder, progress)
    return why_not(files.config, files, request)


def refuse_download(config: Mapping[str, Any], nbytes: int) -> None:
    """Raises ModelError if no runtime of this machine would run a model with this ``config``, whose files of weights
    have ``nbytes``: what is quantised is for mlx alone, and for the memory of a Mac's GPU."""
    from engine.models.opening import refuse_quantized
    from engine.runtimes.mlx import eligible, families

    if eligible.quantisation_of(config) is None or not mlx_installed():
        refuse_quantized(config)
        return
    problem = families.why_not_config(dict(config)) or eligible.why_not_quantised(config)
    if problem is not None:
        raise ModelError(f"{problem}, and nothing else reads its quantised weights; choose a bfloat16 copy of it.")
    eligible.refuse_too_large(nbytes, eligible.working_set_bytes(), quantised=True)


def mlx_by_default() -> bool:
    """Whether ``auto`` is mlx on this machine, for models that it runs."""
    return on_apple_silicon() and mlx_installed()


def mlx_installed() -> bool:
    """Whether mlx-lm can be imported here."""
    return importlib.util.find_spec("mlx_lm") is not None


def on_apple_silicon() -> bool:
    """Whether this is a Mac with Apple Silicon, and a Python made for it."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _why_not_mlx(folder: Path, request: Load) -> str | None:
    if not mlx_installed():
        return "mlx-lm is not installed; `pip install mlx-lm` gives the faster runtime here"
    from engine.models.weight_layout import is_library
    from engine.runtimes.mlx.eligible import why_not

    if is_library(folder):
        return None  # Nothing else reads it: what mlx says of it is what a person should hear.
    return why_not(folder, request)


def _elsewhere(
    request: Load,
    folder: Path,
    on_gpu: bool,
    not_native: Callable[[], str | None] | None,
    not_mlx: str | None,
    progress: ProgressCallback | None,
) -> Choice:
    """``not_mlx``: why mlx, the default here, does not run the model; None where it is not the default."""
    if on_gpu and request.partitioning not in ("cpu", "ring"):
        return Choice("torch", "the default with a GPU")
    node = on_one_machine(request, "native") if request.partitioning == "ring" else request
    reason = not_native() if not_native is not None else why_not_native(folder, node, progress)
    if reason is None:
        return Choice("native", not_mlx or "the default on a CPU", is_fallback=not_mlx is not None)
    slower = f"the faster native trunk is not used, because {reason}"
    return Choice("torch", f"{not_mlx}; {slower}" if not_mlx else slower, is_fallback=True)
