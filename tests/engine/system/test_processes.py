"""Processes of the program's own modules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.system.processes import start_module


def test_a_child_finds_this_program_and_not_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('another engine')\n")
    monkeypatch.chdir(tmp_path)
    child = start_module(
        "engine.doctor_facts", environment={"PRIVATELLM_HOME": str(tmp_path)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    answer, errors = child.communicate(b'{"type":"load","id":0,"model":"starter"}')
    assert child.returncode == 0, errors
    assert b"pull starter" in answer
