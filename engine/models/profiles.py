"""Where what was learned of a model's use is kept: beside the model, under one name for its plain and prepared form."""

from __future__ import annotations

from pathlib import Path

from engine.models.locations import locate

SUFFIXES = (".json", ".calibration.json")
"""Learned from the person's own use; from the calibration prompts."""


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
