"""The files that keep what a model has read between runs: their names, who they belong to, and their removal.

A file holds keys and values of a prompt, and its tokens, so it is as private as a conversation. Its name says whose it
is, so that it can be removed with a conversation by a program that cannot read it. Nothing here imports a runtime.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.system.locations import ensure, locate

SUFFIX = ".prefix"
SERVED = "serve"
"""Owner of what clients of ``serve`` asked. They have no conversations."""

_NAME = re.compile(
    r"(?P<owner>[a-z]{1,16}[0-9]{0,18})-(?P<model>[0-9a-f]{16})-[0-9a-f]{16}\.prefix(?P<part>\.[0-9]+\.part)?"
)
_OWNER = re.compile(r"[a-z]{1,16}[0-9]{0,18}")


@dataclass(frozen=True)
class PrefixFile:
    """A file as its name and the disk describe it. ``used`` is the time of its last use in nanoseconds."""

    path: Path
    owner: str
    model: str
    nbytes: int
    used: int


def is_owner(name: str) -> bool:
    """Whether ``name`` can be that of an owner."""
    return _OWNER.fullmatch(name) is not None


def prefix_folder() -> Path:
    return locate("data") / "prefixes"


def new_path(owner: str, model: str) -> Path:
    """A name that no file has. Makes the folder. Raises OSError."""
    ensure("data")
    folder = prefix_folder()
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return folder / f"{owner}-{model}-{os.urandom(8).hex()}{SUFFIX}"


def part_of(path: Path) -> Path:
    """Temporary path to which this process writes the file that will appear at ``path``."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def prefix_files(model: str = "") -> list[PrefixFile]:
    """The complete files, of all models or of the one with the key ``model``, the last used first."""
    found = [file for file, part in _named() if not part and model in ("", file.model)]
    return sorted(found, key=lambda file: (-file.used, file.path.name))


def remove_prefixes(owners: set[str] | None = None) -> None:
    """Remove the files of ``owners`` (None: all files), those included that are being written. Errors are ignored."""
    for file, _ in _named():
        if owners is None or file.owner in owners:
            remove_file(file.path)
    if owners is None:
        with contextlib.suppress(OSError):
            prefix_folder().rmdir()


def remove_abandoned() -> None:
    """Remove what processes that ended were writing."""
    import psutil

    for file, part in _named():
        if part and not psutil.pid_exists(int(part.split(".")[1])):
            remove_file(file.path)


def remove_file(path: Path) -> None:
    """Remove a file, which may be gone. Errors are ignored."""
    with contextlib.suppress(OSError):
        path.unlink()


def _named() -> Iterator[tuple[PrefixFile, str]]:
    """All files with names of ours, and for one that is being written the end of its name."""
    try:
        entries = list(os.scandir(prefix_folder()))
    except OSError:
        return
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        try:
            about = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        file = PrefixFile(Path(entry.path), match["owner"], match["model"], about.st_size, about.st_mtime_ns)
        yield file, match["part"] or ""
