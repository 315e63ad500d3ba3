"""The threads that the native kernels run on, and how many of them there should be."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.kernels.bindings import load


def usable_cpus() -> int:
    """Hardware threads that this process may run on at once, by affinity and the container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(_CGROUP)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def within_this_machine(load: Load) -> tuple[Load, str]:
    """``load`` with no more threads than there are CPUs for, and a sentence if that changed it.

    Hundreds of threads on two cores answer a hundred times more slowly than two.
    """
    most = usable_cpus()
    if load.cpu_threads is None or load.cpu_threads <= most:
        return load, ""
    said = f"{load.cpu_threads} CPU threads were asked for; this machine runs {most} at once, so {most} are used."
    return msgspec.structs.replace(load, cpu_threads=most), said


def reason_for(load: Load) -> str:
    """The reason for the number of threads, in a few words for a plan."""
    if load.cpu_threads is None:
        return "one per physical core"
    _, said = within_this_machine(load)
    return f"{load.cpu_threads} were asked for, but this machine runs no more at once" if said else "as chosen"


def threads_of(load: Load) -> int:
    """The threads that ``load`` computes with."""
    return within_this_machine(load)[0].cpu_threads or physical_cores()


_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


class Pool:
    """``threads`` threads, of which the caller is one. Blocked, not spinning, between calls.

    ``cpus`` pins thread i to ``cpus[i]`` (the caller itself is left alone). Calls from several threads queue. In a
    forked child the calls run on one thread. Raises ModelError if the threads cannot be had.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        self._native = load()
        pins = None if cpus is None else (ctypes.c_int32 * threads)(*cpus[:threads])
        self.handle: int = self._native.pllm_pool_create(threads, pins) or 0
        if not self.handle:
            raise ModelError(f"{threads} threads cannot be started; choose fewer CPU threads.", "memory")
        self.threads = threads

    def close(self) -> None:
        """Ends the threads; no call may be running."""
        handle, self.handle = self.handle, 0
        if handle:
            self._native.pllm_pool_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self.close()

    def read_seconds(self, address: int, nbytes: int) -> float:
        """Seconds it takes all threads together to read ``nbytes`` from ``address`` once."""
        return float(self._native.pllm_read_seconds(self.handle, address, nbytes))


@functools.cache
def shared_pool(threads: int) -> Pool:
    """One pool per process and number of threads, for everybody who has no reason to own one."""
    return Pool(threads)


def physical_cores() -> int:
    """Cores this process may use: hardware threads of one core count once, and affinity and cgroup quotas hold.

    On Apple Silicon the performance cores alone: an efficiency core would be waited for.
    """
    if sys.platform == "darwin":
        return _performance_cores() or psutil.cpu_count(logical=False) or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = cores_among(allowed, _TOPOLOGY)
    quota = cgroup_quota(_CGROUP)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cores_among(allowed: Iterable[int], topology: Path) -> int:
    """Number of physical cores of the CPUs ``allowed``. ``topology`` is /sys/devices/system/cpu."""
    cores: set[str] = set()
    for cpu in allowed:
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(f"cpu{cpu}")
    return len(cores)


def cgroup_quota(root: Path) -> float | None:
    """CPUs that a container limit allows (cgroup v2, else v1), or None without a limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (root / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _performance_cores() -> int | None:
    try:
        found = subprocess.run(
            ["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, check=True, timeout=5
        )
        return int(found.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
