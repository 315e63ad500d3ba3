"""What the program writes is its owner's alone, whatever the umask it is started with; and a crash leaves no core."""

from __future__ import annotations

import os
import plistlib
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.system.locations import ensure
from tests.app.commands.test_join_process import seen_by_others
from tests.app.terminals import ROOT, Terminal
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.soak
@pytest.mark.slow
def test_a_chat_writes_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_tiny_model(tmp_path / "model", "mixtral")
    (home / "config").mkdir(parents=True, mode=0o700)
    (home / "config" / "settings.toml").write_text(f'[model]\nmodel = "{tmp_path / "model"}"\n')
    (home / "config" / "settings.toml").chmod(0o600)
    terminal = Terminal(home, scripted=False)
    try:
        terminal.until_drawn("sk something")
        terminal.until_quiet()
        terminal.type(b"hello\r")
        terminal.until((home / "data" / "conversations.sqlite").exists, "a conversation")
        terminal.until_quiet()
        terminal.type(f"/export {home / 'mine.md'}\r".encode())
        terminal.until((home / "mine.md").exists, "the export")
        for process in [psutil.Process(terminal.process.pid), *terminal.engines]:
            assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        terminal.type(b"\x11")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert (home / "logs" / "engine.log").exists()
    assert seen_by_others(home) == []


def test_a_folder_of_an_earlier_version_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    (tmp_path / "data").mkdir(mode=0o755)
    assert stat.S_IMODE(ensure("data").stat().st_mode) == 0o700


@pytest.mark.parametrize("command", ["join", "serve"])
def test_the_units_say_so_too(command: str) -> None:
    unit = (ROOT / "packaging" / "systemd" / f"privatellm-{command}.service").read_text().splitlines()
    assert "LimitCORE=0" in unit and "UMask=0077" in unit
    assert any(line.startswith(f"ExecStart=%h/.local/bin/privatellm {command}") for line in unit)
    agent = plistlib.loads((ROOT / "packaging" / "launchd" / f"privatellm.{command}.plist").read_bytes())
    assert agent["Umask"] == 0o077 and agent["HardResourceLimits"] == {"Core": 0}
    assert agent["Label"] == f"privatellm.{command}" and f'privatellm" {command} ' in agent["ProgramArguments"][2]
