"""A ring of real engine processes on loopback, in which machines are killed, stopped, replaced and cut off."""

from __future__ import annotations

import contextlib
import fcntl
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from discovery.identity import load_identity
from discovery.peers import PeersFile, new_peer
from engine.bench.local_ring import Launcher, LocalEngine
from engine.ipc.messages import (
    TERMINAL_EVENTS,
    AnyEvent,
    Failed,
    Finished,
    Generate,
    ListPeers,
    Load,
    Loaded,
    NetworkState,
    Notice,
    OpenNetwork,
    Piece,
    Sampling,
    Shutdown,
)
from engine.ipc.messages.ring import LendingFacts, PeerFacts, RingChoice
from tests.faults import hooks
from tests.faults.slow_wire import PairProxy
from tests.support.engine_forks import forked, measured_before
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

PROMPT = [3, 14, 15, 9, 26, 5]
OTHER_PROMPT = [90, 91, 7, 33, 64, 12, 77, 101]
READY = {"ready", "ring"}
"""States of machines that are there."""
EXACT = RingChoice(even_if_slower=True, mode="exact", exchange="tls")
NETWORK = Path("config") / "network"
THREADS = 1
"""That each machine computes with: as many machines as there are cores share them."""
LAYERS = 2
EXPERT_BYTES = LAYERS * 8 * 3 * 48 * 56 * 4
"""Of :func:`write_model`."""


def write_model(folder: Path) -> Path:
    """Small enough to answer hundreds of tokens a second, with room for answers that can be disturbed."""
    return write_tiny_model(
        folder / "tiny-mixtral",
        "mixtral",
        num_local_experts=8,
        num_hidden_layers=LAYERS,
        max_position_embeddings=4096,
        eos_token_id=None,
    )


def write_large_model(folder: Path, hidden_size: int, intermediate_size: int) -> Path:
    """32 experts, whose weights take time to send and room on a disk."""
    return write_tiny_model(
        folder,
        "mixtral",
        num_local_experts=8,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=4,
        eos_token_id=None,
    )


PORTS = range(10_000, 30_000, 2)
"""Ports that no system gives to outgoing connections: those of other tests cannot take one before it is used, nor while
its machine is gone."""


_LOCKS: list[IO[str]] = []
"""Locks on ports that tests of this process have taken: two workers never take the same."""


def free_pair() -> int:
    """A port of loopback that is free, and so is the next one. It is this process's until it ends."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        lock = (Path(tempfile.gettempdir()) / f"privatellm-tests-port-{port}.lock").open("w")
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            _LOCKS.append(lock)
            return port
        lock.close()


class Machine:
    """A node's home, and the engine process that runs on it at the moment."""

    def __init__(self, home: Path, name: str, measured: bool = True) -> None:
        self.home = home
        self.name = name
        self.port = free_pair()
        self.host = "127.0.0.1"
        self.arguments: Sequence[str] = hooked(hooks.quick)
        """Of its interpreter; see hooked_engine.py."""
        self.environment: dict[str, str] = {}
        self.terms: dict[str, Any] = {"cpu_threads": THREADS}
        """On which it is lent; see OpenNetwork."""
        self.proxy: PairProxy | None = None
        self.launch: Launcher = forked
        self.engine: LocalEngine
        (home / NETWORK).mkdir(parents=True, mode=0o700)
        (home / "models").mkdir(exist_ok=True)
        if measured:
            measured_before(home)
        self.identity = load_identity(home / NETWORK)

    @property
    def address(self) -> str:
        """Where others look for it."""
        return f"{self.host}:{self.proxy.port if self.proxy is not None else self.port}"

    def trust(self, other: Machine) -> None:
        PeersFile(self.home / NETWORK).add(new_peer(other.identity.certificate_der, other.name))

    def start(self, peers: Sequence[str] = (), lend: bool = False) -> None:
        self.opened(self.begin(peers, lend))

    def begin(self, peers: Sequence[str] = (), lend: bool = False) -> int:
        """Start, and do not wait: the id of the request to open the network."""
        self.engine = LocalEngine(self.home, {"OMP_NUM_THREADS": "1", **self.environment}, self.arguments, self.launch)
        listen = f"{self.host}:{self.port}"
        request = OpenNetwork(
            id=self.engine.new_id(), name=self.name, listen=listen, peers=list(peers), lend=lend, **self.terms
        )
        self.engine.send(request)
        return request.id

    def opened(self, request: int) -> None:
        """The network is open."""
        found = self.engine.wait(
            lambda event: isinstance(event, (*TERMINAL_EVENTS, NetworkState)) and event.id == request, PATIENCE_S
        )
        assert not isinstance(found, Failed), found

    def returns(self, lend: bool = True, peers: Sequence[str] = ()) -> None:
        """It is there, whether it was ended, stopped, or nothing had happened to it."""
        if self.engine.process.poll() is None:
            self.signal(signal.SIGCONT)
        else:
            self.engine.close()
            self.start(peers, lend)

    def signal(self, number: signal.Signals) -> None:
        self.engine.process.send_signal(number)

    def is_stopped(self) -> bool:
        pid = self.engine.process.pid
        return self.engine.process.poll() is None and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.engine.process.wait()

    def lending(self) -> LendingFacts | None:
        state = self.engine.state()
        return state.lending if state is not None else None

    def end(self) -> None:
        """Tell it to end, and do not wait."""
        if hasattr(self, "engine"):
            with contextlib.suppress(OSError, ValueError):
                self.signal(signal.SIGCONT)
                self.engine.send(Shutdown(id=0))

    def close(self) -> None:
        self.end()
        if hasattr(self, "engine"):
            self.engine.close()


class Ring:
    """``head`` and ``followers``, paired.

    ``arguments``: of their interpreters, by rank. ``proxied``: every connection between them goes by way of a proxy.
    ``slow``: of those behind proxies, each says that it is a machine of its own, and a slow one. ``measured``: their
    memory was measured before. ``launch``: ``with_libraries`` where one imports torch, during which
    it answers nobody.
    """

    def __init__(
        self,
        followers: int,
        arguments: Mapping[int, Sequence[str]] | None = None,
        proxied: bool = False,
        environments: Mapping[int, Mapping[str, str]] | None = None,
        hosts: Sequence[str] = (),
        terms: Mapping[int, Mapping[str, Any]] | None = None,
        measured: bool = True,
        launch: Launcher = forked,
        slow: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ring-faults-"))
        self._loaded = ""
        self.machines: list[Machine] = []
        try:
            for rank in range(followers + 1):
                machine = Machine(self.folder / f"node-{rank}", f"node {rank}" if rank else "head", measured)
                machine.host = hosts[rank] if hosts else machine.host
                machine.arguments = (arguments or {}).get(rank, machine.arguments)
                machine.launch = launch
                machine.environment = dict((environments or {}).get(rank, {}))
                machine.terms |= (terms or {}).get(rank, {})
                if proxied:
                    machine.proxy = PairProxy(machine.port)
                    named = machine.name if slow else ""
                    machine.arguments = hooked(hooks.behind_proxy, port=machine.proxy.port, slow_as=named)
                self.machines.append(machine)
            self.head, self.followers = self.machines[0], self.machines[1:]
            for follower in self.followers:
                self.head.trust(follower)
                follower.trust(self.head)
            begun = [follower.begin(lend=True) for follower in self.followers]
            for follower, request in zip(self.followers, begun, strict=True):
                follower.opened(request)
            self.head.start(peers=[follower.address for follower in self.followers])
            self.until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> LocalEngine:
        return self.head.engine

    def until(
        self, wanted: Callable[[list[PeerFacts]], bool], seconds: float = PATIENCE_S, since: int = 0
    ) -> NetworkState:
        found = self.engine.wait(
            lambda event: isinstance(event, NetworkState) and wanted(list(event.peers)), seconds, since
        )
        assert isinstance(found, NetworkState)
        return found

    def until_ready(self, since: int = 0) -> None:
        """All followers are reachable, in the ring or not."""
        self.until(lambda peers: all(one.state in READY for one in peers), since=since)

    def states(self) -> dict[str, str]:
        """What the head would show of each machine now, but for strangers: tests that run at once have machines
        that may be found, too. What it has sent may be a quarter of a second old."""
        mine = {machine.identity.node_id for machine in self.machines}
        return {name: state for name, state in self._found().items() if name in mine or state != "found"}

    def state_of(self, machine: Machine) -> str:
        return self._found().get(machine.identity.node_id, "")

    def _found(self) -> dict[str, str]:
        state = self.engine.ask(ListPeers(id=self.engine.new_id()))
        assert isinstance(state, NetworkState)
        return {one.node_id: one.state for one in state.peers}

    def load(self, model: Path, choice: RingChoice = EXACT, runtime: str = "auto", **options: Any) -> Loaded:
        request = Load(
            id=self.engine.new_id(),
            model=str(model),
            partitioning="ring",
            runtime=runtime,  # type: ignore[arg-type]
            ring=choice,
            **{"cpu_threads": THREADS, **options},
        )
        self._loaded = ""
        found = self.engine.ask(request, 120)
        assert isinstance(found, Loaded)
        self._loaded = repr((model, choice, runtime, options))
        return found

    def begin_load(self, model: Path, choice: RingChoice = EXACT) -> int:
        """Load, and do not wait: the request's id."""
        self._loaded = ""
        request = Load(id=self.engine.new_id(), model=str(model), partitioning="ring", ring=choice, cpu_threads=THREADS)
        self.engine.send(request)
        return request.id

    def last_of_load(self, request: int, since: int = 0) -> Loaded | Failed:
        found = self.engine.wait(
            lambda event: isinstance(event, (Loaded, Failed)) and event.id == request, PATIENCE_S, since
        )
        assert isinstance(found, (Loaded, Failed))
        return found

    def whole(self, model: Path, choice: RingChoice = EXACT, **options: Any) -> Ring:
        """The ring of all machines with this model, whatever happened to its machines: rings outlive a test."""
        for machine in self.machines:
            if machine.proxy is not None:
                machine.proxy.behave()
            if machine.is_stopped():
                # Gone on with, it would leave the ring a moment later: it has heard nobody for so long.
                machine.kill()
        for follower in self.followers:
            follower.returns()
        if self.head.engine.process.poll() is not None:
            self._loaded = ""
        self.head.returns(lend=False, peers=[follower.address for follower in self.followers])
        eventually(lambda: len(self.states()) == len(self.followers) and set(self.states().values()) <= READY)
        if self._loaded != repr((model, choice, "auto", options)):
            self.load(model, choice, **options)
        self.answered_by_all(1)
        return self

    def ask(self, tokens: int = 24, prompt: Sequence[int] = PROMPT, **options: Any) -> int:
        """Ask, and do not wait: the request's id."""
        request = Generate(
            id=self.engine.new_id(),
            prompt_ids=list(prompt),
            sampling=Sampling(temperature=0.0),
            max_tokens=tokens,
            **options,
        )
        self.engine.send(request)
        return request.id

    def answer(self, tokens: int = 24, prompt: Sequence[int] = PROMPT, **options: Any) -> Finished:
        return self.finished(self.ask(tokens, prompt, **options))

    def answered_by_all(self, tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        """Token ids of the answer of a ring of all machines. One that is slow to come is taken in by a later
        question."""
        asked_by = time.monotonic() + PATIENCE_S
        while True:
            found = self.answer(tokens, prompt).token_ids
            if set(self.states().values()) == {"ring"}:
                return found
            assert time.monotonic() < asked_by, (self.states(), self.notices()[-9:], self._alive())
            time.sleep(0.1)

    def _alive(self) -> list[bool]:
        return [machine.engine.process.poll() is None for machine in self.machines]

    def finished(self, asked: int, seconds: float = PATIENCE_S) -> Finished:
        found = self.last(asked, seconds)
        assert isinstance(found, Finished), found
        return found

    def last(self, asked: int, seconds: float = PATIENCE_S) -> AnyEvent:
        return self.engine.wait(lambda event: event.id == asked and isinstance(event, (Finished, Failed)), seconds)

    def until_tokens(self, asked: int, tokens: int) -> Piece:
        """The answer has so many tokens and goes on."""
        found = self.engine.wait(
            lambda event: (
                event.id == asked
                and (isinstance(event, (Finished, Failed)) or (isinstance(event, Piece) and event.tokens >= tokens))
            ),
            PATIENCE_S,
        )
        assert isinstance(found, Piece), f"the answer ended before it had {tokens} tokens: {found}"
        return found

    def notices(self, since: int = 0) -> list[str]:
        return [event.text for event in self.engine.events[since:] if isinstance(event, Notice)]

    def mark(self) -> int:
        """What the head says from now on."""
        return len(self.engine.events)

    def close(self) -> None:
        for machine in self.machines:
            machine.end()
        for machine in self.machines:
            machine.close()
        for machine in self.machines:
            if machine.proxy is not None:
                machine.proxy.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Oracle:
    """One engine process that answers by itself: what no disturbance may change."""

    def __init__(self, folder: Path, model: Path, runtime: str = "auto") -> None:
        folder.mkdir(parents=True)
        self.engine = LocalEngine(folder, {"OMP_NUM_THREADS": "1"}, launch=forked)
        self._known: dict[str, Finished] = {}
        load = Load(id=self.engine.new_id(), model=str(model), partitioning="cpu", runtime=runtime, cpu_threads=THREADS)  # type: ignore[arg-type]
        assert isinstance(self.engine.ask(load, 120), Loaded)

    def __call__(self, tokens: int = 24, prompt: Sequence[int] = PROMPT, **options: Any) -> Finished:
        key = repr((tokens, prompt, options))
        if key not in self._known:
            self._ask(1, [159])  # nothing of another question is left in the cache: its last bits may be others
            self._known[key] = self._ask(tokens, prompt, **options)
        return self._known[key]

    def _ask(self, tokens: int, prompt: Sequence[int], **options: Any) -> Finished:
        request = Generate(
            id=self.engine.new_id(),
            prompt_ids=list(prompt),
            sampling=Sampling(temperature=0.0),
            max_tokens=tokens,
            **options,
        )
        found = self.engine.ask(request, 120)
        assert isinstance(found, Finished)
        return found
