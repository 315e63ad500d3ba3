"""How many CPU threads a request may have: threads that have no CPU of their own only make the others wait."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from engine.ipc.messages import Load
from engine.moe.kernels.pool import cgroup_quota, physical_cores

_CGROUP = Path("/sys/fs/cgroup")


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
    """Why a model runs on so many threads, in a few words for a plan."""
    if load.cpu_threads is None:
        return "one per physical core"
    _, said = within_this_machine(load)
    return f"{load.cpu_threads} were asked for, but this machine runs no more at once" if said else "as chosen"


def threads_of(load: Load) -> int:
    """The threads that ``load`` computes with."""
    return within_this_machine(load)[0].cpu_threads or physical_cores()
