"""What surrounds the engine's process: the settings of libraries that it begins with, and how it ends."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from engine.system.processes import ONLY_TLS_1_3
from engine.system.temporary_folders import is_remover

SPINS = 2000
"""Spin iterations of an idle OpenMP thread before it sleeps (libgomp only; elsewhere the wait policy alone counts)."""
KERNELS_KEPT = 128
"""Maximum compiled kernels that torch and oneDNN keep: enough for decoding and for the row counts of prompts."""

EXIT_BAD_FRAME = 3
"""Exit status after a frame that is not a request."""
EXIT_THREAD_FAILED = 4
"""Exit status after an uncaught exception in one of our threads."""


def environment(threads: int) -> dict[str, str]:
    """Settings of libraries before they are imported: no network access by themselves, little spinning, small caches.

    OpenMP threads that spin between two operations become very slow when another process, such as the screen, needs the
    cores. Threads that sleep at once take half as long again on a quiet machine. They therefore spin for some tens of
    microseconds. oneDNN, and torch in front of it, keep a thousand kernels, one for every number of rows, of half a
    megabyte each.
    """
    kernels = str(KERNELS_KEPT)
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "USE_HUB_KERNELS": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        # Handshakes that strangers fail at are no news.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
        **ONLY_TLS_1_3,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", kernels),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels),
        # numpy's own threads spin for tens of milliseconds after a product. One is made only to measure the memory, by
        # threads of ours, and what was measured next took twice as long.
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(SPINS)),
    }


def end_process(status: int) -> NoReturn:
    """End at once, whatever the threads do, and the children with it, but for those that tidy up behind it."""
    with contextlib.suppress(Exception):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if is_remover(child.cmdline()):
                    continue
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(status)


def end_with_thread(failure: threading.ExceptHookArgs, notice: Callable[[str], None]) -> None:
    """End the process if ``failure`` ended a thread that ran our code, as others may wait for that thread.

    An ended process is started again, but a hanging one is not. Threads of other libraries are ignored.
    """
    name = "a thread" if failure.thread is None else failure.thread.name
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    frames = traceback.walk_tb(failure.exc_traceback)
    if not any(frame.f_globals.get("__name__", "").startswith(("engine.", "discovery.")) for frame, _ in frames):
        return
    notice(f"The engine's {name} failed with {failure.exc_type.__name__}: the engine ends, to be started again.")
    end_process(EXIT_THREAD_FAILED)


# --- pipes -----------------------------------------------------------------------------------------------------------


LOG_LIMIT = 4 * 1024 * 1024
"""Size in bytes at which the log is renamed to ``engine.log.1``; at most two such files are on disk."""


class LogFile:
    """The log of descriptors 1 and 2. The file is renamed when it grows large."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        self.path = path
        self._limit = limit
        self.problem: str | None = None
        """A sentence on why nothing is logged; None if the log works."""
        self.open()

    def open(self) -> None:
        """Point descriptors 1 and 2 at the file, or at the null device if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.path.exists() and self.path.stat().st_size > self._limit:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self.problem = f"The engine keeps no log, because {self.path} cannot be written: {error.strerror}."
            target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def roll_if_large(self) -> None:
        """Rename the file if it is too large. Must be called now and then."""
        if self.problem is None:
            with contextlib.suppress(OSError):
                if os.fstat(1).st_size > self._limit:
                    self.open()


@dataclass(frozen=True)
class Pipes:
    """Descriptors of the frames, and the log that took the place of the standard streams."""

    requests: int
    events: int
    log: LogFile


def claim_standard_streams(log: Path) -> Pipes:
    """Keep descriptors 0 and 1 for frames under other numbers, not inherited by children, and redirect 0 to nothing,
    1 and 2 to ``log``."""
    requests, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    file = LogFile(log)
    sys.stdout, sys.stderr = _printing_to(1), _printing_to(2)
    return Pipes(requests, events, file)


class _Forgiving(io.FileIO):
    """A stream that ignores errors: a full disk must not turn a print into an exception."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _printing_to(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
