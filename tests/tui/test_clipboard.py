"""Copying: the machine's tool first, then the terminal, and the truth about which."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.tui.terminal import application


def test_the_tools_fit_the_machine() -> None:
    assert application.clipboard_tools({}, "darwin") == [["pbcopy"]]
    assert application.clipboard_tools({}, "linux") == []
    both = application.clipboard_tools({"WAYLAND_DISPLAY": "w", "DISPLAY": ":0"}, "linux")
    assert [command[0] for command in both] == ["wl-copy", "xclip", "xsel"]


async def test_the_tool_gets_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "copied"
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\ncat > '{target}'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(application, "clipboard_tools", lambda: [[str(tmp_path / "missing")], [str(tool)]])
    handed: list[str] = []
    assert await application.copy_text("übrigens", "The answer", handed.append) == "The answer was copied."
    assert target.read_text(encoding="utf-8") == "übrigens"
    assert handed == []


async def test_without_a_tool_the_terminal_is_asked_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "clipboard_tools", lambda: [["/nonexistent/tool"]])
    handed: list[str] = []
    said = await application.copy_text("x", "The answer", handed.append)
    assert handed == ["x"]
    assert "with shift and the mouse" in said
