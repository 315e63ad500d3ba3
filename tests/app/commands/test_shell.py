"""Completion in shells and the man page: both from the same commands as the help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from app.commands.root import privatellm, run
from app.commands.shell import VARIABLE, completion_script, manual

ROOT = Path(__file__).parents[3]


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What bash is offered for the last of ``words``."""
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["privatellm", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert run([]) == 0
    return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]


def test_commands_options_models_and_choices_are_offered(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"ask", "models", "completion", "man"} <= set(offered(monkeypatch, capsys, ""))
    assert offered(monkeypatch, capsys, "models", "pu") == ["pull"]
    assert "--temperature" in offered(monkeypatch, capsys, "ask", "--t")
    assert offered(monkeypatch, capsys, "models", "pull", "start") == ["starter"]
    assert offered(monkeypatch, capsys, "ask", "--model", "start") == ["starter"]
    assert offered(monkeypatch, capsys, "locate", "k") == ["keymap"]
    assert offered(monkeypatch, capsys, "bench", "decode", "start") == ["starter"]
    (home / "config").mkdir(exist_ok=True)
    (home / "config" / "personas.toml").write_text('[Editor]\nsystem = "You edit."\n')
    assert offered(monkeypatch, capsys, "ask", "--persona", "E") == ["Editor"]


@pytest.mark.parametrize(
    "words",
    [("ask", "--file"), ("ask", "--schema"), ("chats", "export", "1", "--output"), ("chats", "import")],
)
def test_the_shell_is_asked_for_names_of_files(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert offered(monkeypatch, capsys, *words, "no") == ["no"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_call_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script and "privatellm" in script
    assert script == completion_script(privatellm, shell) + "\n"
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")


def test_bash_completes(home: Path) -> None:
    """The real program in the real shell, which calls it without arguments."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = home / "privatellm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m app.cli "$@"\n')
    program.chmod(0o755)
    script = (
        f'source <({program} completion bash); COMP_WORDS=({program} models rem); COMP_CWORD=2; '
        f"_privatellm_completion {program}; echo \"${{COMPREPLY[@]}}\""
    )  # fmt: skip
    environment = os.environ | {"PRIVATELLM_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout.split(), done.stderr) == (["remove"], "")


def test_the_man_page_has_every_command_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man"]) == 0
    page = capsys.readouterr().out.replace("\\-", "-")
    for path, command in commands(privatellm):
        assert f'.SS "privatellm {path} ' in page
        section = page[page.index(f'.SS "privatellm {path} ') :].partition("\n.S")[0]
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts] if isinstance(parameter, click.Option) else []
            assert all(name in section for name in names), (path, parameter)
            assert isinstance(parameter, click.Option) or parameter.make_metavar(click.Context(command)) in section
    for parameter in privatellm.params:
        assert parameter.opts[0] in page.partition(".SH COMMANDS")[0]
    for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "FILES", "ENVIRONMENT", "EXIT STATUS"):
        assert f"\n.SH {title}\n" in page


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_man_page_is_sound() -> None:
    page = manual(privatellm, "1.2.3")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-c"], input=page, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "privatellm - chat privately with" in " ".join(done.stdout.split()) and "1.2.3" in done.stdout


def test_what_looks_like_a_request_is_text() -> None:
    root = click.Group(help=".de evil. More \\fBtext\\fR")
    root.add_command(click.Command("x", help=".so /etc/passwd"))
    page = manual(root, "1")
    assert "\n\\&.so /etc/passwd\n" in page and "\n\\&.de evil. More \\efBtext\\efR\n" in page
