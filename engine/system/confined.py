"""A separate process for what is computed from untrusted files: it is killed when it takes too long or is cancelled.

The parent has a :class:`ConfinedProcess`, and the module that it starts calls :func:`answer_requests`. A request and
its answer are a length of 8 bytes, big-endian, and that many bytes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from engine.errors import Cancelled
from engine.system.processes import keep_to_owner, start_module

DEADLINE_S = 30.0
"""Maximum seconds for an answer, if the process does not reach its limit of CPU time before."""
LOOK_S = 0.02
"""Seconds between two checks whether to stop."""
ANSWER_BYTES = 256 << 20
"""Maximum bytes of one answer."""
_OWN_BYTES = 256 << 20
"""Bytes of memory that a process may have besides what it is given, where the parent looks after its limit."""

_LENGTH = struct.Struct(">Q")
_SYSTEM_LIMITS_MEMORY = platform.system() == "Linux"

StopCheck = Callable[[], bool]


class GaveUp(Exception):
    """A confined process did not answer. The text says why, with *it* for what was asked: ``it does not end within 5
    seconds``."""


# --- the parent ------------------------------------------------------------------------------------------------------


class ConfinedProcess:
    """A process that runs ``module``. It is started at once, and again after it was killed.

    From any thread, one request at a time. It ends with this object, and with this process. An answer may take
    ``cpu_s`` seconds of CPU time and ``memory_bytes`` more memory than the process has at its beginning.
    """

    def __init__(self, module: str, *, cpu_s: float, memory_bytes: int) -> None:
        self._module = module
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._process = start_module(
            self._module,
            [str(self._cpu_s), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that runs now."""
        return self._process

    def close(self) -> None:
        self._finalizer()

    def ask(self, request: bytes, should_stop: StopCheck = lambda: False) -> bytearray:
        """The answer to ``request``. Raises GaveUp; Cancelled as soon as ``should_stop()``."""
        with self._lock:
            if self._process.poll() is not None:
                self._begin_again()
            try:
                return self._exchange(_LENGTH.pack(len(request)) + request, should_stop)
            except BaseException:
                # It may be in the middle of something: the next request needs one that listens.
                self._begin_again()
                raise

    def _begin_again(self) -> None:
        self._finalizer()
        self._begin()

    def _exchange(self, request: bytes, should_stop: StopCheck) -> bytearray:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        to_send, received = memoryview(request), bytearray()
        wanted = _LENGTH.size
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(received) < wanted:
                if should_stop():
                    raise Cancelled("Stopped on request.")
                if time.monotonic() > deadline:
                    raise GaveUp(f"it does not end within {DEADLINE_S:g} seconds")
                if wanted > ANSWER_BYTES or _memory_of(process.pid) > self._memory_bytes + _OWN_BYTES:
                    raise GaveUp(too_much_memory(self._memory_bytes))
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is process.stdin:
                        to_send = to_send[_write(process.stdin.fileno(), to_send) :]
                        if not to_send:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(process.stdout.fileno(), 1 << 20)
                    if not piece:
                        raise GaveUp(_why_ended(process, self._cpu_s))
                    received += piece
                    if wanted == _LENGTH.size <= len(received):
                        wanted += _LENGTH.unpack_from(received)[0]
        del received[: _LENGTH.size]
        return received


def too_much_memory(memory_bytes: int) -> str:
    """The reason of a process that needs more than it may have."""
    return f"it needs more than {memory_bytes >> 20} MB of memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _write(descriptor: int, data: memoryview) -> int:
    """How many bytes were taken; all of them if nobody listens any more, which shows when reading."""
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def _why_ended(process: subprocess.Popen[bytes], cpu_s: float) -> str:
    status = process.wait()
    if status == -signal.SIGVTALRM:
        return f"it does not end within {cpu_s:g} seconds"
    return f"its process ended by itself (status {status})"


def _memory_of(pid: int) -> int:
    """Bytes that the process has in memory; 0 where that is limited by the system, or it is gone."""
    if _SYSTEM_LIMITS_MEMORY:
        return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


# --- the process -----------------------------------------------------------------------------------------------------


def answer_requests(answer: Callable[[bytes], bytes], *, opens_files: bool) -> None:
    """Answer requests from stdin on stdout until that is closed, within the limits of the parent.

    ``answer`` raises nothing but MemoryError, which ends the process as any error does. Without ``opens_files`` the
    process can open no file and no socket from now on, so everything that it needs must be imported.
    """
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    keep_to_owner()
    _limit(memory_bytes, opens_files)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while head := stdin.read(_LENGTH.size):
        request = stdin.read(_LENGTH.unpack(head)[0])
        # The signal ends the process, whatever it is in; the time of waiting for a request does not count.
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        found = answer(request)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        stdout.write(_LENGTH.pack(len(found)))
        stdout.write(found)
        stdout.flush()


def _limit(memory_bytes: int, opens_files: bool) -> None:
    """No more memory than now and ``memory_bytes``, where the system can say so, and no core file."""
    import resource

    def most(kind: int, value: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (value, value))

    most(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            pages = int(file.read().split()[0])
        most(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)
    if not opens_files:
        most(resource.RLIMIT_FSIZE, 0)
        most(resource.RLIMIT_NOFILE, 0)
