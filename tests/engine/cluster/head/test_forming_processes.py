"""Rings of real engine processes on loopback: forming, equal answers, refusals, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.bench.local_ring import Launcher, LocalEngine, LocalRing, open_network
from engine.errors import ModelError
from engine.ipc.messages import (
    Cancel,
    CloseNetwork,
    Failed,
    Finished,
    ForgetPeer,
    Generate,
    ListPeers,
    Load,
    Loaded,
    NetworkState,
    OpenNetwork,
    Pair,
    Plan,
    Planned,
    Progress,
    Sampling,
    ShowCode,
)
from engine.ipc.messages.ring import ExchangeName, RingChoice
from tests.engine.cluster import machine_hooks
from tests.support.engine_forks import ForkedProcess, forked, measured_before
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model
from tests.support.unprivileged_reader import check_private, children, unprivileged

pytestmark = pytest.mark.slow

PROMPT = [3, 14, 15, 9, 26, 5]
PATIENCE_S = 120.0
"""After so long a test fails rather than hangs; nothing is asserted about time."""
RING = RingChoice(even_if_slower=True, mode="exact", exchange="tls", overlap=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-mixtral", "mixtral", num_local_experts=8)


def measuring_little(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> ForkedProcess | subprocess.Popen[bytes]:
    """An engine that does not take long to form a ring."""
    return forked(hooked(machine_hooks.quick), environment)


class Head:
    """The engine process under a chat, and the lent ones around it."""

    def __init__(self, folder: Path, followers: int, launch: Launcher = forked) -> None:
        (folder / "config" / "network").mkdir(parents=True)
        self.ring = LocalRing(folder, followers, launch=launch)
        try:
            self.engine = LocalEngine(folder, launch=launch)
            for engine in (self.engine, *self.ring.engines):
                measured_before(engine.home)
            self.address = open_network(self.engine, "head", peers=self.ring.addresses)
            self.until(lambda peers: sum(peer.state == "ready" for peer in peers) == followers)
        except BaseException:
            self.close()
            raise

    def until(self, wanted: object, seconds: float = PATIENCE_S, since: int = 0) -> NetworkState:
        assert callable(wanted)
        found = self.engine.wait(lambda event: isinstance(event, NetworkState) and wanted(event.peers), seconds, since)
        assert isinstance(found, NetworkState)
        return found

    def load(self, model: Path, choice: RingChoice) -> Loaded:
        found = self.engine.ask(self.request(model, choice), PATIENCE_S)
        assert isinstance(found, Loaded)
        return found

    def request(self, model: Path, choice: RingChoice) -> Load:
        return Load(id=self.engine.new_id(), model=str(model), partitioning="ring", ring=choice)

    def alone(self, model: Path) -> None:
        self.engine.ask(Load(id=self.engine.new_id(), model=str(model), partitioning="cpu"), PATIENCE_S)

    def all_free(self, model: Path) -> None:
        """The head answers alone, and nobody is lent to it any more."""
        self.alone(model)
        for engine in self.ring.engines:
            eventually(lambda engine=engine: (state := engine.state()) and state.lending is None, PATIENCE_S)  # type: ignore[misc]

    def answer(self, tokens: int = 16) -> list[int]:
        found = self.engine.ask(self.question(tokens), PATIENCE_S)
        assert isinstance(found, Finished)
        return found.token_ids

    def question(self, tokens: int) -> Generate:
        return Generate(
            id=self.engine.new_id(), prompt_ids=PROMPT, sampling=Sampling(temperature=0.0), max_tokens=tokens
        )

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
        self.ring.close()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("two") / "head", 1, measuring_little)
    yield head
    head.close()


@pytest.fixture
def two(processes: Head, model: Path) -> Head:
    """A head and a follower, not in a ring."""
    processes.all_free(model)
    return processes


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("three") / "head", 2, measuring_little)
    yield head
    head.close()


@pytest.mark.parametrize(
    ("mode", "exchange"),
    [("exact", "auto"), *(pytest.param(mode, "tls", marks=pytest.mark.soak) for mode in ("fast", "central"))],
)
def test_three_processes_answer_as_one(three: Head, model: Path, mode: str, exchange: ExchangeName) -> None:
    choice = RingChoice(even_if_slower=True, mode=mode, exchange=exchange, overlap=False)  # type: ignore[arg-type]
    loaded = three.load(model, choice)
    ring = loaded.facts.ring
    assert ring is not None
    assert (ring.mode, len(ring.nodes), ring.encrypted) == (mode, 3, True)
    assert sum(share.experts for share in ring.nodes) == 8 * len(loaded.facts.moe_layers)
    assert ring.exchange_s is not None
    together = three.answer()
    three.all_free(model)
    if mode == "exact":
        assert together == three.answer()
    else:
        assert len(together) == 16


def test_a_plan_knows_what_was_received_and_what_each_node_needs(two: Head, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny-other", "mixtral", num_local_experts=8, seed=1)
    first = two.load(model, RING).facts.ring
    assert first is not None
    assert first.nodes[1].has_bytes == 0
    again = two.load(model, RING).facts.ring
    assert again is not None
    assert again.nodes[1].has_bytes > 0
    planned = two.engine.ask(Plan(id=two.engine.new_id(), load=two.request(model, RING)), PATIENCE_S)
    assert isinstance(planned, Planned) and planned.ring is not None
    share = planned.ring.nodes[1]
    assert share.has_bytes >= share.trunk_bytes + share.expert_bytes > 0
    assert len(planned.memory) == 2 and all(node.key_values > 0 and node.workspace > 0 for node in planned.memory)


def test_second_head_is_told_that_the_machine_is_lent(two: Head, model: Path, tmp_path: Path) -> None:
    two.load(model, RING)
    follower = two.ring.engines[0]
    other = LocalEngine(tmp_path / "other", launch=forked)
    try:
        open_network(other, "other head")
        follower.ask(ShowCode(id=follower.new_id()))
        state = follower.wait(lambda event: isinstance(event, NetworkState) and bool(event.code), PATIENCE_S)
        assert isinstance(state, NetworkState)
        other.ask(Pair(id=other.new_id(), peer=two.ring.addresses[0], code=state.code))
        other.wait(
            lambda event: isinstance(event, NetworkState) and [peer.state for peer in event.peers] == ["busy"],
            PATIENCE_S,
        )
        request = Load(id=other.new_id(), model=str(model), partitioning="ring", ring=RING)
        loaded = other.ask(request, PATIENCE_S)
        assert isinstance(loaded, Loaded)
        assert loaded.facts.ring is not None
        assert len(loaded.facts.ring.nodes) == 1
        assert len(two.answer(4)) == 4
    finally:
        other.close()
        follower.ask(ForgetPeer(id=follower.new_id(), peer="other head"))


def test_stopping_while_a_ring_forms_frees_the_follower(two: Head, model: Path) -> None:
    request = two.request(model, RING)
    follower = two.ring.engines[0]
    since, before = len(two.engine.events), len(follower.events)
    two.engine.send(request)
    two.engine.wait(lambda event: isinstance(event, Progress) and event.stage != "loading", PATIENCE_S, since)
    two.engine.send(Cancel(id=two.engine.new_id(), target=request.id))
    found = two.engine.wait(
        lambda event: isinstance(event, (Failed, Loaded)) and event.id == request.id, PATIENCE_S, since
    )
    if isinstance(found, Failed):
        assert "Stopped" in found.error or "gave up" in found.error
        follower.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, PATIENCE_S, before)
    again = two.load(model, RING)
    assert again.facts.ring is not None
    assert len(again.facts.ring.nodes) == 2
    assert len(two.answer(4)) == 4


def test_plan_shows_the_ring_without_loading(two: Head, model: Path) -> None:
    found = two.engine.ask(Plan(id=two.engine.new_id(), load=two.request(model, RING)), PATIENCE_S)
    assert isinstance(found, Planned)
    assert found.fits
    assert found.ring is not None
    assert [share.name for share in found.ring.nodes] == ["head", "node 1"]
    assert found.ring.tokens_per_s is not None
    follower = two.ring.engines[0].state()
    assert follower is not None
    assert follower.lending is None


def test_model_that_fits_nowhere_is_refused_with_the_shortfall_before_anything_is_sent(
    two: Head, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny-never-sent", "mixtral", num_local_experts=8, seed=2)
    before = set((two.ring.engines[0].home / "models").iterdir())
    everybody = [identity.node_id for identity in two.ring.identities]
    choice = RingChoice(even_if_slower=True, shares=dict.fromkeys(everybody, 0))
    with pytest.raises(ModelError, match="are missing") as refused:
        two.load(model, choice)
    assert refused.value.kind == "memory"
    assert set((two.ring.engines[0].home / "models").iterdir()) == before


def test_nothing_listens_before_the_network_is_opened(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home", launch=forked)
    try:
        found = engine.ask(ListPeers(id=engine.new_id()))
        assert isinstance(found, NetworkState)
        assert not found.open
        assert psutil.Process(engine.process.pid).net_connections("inet") == []
        with pytest.raises(ModelError, match="network is closed"):
            engine.ask(ShowCode(id=engine.new_id()))
        address = open_network(engine, "one", lend=True)
        ports = {one.laddr.port for one in psutil.Process(engine.process.pid).net_connections("inet")}
        assert int(address.rpartition(":")[2]) in ports
        engine.ask(CloseNetwork(id=engine.new_id()))
        listening = [
            one for one in psutil.Process(engine.process.pid).net_connections("inet") if one.status == "LISTEN"
        ]
        assert listening == []
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("rounds", "exchange"), [(3, "tls"), pytest.param(30, "auto", marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_formings_and_closings_leave_nothing_behind(
    two: Head, model: Path, rounds: int, exchange: ExchangeName
) -> None:
    processes = [psutil.Process(engine.process.pid) for engine in (two.engine, two.ring.engines[0])]

    def once(exchange: ExchangeName) -> None:
        two.load(model, RingChoice(even_if_slower=True, exchange=exchange, overlap=False))
        assert len(two.answer(2)) == 2
        two.all_free(model)

    def counts() -> list[int]:
        return [count for one in processes for count in (one.num_threads(), one.num_fds())]

    # What is made once in the life of a process is made here: envoys are measured, libraries start their threads.
    first: ExchangeName
    for first in ("auto", exchange):
        once(first)
    before = counts()
    memory = [one.memory_info().rss for one in processes]
    for _ in range(rounds):
        once(exchange)
    eventually(lambda: all(now <= old + 3 for now, old in zip(counts(), before, strict=True)))
    assert all(one.memory_info().rss <= old + 50e6 for one, old in zip(processes, memory, strict=True))
    eventually(lambda: not [child for one in processes for child in one.children(recursive=True)])


def test_processes_end_with_their_screens(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home", launch=forked)
    open_network(engine, "one", lend=True)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(PATIENCE_S) == 0
    engine.close()


def test_opening_twice_is_refused(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home", launch=forked)
    try:
        address = open_network(engine, "one")
        with pytest.raises(ModelError, match="open already"):
            engine.ask(OpenNetwork(id=engine.new_id()))
        port = int(address.rpartition(":")[2])
        second = LocalEngine(tmp_path / "second", launch=forked)
        try:
            with pytest.raises(ModelError, match="in use"):
                second.ask(OpenNetwork(id=1, listen=f"127.0.0.1:{port}"))
        finally:
            second.close()
    finally:
        engine.close()


def started_unprivileged(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = unprivileged(sys.executable, *hooked(machine_hooks.quick))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment))


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("exchange", ["tls", "envoy"])
def test_no_process_of_a_ring_can_be_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, exchange: ExchangeName
) -> None:
    """As those of a chat and of a server."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    head = Head(tmp_path / "head", 1, started_unprivileged)
    try:
        head.load(model, msgspec.structs.replace(RING, exchange=exchange))
        assert head.answer()
        for engine in (head.engine, *head.ring.engines):
            envoys = [
                "engine.cluster.transport.envoy_process" in child.cmdline() for child in children(engine.process.pid)
            ]
            assert any(envoys) == (exchange == "envoy")
            check_private(engine.process.pid)
    finally:
        head.close()
