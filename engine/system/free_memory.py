"""The bytes of memory that this process may still take, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

RESERVE_BYTES = 256 * 1024 * 1024
"""Bytes of memory left to the screen and other programs."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
)
"""Files with limit and use of a control group, and its statistics that count pages of files; versions 2 and 1."""


def available_bytes(device: str = "cpu") -> int:
    """Bytes free for keys and values on ``device`` (as in ``ModelFacts.device``), a reserve deducted; never negative.

    Pages of memory-mapped weights count as free: the system drops them when it must.
    """
    if device.startswith("cuda"):
        torch = sys.modules["torch"]
        free, _ = torch.cuda.mem_get_info()
        return max(0, int(free) - RESERVE_BYTES)
    return max(0, memory().free - RESERVE_BYTES)


@dataclass(frozen=True)
class Memory:
    """The machine's memory as far as this process may use it, in bytes."""

    total: int
    """The machine's memory, or the lowest limit of a control group of this process if that is less."""
    free: int
    machine: int
    """The machine's memory."""


def memory() -> Memory:
    """The memory of this process, now. Pages of memory-mapped files count as free."""
    import psutil

    machine = psutil.virtual_memory()
    limits = _limits(_CGROUP, _MEMBERSHIP)
    return Memory(
        total=min((int(machine.total), *(limit for limit, _ in limits))),
        free=min((int(machine.available), *(left for _, left in limits))),
        machine=int(machine.total),
    )


def give_back() -> None:
    """Hand freed memory back to the system, where the C library keeps it (glibc).

    The buffers of a long prefill leave holes that no later step fills.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def container_bytes(mount: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int | None:
    """What is left of the tightest memory limit that holds for this process, its container's or any control group's
    around it (versions 1 and 2); None where there is no limit. Pages of files count as free."""
    return min((left for _, left in _limits(mount, membership)), default=None)


def container_limit(mount: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int | None:
    """The tightest memory limit itself; None where there is none."""
    return min((limit for limit, _ in _limits(mount, membership)), default=None)


def _limits(mount: Path, membership: Path) -> list[tuple[int, int]]:
    """Limit and what is left of it, of each control group that has one."""
    return [found for folder in _groups(mount, membership) if (found := _limit_of(folder)) is not None]


def _groups(mount: Path, membership: Path) -> list[Path]:
    """The folders of this process's control groups, the outermost too: inside a container there may be no other."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    folders = [mount, mount / "memory"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = mount / "memory" if controllers else mount
        for part in Path(path).parts[1:]:
            folder /= part
            folders.append(folder)
    return folders


def _limit_of(folder: Path) -> tuple[int, int] | None:
    """The limit of the control group ``folder`` and what is left of it, or None if it has none (or is none)."""
    for names in _FILES:
        try:
            limit, used = ((folder / name).read_text().strip() for name in names[:2])
            if limit == "max":
                return None
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(statistics.get(name, 0)) for name in names[2:])
            return int(limit), max(0, int(limit) - int(used) + files)
        except (OSError, ValueError):
            continue
    return None


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` of Python, torch or mlx means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    signs = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc", "[metal::malloc]")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
