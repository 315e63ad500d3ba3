"""Facts about this machine that are found without importing torch or mlx: processor, GPU, installed libraries."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.planning.runtime_choice import WSL_LIBRARIES, candidates, has_gpu


@dataclass(frozen=True)
class Machine:
    """The facts that decide which settings can be chosen here."""

    system: str
    """``linux``, ``darwin``, ..., as in ``sys.platform``."""
    architecture: str
    """``x86_64``, ``arm64``, ..., as in ``platform.machine()``."""
    gpu: bool
    """True if there is a GPU that torch might use."""
    torch: bool
    mlx: bool
    """True if the library is installed, whether or not it works."""

    @property
    def apple_silicon(self) -> bool:
        return self.system == "darwin" and self.architecture == "arm64"


@functools.cache
def this_machine() -> Machine:
    """The facts of this machine, found once per process in well under a millisecond."""
    return Machine(
        system=sys.platform,
        architecture=platform.machine(),
        gpu=has_gpu(_names_in("/dev"), _names_in(WSL_LIBRARIES), os.environ.get("CUDA_VISIBLE_DEVICES")),
        torch=_installed("torch"),
        mlx=_installed("mlx") and _installed("mlx_lm"),
    )


def unavailable_reason(key: str, choice: object, machine: Machine | None = None) -> str | None:
    """Why ``choice`` of the setting ``key`` is unavailable on ``machine`` (default: this one); None if it is available.

    ``choice`` None asks about the setting as a whole: has it any effect here? The screen greys what is unavailable and
    shows the reason.
    """
    machine = machine or this_machine()
    if key == "runtime":
        if choice == "mlx" and not machine.apple_silicon:
            return "mlx needs Apple Silicon"
        if choice == "mlx" and not machine.mlx:
            return "mlx-lm is not installed"
        if choice == "torch" and not machine.torch:
            return "torch is not installed"
    if key in ("policy", "gpu_expert_memory"):
        return _no_sharing(machine)
    if key == "partitioning" and choice == "hybrid":
        return _no_sharing(machine)
    if key == "ring_exchange":
        if choice == "mlx" and not machine.mlx:
            return "mlx-lm is not installed"
        if choice == "gloo" and not machine.torch:
            return "torch is not installed"
    return None


def _no_sharing(machine: Machine) -> str | None:
    """Why GPU and CPU cannot share the experts here."""
    if machine.apple_silicon:
        return "CPU and GPU share their memory on Apple Silicon"
    return None if machine.gpu else "no GPU found"


def default_runtime(machine: Machine | None = None) -> tuple[str, str]:
    """The meaning of ``runtime = "auto"`` here and its reason, e.g. ``("native or torch", "as the model allows")``."""
    machine = machine or this_machine()
    names = candidates(apple_silicon=machine.apple_silicon, gpu=machine.gpu)
    if names[0] == "mlx" and machine.mlx:
        return "mlx", f"Apple Silicon; {' or '.join(names[1:])} for models that mlx does not run"
    if names[0] == "mlx":
        return " or ".join(names[1:]), "Apple Silicon, but mlx-lm is not installed"
    if len(names) == 1:
        return names[0], "there is a GPU"
    return " or ".join(names), "native where it can run the model; mlx needs Apple Silicon"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _names_in(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []
