"""No process of the program can be read by another program of the same person, and none inherits a token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.conversations.opening import open_store
from tests.app.terminals import ROOT, Terminal
from tests.support.eventually import eventually
from tests.support.speaking_model import write_speaking_model
from tests.support.unprivileged_reader import check_private, children, readable, unprivileged

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"
CODE = "Read this:\n\n```python\nfor number in range(10):\n    print(number)\n```\n"
ARGUMENTS = {
    "app.tui.render.highlight_process": ["2.0"],
    "engine.models.text.template_sandbox": ["2.0", str(1 << 30)],
    "engine.pictures.decoding_sandbox": ["2.0", str(1 << 30)],
    "engine.system.temporary_folders": ["/nonexistent/folder"],
}


def programs() -> Iterator[str]:
    """The modules of the packages that are started by ``python -m``."""
    for package in ("app", "engine", "discovery"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if '\nif __name__ == "__main__":' in path.read_text("utf-8"):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_a_process_that_does_nothing_for_it_is_readable() -> None:
    command = unprivileged(sys.executable, "-c", "print(flush=True); input()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert readable([process.pid])[process.pid] == ["environ", "mem"]
        process.communicate(b"\n")


@pytest.mark.sampled
@pytest.mark.parametrize("program", list(programs()))
def test_every_program_protects_itself(program: str, tmp_path: Path) -> None:
    """Each waits for what it is told."""
    mine, theirs = socket.socketpair()
    arguments = [str(theirs.fileno())] if program.endswith("envoy_process") else ARGUMENTS.get(program, [])
    arguments = ["serve", "--listen", "127.0.0.1:0"] if program == "app.cli" else arguments
    process = subprocess.Popen(
        unprivileged(sys.executable, "-P", "-m", program, *arguments),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
        env={**os.environ, "PRIVATELLM_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        eventually(lambda: readable([process.pid]) == {} or process.poll() is not None)
        assert process.poll() is None
    finally:
        for each in [*psutil.Process(process.pid).children(), process]:
            each.kill()
        process.communicate()
        mine.close()
        theirs.close()


def running(process: int) -> set[str]:
    """The modules that ``process`` has started."""
    known = set(programs())
    return {word for child in children(process) for word in child.cmdline() if word in known}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return write_speaking_model(tmp_path / "model", TEMPLATE)


@pytest.mark.soak
@pytest.mark.slow
def test_the_processes_of_a_chat(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    (home / "config").mkdir(parents=True, mode=0o700)
    (home / "config" / "settings.toml").write_text(f'[model]\nmodel = "{model}"\n')
    (home / "config" / "settings.toml").chmod(0o600)
    store = open_store(home / "data" / "conversations.sqlite")
    conversation = store.create(model=str(model))
    question = store.add(conversation.id, "user", "code", parent=None)
    store.add(conversation.id, "assistant", CODE, parent=question.id)
    store.close()
    terminal = Terminal(home, "--continue", scripted=False, wrap=unprivileged)
    try:
        terminal.until_drawn("range")
        terminal.until_quiet()
        terminal.type(b"hello\r")
        wanted = {"engine.host", "engine.models.text.template_sandbox", "app.tui.render.highlight_process"}
        terminal.until(lambda: running(terminal.process.pid) == wanted, "the processes of a chat")
        check_private(terminal.process.pid)
    finally:
        terminal.close()


@pytest.mark.soak
@pytest.mark.slow
def test_the_processes_of_a_server(tmp_path: Path, model: Path) -> None:
    command = [sys.executable, "-P", "-m", "app.cli", "serve", "--listen", "127.0.0.1:0", "--runtime", "native"]
    process = subprocess.Popen(
        unprivileged(*command, "--model", str(model)), stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PRIVATELLM_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            url = line.split(" at ")[1].split()[0] if line.startswith("Serving") else url
            if "is loaded" in line:
                break
        body = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"]
        assert running(process.pid) == {"engine.host", "engine.models.text.template_sandbox"}
        check_private(process.pid)
    finally:
        for child in children(process.pid):
            child.kill()
        process.kill()
        process.communicate()
