"""What the screen costs: the report, the terminal, and one real chat from end to end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.screen import main, report
from benchmarks.terminal import Terminal, TerminalError

RESULT = {
    "model": "starter", "panel": True, "headless": [100.0, 110.0, 90.0], "chat": [97.0, 99.0, 90.0],
    "tokens": [256, 256, 256], "echo_s": [0.010, 0.020, 0.049],
}  # fmt: skip


def test_the_report_judges_ratio_and_echo() -> None:
    text = report(RESULT)
    assert "| chat, tokens/s | 97.0 (90.0–99.0) |" in text
    assert "| echo of 3 characters while answering, ms | 20.0 (10.0–49.0) |" in text
    assert "| tokens/s relative to `ask` | ≥ 0.95 | 0.97 (0.90–1.00) | yes |" in text
    assert "| slowest echo of a typed character, ms | ≤ 50.00 | 49.00 | yes |" in text
    slow = report({**RESULT, "chat": [90.0, 90.0, 90.0], "echo_s": [0.010, 0.051]})
    assert "≥ 0.95 | 0.90 (0.82–1.00) | no |" in slow and "≤ 50.00 | 51.00 | no |" in slow


def test_an_echo_that_was_not_measured_is_said_to_be_so() -> None:
    text = report({**RESULT, "echo_s": []})
    assert "| ≤ 50.00 | not measured | – |" in text and "give more --tokens" in text


ECHOING = """
import os, sys, tty
tty.setraw(0)
os.write(1, b"ready")
while (data := os.read(0, 100)) != b"q":
    os.write(1, b"\x1b[1m" + data)
"""


def test_an_echo_is_seen_and_the_program_is_left(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", ECHOING], dict(os.environ), tmp_path, columns=80, rows=24)
    terminal.wait_for(b"ready", timeout=60)
    assert terminal.echo("Ж".encode(), timeout=60) >= 0
    assert terminal.alive()
    terminal.close(b"q")
    assert not terminal.alive()


def test_a_program_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", ""], dict(os.environ), tmp_path, columns=80, rows=24)
    with pytest.raises(TerminalError, match="'ready' was not drawn"):
        terminal.wait_for(b"ready", timeout=60)
    terminal.close(b"q")


@pytest.mark.slow
def test_a_real_chat_is_measured(
    starter_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(starter_home))
    result = tmp_path / "result.json"
    assert main(["--rounds", "1", "--tokens", "48", "--threads", "1", "--json", str(result)]) == 0
    measured = json.loads(result.read_text(encoding="utf-8"))
    assert measured["tokens"] == [48]
    assert measured["headless"][0] > 0 and measured["chat"][0] > 0
    assert "| tokens/s relative to `ask` |" in capsys.readouterr().out
