"""Cores of their own for the processes of a benchmark, where the machine has enough."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")


def shared_out(cores: Sequence[frozenset[int]], processes: int) -> list[frozenset[int]]:
    """Of ``cores`` (the hardware threads of each), as many for each process; empty if there are too few. Pure."""
    each = len(cores) // processes
    if not each:
        return []
    return [frozenset().union(*cores[rank * each : (rank + 1) * each]) for rank in range(processes)]


def cores_here(topology: Path = _TOPOLOGY) -> list[frozenset[int]]:
    """The hardware threads this process may run on, core by core; empty where processes cannot be bound to them."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    cores: dict[str, set[int]] = {}
    for cpu in sorted(allowed):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            core = f"cpu{cpu}"
        cores.setdefault(core, set()).add(cpu)
    return [frozenset(cpus) for cpus in cores.values()]


@contextlib.contextmanager
def bound(cpus: Iterable[int]) -> Iterator[None]:
    """Within it, all threads of this process run on ``cpus`` alone; without any, wherever they ran before."""
    wanted = set(cpus)
    before = _affinities() if wanted else {}
    for thread in before:
        _bind(thread, wanted)
    try:
        yield
    finally:
        everywhere = set().union(*before.values()) if before else set()
        for thread in _affinities() if before else {}:
            _bind(thread, before.get(thread, everywhere))


def _affinities() -> dict[int, set[int]]:
    """By thread of this process."""
    found = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def _bind(thread: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.sched_setaffinity(thread, cpus)
