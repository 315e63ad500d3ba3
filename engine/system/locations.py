"""The folders of this program on this machine. ``PRIVATELLM_HOME`` moves all of them under one folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import platformdirs

Kind = Literal["config", "data", "models", "logs"]
_TMUTIL_S = 10.0

KINDS: tuple[Kind, ...] = ("config", "data", "models", "logs")


def locate(kind: Kind) -> Path:
    """The folder for ``kind``; it may not exist yet."""
    home = os.environ.get("PRIVATELLM_HOME")
    if home:
        return Path(home).expanduser().absolute() / kind
    directories = platformdirs.PlatformDirs("privatellm", appauthor=False)
    return {
        "config": directories.user_config_path,
        "data": directories.user_data_path,
        "models": directories.user_data_path / "models",
        "logs": directories.user_log_path,
    }[kind]


def ensure(kind: Kind) -> Path:
    """The folder for ``kind``, made if it is missing, readable by its owner only."""
    folder = locate(kind)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(OSError):  # somebody else's folder stays as it is
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
    if new and kind == "models" and sys.platform == "darwin":
        _leave_out_of_backups(folder)
    return folder


def _leave_out_of_backups(folder: Path) -> None:
    """Exclude the folder from Time Machine, as its gigabytes can be fetched again.

    This is done once, when the folder is made, so that ``tmutil removeexclusion`` has a lasting effect.
    """
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["/usr/bin/tmutil", "addexclusion", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TMUTIL_S,
            check=False,
        )


SUFFIXES = (".json", ".calibration.json")
"""Endings of the two popularity files: of the person's own use, and of the calibration prompts."""


def profile_paths(key: str) -> tuple[Path, Path]:
    """The two files of the model called ``key``: from the person's own use, and from the calibration prompts."""
    folder = locate("data") / "popularity"
    own, calibration = (folder / (key + suffix) for suffix in SUFFIXES)
    return own, calibration


def remove_profiles(key: str) -> int:
    """Delete the popularity files of the model called ``key``, as far as possible. Returns the freed bytes."""
    freed = 0
    for path in profile_paths(key):
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except OSError:
            continue
        freed += nbytes
    return freed
