"""Where what was learned of a model's use is kept: beside the model, under one name for its plain and prepared form."""

from __future__ import annotations

from pathlib import Path

from engine.models.locations import locate

PREPARED = ".prepared"
SUFFIXES = (".json", ".calibration.json")
"""Learned from the person's own use; from the calibration prompts."""


def profile_key(folder: Path) -> str:
    """One name for the model in ``folder``, the same for its plain folder and for its bank."""
    folder = folder.absolute()
    if folder.parent == locate("models").absolute():
        return folder.name.removesuffix(PREPARED)
    # As engine.models.store names the bank of a folder that lies elsewhere.
    from engine.models.store import resolve

    return resolve(str(folder)).prepared_folder.name.removesuffix(PREPARED)


def profile_paths(key: str) -> tuple[Path, Path]:
    """The two files of the model called ``key``: from the person's own use, and from the calibration prompts."""
    folder = locate("data") / "popularity"
    own, calibration = (folder / (key + suffix) for suffix in SUFFIXES)
    return own, calibration


def remove_profiles(key: str) -> int:
    """Delete what was learned of the model called ``key``; the bytes freed. What cannot be deleted stays."""
    freed = 0
    for path in profile_paths(key):
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except OSError:
            continue
        freed += nbytes
    return freed
