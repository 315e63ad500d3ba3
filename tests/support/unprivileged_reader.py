"""What another program of the same person could read of a running process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

import psutil

from tests.support.eventually import eventually

# PR_CAPBSET_DROP of all capabilities: a program that root executes afterwards may do no more than anybody's.
_DROP = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_READ = """
import json, sys
found = {}
for process in sys.argv[1:]:
    for name in ("environ", "mem"):
        try:
            with open(f"/proc/{process}/{name}", "rb"):
                found.setdefault(process, []).append(name)
        except OSError:
            pass
print(json.dumps(found))
"""


def unprivileged(*command: str) -> list[str]:
    """The command that executes ``command`` without the capabilities by which root reads and is not read."""
    return [sys.executable, "-c", _DROP, *command]


def readable(processes: Iterable[int]) -> dict[int, list[str]]:
    """Which files in /proc of ``processes``, started :func:`unprivileged`, another process of this user can open."""
    command = unprivileged(sys.executable, "-c", _READ, *map(str, processes))
    found: dict[str, list[str]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {int(number): names for number, names in found.items()}


def children(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def check_private(process: int) -> None:
    """``process``, started :func:`unprivileged`, and all that it started. Of these only engines have a token."""
    everything = [psutil.Process(process), *children(process)]
    eventually(lambda: readable(each.pid for each in everything) == {})
    for each in everything[1:]:
        assert "engine.host" in each.cmdline() or "HF_TOKEN" not in each.environ(), each.cmdline()
