"""What benchmarks found out about this machine that predictions for other models rest on: one small file.

``data/calibration/machine.json`` holds, per machine (:func:`engine.calibration.calibration_file.machine_key`), the rate
at which memory is read, and what a forward pass costs per decoder layer beside reading its weights, per runtime. A
damaged file is ignored and replaced.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from engine.models.durable_files import new_file
from engine.models.locations import ensure, locate

SPEED_VERSION = 1
MLX_GPU = "mlx on the GPU"
"""Stands for the GPU in the machine's key where mlx's GPU was measured: what it reads is no figure of the CPU's."""

_FILE_LIMIT = 1_000_000


class MachineSpeed(msgspec.Struct, frozen=True):
    """``memory_read`` in bytes per second; ``layer_overhead_s`` in seconds per layer and step, by runtime."""

    memory_read: float
    layer_overhead_s: dict[str, float] = {}


class _File(msgspec.Struct):
    version: int
    machines: dict[str, MachineSpeed]


def load_speed(machine: str) -> MachineSpeed | None:
    """What is known of ``machine``; None if nothing is."""
    found = _read().machines.get(machine)
    if found is None or not (math.isfinite(found.memory_read) and found.memory_read > 0):
        return None
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in found.layer_overhead_s.values()):
        return None
    return found


def save_speed(machine: str, memory_read: float, runtime: str, layer_overhead_s: float) -> None:
    """Keep what was measured, beside what is known of other runtimes and machines. Raises OSError."""
    file = _read()
    before = file.machines.get(machine)
    overheads = {**(before.layer_overhead_s if before else {}), runtime: max(0.0, layer_overhead_s)}
    file.machines[machine] = MachineSpeed(memory_read, overheads)
    ensure("data")
    path = _path()
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with new_file(path) as out:
        out.write(msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def _path() -> Path:
    return locate("data") / "calibration" / "machine.json"


def _read() -> _File:
    path = _path()
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise ValueError("too large")
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, ValueError, msgspec.DecodeError):
        return _File(SPEED_VERSION, {})
    return found if found.version == SPEED_VERSION else _File(SPEED_VERSION, {})
