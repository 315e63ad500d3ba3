"""Moves a process into a network namespace; see :mod:`network_namespaces`."""

from __future__ import annotations

import ctypes
from pathlib import Path

CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """The calling thread, and those that it starts, are in the namespace ``name`` from now on. Raises OSError."""
    with Path("/run/netns", name).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
