"""How much memory this process may still take, in bytes; and giving back what it has freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

RESERVE_BYTES = 256 * 1024 * 1024
"""Left to the screen and the rest of the machine."""

_CGROUP = Path("/sys/fs/cgroup")


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
    limit = _container_bytes(_CGROUP)
    return max(0, (free if limit is None else min(free, limit)) - RESERVE_BYTES)


def give_back() -> None:
    """Hand freed memory back to the system, where the C library keeps it (glibc).

    The buffers of a long prefill leave holes that no later step fills.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _container_bytes(folder: Path) -> int | None:
    """What the container's limit leaves, or None where there is no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics.get("file", 0)))
    except (OSError, ValueError):
        return None
