"""``privatellm join --plain`` as a service runs it: real processes on the loopback interface, ended in every way."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.commands.root import run
from tests.app.scripted import fork_engines
from tests.support.eventually import has_ended

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 120.0


class Joined:
    """A machine that is lent: its process, and what it said so far."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self._file = (home / "said").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "join", "--plain", "--listen", "127.0.0.1:0", *arguments],
            stdout=self._file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment(home),
        )  # fmt: skip

    @property
    def said(self) -> str:
        return (self.home / "said").read_text("utf-8")

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None, self.said
            time.sleep(0.05)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    @property
    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def close(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
        self._file.close()


@contextlib.contextmanager
def hang_up_is(handler: signal.Handlers) -> Iterator[None]:
    """What processes do that are started here, whatever the tests themselves were started with."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def seen_by_others(home: Path) -> list[str]:
    """What in ``home`` others may do anything with; links have no modes of their own."""
    return [
        f"{path.relative_to(home)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in sorted(home.rglob("*"))
        if not path.is_symlink() and stat.S_IMODE(path.lstat().st_mode) & 0o077
    ]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PRIVATELLM_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    with hang_up_is(signal.SIG_DFL):
        machine = Joined(tmp_path, "--name", "studio")
    yield machine
    machine.close()


def ends_with(joined: Joined, number: int, status: int) -> None:
    """Nothing of it is left."""
    engines = joined.engines
    assert engines
    assert joined.end(number) == status
    assert all(map(has_ended, engines))


@pytest.mark.soak
def test_it_says_who_it_is_heeds_nohup_and_sigterm_is_an_orderly_end(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with hang_up_is(signal.SIG_IGN):
            machine = Joined(tmp_path, "--name", "studio")
    finally:
        os.umask(before)
    (tmp_path / "said").chmod(0o600)  # the test's own
    try:
        machine.until(lambda: "Code: " in machine.said)
        (engine,) = machine.engines
        listening = [line for line in machine.said.splitlines() if "studio, " in line and "listens on 127.0.0" in line]
        assert listening and listening[0][:4].isdecimal()  # the time stands before it
        machine.process.send_signal(signal.SIGHUP)
        assert machine.end(signal.SIGTERM) == 0
        assert machine.said.splitlines()[-1].endswith("This machine is no longer lent.")
        assert has_ended(engine)
    finally:
        machine.close()
    # Whatever the umask, what it wrote is its owner's alone.
    assert len(list(tmp_path.rglob("*"))) > 4
    assert seen_by_others(tmp_path) == []


@pytest.mark.soak
@pytest.mark.slow
def test_an_engine_that_dies_is_started_again_and_a_closed_terminal_is_an_orderly_end(joined: Joined) -> None:
    joined.until(lambda: "Code: " in joined.said)
    joined.engines[0].kill()
    joined.until(lambda: "this machine can be used again" in joined.said)
    assert "The engine ended. It restarts in 1 s." in joined.said
    joined.until(lambda: joined.said.count("Code: ") == 2)
    ends_with(joined, signal.SIGHUP, 129)
    assert joined.said.splitlines()[-1].endswith("This machine is no longer lent.")


@pytest.mark.soak
def test_nobody_reading_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "join", "--plain", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment(tmp_path),
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    try:
        assert process.wait(WAIT_S) == 0
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.stderr.close()
        process.kill()


@pytest.mark.soak
@pytest.mark.slow
def test_two_machines_are_paired_by_the_code_one_forgets_the_other_and_ctrl_c_ends_the_lending(
    joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "other"))
    fork_engines(monkeypatch)

    def peers(*arguments: str) -> subprocess.CompletedProcess[str]:
        status = run(["peers", *arguments])
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    joined.until(lambda: "Code: " in joined.said)
    address = joined.said.split("listens on ")[1].split()[0].rstrip(".,")
    code = joined.said.split("Code: ")[1].split(" (")[0]
    wrong = "".join("1" if digit == "0" else "0" if digit.isdecimal() else digit for digit in code)
    refused = peers("pair", address, "--code", wrong)
    assert refused.returncode == 1 and "code" in refused.stderr and not refused.stdout
    paired = peers("pair", address, "--code", code)
    assert paired.returncode == 0 and "Paired with studio." in paired.stderr
    assert "studio" in peers("list").stdout
    joined.until(lambda: "Paired with" in joined.said)
    again = peers("pair", address, "--code", code)
    assert again.returncode == 1  # a code is good for one machine
    assert peers("forget", "studio").returncode == 0
    assert "No machine is paired" in peers("list").stdout
    ends_with(joined, signal.SIGINT, 130)
    assert "Traceback" not in joined.said


def test_what_lends_knows_nothing_of_the_screen() -> None:
    program = "import sys, app.commands.join, app.lending, app.network; print([m for m in ('textual', 'grpc', 'zeroconf', 'torch') if m in sys.modules])"  # fmt: skip  # noqa: E501
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
