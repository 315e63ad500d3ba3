"""Folders that several tests read, and that one process of a run of the tests writes for all of its workers."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_root(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, the same one for all workers."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)
    return root


def written_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """``folder``, filled by ``write`` in the process that needs it first. Not to be changed."""
    done = folder.with_name(f"{folder.name}.written")
    if not done.exists():
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                write(folder)
                done.touch()
    return folder
