"""A process that has imported what an engine imports and forks engine processes from that; see engine_forks.py.

``python fork_server.py LISTENER [libraries [tests]]``: ``libraries`` imports torch and mlx, too; ``tests`` also what
the tests import, for the workers that run them. LISTENER is the descriptor of a socket, on which each worker of the
tests connects and is told ``ACCEPTED``. Each packet on a connection is a job, with four descriptors: standard input,
output and errors, and a socket on which the process id and, at its end, the exit status are reported; then those that
the process is given under the numbers of the job's ``descriptors``. The process stays a zombie until the other side has
closed that socket, so that its id is not given away before.

No thread and no gRPC object may exist here: neither survives a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARIES = (
    "engine.runtimes.torch",
    "engine.runtimes.mlx",
    "engine.cluster.transport.gloo",
    "engine.cluster.transport.mlx_group",
)
"""Modules of the engine that import torch or mlx."""
NO_MODULE = ("engine.moe.kernels._native",)
"""The library of the kernels, which is no Python module."""

LATE = (
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.ascii",
    "encodings.idna",
    "grpc._channel",
    "grpc._interceptor",
    "grpc._server",
    "grpc.experimental",
)
"""Modules that libraries import when they are first used."""

OF_TESTS = (
    "_pytest.assertion.truncate",
    "_pytest.junitxml",
    "anthropic",
    "gguf",
    "hypothesis.stateful",
    "jsonschema",
    "mlx_lm.utils",
    "openai",
    "pytest_asyncio.plugin",
    "textual.pilot",
    "transformers.models.auto.modeling_auto",
    "xdist.remote",
)
"""Modules that tests import and the program does not, or not at once."""

HIDDEN = 48
"""Numbers of a hidden state of the tiny models; see tiny_models.py."""
PACKET_BYTES = 1 << 20
STANDARD = 4
"""Descriptors of every job: standard streams and the report socket."""
MOST_DESCRIPTORS = 16
ACCEPTED = b"accepted"
REPORT = 8
"""Bytes of a number on a report socket."""


def main() -> None:
    del sys.path[0]  # the folder of this file: its modules are those of the package ``tests.support``
    listener = socket.socket(fileno=int(sys.argv[1]))
    whole, tests = "libraries" in sys.argv[2:], "tests" in sys.argv[2:]
    left_out = NO_MODULE if whole else (*NO_MODULE, *LIBRARIES)
    packages = ("discovery", "engine", *(("app",) if tests else ()))
    names = [name for package in packages for name in modules_of(package, left_out)]
    for name in (*names, *(OF_TESTS if tests else ())):
        with contextlib.suppress(ModuleNotFoundError if whole else ()):  # mlx is not installed everywhere
            importlib.import_module(name)
    for name in LATE:
        importlib.import_module(name)
    warm_up(whole)
    assert whole or not {"torch", "mlx"} & sys.modules.keys(), "something else of the engine imports torch or mlx"
    fork_for(listener)


def fork_for(listener: socket.socket) -> None:
    """Fork from what is imported now, until the last connection is closed. A forked process ends here, too."""
    listener.setblocking(False)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread was started by an import: forking is not safe"
    gc.collect()
    gc.freeze()
    job = serve(listener)
    if job is not None:
        status = status_of(job)
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def warm_up(libraries: bool) -> None:
    """What is measured or compiled once per process for the first model is done here, for all engines and workers."""
    from engine.calibration import memory_rate, synthetic_experts
    from engine.cluster.membership.measuring_node import central_seconds, layer_seconds
    from engine.models.architectures.families import FAMILIES, match_tensor

    # The smallest buffer is read to measure the memory, as with no memory free: a GiB takes a second to be made.
    memory_rate.available_bytes = _nothing_free
    # Experts are measured in the fewest rounds.
    synthetic_experts.BUDGET_S = 0.0
    for measured in (layer_seconds, central_seconds):
        measured(HIDDEN)
    for family in FAMILIES.values():
        match_tensor(family, "")
    if libraries:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")  # thousands of regular expressions, whichever family is asked for


def _nothing_free(device: str = "cpu") -> int:
    return 0


def modules_of(package: str, left_out: tuple[str, ...]) -> Iterator[str]:
    """The names of all modules of ``package``, at any depth."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name not in left_out:
            yield module.name
            if module.ispkg:
                yield from modules_of(module.name, left_out)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork until the last connection is closed: None then. In a forked process: its job."""
    woken, wake = socket.socketpair()
    for one in (woken, wake):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    ended: dict[int, socket.socket] = {}
    connections = 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, "listener")
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    while _received(woken):
                        pass
                    for pid in [pid for pid in running if has_ended(pid)]:
                        ended[pid] = running.pop(pid)
                        _report(ended[pid], os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))
                        selector.register(ended[pid], selectors.EVENT_READ, pid)
                elif key.data == "listener":
                    control, _ = listener.accept()
                    control.setblocking(True)
                    control.sendall(ACCEPTED)
                    selector.register(control, selectors.EVENT_READ, "control")
                    connections += 1
                elif key.data == "control":
                    assert isinstance(key.fileobj, socket.socket)
                    packet, descriptors, _, _ = socket.recv_fds(key.fileobj, PACKET_BYTES, MOST_DESCRIPTORS)
                    if not packet:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                        connections -= 1
                        if not connections:
                            # A process that was forked may end after this, when that socket is closed.
                            signal.set_wakeup_fd(-1)
                            return None
                        continue
                    job = json.loads(packet)
                    pid = os.fork()
                    if pid == 0:
                        mine = [each.fileobj for each in selector.get_map().values()]
                        selector.close()
                        # Closed as descriptors: a socket object would close whatever has its number by then.
                        for held in (*mine, wake, *running.values()):
                            assert isinstance(held, socket.socket)
                            held.detach()
                        become(job, descriptors)
                        return dict(job)
                    for descriptor in (*descriptors[:3], *descriptors[STANDARD:]):
                        os.close(descriptor)
                    running[pid] = socket.socket(fileno=descriptors[3])
                    _send(running[pid], pid)
                else:
                    selector.unregister(key.fileobj)
                    ended.pop(key.data).close()
                    os.waitpid(key.data, 0)


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _received(woken: socket.socket) -> bytes:
    try:
        return woken.recv(1 << 12)
    except BlockingIOError:
        return b""


def _report(report: socket.socket, how: Any) -> None:
    """The exit status as subprocess has it: negative for a signal."""
    _send(report, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)


def _send(report: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody asks any more
        report.sendall(number.to_bytes(REPORT, "little", signed=True))


def become(job: dict[str, Any], descriptors: list[int]) -> None:
    """Make this forked process look as one that ``subprocess`` has just started."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if job["session"]:
        os.setsid()
    wanted = dict(zip([0, 1, 2, *job["descriptors"]], [*descriptors[:3], *descriptors[STANDARD:]], strict=True))
    # First out of the way: a descriptor that came may have the number that another one is to have.
    above = max(*wanted, *descriptors) + 1
    for number, descriptor in wanted.items():
        wanted[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)
    for number, descriptor in wanted.items():
        os.dup2(descriptor, number)
    free = 3
    for number in sorted(job["descriptors"]):
        os.closerange(free, number)
        free = number + 1
    os.closerange(free, os.sysconf("SC_OPEN_MAX"))
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])


def status_of(job: dict[str, Any]) -> int:
    """Run ``job`` and what is registered for the end of an interpreter, but do not take its modules to pieces: that
    would copy all memory shared with the server, and take a quarter of a second where torch is imported."""
    status = 0
    try:
        run(job)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status


def run(job: dict[str, Any]) -> None:
    """As ``python -m MODULE ARGUMENTS`` or ``python -c CODE``."""
    if "code" in job:
        sys.argv = ["-c"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(job["code"], vars(sys.modules["__main__"]))
        return
    sys.argv = ["-m", *job["arguments"]]
    sys.modules.pop(job["module"], None)
    runpy._run_module_as_main(job["module"])  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
