"""The files below a folder, as references name them, and which of them fit what was typed. No Textual."""

from __future__ import annotations

import heapq
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

MOST_LISTED = 10_000
"""Maximum number of files that are listed below a folder. All of them are compared with what is typed, at each key."""
_DEPTH = 12
"""Maximum depth of folders that are looked into."""
_PATIENCE_S = 3.0
"""Seconds after which the listing ends with what was found."""
_GIT_OUTPUT = 8_000_000
"""Maximum bytes of names that are taken from git. An index of a few kilobytes may name gigabytes, as each of its names
may say how much it has in common with the one before."""
_GIT_MEMORY = 500_000
"""Maximum kilobytes of data in git's memory. A repository of half a million files takes a quarter of that."""
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "target", "build", "dist"})
"""Folders of made files. They are skipped, like hidden ones, where no ``.gitignore`` says so."""


def files_below(folder: Path) -> list[str]:
    """Paths of the files below ``folder``, relative to it, sorted. It may take some seconds.

    In a repository these are the files that git tracks, or would with ``git add``. Elsewhere hidden folders and those
    of made files are left out.
    """
    tracked = _by_git(folder)
    return sorted(_by_walking(folder) if tracked is None else tracked)[:MOST_LISTED]


def entries_of(folder: Path) -> list[str]:
    """Names of what is in ``folder``, those of folders with a slash at the end; empty if it cannot be read."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name + ("/" if entry.is_dir() else ""))
                if len(names) >= MOST_LISTED:
                    break
    except (OSError, ValueError):
        return []
    return sorted(names)


def folders_of(files: Iterable[str]) -> list[str]:
    """The folders that ``files`` are in, each with a slash at the end."""
    folders: dict[str, None] = {}
    for file in files:
        end = file.rfind("/")
        while end > 0 and file[: end + 1] not in folders:
            folders[file[: end + 1]] = None
            end = file.rfind("/", 0, end)
    return sorted(folders)


def fitting(typed: str, names: Iterable[str]) -> list[tuple[int, int, str]]:
    """The members of ``names`` that contain the letters of ``typed`` in order, each with its rank, unsorted.

    A name whose last part begins with or contains the text ranks before one whose letters are scattered; then the
    shorter one.
    """
    wanted = typed.casefold()
    ranked = []
    for name in names:
        score = _score(wanted, name.casefold())
        if score is not None:
            ranked.append((score, len(name), name))
    return ranked


def best(found: Iterable[tuple[int, int, str]], limit: int) -> list[str]:
    """The names of the first ``limit`` by rank."""
    return [name for _, _, name in heapq.nsmallest(limit, found)]


def _score(wanted: str, name: str) -> int | None:
    """Penalty of ``name``, 0 for the best fit; None if it does not fit at all."""
    last = name.rstrip("/").rpartition("/")[2]
    if last.startswith(wanted):
        return 0
    if name.startswith(wanted):
        return 1
    if wanted in last:
        return 2
    if wanted in name:
        return 3
    position = first = -1
    for letter in wanted:
        position = name.find(letter, position + 1)
        if position < 0:
            return None
        first = position if first < 0 else first
    return 4 + (position - first) - len(wanted)


def _by_git(folder: Path) -> list[str] | None:
    """Files that git lists; None without git or a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    # A repository's own configuration may name programs to run; listing needs none of them. Git runs one to watch the
    # files, and others to fetch objects that the repository lacks: without any protocol, and without fetching, none.
    command = [git, "-c", "core.fsmonitor=false", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    limited = ["/bin/sh", "-c", f'ulimit -d {_GIT_MEMORY}; exec "$@"', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    try:
        with subprocess.Popen(
            limited,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            patience = threading.Timer(_PATIENCE_S, process.kill)
            patience.start()
            try:
                output = process.stdout.read(_GIT_OUTPUT)
            finally:
                patience.cancel()
            more = len(output) == _GIT_OUTPUT
            if more:
                process.kill()
    except (OSError, ValueError):
        return None
    if process.returncode != 0 and not more:
        return None
    return [os.fsdecode(name) for name in output.split(b"\0")[:-1][:MOST_LISTED] if name]


def _by_walking(folder: Path) -> list[str]:
    files: list[str] = []
    end = time.monotonic() + _PATIENCE_S
    waiting = [("", 0)]
    while waiting and len(files) < MOST_LISTED and time.monotonic() < end:
        below, depth = waiting.pop()
        try:
            with os.scandir(folder / below) as entries:
                for entry in entries:
                    name = below + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if depth < _DEPTH and entry.name not in _SKIPPED and not entry.name.startswith("."):
                            waiting.append((name + "/", depth + 1))
                    elif entry.is_file():
                        files.append(name)
        except (OSError, ValueError):
            continue
    return files
