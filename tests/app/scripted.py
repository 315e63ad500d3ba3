"""The command line over the scripted engine: a home to run it in, which engine answers, and what was printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from app import engine_process
from engine.bench.local_ring import Launcher
from tests.support.engine_forks import forked

SCRIPT = Path(__file__).with_name("scripted_engine.py")


def play(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Engines that are started from now on do what ``script`` says."""
    monkeypatch.setattr(engine_process, "host_command", lambda: (sys.executable, str(SCRIPT), script))


def fork_engines(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str] = ("-m", "engine.host"), launch: Launcher = forked
) -> None:
    """Engines that are started from now on are real ones, forked from a process that has imported everything.
    ``launch``: ``with_libraries`` where the model is one that sees, of which torch runs the tower."""
    monkeypatch.setattr(engine_process, "start", lambda command: launch(arguments, os.environ))


def make_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``folder`` is home and working folder, without a model; the scripted engine answers."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(folder))
    monkeypatch.chdir(folder)
    play(monkeypatch, "")
    return folder


def install(home: Path, name: str = "starter") -> Path:
    """A folder that looks like an installed model; the scripted engine does not open it."""
    folder = home / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    return folder


def written(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Output and errors, in which no escape sequence may be."""
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    return out, err
