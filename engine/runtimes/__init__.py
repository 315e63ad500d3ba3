"""Runtimes run the trunk of a model and own its key/value cache; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys

from engine.errors import ModelError
from engine.runtimes.protocol import Runtime

_CLASSES = {
    "torch": ("engine.runtimes.torch.runtime", "TorchRuntime"),
    "mlx": ("engine.runtimes.mlx.runtime", "MlxRuntime"),
}

_NEEDS = {"torch": "torch", "mlx": "mlx_lm"}

NAMES = tuple(_CLASSES)


def runtime_named(name: str) -> Runtime:
    """The runtime called ``name``: ``torch`` or ``mlx``. Its libraries are imported now.

    Raises ModelError if there is no such runtime, or its libraries are not installed.
    """
    if name not in _CLASSES:
        raise ModelError(f"There is no runtime named {name!r}; choose one of {', '.join(NAMES)}.", kind="bad-input")
    if importlib.util.find_spec(_NEEDS[name]) is None:
        raise ModelError(
            f"The {name} runtime needs the package {_NEEDS[name]}, which is not installed here; "
            f"install {_NEEDS[name].replace('_', '-')} in privatellm's environment, or choose another runtime."
        )
    module, attribute = _CLASSES[name]
    runtime: Runtime = getattr(importlib.import_module(module), attribute)()
    return runtime


def pick_runtime(name: str = "auto") -> tuple[Runtime, str]:
    """The runtime for ``name`` (``auto``, ``torch`` or ``mlx``), and in a few words why it is this one.

    ``auto`` is mlx on Apple Silicon where it is installed, torch everywhere else. Raises ModelError as runtime_named.
    """
    if name != "auto":
        return runtime_named(name), "chosen by the settings"
    if not _on_apple_silicon():
        return runtime_named("torch"), "the default off Apple Silicon"
    if importlib.util.find_spec(_NEEDS["mlx"]) is None:
        return runtime_named("torch"), "mlx-lm is not installed; `pip install mlx-lm` gives the faster runtime here"
    return runtime_named("mlx"), "the default on Apple Silicon"


def _on_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
