"""In a ring each node keeps the experts that are its own in memory, also after the ring was formed anew."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import commands
from engine.cluster.central import CentralHead
from engine.cluster.head.head_model import RingModel
from engine.cluster.membership.control_messages import EpochMember, EpochSpec
from engine.cluster.membership.measuring_node import runtimes
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.worker.follower import Follower
from engine.cluster.worker.follower_work import CentralWork, FollowerTask
from engine.errors import ModelError
from engine.ipc.messages import AnyEvent, Finished, LendTerms, Load, ModelOptions, Notice, WarmUp
from engine.models.folders.weight_layout import layout_of
from engine.moe.expert_parallel import RankContext
from engine.planning.placement import Placement
from engine.residency import page_warmer
from engine.residency.resident_model import Residency, ResidentModel, held_in
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedWeights, RingPlace
from tests.engine.cluster.memory_exchange import MemoryRing
from tests.engine.cluster.thread_ring import ThreadFormer, split

TinyModel = Callable[..., Path]
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "residency"]


class Warmth:
    """The totals of the warm-ups that were finished."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.notices: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, event: AnyEvent) -> None:
        with self._changed:
            if isinstance(event, WarmUp) and event.done == event.total:
                self.totals.append(event.total)
            if isinstance(event, Notice):
                self.notices.append(event.text)
            self._changed.notify_all()

    def wait(self, count: int) -> int:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.totals) >= count, PATIENCE_S)
            return self.totals[count - 1]


def test_the_head_keeps_its_own_experts_and_more_when_it_is_alone(tiny_model: TinyModel):
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    request = Load(id=1, model=str(folder), runtime="torch", cpu_threads=1)
    former = ThreadFormer(folder, request, ["head", "other"], layout.layers, layout.count)
    model = RingModel("m", former, lambda *_: None)
    context = model.context
    assert context is not None and context.nodes == 2
    warmth = Warmth()
    keeping = Residency(warmth)
    keeping.loaded(model, lambda: folder, request)
    half = layout.trunk_bytes + layout.expert_bytes * len(layout.experts) // 2
    assert warmth.wait(1) == half
    with keeping.answering():
        former.formations[-1].kill(1)
        former.names.remove("other")
        model.recover(PeerLost("killed"), lambda *_: None, lambda text: None)
    assert warmth.wait(2) == layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    with keeping.answering():
        pass
    keeping.release()
    keeping.release()
    assert len(warmth.totals) == 2 and warmth.notices == []
    model.close()


def test_a_ring_that_changes_in_an_answer_that_fails_is_kept_all_the_same(tiny_model: TinyModel):
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    request = Load(id=1, model=str(folder), runtime="torch", cpu_threads=1)
    former = ThreadFormer(folder, request, ["head", "other"], layout.layers, layout.count)
    model = RingModel("m", former, lambda *_: None)
    warmth = Warmth()
    keeping = Residency(warmth)
    keeping.loaded(model, lambda: folder, request)
    warmth.wait(1)
    with pytest.raises(ModelError, match="given up"), keeping.answering():
        former.formations[-1].kill(1)
        former.names.remove("other")
        model.recover(PeerLost("killed"), lambda *_: None, lambda text: None)
        raise ModelError("The answer was given up.")
    assert warmth.wait(2) == layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    keeping.release()
    model.close()


def finished(**changes: Any) -> Finished:
    values: dict[str, Any] = {
        "id": 1,
        "text": "",
        "token_ids": [],
        "finish_reason": "length",
        "prompt_tokens": 1,
        "prefilled_tokens": 1,
        "completion_tokens": 1,
        "ttft_s": 9.0,
        "tokens_per_s": 1.0,
    }
    return Finished(**(values | changes))


def test_the_probe_of_the_head_is_its_first_pass_and_no_forming(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_warmer, "IDLE_S", -1.0)
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    request = Load(id=1, model=str(folder), runtime="torch", cpu_threads=1, keep_resident=False)
    former = ThreadFormer(folder, request, ["head", "other"], layout.layers, layout.count)
    model = RingModel("m", former, lambda *_: None)
    keeping = Residency(lambda event: None)
    keeping.loaded(model, lambda: folder, request)
    with keeping.answering():
        assert keeping.probed(finished(), 0.25).probe_s == 0.25
    with keeping.answering():
        assert keeping.probed(finished(), None).probe_s is None
    with keeping.answering():
        former.formations[-1].kill(1)
        former.names.remove("other")
        model.recover(PeerLost("killed"), lambda *_: None, lambda text: None)
        assert keeping.probed(finished(), 4.5).probe_s is None
    with keeping.answering():
        assert keeping.probed(finished(), 0.5).probe_s == 0.5
    keeping.release()
    model.close()


def test_a_warm_up_that_is_broken_off_is_over_for_the_screen():
    told: list[AnyEvent] = []
    keeping = Residency(told.append)
    keeping._on_progress(100, 1000)
    keeping.release()
    keeping.release()
    assert told == [WarmUp(done=100, total=1000), WarmUp(done=1000, total=1000)]


def test_a_place_in_a_ring_names_its_experts():
    placement = split((0, 2), 5, 2, overlap=1)
    assert held_in(RankContext("epoch", 1, placement)) == {0: (0, 1, 3), 2: (0, 1, 3)}


class Layers:
    """What a follower needs of its layers."""

    def begin_pass(self) -> None: ...

    def give_up(self, reason: str = "") -> bool:
        return False


class Rows:
    rows = 1
    length = 0

    def extend(self, tokens: Any, want_logits: bool = True) -> None: ...


class Model(LoadedWeights):
    facts = SimpleNamespace(vocabulary=100, context_limit=64)

    def start(self) -> Rows:
        return Rows()

    def close(self) -> None:
        return


def test_a_follower_touches_nothing_while_a_pass_runs():
    entered: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    follower = Follower(Model(), Layers(), lambda tokens: entered.append(f"ran {tokens}"), around)  # type: ignore[arg-type]
    follower.do(commands.StartRows(0))
    assert entered == []
    follower.do(commands.Extend(0, commands.Prefixes().state, [5, 6], False))
    assert entered == ["in", "out", "ran 2"]


def test_the_first_pass_after_idling_is_the_probe(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    folder = tiny_model("mixtral")
    request = Load(id=1, model=str(folder), keep_resident=False)
    ready = ResidentModel(Model(), folder, request, clock=lambda: now)  # type: ignore[arg-type]
    with ready.passing():
        now += 1.0
    assert ready.probe_s is None
    now += page_warmer.IDLE_S + 1
    with ready.passing():
        now += 0.5
    with ready.passing():
        now += 3.0
    assert ready.probe_s == 0.5
    now += page_warmer.IDLE_S + 1
    with contextlib.suppress(PeerLost), ready.passing():
        raise PeerLost("gone")
    assert ready.probe_s == 0.5
    ready.close()


def test_a_pass_that_comes_in_parts_is_one_probe(tmp_path: Path):
    now = 0.0
    ready = ResidentModel(object(), tmp_path, Load(id=1, model="m", keep_resident=False), clock=lambda: now)

    def part(first: bool, last: bool, seconds: float) -> None:
        nonlocal now
        with ready.part_of_pass(first, last):
            now += seconds

    now += page_warmer.IDLE_S + 1
    part(True, False, 0.5)
    now += 0.25  # the head's own work
    part(False, True, 0.5)
    assert ready.probe_s == 1.25
    part(True, False, 4.0)
    part(False, True, 4.0)
    assert ready.probe_s == 1.25  # that was not after idling
    now += page_warmer.IDLE_S + 1
    part(True, False, 4.0)  # given up before its last part
    part(True, False, 3.0)
    part(False, True, 3.0)
    assert ready.probe_s == 1.25
    ready.close()


def central_spec(folder: Path, placement: Placement) -> EpochSpec:
    members = [EpochMember(rank=rank, node_id=f"{rank}" * 64, certificate=b"") for rank in range(2)]
    return EpochSpec(
        epoch="e" * 16,
        version="1",
        rank=1,
        members=members,
        key=b"k" * 32,
        placement=placement,
        mode="central",
        loading="selected",
        weights=[1.0, 1.0],
        exchanges=["tls"],
        options=ModelOptions(model=str(folder), runtime="torch", cpu_threads=1),
    )


def test_a_follower_of_central_mode_keeps_its_experts_and_no_trunk(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_warmer, "IDLE_S", -1.0)  # every pass comes after idling
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    placement = split(layout.layers, layout.count, 2)
    memory = MemoryRing(2)
    told: list[tuple[int, int]] = []
    ran: list[int] = []
    spec = central_spec(folder, placement)
    said: list[str] = []
    task = FollowerTask(
        spec,
        folder,
        LendTerms(),
        runtimes(),
        lambda *_: None,
        ran.append,
        lambda done, total: told.append((done, total)),
        said.append,
    )
    work = CentralWork(task, memory.ends[1])
    keeping = work._ready.warmer
    assert keeping is not None and keeping.wait_until_warm(PATIENCE_S)
    held = sum(len(placement.held(1, layer)) for layer in layout.layers)
    assert told[-1] == (held * layout.expert_bytes,) * 2
    assert work.probe_s is None
    context = RankContext("e" * 16, 0, placement, "central")
    head = CentralHead(context, memory.ends[0])
    request = Load(id=1, model=folder.name, cpu_threads=1)
    model = runtime_named("torch").load(folder, request, lambda *_: None, RingPlace(context, head))

    def follow() -> None:
        with contextlib.suppress(PeerLost):
            work.run()

    following = threading.Thread(target=follow)
    following.start()
    rows = model.start()
    rows.extend([5, 6, 7])
    rows.step([8])
    memory.ends[0].close()
    following.join(PATIENCE_S)
    work.close()
    model.close()
    assert ran == [3, 1]  # tokens of each pass, also if no expert of its first layer was this machine's
    assert work.probe_s is not None and work.probe_s > 0
    assert said == [] and work.notices == []
    unkept = CentralWork(replace(task, terms=LendTerms(keep_resident=False)), MemoryRing(2).ends[1])
    assert unkept._ready.warmer is None
    unkept.close()


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path):
    said: list[str] = []
    ready = ResidentModel(Model(), tmp_path / "gone", Load(id=1, model="m"), notice=said.append)  # type: ignore[arg-type]
    assert said == [f"The weights are not kept in memory: {tmp_path / 'gone'} does not exist; name a folder with "
                    "config.json and safetensors files."]  # fmt: skip
    with ready.answering():
        pass
    ready.close()
