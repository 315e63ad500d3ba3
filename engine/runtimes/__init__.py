"""Runtimes run the trunk of a model and own its key/value cache; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

from engine.errors import ModelError
from engine.messages import Load
from engine.runtimes.protocol import Runtime

_CLASSES = {
    "native": ("engine.runtimes.native.runtime", "NativeRuntime"),
    "torch": ("engine.runtimes.torch.runtime", "TorchRuntime"),
    "mlx": ("engine.runtimes.mlx.runtime", "MlxRuntime"),
}

_NEEDS = {"torch": "torch", "mlx": "mlx_lm"}

NAMES = tuple(_CLASSES)


def runtime_named(name: str) -> Runtime:
    """The runtime called ``name``: one of NAMES. Its libraries are imported now.

    Raises ModelError if there is no such runtime, or its libraries are not installed.
    """
    if name not in _CLASSES:
        raise ModelError(f"There is no runtime named {name!r}; choose one of {', '.join(NAMES)}.", kind="bad-input")
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        raise ModelError(
            f"The {name} runtime needs the package {_NEEDS[name]}, which is not installed here; "
            f"install {_NEEDS[name].replace('_', '-')} in privatellm's environment, or choose another runtime."
        )
    module, attribute = _CLASSES[name]
    runtime: Runtime = getattr(importlib.import_module(module), attribute)()
    return runtime


def pick_runtime(name: str = "auto", folder: Path | None = None, request: Load | None = None) -> tuple[Runtime, str]:
    """The runtime for ``name`` (``auto`` or one of NAMES), and in a few words why it is this one.

    ``auto`` is mlx on Apple Silicon where it is installed; elsewhere native where no GPU is used and it can run the
    model in ``folder`` as ``request`` asks, else torch. A reason that does not begin with "the default" is a fallback.
    Raises ModelError as runtime_named does, or if the model in ``folder`` cannot be opened.
    """
    if name != "auto":
        return runtime_named(name), "chosen by the settings"
    if not _on_apple_silicon():
        return _pick_elsewhere(folder, request)
    if importlib.util.find_spec(_NEEDS["mlx"]) is None:
        return runtime_named("torch"), "mlx-lm is not installed; `pip install mlx-lm` gives the faster runtime here"
    return runtime_named("mlx"), "the default on Apple Silicon"


def _pick_elsewhere(folder: Path | None, request: Load | None) -> tuple[Runtime, str]:
    if folder is None or request is None:
        return runtime_named("torch"), "the default off Apple Silicon"
    if request.partitioning != "cpu" and gpu_present():
        return runtime_named("torch"), "the default with a GPU"
    reason = why_not_native(folder, request)
    if reason is None:
        return runtime_named("native"), "the default on a CPU"
    return runtime_named("torch"), f"the faster native trunk is not used, because {reason}"


def why_not_native(folder: Path, request: Load) -> str | None:
    """Why the native trunk does not run the model in ``folder``, in a few words; None if it does.

    Raises ModelError if the model cannot be opened.
    """
    from engine.models.opening import open_model
    from engine.runtimes.native.runtime import why_not

    files = open_model(folder)
    return why_not(files.config, files, request)


def gpu_present() -> bool:
    """Whether there is a GPU that torch might use; found without importing torch, which takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        built_for_cpu = "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    devices = Path("/dev")
    return not built_for_cpu and (any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists())


def mlx_by_default() -> bool:
    """Whether ``auto`` is mlx on this machine."""
    return _on_apple_silicon() and importlib.util.find_spec(_NEEDS["mlx"]) is not None


def _on_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
