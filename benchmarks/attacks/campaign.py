"""One attack: attempts in a child process that may die, hang or grow, and what became of each.

An attempt is a function of a seed and a number alone, so that whatever is found can be done again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType


class Draw(random.Random):
    """What an attempt draws its input from. ``number``: of the attempt, from 0 on."""

    number = 0


Attempt = Callable[[Draw], None]
"""Tries one input, drawn from the generator. Returns if it was taken, raises :class:`Refused` if it was refused in the
words meant for that, and anything else if something is wrong."""

CPU_S = 10.0
"""An attempt that computes for longer hangs. Processor time, so that a busy machine makes no difference."""
WALL_S = 120.0
"""An attempt that waits for longer hangs, too."""
MEMORY_BYTES = 1 << 30
"""An attempt may not make the process grow by more."""


MOST_DATA = 6 << 30
"""Bytes that the process of an attack may allocate; -1: any number."""


_CANNOT_BEGIN = 9
"""Exit status of a child in which nothing could be attacked."""


class Refused(Exception):
    """The input was refused as it should be."""


class Hangs(BaseException):
    """Raised in an attempt that takes too long; nothing that catches errors of the input catches it."""


@dataclass(frozen=True)
class Attack:
    """``open`` makes what the attempts need in a folder of its own, and ends it. ``inputs``: attempts of a whole run;
    ``seeds``: which of them to make, numbers from 0 on."""

    name: str
    inputs: int
    open: Callable[[Path], contextlib.AbstractContextManager[Attempt]]
    memory_bytes: int = MEMORY_BYTES
    cpu_s: float = CPU_S


@dataclass
class Tally:
    """What became of the attempts of one attack. ``unexpected``: the kind and place of what was raised, by count;
    ``found``: a line for each thing that is wrong, with the number of the attempt."""

    name: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    peak_bytes: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.crashes or self.hangs or self.unexpected)


_STATE = struct.Struct("<qqqqq")
"""What child and parent share: the next attempt, taken, refused, clock of the last beginning, growth in bytes."""


def run(attack: Attack, seed: int, inputs: int) -> Tally:
    """``inputs`` attempts; a child that dies or hangs is replaced by one that goes on behind that attempt."""
    tally = Tally(attack.name)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="attack-") as folder, mmap.mmap(-1, _STATE.size) as shared:
        state = _State(shared)
        children = 0
        while state.next < inputs:
            children += 1
            home = Path(folder) / str(children)
            home.mkdir()
            said = context.SimpleQueue()
            child = context.Process(target=_attempts, args=(attack, seed, inputs, state, home, said.put))
            child.start()
            hung = _watch(child, state)
            _collect(said, tally)
            if child.exitcode == _CANNOT_BEGIN:
                raise RuntimeError(f"{attack.name}: what is attacked does not work as it is")
            if hung:
                tally.hangs += 1
                tally.found.append(f"attempt {state.next} waits for ever")
                state.next += 1
            elif child.exitcode:
                how = signal.Signals(-child.exitcode).name if child.exitcode < 0 else f"exit status {child.exitcode}"
                tally.crashes += 1
                tally.found.append(f"attempt {state.next} ended the process ({how})")
                state.next += 1
        tally.inputs, tally.taken, tally.refused, tally.peak_bytes = inputs, state.taken, state.refused, state.growth
    return tally


class _State:
    """Numbers in memory that parent and child share, so that they outlive the child."""

    def __init__(self, shared: mmap.mmap) -> None:
        self._shared = shared

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("<q", self._shared, 8 * place)[0])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("<q", self._shared, 8 * place, value)

    next = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    taken = property(lambda self: self._get(1), lambda self, value: self._set(1, value))
    refused = property(lambda self: self._get(2), lambda self, value: self._set(2, value))
    begun = property(lambda self: self._get(3), lambda self, value: self._set(3, value))
    growth = property(lambda self: self._get(4), lambda self, value: self._set(4, value))


def _watch(child: BaseProcess, state: _State) -> bool:
    """Wait until the child has ended; kill it and say so if one attempt waits too long."""
    state.begun = time.monotonic_ns()
    while child.is_alive():
        child.join(0.2)
        if time.monotonic_ns() - state.begun > WALL_S * 1e9:
            child.kill()
            child.join()
            return True
    return False


def _collect(said: multiprocessing.SimpleQueue[tuple[str, str]], tally: Tally) -> None:
    while not said.empty():
        kind, line = said.get()
        if kind == "hang":
            tally.hangs += 1
        else:
            tally.unexpected[kind] += 1
        if tally.unexpected[kind] <= 3:
            tally.found.append(line)


def _attempts(
    attack: Attack, seed: int, inputs: int, state: _State, home: Path, say: Callable[[tuple[str, str]], None]
) -> None:
    """In the child: attempts until all are made."""
    os.environ |= {
        "PRIVATELLM_HOME": str(home),
        "GRPC_VERBOSITY": "NONE",
        "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What would take all of the machine's memory is an error instead.
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA))
    signal.signal(signal.SIGPROF, _too_long)
    # A crash is told by its number and place in the table; where it happened, by a debugger.
    faulthandler.disable()
    with contextlib.ExitStack() as stack:
        try:
            attempt = stack.enter_context(attack.open(home))
        except Exception:
            traceback.print_exc()
            os._exit(_CANNOT_BEGIN)
        before = _peak()
        while (number := state.next) < inputs:
            state.begun = time.monotonic_ns()
            signal.setitimer(signal.ITIMER_PROF, attack.cpu_s)
            draw = Draw(f"{attack.name}/{seed}/{number}")
            draw.number = number
            try:
                attempt(draw)
                state.taken += 1
            except Refused:
                state.refused += 1
            except Hangs:
                say(("hang", f"attempt {number} computes for more than {attack.cpu_s:g} s"))
            except BaseException as error:
                kind = f"{type(error).__name__} at {_place(error)}"
                say((kind, f"attempt {number}: {kind}: {str(error)[:200]}"))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            growth = _peak() - before
            if growth > max(state.growth, attack.memory_bytes):
                say(("memory", f"attempt {number} grew the process by {growth / 1e6:.0f} MB"))
            state.growth = max(state.growth, growth)
            state.next = number + 1


def _too_long(signal_number: int, frame: FrameType | None) -> None:
    raise Hangs


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "nowhere"


def _peak() -> int:
    """Most memory of this process so far, or of one that it started and that has ended, in bytes."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak if sys.platform == "darwin" else peak << 10


@contextlib.contextmanager
def plain(attempt: Attempt) -> Iterator[Attempt]:
    """For attempts that need nothing made."""
    yield attempt
