"""How much memory this process may still take, in bytes; and giving back what it has freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

RESERVE_BYTES = 256 * 1024 * 1024
"""Left to the screen and the rest of the machine."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
)
"""Limit and use of a control group, and the names of its statistics that count pages of files: versions 2 and 1."""


def available_bytes(device: str = "cpu") -> int:
    """Bytes free for keys and values on ``device`` (as in ``ModelFacts.device``), a reserve deducted; never negative.

    Pages of memory-mapped weights count as free: the system drops them when it must.
    """
    if device.startswith("cuda"):
        torch = sys.modules["torch"]
        free, _ = torch.cuda.mem_get_info()
        return max(0, int(free) - RESERVE_BYTES)
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = container_bytes()
    return max(0, (free if limit is None else min(free, limit)) - RESERVE_BYTES)


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
    left = [_left_of(folder) for folder in _groups(mount, membership)]
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


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


def _left_of(folder: Path) -> int | None:
    """What the control group ``folder`` leaves of its limit, or None if it has none (or is none)."""
    for names in _FILES:
        try:
            limit, used = ((folder / name).read_text().strip() for name in names[:2])
            if limit == "max":
                return None
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(statistics.get(name, 0)) for name in names[2:])
            return max(0, int(limit) - int(used) + files)
        except (OSError, ValueError):
            continue
    return None


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is how Python, torch or mlx say that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    signs = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc", "[metal::malloc]")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
