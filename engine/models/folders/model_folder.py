"""A model folder: the suffixes and marks of its name and contents, the right to write it, and its bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelError
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.planning.units import byte_size
from engine.system.locations import ensure

PARTIAL = ".partial"
PREPARED = ".prepared"
SHARD = ".share"
RECEIVED = ".received"
TOWER = "tower"
"""Name of the folder inside a GGUF model's that has its vision tower."""
INDEX = "model.safetensors.index.json"
"""Name of the file that says which tensor is in which safetensors file; a prepared folder's also names its source."""
SHARD_MANIFEST = "share.json"
"""Name of the file that marks a folder as a shard of a model (:mod:`engine.models.folders.shard_files`)."""
JOURNAL = "journal.jsonl"
"""Name of the file that records which parts of a preparation are finished."""
BANK_MANIFEST = "bank.json"
"""Name of the file that marks a model that an earlier version prepared (:mod:`engine.models.folders.old_bank`)."""


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is a finished model: it has a config, is not a shard, and has no name of something
    unfinished."""
    if folder.suffix in (PARTIAL, SHARD) or path_exists(folder / SHARD_MANIFEST):
        return False
    return path_exists(folder / "config.json")


def refuse_shard(folder: Path) -> None:
    """Raises ModelError (bad-input) if ``folder`` is a shard, which cannot be loaded by itself."""
    if path_exists(folder / SHARD_MANIFEST):
        raise ModelError(
            f"{folder} is this machine's share of a model that a ring runs, not a whole model; name the model itself.",
            "bad-input",
        )


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the exclusive right to write ``folder`` in the models folder. The system releases it if the process dies.

    Raises ModelError at once if another process holds it.
    """
    ensure("models")
    lock_path = folder.with_name(f".{folder.name}.lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ModelError(
                f"Another privatellm is already working on {folder.name}; wait for it or stop it.", "bad-input"
            ) from error
        yield
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises ModelError (disk) if ``needed`` bytes and a small reserve do not fit on the disk of ``folder``."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    reserve = 64 * 1024 * 1024
    if needed + reserve > free:
        raise ModelError(
            f"{what} needs {byte_size(needed + reserve)} on the disk of {existing}, which has {byte_size(free)} free; "
            f"make room, or set PRIVATELLM_HOME to a larger disk.",
            "disk",
        )


def family_of(folder: Path) -> str:
    """``model_type`` of the folder's config; empty if it cannot be read."""
    try:
        family = read_object(folder / "config.json", SMALL_FILE).get("model_type", "")
    except ModelError:
        return ""
    return family if isinstance(family, str) else ""


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 if there is none."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(base) / name).lstat().st_size
    return total


def path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with characters it cannot hold
        return False
