"""Further nodes on this machine: separate engine processes, paired with this one, on loopback only.

The ring's benchmark and tests use them. Every process has its own PRIVATELLM_HOME in a temporary folder, which is
removed at the end. All processes end with the object.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeVar

from discovery.identity import Identity, load_identity
from discovery.peers import PeersFile, new_peer
from engine.errors import ModelError
from engine.ipc.messages import (
    TERMINAL_EVENTS,
    AnyEvent,
    AnyRequest,
    Failed,
    NetworkState,
    OpenNetwork,
    ProtocolError,
    Shutdown,
    event_reader,
    pack,
)
from engine.system.temporary_folders import temporary_folder

START_S = 60.0
END_S = 3.0
NETWORK = Path("config") / "network"
"""Folder of the network's files in a PRIVATELLM_HOME; see :func:`engine.cluster.membership.node.network_folder`."""

E = TypeVar("E", bound=AnyEvent)


class ChildProcess(Protocol):
    """The part of ``subprocess.Popen`` that is used for an engine process."""

    pid: int
    returncode: int | None
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


Launcher = Callable[[Sequence[str], Mapping[str, str]], ChildProcess]
"""Starts a Python interpreter with these arguments and this environment, and pipes for its input and output."""


def launch_python(arguments: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
    """A new interpreter. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
    )


class LocalEngine:
    """An engine process of this machine, and the events it sent. Thread-safe.

    ``arguments`` of the Python interpreter may prepare the process before it calls ``engine.host.main()``. ``launch``
    starts the process; tests fork it from one that has imported everything.
    """

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = ("-P", "-m", "engine.host"),
        launch: Launcher = launch_python,
    ) -> None:
        self.home = home
        env = {**os.environ, "PRIVATELLM_HOME": str(home), "GRPC_VERBOSITY": "NONE", **(environment or {})}
        # The keyring belongs to the person: short-lived processes keep their keys in files.
        env["PYTHON_KEYRING_BACKEND"] = "keyring.backends.null.Keyring"
        self.process = launch(arguments, env)
        self.events: list[AnyEvent] = []
        self._news = threading.Condition()
        self._ended = False
        self._end = ""
        """Reason for the process's end."""
        self._next = 0
        self._reader = threading.Thread(target=self._read, name="reading events", daemon=True)
        self._reader.start()

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def send(self, request: AnyRequest) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(pack(request))
        self.process.stdin.flush()

    def ask(self, request: AnyRequest, seconds: float = START_S) -> AnyEvent:
        """Send ``request`` and wait for its last event. Raises ModelError if it failed or did not come."""
        self.send(request)
        answer = self.wait(
            lambda event: isinstance(event, (*TERMINAL_EVENTS, NetworkState)) and event.id == request.id, seconds
        )
        if isinstance(answer, Failed):
            raise ModelError(answer.error, answer.kind)
        return answer

    def wait(self, wanted: Callable[[AnyEvent], bool], seconds: float = START_S, since: int = 0) -> AnyEvent:
        """The first wanted event with index ``since`` or higher. Raises ModelError if none comes in time."""
        by = time.monotonic() + seconds
        with self._news:
            while True:
                while since < len(self.events):
                    if wanted(self.events[since]):
                        return self.events[since]
                    since += 1
                if self._ended or not self._news.wait(max(0.0, by - time.monotonic())):
                    ended = f"ended ({self._end}; status {self.process.poll()})"
                    what = ended if self._ended else f"sent nothing of that within {seconds:g} s"
                    raise ModelError(f"An engine process on this machine {what} ({self.home}).", kind="internal")

    def state(self) -> NetworkState | None:
        """The last state that it sent."""
        with self._news:
            states = [event for event in self.events if isinstance(event, NetworkState)]
        return states[-1] if states else None

    def close(self) -> None:
        """End the process, and kill it if it does not end by itself. May be called twice."""
        with contextlib.suppress(OSError, ValueError):
            self.send(Shutdown(id=0))
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        reader = event_reader()
        descriptor = self.process.stdout.fileno()
        try:
            while data := os.read(descriptor, 1 << 16):
                found = reader.feed(data)
                with self._news:
                    self.events += found
                    self._news.notify_all()
            self._end = "it has closed its output"
        except (OSError, ValueError, ProtocolError) as error:
            self._end = str(error) or type(error).__name__
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()


def pair_homes(homes: Sequence[Path], with_all: bool = False) -> list[Identity]:
    """Give every home an identity, and pair the first with each other one, or all with all, as a code would."""
    identities = [load_identity(home / NETWORK) for home in homes]
    for index, one in enumerate(identities):
        for other in range(index):
            if other == 0 or with_all:
                _trust(homes[index], identities[other], f"node {other}" if other else "head")
                _trust(homes[other], one, f"node {index}")
    return identities


def _trust(home: Path, peer: Identity, name: str) -> None:
    PeersFile(home / NETWORK).add(new_peer(peer.certificate_der, name))


class LocalRing:
    """``followers`` lent engine processes, each paired with the head whose home is ``head``, and listening.

    ``models`` are model folders that they find as their own, so that no weights are sent. ``threads`` is the number for
    libraries that choose by themselves; a ring's own number is in its Load. ``cpus`` are the hardware threads of each
    process; None: all.
    """

    def __init__(
        self,
        head: Path,
        followers: int,
        models: Sequence[Path] = (),
        threads: int | None = None,
        cpus: Sequence[frozenset[int]] = (),
        launch: Launcher = launch_python,
    ) -> None:
        """Raises ModelError if a process does not start."""
        self.engines: list[LocalEngine] = []
        self._opened = contextlib.ExitStack()
        try:
            folder = self._opened.enter_context(temporary_folder("privatellm-ring-"))
            homes = [folder / f"node-{index + 1}" for index in range(followers)]
            for home in homes:
                (home / NETWORK).mkdir(parents=True, mode=0o700)
                (home / "models").mkdir()
                for model in models:
                    (home / "models" / model.name).symlink_to(model, target_is_directory=True)
            self.identities = pair_homes([head, *homes])
            environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
            for index, home in enumerate(homes):
                engine = LocalEngine(home, environment, launch=launch)
                self.engines.append(engine)
                if index < len(cpus):
                    # This is done before the process has other threads, which inherit it.
                    os.sched_setaffinity(engine.process.pid, cpus[index])
            self.addresses = [
                open_network(engine, f"node {index + 1}", lend=True) for index, engine in enumerate(self.engines)
            ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for engine in self.engines:
            with contextlib.suppress(OSError, ValueError):
                engine.send(Shutdown(id=0))
        for engine in self.engines:
            engine.close()
        self._opened.close()

    def __enter__(self) -> LocalRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_network(engine: LocalEngine, name: str, lend: bool = False, peers: Sequence[str] = ()) -> str:
    """Open the network of ``engine`` on loopback. Returns the address of its control port. Raises ModelError."""
    request = OpenNetwork(id=engine.new_id(), name=name, listen="127.0.0.1:0", peers=list(peers), lend=lend)
    engine.ask(request)
    state = engine.wait(lambda event: isinstance(event, NetworkState) and bool(event.me.listening))
    assert isinstance(state, NetworkState)
    return state.me.listening[0]


_TOPOLOGY = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")


def shared_out(cores: Sequence[frozenset[int]], processes: int) -> list[frozenset[int]]:
    """Divide ``cores`` (the hardware threads of each) evenly among the processes; empty if there are too few. Pure."""
    each = len(cores) // processes
    if not each:
        return []
    return [frozenset().union(*cores[rank * each : (rank + 1) * each]) for rank in range(processes)]


def cores_here(topology: Path = _TOPOLOGY) -> list[frozenset[int]]:
    """The hardware threads available to this process, by core; empty if processes cannot be bound to them."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    cores: dict[str, set[int]] = {}
    for cpu in sorted(allowed):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            core = f"cpu{cpu}"
        cores.setdefault(core, set()).add(cpu)
    return [frozenset(cpus) for cpus in cores.values()]


@contextlib.contextmanager
def bound(cpus: Iterable[int]) -> Iterator[None]:
    """Bind all threads of this process to ``cpus``, until the end of the context; without ``cpus``, change nothing."""
    wanted = set(cpus)
    before = _affinities() if wanted else {}
    for thread in before:
        _bind(thread, wanted)
    try:
        yield
    finally:
        everywhere = set().union(*before.values()) if before else set()
        for thread in _affinities() if before else {}:
            _bind(thread, before.get(thread, everywhere))


def _affinities() -> dict[int, set[int]]:
    """The hardware threads of each thread of this process."""
    found = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def _bind(thread: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.sched_setaffinity(thread, cpus)


__all__ = [
    "ChildProcess",
    "Launcher",
    "LocalEngine",
    "LocalRing",
    "bound",
    "cores_here",
    "launch_python",
    "open_network",
    "pair_homes",
    "shared_out",
]
