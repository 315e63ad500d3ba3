"""The bytes of memory that this process may still take, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.ipc.messages import MemoryUse

RESERVE_BYTES = 256 * 1024 * 1024
"""Bytes of memory left to the screen and other programs."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_NAMES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
)
"""Files with limit and use of a control group, and its statistics that count pages of files; versions 2 and 1."""
_NO_LIMIT = 1 << 60
"""Bytes from which a limit counts as none. Version 1 expresses the absence of a limit by such a number."""


class _Files(NamedTuple):
    """Files of one control group, as one version of control groups names them."""

    limit: Path
    used: Path
    statistics: Path
    file_pages: list[str]


def available_bytes(device: str = "cpu") -> int:
    """Bytes free for keys and values on ``device`` (as in ``ModelFacts.device``), a reserve deducted; never negative.

    Pages of memory-mapped weights count as free: the system drops them when it must.
    """
    if device.startswith("cuda"):
        torch = sys.modules["torch"]
        free, _ = torch.cuda.mem_get_info()
        return max(0, int(free) - RESERVE_BYTES)
    return memory().available


@dataclass(frozen=True)
class Memory:
    """The machine's memory as far as this process may use it, in bytes."""

    total: int
    """The machine's memory, or the lowest limit of a control group of this process if that is less."""
    free: int
    machine: int
    """The machine's memory."""

    @property
    def available(self) -> int:
        """Free bytes minus a reserve; never negative."""
        return max(0, self.free - RESERVE_BYTES)


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
    """Bytes left of the tightest memory limit on this process, by its container or any control group (versions 1 and
    2).

    None without a limit. Pages of files count as free.
    """
    return min((left for _, left in _limits(mount, membership)), default=None)


def container_limit(mount: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int | None:
    """The tightest memory limit itself; None where there is none."""
    return min((limit for limit, _ in _limits(mount, membership)), default=None)


def _limits(mount: Path, membership: Path) -> list[tuple[int, int]]:
    """Limit and what is left of it, of each control group that has one."""
    try:
        groups = membership.read_text()
    except OSError:
        groups = ""
    return [found for files in _files(mount, groups) if (found := _limit_of(files)) is not None]


@functools.lru_cache(maxsize=4)
def _files(mount: Path, groups: str) -> list[list[_Files]]:
    """Possible paths of the limit, the use and the statistics of each control group of this process.

    The outermost group is included: inside a container there may be no other. ``groups``: the text of
    /proc/self/cgroup. The result is cached, because every heartbeat of a ring asks for the memory and making the paths
    takes longer than reading the files.
    """
    folders = [mount, mount / "memory"]
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = mount / "memory" if controllers else mount
        for part in Path(path).parts[1:]:
            folder /= part
            folders.append(folder)
    return [
        [_Files(folder / limit, folder / used, folder / "memory.stat", names) for limit, used, *names in _NAMES]
        for folder in folders
    ]


def _limit_of(versions: list[_Files]) -> tuple[int, int] | None:
    """The limit of a control group and what is left of it, or None if it has none (or is none)."""
    for files in versions:
        try:
            text = files.limit.read_text().strip()
            # The statistics of a group without a limit would be asked for nothing: the system adds them up for that.
            if text == "max" or (limit := int(text)) >= _NO_LIMIT:
                return None
            used = int(files.used.read_text())
            statistics = dict(line.split() for line in files.statistics.read_text().splitlines())
            return limit, max(0, limit - used + sum(int(statistics.get(name, 0)) for name in files.file_pages))
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


# --- memory of this process ------------------------------------------------------------------------------------------


_STATUS = Path("/proc/self/status")


def memory_in_use() -> MemoryUse:
    """Read from the system. Where it does not tell mapped files apart, everything counts as the process's own."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines() if ":" in line)
        own, mapped = _bytes(lines["RssAnon"]) + _bytes(lines["RssShmem"]), _bytes(lines["RssFile"])
    except (OSError, KeyError, ValueError):
        import psutil

        return MemoryUse(own=int(psutil.Process().memory_info().rss))
    return MemoryUse(own=own, mapped=mapped)


def _bytes(line: str) -> int:
    """``\t  1234 kB`` in bytes."""
    return 1024 * int(line.split(maxsplit=1)[0])
