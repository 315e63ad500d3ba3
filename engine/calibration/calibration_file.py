"""Calibrations on the disk: measured figures are kept, and used only on the same machine and for the same experts.

One JSON file per machine and shape under ``data/calibration``. A file of another version, machine (processor,
instruction set, threads, GPU) or shape is refused. A damaged file is reported and left alone; measuring again replaces
it. ``machine.json`` beside them holds, per machine (:func:`machine_key`), the rate at which memory is read and the cost
of a forward pass per decoder layer beside reading its weights, per runtime. If damaged, it is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.models.formats.model_files import Experts, first_place, whole_bytes
from engine.moe.kernels.bindings import choose
from engine.moe.kernels.pool import physical_cores
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, ExpertShape, check_calibration
from engine.system.durable_files import new_file
from engine.system.locations import ensure, locate
from engine.system.machine import processor

_BLOCK = 32
"""Weights of a block of most packed formats."""
_FILE_LIMIT = 1_000_000
"""Largest calibration file in bytes."""

SPEED_VERSION = 1
MLX_GPU = "mlx on the GPU"
"""Name of the GPU in the machine's key for figures of mlx's GPU, which are kept apart from the CPU's."""


def machine_key(instruction_set: str, threads: int, gpu: str | None) -> str:
    """Name of a machine by all that its figures depend on: ``AMD EPYC (26.2.1); avx512_bf16; 2 threads; no GPU``."""
    return f"{processor()}; {instruction_set}; {threads} thread{'s' * (threads != 1)}; {gpu or 'no GPU'}"


def shape_of(experts: Experts) -> ExpertShape:
    """The shape of a model's experts; reads no weights. Bytes are the mean, as layers may store theirs in different
    formats. Experts without a gate count as those that have as many weights in three matrices, whole blocks of them.
    """
    matrices = first_place(experts).matrices
    ffn, hidden = matrices["gate"].shape
    if "up" not in matrices:
        ffn = 2 * ffn // 3 // _BLOCK * _BLOCK or 2 * ffn // 3
    nbytes = -(-whole_bytes(experts) // (experts.count * len(experts.layers)))
    return ExpertShape(hidden=hidden, ffn=ffn, dtype=experts.dtype, expert_bytes=nbytes)


def calibration_path(shape: ExpertShape, machine: str) -> Path:
    """Path of the calibration of ``shape`` on ``machine``."""
    identity = hashlib.sha256(f"{machine}\n{shape}".encode()).hexdigest()[:12]
    name = f"experts-{shape.hidden}x{shape.ffn}-{shape.dtype.lower()}-{identity}.json"
    return locate("data") / "calibration" / name


def load_calibration(
    shape: ExpertShape, machine: str, notice: Callable[[str], None] = lambda text: None
) -> Calibration | None:
    """The calibration of experts of ``shape`` on ``machine`` (:func:`machine_key`); None if there is none to be used.

    ``notice`` gets one sentence if there is a file but it is damaged, or of something else.
    """
    path = calibration_path(shape, machine)
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise ValueError(f"it has over {_FILE_LIMIT} bytes")
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notice(_damaged(path, str(getattr(error, "strerror", None) or error)))
        return None
    try:
        found = msgspec.json.decode(raw, type=_Versioned)
        if found.version != CALIBRATION_VERSION:
            notice(_refused(path, f"version {found.version}, not {CALIBRATION_VERSION}"))
            return None
        calibration = msgspec.json.decode(raw, type=Calibration)
        check_calibration(calibration)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        notice(_damaged(path, str(error)))
        return None
    if calibration.machine != machine:
        notice(_refused(path, f"measured on {calibration.machine}, and this is {machine}"))
        return None
    if calibration.shape != shape:
        notice(_refused(path, "measured with experts of another shape"))
        return None
    return calibration


def save_calibration(calibration: Calibration) -> Path:
    """Keep ``calibration``, replacing an older one of the same machine and shape; where it is.

    Raises ValueError if it holds what cannot have been measured, OSError if it cannot be written.
    """
    check_calibration(calibration)
    ensure("data")
    path = calibration_path(calibration.shape, calibration.machine)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with new_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    return path


class _Versioned(msgspec.Struct):
    """The part that every version of the file has."""

    version: int


def _damaged(path: Path, why: str) -> str:
    return f"The calibration {path} is damaged ({why}) and not used; `privatellm bench experts` measures again."


def _refused(path: Path, why: str) -> str:
    return f"The calibration {path} is not used: {why}; `privatellm bench experts` measures again."


def calibration_key(dtype: str, threads: int | None, gpu: str | None) -> str:
    """:func:`machine_key` of this machine for computing in ``dtype`` (``bfloat16``, ``float32``, ...).

    ``threads`` None: one per physical core. ``gpu``: the GPU's name. Raises ModelError if PRIVATELLM_KERNELS asks for
    what this CPU does not have.
    """
    kernels = choose("bfloat16" if dtype == "bfloat16" else "float32")
    return machine_key(kernels.name if kernels.native else "torch", threads or physical_cores(), gpu)


# --- the machine's speed ---------------------------------------------------------------------------------------------


class MachineSpeed(msgspec.Struct, frozen=True):
    """``memory_read`` in bytes per second. The others are by runtime, two ways to say what a step took beside streaming
    its weights: ``layer_overhead_s`` in seconds per layer and step, ``read_share`` as the fraction of ``memory_read``
    at which it read them."""

    memory_read: float
    layer_overhead_s: dict[str, float] = {}
    read_share: dict[str, float] = {}


class _SpeedFile(msgspec.Struct):
    version: int
    machines: dict[str, MachineSpeed]


def load_speed(machine: str) -> MachineSpeed | None:
    """The figures of ``machine``; None if none are kept."""
    speed = _read_speed().machines.get(machine)
    if speed is None or not (math.isfinite(speed.memory_read) and speed.memory_read > 0):
        return None
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in speed.layer_overhead_s.values()):
        return None
    if not all(0 < share <= 1 for share in speed.read_share.values()):
        return None
    return speed


def save_speed(
    machine: str, memory_read: float, runtime: str, layer_overhead_s: float, read_share: float | None = None
) -> None:
    """Keep measured figures beside those of other runtimes and machines. ``read_share`` above 1 counts as 1, and None
    is not kept. Raises OSError."""
    file = _read_speed()
    before = file.machines.get(machine)
    overheads = {**(before.layer_overhead_s if before else {}), runtime: max(0.0, layer_overhead_s)}
    shares = {name: share for name, share in (before.read_share if before else {}).items() if name != runtime}
    if read_share is not None:
        shares[runtime] = min(1.0, read_share)
    file.machines[machine] = MachineSpeed(memory_read, overheads, shares)
    ensure("data")
    path = _speed_path()
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with new_file(path) as out:
        out.write(msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def _speed_path() -> Path:
    return locate("data") / "calibration" / "machine.json"


def _read_speed() -> _SpeedFile:
    path = _speed_path()
    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise ValueError("too large")
        found = msgspec.json.decode(path.read_bytes(), type=_SpeedFile)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return _SpeedFile(SPEED_VERSION, {})
    return found if found.version == SPEED_VERSION else _SpeedFile(SPEED_VERSION, {})
