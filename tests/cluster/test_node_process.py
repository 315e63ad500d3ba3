"""Rings of real engine processes on loopback: forming, equal answers, loss, return, refusals, nothing left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_forks import with_libraries
from tiny_models import write_tiny_model

from engine.bench.local_ring import LocalEngine, LocalRing, open_network
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
    Piece,
    Plan,
    Planned,
    Progress,
    Sampling,
    ShowCode,
)
from engine.ipc.messages.ring import RingChoice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [3, 14, 15, 9, 26, 5]
SMALL_FILES = 128 * 1024
PATIENCE_S = 120.0
"""After so long a test fails rather than hangs; nothing is asserted about time."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-mixtral", "mixtral", num_local_experts=8)


class Head:
    """The engine process under a chat, and the lent ones around it."""

    def __init__(self, folder: Path, followers: int) -> None:
        (folder / "config" / "network").mkdir(parents=True)
        self.ring = LocalRing(folder, followers, launch=with_libraries)
        try:
            self.engine = LocalEngine(folder, launch=with_libraries)
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

    def load(self, model: Path, choice: RingChoice, runtime: str = "auto") -> Loaded:
        request = Load(
            id=self.engine.new_id(),
            model=str(model),
            partitioning="ring",
            runtime=runtime,  # type: ignore[arg-type]
            ring=choice,
        )
        found = self.engine.ask(request, 120)
        assert isinstance(found, Loaded)
        return found

    def alone(self, model: Path) -> None:
        self.engine.ask(Load(id=self.engine.new_id(), model=str(model), partitioning="cpu"), 120)

    def answer(self, tokens: int = 16) -> list[int]:
        found = self.engine.ask(self.question(tokens), 120)
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


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path / "head", 1)
    yield head
    head.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path / "head", 2)
    yield head
    head.close()


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
def test_three_processes_answer_as_one(three: Head, model: Path, mode: str) -> None:
    loaded = three.load(model, RingChoice(even_if_slower=True, mode=mode, overlap=False))  # type: ignore[arg-type]
    ring = loaded.facts.ring
    assert ring is not None
    assert (ring.mode, len(ring.nodes), ring.encrypted) == (mode, 3, True)
    assert sum(share.experts for share in ring.nodes) == 8 * len(loaded.facts.moe_layers)
    assert ring.exchange_s is not None
    together = three.answer()
    three.alone(model)
    if mode == "exact":
        assert together == three.answer()
    else:
        assert len(together) == 16
    for engine in three.ring.engines:
        state = engine.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, 10, 5)
        assert isinstance(state, NetworkState)


def test_torch_forms_a_ring_too(two: Head, model: Path) -> None:
    loaded = two.load(model, RingChoice(even_if_slower=True, mode="exact", overlap=False), runtime="torch")
    assert loaded.facts.ring is not None
    assert loaded.facts.runtime == "torch"
    together = two.answer()
    two.engine.ask(Load(id=two.engine.new_id(), model=str(model), partitioning="cpu", runtime="torch"), 120)
    assert together == two.answer()


def test_follower_receives_its_share_once_and_only_that(two: Head, model: Path) -> None:
    choice = RingChoice(even_if_slower=True, mode="exact", overlap=False)
    first = two.load(model, choice).facts.ring
    assert first is not None
    assert first.nodes[1].has_bytes == 0
    shares = list((two.ring.engines[0].home / "models").glob("*"))
    kept = sum(path.stat().st_blocks * 512 for share in shares for path in share.rglob("*") if path.is_file())
    mine = first.nodes[1].trunk_bytes + first.nodes[1].expert_bytes
    assert mine <= kept <= mine + SMALL_FILES
    again = two.load(model, choice).facts.ring
    assert again is not None
    assert again.nodes[1].has_bytes > 0
    # What is planned from now on knows that, and what each node needs beside its weights.
    load = Load(id=0, model=str(model), partitioning="ring", ring=choice)
    planned = two.engine.ask(Plan(id=two.engine.new_id(), load=load), 60)
    assert isinstance(planned, Planned) and planned.ring is not None
    share = planned.ring.nodes[1]
    assert share.has_bytes >= share.trunk_bytes + share.expert_bytes > 0
    assert len(planned.memory) == 2 and all(node.key_values > 0 and node.workspace > 0 for node in planned.memory)
    after = sum(path.stat().st_blocks * 512 for share in shares for path in share.rglob("*") if path.is_file())
    assert after <= mine + SMALL_FILES


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_follower_is_noticed_and_the_answer_goes_on(three: Head, model: Path, kill: signal.Signals) -> None:
    three.load(model, RingChoice(even_if_slower=True, mode="exact"))
    undisturbed = three.answer(200)
    request = three.question(200)
    since = len(three.engine.events)
    three.engine.send(request)
    three.engine.wait(lambda event: isinstance(event, Piece) or event.id == request.id, 60, since)
    gone = three.ring.engines[1]
    gone.process.send_signal(kill)
    three.until(lambda peers: any(peer.state in ("lost", "paired") for peer in peers), PATIENCE_S, since)
    found = three.engine.wait(lambda event: isinstance(event, (Finished, Failed)) and event.id == request.id, 120)
    assert isinstance(found, Finished)
    assert found.token_ids == undisturbed
    if kill is signal.SIGSTOP:
        back = len(three.engine.events)
        gone.process.send_signal(signal.SIGCONT)
        three.until(lambda peers: all(peer.state in ("ready", "ring") for peer in peers), PATIENCE_S, back)
        assert three.answer(8) == undisturbed[:8]
        three.until(lambda peers: [peer.state for peer in peers] == ["ring", "ring"], PATIENCE_S, back)


def test_stopped_head_frees_its_follower(two: Head, model: Path) -> None:
    two.load(model, RingChoice(even_if_slower=True))
    follower = two.ring.engines[0]
    follower.wait(lambda event: isinstance(event, NetworkState) and event.lending is not None)
    since = len(follower.events)
    two.engine.process.send_signal(signal.SIGSTOP)
    try:
        follower.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, PATIENCE_S, since)
    finally:
        two.engine.process.send_signal(signal.SIGCONT)


def test_forgetting_the_head_cuts_the_ring(two: Head, model: Path) -> None:
    two.load(model, RingChoice(even_if_slower=True))
    follower = two.ring.engines[0]
    since, head_since = len(follower.events), len(two.engine.events)
    follower.ask(ForgetPeer(id=follower.new_id(), peer="head"))
    follower.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, PATIENCE_S, since)
    two.until(lambda peers: all(peer.state != "ring" for peer in peers), PATIENCE_S, head_since)
    # The conversation goes on with the machine that is left.
    assert len(two.answer(4)) == 4


def test_second_head_is_told_that_the_machine_is_lent(two: Head, model: Path, tmp_path: Path) -> None:
    two.load(model, RingChoice(even_if_slower=True))
    follower = two.ring.engines[0]
    other = LocalEngine(tmp_path / "other", launch=with_libraries)
    try:
        open_network(other, "other head")
        follower.ask(ShowCode(id=follower.new_id()))
        state = follower.wait(lambda event: isinstance(event, NetworkState) and bool(event.code))
        assert isinstance(state, NetworkState)
        other.ask(Pair(id=other.new_id(), peer=two.ring.addresses[0], code=state.code))
        other.wait(lambda event: isinstance(event, NetworkState) and [peer.state for peer in event.peers] == ["busy"])
        loaded = other.ask(
            Load(id=other.new_id(), model=str(model), partitioning="ring", ring=RingChoice(even_if_slower=True)), 60
        )
        assert isinstance(loaded, Loaded)
        assert loaded.facts.ring is not None
        assert len(loaded.facts.ring.nodes) == 1
        assert len(two.answer(4)) == 4
    finally:
        other.close()


def test_stopping_while_a_ring_forms_frees_the_follower(two: Head, model: Path) -> None:
    request = Load(id=two.engine.new_id(), model=str(model), partitioning="ring", ring=RingChoice(even_if_slower=True))
    follower = two.ring.engines[0]
    since = len(two.engine.events)
    two.engine.send(request)
    two.engine.wait(lambda event: isinstance(event, Progress) and event.stage != "loading", 60, since)
    two.engine.send(Cancel(id=two.engine.new_id(), target=request.id))
    found = two.engine.wait(lambda event: isinstance(event, (Failed, Loaded)) and event.id == request.id, 60, since)
    if isinstance(found, Failed):
        assert "Stopped" in found.error or "gave up" in found.error
        follower.wait(lambda event: isinstance(event, NetworkState) and event.lending is None, 20, 2)
    again = two.load(model, RingChoice(even_if_slower=True))
    assert again.facts.ring is not None
    assert len(again.facts.ring.nodes) == 2
    assert len(two.answer(4)) == 4


def test_plan_shows_the_ring_without_loading(two: Head, model: Path) -> None:
    load = Load(id=0, model=str(model), partitioning="ring", ring=RingChoice(even_if_slower=True, overlap=False))
    found = two.engine.ask(Plan(id=two.engine.new_id(), load=load), 60)
    assert isinstance(found, Planned)
    assert found.fits
    assert found.ring is not None
    assert [share.name for share in found.ring.nodes] == ["head", "node 1"]
    assert found.ring.tokens_per_s is not None
    follower = two.ring.engines[0].state()
    assert follower is not None
    assert follower.lending is None


def test_model_that_fits_nowhere_is_refused_with_the_shortfall_before_anything_is_sent(two: Head, model: Path) -> None:
    everybody = [identity.node_id for identity in two.ring.identities]
    choice = RingChoice(even_if_slower=True, shares=dict.fromkeys(everybody, 0))
    with pytest.raises(ModelError, match="are missing") as refused:
        two.load(model, choice)
    assert refused.value.kind == "memory"
    assert list((two.ring.engines[0].home / "models").iterdir()) == []


def test_nothing_listens_before_the_network_is_opened(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home")
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


def test_ten_formings_and_closings_leave_nothing_behind(two: Head, model: Path) -> None:
    follower = two.ring.engines[0]
    processes = [psutil.Process(engine.process.pid) for engine in (two.engine, follower)]

    def once() -> None:
        two.load(model, RingChoice(even_if_slower=True, overlap=False))
        assert len(two.answer(2)) == 2
        two.alone(model)

    for _ in range(3):
        once()
    before = [(one.num_threads(), one.num_fds(), one.memory_info().rss) for one in processes]
    for _ in range(10):
        once()
    time.sleep(1.0)
    after = [(one.num_threads(), one.num_fds(), one.memory_info().rss) for one in processes]
    for old, new in zip(before, after, strict=True):
        assert new[0] <= old[0] + 4
        assert new[1] <= old[1] + 4
        assert new[2] <= old[2] + 50e6
    children = [child for one in processes for child in one.children(recursive=True)]
    assert children == []


def test_processes_end_with_their_screens(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home")
    open_network(engine, "one", lend=True)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(10) == 0
    engine.close()


def test_opening_twice_is_refused(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "home")
    try:
        address = open_network(engine, "one")
        with pytest.raises(ModelError, match="open already"):
            engine.ask(OpenNetwork(id=engine.new_id()))
        port = int(address.rpartition(":")[2])
        second = LocalEngine(tmp_path / "second", launch=with_libraries)
        try:
            with pytest.raises(ModelError, match="in use"):
                second.ask(OpenNetwork(id=1, listen=f"127.0.0.1:{port}"))
        finally:
            second.close()
    finally:
        engine.close()
