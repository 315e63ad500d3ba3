"""Engine processes that are forked from one that has imported everything, where a test does not test the start itself.

A cold start costs a second of processor time for the imports (two more with torch), a fork a few milliseconds. There is
one fork server per run of the tests, whatever its workers, and a second one with torch and mlx. The workers are forked
from a third one, which is forked from the second and has imported the tests. Elsewhere than on Linux engines start
cold: a process that has used Apple's frameworks must not be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import io
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.calibration.calibration_file import calibration_key, save_speed
from engine.system.processes import start_module
from tests.support import fork_server, forked_worker, hooked_engine

FORKS = sys.platform == "linux"
START_S = 600.0
RUN = "PRIVATELLM_TESTS_RUN"
"""Variable that names this run of the tests, in all of its workers."""
WORKERS = "workers"
"""The server that forks the workers; see collected_tests.py."""
MOST_STARTS = 4
"""Of a server by one process: one that has just ended is started again."""
MEMORY_READ = 10e9
"""Bytes per second that every node believes to read; nothing that is tested depends on it."""
LAYER_S = 1e-5


class ForkedProcess:
    """A process that the fork server started, used as one of ``subprocess.Popen``."""

    def __init__(
        self, pid: int, report: socket.socket, stdin: io.FileIO | None, stdout: io.BufferedReader | None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self._report = report
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self.returncode if self._ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens where the process has ended."""
        if not self._ended(0.0):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)

    def terminate(self) -> None:
        self.send_signal(15)

    def _ended(self, timeout: float | None) -> bool:
        """The id of an ended process is in use until this has seen the end."""
        if self.returncode is None and readable(self._report, timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = number_on(self._report)
                    self._report.close()
        return self.returncode is not None


def readable(report: socket.socket, timeout: float | None) -> bool:
    try:
        poll = select.poll()
        poll.register(report, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))
    except (OSError, ValueError):
        return True  # another thread has seen the end


def number_on(report: socket.socket) -> int:
    data = b""
    while len(data) < fork_server.REPORT:
        more = report.recv(fork_server.REPORT - len(data))
        assert more, "the fork server is gone"
        data += more
    return int.from_bytes(data, "little", signed=True)


class ForkServer:
    """A connection with the server of all workers of this run; the server's process, where it is the first one."""

    def __init__(self, *more: str) -> None:
        run = os.environ.get(RUN, str(os.getpid()))
        self.address = "-".join(["privatellm-forks", run, *more[:1]])
        # A name that ends with its last socket, and belongs to no folder.
        address = f"\0{self.address}"
        starts = 0
        while (control := _connected(address)) is None:
            starts += _serve(address, *more)
            assert starts < MOST_STARTS, "the fork server ends as soon as it is started"
        self._control = control
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(
        self, job: Mapping[str, Any], standard: Sequence[int], kept: Sequence[int] = ()
    ) -> tuple[int, socket.socket]:
        """The new process's id, and the socket on which its end is reported. ``kept``: the job's ``descriptors``."""
        report, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [json.dumps(job).encode()], [*standard, theirs.fileno(), *kept])
        return number_on(report), report

    def close(self) -> None:
        """The server ends with the last connection."""
        self._control.close()


def _serve(address: str, *more: str) -> bool:
    """Start the server at ``address``. False: another worker has done so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        listener.listen()
        if more[:1] == (WORKERS,):
            own = listener.fileno()
            forked_module(
                "tests.support.collected_tests",
                [str(own), *more[1:]],
                stdin=subprocess.DEVNULL,
                pass_fds=[own],
                libraries=True,
            )
            return True
        root = Path(__file__).resolve().parents[2]
        # A shell puts it into the background: tests that count this process's children do not see it.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, fork_server.__file__, str(listener.fileno()), *more],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            check=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            },
        )
    return True


def _connected(address: str) -> socket.socket | None:
    """A connection that the server at ``address`` has accepted. None: there is none, or it was just ending."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(START_S)
    with contextlib.suppress(ConnectionError):
        control.connect(address)
        if control.recv(len(fork_server.ACCEPTED)) == fork_server.ACCEPTED:
            return control
    control.close()
    return None


server = functools.cache(ForkServer)
"""Started when it is first asked for."""


def interpreter_of_workers(arguments: Sequence[str]) -> str:
    """The command that takes the place of Python's where a worker of the tests is started. ``arguments``: pytest's, by
    which the workers collect tests."""
    os.environ.setdefault(RUN, str(os.getpid()))
    with ThreadPoolExecutor() as pool:
        # No test has to wait, on a busy machine longer than its engine may take, for the imports of the first one.
        for started in [pool.submit(server), pool.submit(server, "libraries", "tests")]:
            started.result()
    workers = server(WORKERS, *arguments)
    return shlex.join([sys.executable, "-I", "-S", forked_worker.__file__, workers.address])


def needs_a_cold_start(environment: Mapping[str, str]) -> bool:
    """Whether the loader or Python would read something of ``environment`` at the start that the fork server had not:
    a library that is loaded first, say."""
    read = {
        name
        for name in {*environment, *os.environ}
        if name.startswith(("LD_", "PYTHON")) and name != "PYTHON_KEYRING_BACKEND"
    }
    return any(environment.get(name) != os.environ.get(name) for name in read)


def forked(
    arguments: Sequence[str], environment: Mapping[str, str], *more: str, session: bool = False
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start an engine as ``python ARGUMENTS`` would, with pipes for its input and output.

    ``arguments``: ``-m engine.host``, or those of :func:`hooked_engine.hooked`. ``session``: it gets a session of its
    own, and no terminal.
    """
    if not FORKS or needs_a_cold_start(environment):
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=session,
        )
    assert "-m" in arguments or arguments[0] == hooked_engine.__file__
    module, *given = list(arguments)[-1:] if "-m" in arguments else [hooked_engine.__name__, *arguments[1:]]
    return _forked(module, given, environment, subprocess.PIPE, subprocess.PIPE, None, (), *more, session=session)


def forked_module(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    libraries: bool = False,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """A process of the program beside the engine, started as by ``engine.system.processes.start_module``.

    ``libraries``: it will import torch or mlx.
    """
    whole = {**os.environ, **(environment or {})}
    if not FORKS or needs_a_cold_start(whole):
        return start_module(
            module, arguments, environment, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds
        )
    more = ("libraries",) if libraries else ()
    return _forked(module, arguments, whole, stdin, stdout, stderr, pass_fds, *more)


def _forked(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: int | None,
    stdout: int | None,
    stderr: int | None,
    pass_fds: Sequence[int],
    *more: str,
    session: bool = False,
) -> ForkedProcess:
    """``stdin`` and so on: as ``subprocess.Popen`` takes them; of pipes, input and output only."""
    job = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": str(Path.cwd()),
        "session": session,
        "descriptors": list(pass_fds),
    }
    with contextlib.ExitStack() as theirs:

        def descriptor(wanted: int | None, inherited: int, pipe_end: int | None) -> int:
            if wanted is None:
                return inherited
            if wanted == subprocess.DEVNULL:
                pipe_end = os.open(os.devnull, os.O_RDWR)
            assert pipe_end is not None
            theirs.callback(os.close, pipe_end)
            return pipe_end

        requests, to_it = os.pipe() if stdin == subprocess.PIPE else (None, None)
        from_it, events = os.pipe() if stdout == subprocess.PIPE else (None, None)
        standard = [descriptor(stdin, 0, requests), descriptor(stdout, 1, events), descriptor(stderr, 2, None)]
        pid, report = server(*more).start(job, standard, pass_fds)
    return ForkedProcess(
        pid,
        report,
        None if to_it is None else os.fdopen(to_it, "wb"),  # type: ignore[arg-type]
        None if from_it is None else os.fdopen(from_it, "rb"),
    )


def with_libraries(arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess | subprocess.Popen[bytes]:
    """An engine that has imported torch and mlx already, during which it would answer nobody."""
    return forked(arguments, environment, "libraries")


def measured_before(home: Path) -> None:
    """Put down how fast this machine reads its memory, as its benchmark does, so that no node measures it anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATELLM_HOME", str(home))
        for dtype, threads in product(("float32", "bfloat16"), (None, 1)):
            save_speed(calibration_key(dtype, threads, None), MEMORY_READ, "native", LAYER_S)
