"""No socket of the network is open before a person asks for one: over all processes of the chat and of a question,
looked at all the time while they start, answer and wait."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.app.commands.test_join_process import ROOT, WAIT_S, Joined, environment
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

LOOKS = 20
"""Number of looks at the sockets of a chat whose model is loaded."""


class Watch:
    """Every Internet socket, TCP and UDP, that a process or its children have at any moment."""

    def __init__(self, process_id: int) -> None:
        self.seen: set[str] = set()
        self.processes: set[int] = set()
        self.looks = 0
        self._root = psutil.Process(process_id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.looks += 1
            with suppress(psutil.Error):
                for process in [self._root, *self._root.children(recursive=True)]:
                    self.processes.add(process.pid)
                    for one in process.net_connections("inet"):
                        self.seen.add(f"{one.type.name} {one.laddr} {one.raddr} {one.status}")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)


@contextmanager
def watched(process: subprocess.Popen[bytes]) -> Iterator[Watch]:
    watch = Watch(process.pid)
    try:
        yield watch
    finally:
        watch.close()
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
            process.kill()
        process.wait(WAIT_S)


@pytest.mark.soak
def test_the_chat_opens_none(tmp_path: Path) -> None:
    # With a model that is here: the first start without one fetches the starter model.
    model = write_tiny_model(tmp_path / "tiny", "mixtral")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "settings.toml").write_text(f'[model]\nmodel = "{model}"\n', encoding="utf-8")
    screen, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli"],
            stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, start_new_session=True,
            env={**environment(tmp_path), "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(terminal)
        drawn = bytearray()

        def read() -> None:
            with suppress(OSError):
                while piece := os.read(screen, 1 << 16):
                    drawn.extend(piece)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        with watched(process) as watch:
            end = time.monotonic() + WAIT_S
            while len(watch.processes) < 2 or b"active per token" not in drawn:
                assert time.monotonic() < end, bytes(drawn[-500:])
                assert process.poll() is None, bytes(drawn[-500:])
                time.sleep(0.05)
            # The model is loaded, which the screen says: everything that is imported later is imported.
            looks = watch.looks
            while watch.looks < looks + LOOKS:
                time.sleep(0.05)
            assert process.poll() is None
    finally:
        os.close(screen)
    assert watch.seen == set()


@pytest.mark.soak
@pytest.mark.parametrize("command", ["peers list", "plan tiny", "doctor", "models list"])
def test_commands_open_none(tmp_path: Path, command: str) -> None:
    model = write_tiny_model(tmp_path / "tiny", "mixtral")
    words = [str(model) if word == "tiny" else word for word in command.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        cwd=ROOT, env=environment(tmp_path),
    )  # fmt: skip
    with watched(process) as watch:
        assert process.wait(WAIT_S) == 0
    assert watch.seen == set()


@pytest.mark.soak
def test_joining_opens_them(tmp_path: Path) -> None:
    """The same look sees sockets where there are some."""
    joined = Joined(tmp_path)
    try:
        watch = Watch(joined.process.pid)
        joined.until(lambda: "127.0.0.1" in joined.said and bool(watch.seen))
        watch.close()
        assert any("LISTEN" in one for one in watch.seen)
        # What this machine keeps of the network is its owner's alone.
        network = tmp_path / "config" / "network"
        assert network.stat().st_mode & 0o077 == 0
        kept = [path for path in network.rglob("*") if path.is_file()]
        assert any(path.name == "certificate.pem" for path in kept)
        assert [path for path in kept if path.stat().st_mode & 0o177] == []
        # Nothing secret is in arguments or environments, which other users of the machine can see.
        key = (network / "private-key.pem").read_text() if (network / "private-key.pem").exists() else "no key file"
        secret = key.splitlines()[1] if "\n" in key else key
        for process in [psutil.Process(joined.process.pid), *joined.engines]:
            assert secret not in " ".join([*process.cmdline(), *process.environ().values()])
        logs = tmp_path / "logs"
        for path in logs.rglob("*") if logs.exists() else []:
            assert "PRIVATE KEY" not in path.read_text("utf-8", "replace")
    finally:
        joined.close()
