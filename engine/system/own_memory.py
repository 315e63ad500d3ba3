"""The memory that this process takes now."""

from __future__ import annotations

from pathlib import Path

from engine.ipc.messages import MemoryUse

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
