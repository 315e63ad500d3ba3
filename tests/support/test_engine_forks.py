"""Forked engine processes behave as those that ``subprocess`` starts: the tests that use them rely on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests.support import forked_worker
from tests.support.engine_forks import FORKS, ForkedProcess, forked, forked_module, server
from tests.support.forked_programs import fails, imports_tests, reads, says, says_whether_it_was_forked
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.skipif(not FORKS, reason="processes are forked on Linux only")


def started(program: Callable[..., NoReturn], **options: int) -> ForkedProcess:
    process = forked(hooked(program, **options), os.environ)
    assert isinstance(process, ForkedProcess)
    return process


def close(process: ForkedProcess) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_it_has_its_own_environment_pipes_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PRIVATELLM_HOME": "some home"}
    process = forked(hooked(says), environment)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"a request")
    process.stdin.close()
    said = json.loads(process.stdout.read())
    process.stdout.close()
    assert process.wait() == 7 == process.poll()
    # Standard streams, and the folder that is listed.
    assert said.pop("descriptors") == 4
    assert said == {
        "home": "some home",
        "variables": len(environment),
        "folder": str(tmp_path),
        "pid": process.pid,
        "read": "a request",
        "imported": True,
        "torch": False,
    }


def test_it_can_be_signalled_and_its_number_is_its_own_until_the_end_was_seen() -> None:
    process = started(reads)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGKILL)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert process.wait() == -signal.SIGKILL
    process.kill()
    close(process)


def test_many_run_at_once() -> None:
    processes = [started(reads, status=number) for number in range(8)]
    assert len({process.pid for process in processes}) == 8
    for process in processes:
        close(process)
    assert [process.wait() for process in processes] == list(range(8))


def test_an_error_is_an_exit_status_too() -> None:
    process = started(fails)
    assert process.wait() == 1
    close(process)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED"])
def test_what_is_read_at_the_start_makes_it_a_cold_one(name: str) -> None:
    process = forked(hooked(says_whether_it_was_forked), {**os.environ, name: ""})
    assert isinstance(process, subprocess.Popen) == (os.environ.get(name) != "")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.stdout.read() == b"False\n"
    process.stdout.close()
    assert process.wait() == 0


def test_a_module_has_its_arguments_and_the_descriptors_that_are_passed() -> None:
    """The envoy speaks over one, and ends with it."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = forked_module(
                "engine.cluster.transport.envoy_process",
                [str(theirs.fileno())],
                {"SOME_VARIABLE": "some value"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        assert isinstance(process, ForkedProcess)
        assert process.stdin is None and process.stdout is None
        assert process.poll() is None
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b""
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)], ids=["exit", "signal"]
)
def test_a_worker_reads_writes_and_ends_as_its_interpreter_would(tmp_path: Path, end: str, status: int) -> None:
    code = f"import os, sys; print(sys.stdin.readline(), os.getcwd(), os.environ['SAID'], flush=True); {end}"
    ended = subprocess.run(
        [sys.executable, forked_worker.__file__, server().address, "-u", "-c", code],
        input="a line", capture_output=True, check=False, text=True, cwd=tmp_path, env={**os.environ, "SAID": "here"},
    )  # fmt: skip
    assert (ended.stdout, ended.stderr, ended.returncode) == (f"a line {tmp_path} here\n", "", status)


def test_workers_are_forked_with_the_tests_imported_and_nothing_else_changed() -> None:
    process = forked(hooked(imports_tests, path=str(Path(__file__).with_name("test_pairwise.py"))), os.environ)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.stdout.read() == b"True False True\n"
    process.stdout.close()
    assert process.wait() == 0
