"""Where things are kept, and what a backup need not have."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.system import locations
from engine.system.locations import ensure, locate


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The programs that were run, on what is taken for a Mac."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(locations.sys, "platform", "darwin")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(locations.subprocess, "run", run)
    return commands


def test_models_are_left_out_of_backups_once(asked: list[list[str]]) -> None:
    for _ in range(2):
        folder = ensure("models")
        assert folder == locate("models") and folder.is_dir()
    assert asked == [["/usr/bin/tmutil", "addexclusion", str(folder)]]


def test_conversations_are_not(asked: list[list[str]]) -> None:
    for kind in ("config", "data", "logs"):
        ensure(kind)  # type: ignore[arg-type]
    assert asked == []


def test_elsewhere_nothing_is_asked(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations.sys, "platform", "linux")
    ensure("models")
    assert asked == []
