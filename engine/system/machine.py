"""This machine's processor and GPUs with their memory, found without importing torch."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.planning.runtime_choice import WSL_LIBRARIES

_QUERY = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_S = 10.0
_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Oldest major version of NVIDIA's driver by CUDA's, within which newer libraries run on an older driver."""
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch could use. Memory in bytes."""

    name: str
    total: int
    free: int


def gpu() -> Gpu | None:
    """The GPU that the torch runtime would use, or None.

    torch is asked if it is loaded and has a GPU, else the driver's own program, as importing torch takes seconds.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            free, total = torch.cuda.mem_get_info()
        except RuntimeError:  # it was lost
            return None
        return Gpu(str(torch.cuda.get_device_name()), int(total), int(free))
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    return parse_gpus(_asked_of_driver(*_QUERY), os.environ.get("CUDA_VISIBLE_DEVICES"))


def driver_problem(cuda: str | None, driver: str | None = None) -> str:
    """Why the NVIDIA driver is too old for a torch made for CUDA ``cuda``, such as ``13.0``; empty if it is not, or
    that is not known. ``driver``: its version, such as ``550.54.14``; None: look."""
    needed = _DRIVERS.get((cuda or "").partition(".")[0], 0)
    if driver is None:
        first = _asked_of_driver("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
        driver = first[0].strip() if first else ""
    installed = driver.partition(".")[0]
    if not installed.isdecimal() or int(installed) >= needed:
        return ""
    return f"it needs driver {needed} or newer for CUDA {cuda}, and {driver} is installed"


def _asked_of_driver(*query: str) -> str:
    """The output of nvidia-smi; empty if it is absent or fails."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL_LIBRARIES)
    return "" if program is None else _output(program, *query)


def parse_gpus(text: str, visible: str | None = None) -> Gpu | None:
    """The first visible GPU of nvidia-smi's answer, one per line: name, MiB in all, MiB free. None if it tells none."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            gpus.append(Gpu(parts[0], int(parts[1]) * _MIB, int(parts[2]) * _MIB))
    first = (visible or "0").split(",")[0].strip()
    # A GPU may also be named by its UUID, which is not queried. The first GPU is used then.
    index = int(first) if first.isdecimal() else 0
    return gpus[index] if index < len(gpus) else None


@functools.cache
def processor() -> str:
    """The processor's name, e.g. ``AMD EPYC 9755``; where the system does not tell one, its architecture."""
    if sys.platform == "darwin":
        found = _output("sysctl", "-n", "machdep.cpu.brand_string")
        return found or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), value.strip())
    if "model name" in facts:
        numbers = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
        return facts["model name"] + (f" ({'.'.join(numbers)})" if numbers else "")
    arm = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    return " ".join([platform.machine(), *arm])


def on_battery() -> bool:
    """Whether this machine runs on its battery now; False where it has none, or does not tell."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return False
    return battery is not None and battery.power_plugged is False


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
