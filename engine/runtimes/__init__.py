"""Runtimes run the trunk of a model and own its key/value cache; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

from engine.errors import ModelError
from engine.planning.runtime_choice import WSL_LIBRARIES, has_gpu
from engine.runtimes.common.loading import Runtime

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


def gpu_present() -> bool:
    """Whether there is a GPU that torch might use; found without importing torch, which takes seconds."""
    if not has_gpu(_names_in("/dev"), _names_in(WSL_LIBRARIES), os.environ.get("CUDA_VISIBLE_DEVICES")):
        return False
    import importlib.metadata

    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def _names_in(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []
