"""Warm-up and standby: which pages, how much may be wired or locked, and never while somebody is answered."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import offer, stream
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.folders.weight_layout import layout_of
from engine.planning import residency as deciding
from engine.residency import page_warmer as keeping
from engine.residency.mapped import PIECE_BYTES, MappedWeights
from engine.residency.page_warmer import IDLE_S, IdleProbe, PageWarmer
from engine.residency.resident_model import ResidentModel
from engine.runtimes import runtime_named
from engine.system.durable_files import forget_cached
from tests.support.resident_memory import needs_smaps, resident_bytes

TinyModel = Callable[..., Path]
GB = 10**9
PATIENCE_S = 120.0


def quiet(stage: str, done: int, total: int, unit: str) -> None:
    """Nobody looks at the progress."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))


# --- decisions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "key_values", "memory", "recommended", "limit"),
    [
        (20 * GB, 2 * GB, 64 * GB, 48 * GB, 22 * GB),  # all of it fits
        (100 * GB, 10 * GB, 128 * GB, 96 * GB, 96 * GB),  # the GPU's working set
        (100 * GB, 10 * GB, 128 * GB, None, 96 * GB),  # a quarter stays free
        (15 * GB, 1 * GB, 16 * GB, 12 * GB, 8 * GB),  # eight gigabytes stay free
        (15 * GB, 1 * GB, 8 * GB, 6 * GB, 0),
    ],
)
def test_what_may_be_wired(share: int, key_values: int, memory: int, recommended: int | None, limit: int):
    found = deciding.wiring(share, key_values, memory, recommended)
    assert found == deciding.Wiring(limit, share + key_values - limit)


@given(st.integers(0, 10**12), st.integers(0, 10**11), st.integers(0, 10**12), st.none() | st.integers(0, 10**12))
def test_wiring_never_takes_the_reserve(share: int, key_values: int, memory: int, recommended: int | None):
    found = deciding.wiring(share, key_values, memory, recommended)
    assert 0 <= found.limit <= share + key_values
    assert found.limit == 0 or memory - found.limit >= max(8 * GB, memory // 4)
    assert recommended is None or found.limit <= recommended
    assert found.limit + found.short == share + key_values


@given(st.lists(st.integers(1, 1000)), st.integers(0, 10**5))
def test_no_more_is_touched_than_fits(sizes: list[int], available: int):
    count = deciding.touchable(sizes, available)
    assert sum(sizes[:count]) <= deciding.LOCKED_SHARE * available
    assert count == len(sizes) or sum(sizes[: count + 1]) > deciding.LOCKED_SHARE * available


def test_how_often_weights_are_touched():
    assert deciding.standby_period(0.01, wired=True, own_memory=True) is None
    assert deciding.standby_period(0.01, wired=False, own_memory=True) == deciding.UNWIRED_AFTER_S
    assert deciding.standby_period(1.0, wired=False, own_memory=True) == 20.0  # five per cent of the time
    assert deciding.standby_period(0.01, wired=False, own_memory=False) == deciding.EVICTED_AFTER_S
    assert deciding.pause_after(0.1, 0.5) == pytest.approx(0.1)
    assert deciding.pause_after(0.1, 0.05) == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("wanted", "allowed", "available", "locked"),
    [(10, None, 100, 10), (90, None, 100, 80), (90, 5, 100, 5), (10, 0, 100, 0), (10, None, 0, 0)],
)
def test_how_much_is_locked(wanted: int, allowed: int | None, available: int, locked: int):
    assert deciding.lockable(wanted, allowed, available) == locked


# --- pages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A bank whose slabs are of many pages."""
    prepare(tiny_model("mixtral", hidden_size=192, intermediate_size=384), tmp_path / "bank", quiet)
    return tmp_path / "bank"


def test_touching_brings_back_what_the_system_dropped(large: Path):
    layout = layout_of(large)
    weights = MappedWeights(large)
    assert weights.nbytes == layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    assert max(weights.sizes) <= PIECE_BYTES
    os.sync()
    for name, _ in layout.files:
        forget_cached(large / name)
    if all(map(weights.resident, range(len(weights.sizes)))):
        pytest.skip("this file system does not drop pages when asked")
    assert not weights.resident(len(weights.sizes) - 1)
    for index in range(len(weights.sizes)):
        weights.touch(index)
        assert weights.resident(index)
    assert all(map(weights.resident, range(len(weights.sizes))))
    weights.close()
    weights.close()


def test_what_a_gpu_has_a_copy_of_comes_last(large: Path):
    layout = layout_of(large)
    first = layout.layers[0]
    on_gpu = {first: range(layout.count), layout.layers[1]: [1]}
    whole, ordered = MappedWeights(large), MappedWeights(large, last=on_gpu)
    alone = MappedWeights(large, on_gpu, trunk=False)
    count = len(alone.sizes)
    assert ordered._pieces[-count:] == alone._pieces
    assert not set(ordered._pieces[:-count]) & set(alone._pieces)
    assert ordered.nbytes == whole.nbytes
    for weights in (whole, ordered, alone):
        weights.close()


@needs_smaps
def test_warming_up_leaves_no_page_to_the_first_question(large: Path):
    """What the runtime reads is in its own mapping, not only in memory; and copy-on-write pages are not copied."""
    files = open_model(large)
    weights = MappedWeights(large, in_use=files.mapped_files)
    before = {mapped.path: resident_bytes(mapped.address, mapped.size) for mapped in files.mapped_files}
    assert sum(before.values()) < weights.nbytes / 2
    for index in range(len(weights.sizes)):
        weights.touch(index)
    for mapped in files.mapped_files:
        assert resident_bytes(mapped.address, mapped.size) >= mapped.size * 0.9
    weights.close()


@needs_smaps
def test_the_native_runtime_names_the_mappings_it_reads(large: Path):
    model = runtime_named("native").load(large, Load(id=1, model=str(large)), quiet)
    assert {mapped.path for mapped in model.mapped_files} == {large / name for name, _ in layout_of(large).files}
    ready = ResidentModel(model, large, Load(id=1, model=str(large)))
    assert ready.warmer is not None and ready.warmer.wait_until_warm()
    for mapped in model.mapped_files:
        assert resident_bytes(mapped.address, mapped.size) >= mapped.size * 0.9
    ready.close()
    model.close()


def test_of_a_share_only_what_is_here_is_touched(large: Path, tmp_path: Path):
    layout = layout_of(large)
    held = {layer: [1, 2] for layer in layout.layers}
    for trunk in (False, True):
        shares = ShardStore(tmp_path / f"node-{trunk}", "head")
        offered = offer(large, held, quiet, trunk=trunk)
        need = shares.need(offered, quiet)
        shares.receive(offered, need.wanted, stream(large, offered, need.wanted), quiet)
        weights = MappedWeights(need.folder)
        assert weights.nbytes == trunk * layout.trunk_bytes + 2 * len(layout.layers) * layout.expert_bytes
        weights.close()
        weights = MappedWeights(need.folder, {layer: [2, 3] for layer in layout.layers})
        assert weights.nbytes == trunk * layout.trunk_bytes + len(layout.layers) * layout.expert_bytes
        weights.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is locked from /proc")
def test_locking_says_what_was_locked(large: Path, monkeypatch: pytest.MonkeyPatch):
    from engine.residency import mapped

    def locked_kilobytes() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmLck:")[1].split()[0])

    before = locked_kilobytes()
    weights = MappedWeights(large)
    monkeypatch.setattr(mapped, "_allowed_to_lock", lambda: 4 * mmap.PAGESIZE)
    found = weights.lock(available=GB)
    assert found.nbytes <= 4 * mmap.PAGESIZE
    assert found.wanted == weights.nbytes
    assert "`ulimit -l` raises that" in str(found)
    monkeypatch.undo()
    allowed = mapped._allowed_to_lock()
    if allowed is None or allowed > 2 * weights.nbytes:
        all_of_it = weights.lock(available=100 * GB)
        assert all_of_it.nbytes == weights.nbytes and all_of_it.reason == ""
        assert (locked_kilobytes() - before) * 1024 >= weights.nbytes
        assert weights.lock(available=0).nbytes == 0
    weights.close()
    assert locked_kilobytes() == before


# --- the warmer ---------------------------------------------------------------------------------------------------


class Recorded:
    """Weights that note what is asked of them."""

    own_memory = True

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.touches: list[int] = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.missing: set[int] = set()
        self.enough = threading.Event()
        self.target = 1 << 30

    def touch(self, index: int) -> None:
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        self.touches.append(index)
        if len(self.touches) >= self.target:
            self.enough.set()

    def resident(self, index: int) -> bool:
        return index not in self.missing

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "residency"]


def test_warm_up_goes_through_everything_in_order():
    weights, news = Recorded([10, 20, 30]), []
    after = threading.Event()
    warmer = PageWarmer(weights, lambda done, total: news.append((done, total)), wired=True, after_warm_up=after.set)
    warmer.start()
    assert warmer.wait_until_warm(PATIENCE_S)
    assert weights.touches == [0, 1, 2]
    assert news[0] == (10, 60) and news[-1] == (60, 60)
    assert after.is_set()
    warmer.close()
    warmer.close()
    assert weights.closed and warmer.passes == 0 and warmer.problem == ""


@pytest.mark.parametrize(("in_files", "touched"), [(True, [0, 1]), (False, [0, 1, 2])])
def test_of_files_only_what_fits_is_touched_and_all_of_a_gpus_memory(in_files: bool, touched: list[int]):
    weights = Recorded([10, 20, 30])
    weights.own_memory = not in_files
    warmer = PageWarmer(weights, wired=True, available=lambda: 45)
    warmer.start()
    assert warmer.wait_until_warm(PATIENCE_S)
    warmer.close()
    assert weights.touches == touched


def test_standby_passes_go_on_until_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deciding, "UNWIRED_AFTER_S", 0.0)
    weights = Recorded([10, 20])
    weights.target = 8
    warmer = PageWarmer(weights)
    warmer.start()
    assert weights.enough.wait(PATIENCE_S)
    warmer.close()
    assert weights.touches[:8] == [0, 1] * 4
    assert warmer.passes >= 2 and warmer.touched >= 120


def test_files_are_touched_again_only_where_pages_are_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deciding, "EVICTED_AFTER_S", 0.0)
    weights = Recorded([10, 20, 30])
    weights.own_memory = False
    weights.missing = {1}
    weights.target = 6
    warmer = PageWarmer(weights)
    warmer.start()
    assert weights.enough.wait(PATIENCE_S)
    warmer.close()
    assert weights.touches[:6] == [0, 1, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("idle_s", "on_battery", "found"),
    [(0, False, False), (299, False, False), (300, False, True), (29, True, False), (30, True, True)],
)
def test_when_it_lets_go(idle_s: float, on_battery: bool, found: bool):
    assert deciding.lets_go(idle_s, on_battery) == found


@pytest.mark.parametrize("wired", [True, False])
def test_after_idling_long_nothing_is_kept_until_the_next_answer(wired: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeping, "CHECK_S", 0.01)
    monkeypatch.setattr(deciding, "UNWIRED_AFTER_S", 0.0)
    weights, held, asked = Recorded([10, 20]), [], threading.Event()
    long_enough, let_go = threading.Event(), threading.Event()

    def lets_go(idle_s: float) -> bool:
        assert idle_s >= 0
        asked.set()
        return long_enough.is_set()

    def hold(wanted: bool) -> None:
        held.append(wanted)
        if not wanted:
            let_go.set()

    warmer = PageWarmer(weights, wired=wired, lets_go=lets_go, hold=hold)
    warmer.start()
    assert warmer.wait_until_warm(PATIENCE_S)
    assert asked.wait(PATIENCE_S) and held == []
    long_enough.set()
    assert let_go.wait(PATIENCE_S)
    touched = warmer.touched
    long_enough.clear()
    asked.clear()
    with warmer.answering():
        assert held == [False, True]
    with warmer.answering():
        assert held == [False, True], "once"
    assert asked.wait(PATIENCE_S), "it goes on"
    warmer.close()
    assert not wired or warmer.touched == touched
    assert warmer.problem == "" and held == [False, True]


def test_closing_while_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeping, "CHECK_S", 0.0)
    let_go = threading.Event()
    warmer = PageWarmer(Recorded([1]), wired=True, lets_go=lambda idle: True, hold=lambda wanted: let_go.set())
    warmer.start()
    assert let_go.wait(PATIENCE_S)
    warmer.close()
    assert warmer.problem == ""


def test_nothing_is_touched_while_somebody_is_answered():
    weights = Recorded([1] * 5)
    warmer = PageWarmer(weights, wired=True)
    weights.gate.clear()
    warmer.start()
    assert weights.begun.wait(PATIENCE_S)
    entered = threading.Event()
    leave = threading.Event()

    def answer() -> None:
        with warmer.answering():
            entered.set()
            assert leave.wait(PATIENCE_S)

    answering = threading.Thread(target=answer)
    answering.start()
    assert not entered.wait(0.05)  # the piece at hand is finished first
    weights.gate.set()
    assert entered.wait(PATIENCE_S)
    done = list(weights.touches)
    assert not warmer.wait_until_warm(0.1)
    assert weights.touches == done and len(done) < 5
    leave.set()
    answering.join()
    assert warmer.wait_until_warm(PATIENCE_S)
    assert weights.touches == [0, 1, 2, 3, 4]
    warmer.close()


def test_closing_during_an_answer_does_not_wait_for_it():
    weights = Recorded([1] * 5)
    warmer = PageWarmer(weights)
    with warmer.answering():
        warmer.start()
        warmer.close()
    assert weights.touches == [] and weights.closed


def test_a_disk_that_fails_ends_the_keeping():
    weights = Recorded([1, 1])
    weights.touch = lambda index: (_ for _ in ()).throw(OSError("the disk is gone"))  # type: ignore[method-assign]
    warmer = PageWarmer(weights)
    warmer.start()
    assert warmer.wait_until_warm(PATIENCE_S)
    warmer.close()
    assert "the disk is gone" in warmer.problem and weights.closed


def test_the_probe_measures_after_idling_only():
    now = 100.0
    probe = IdleProbe(lambda: now)
    probe.begin()
    assert probe.first_token(0.5) is None and probe.probe_s is None
    probe.end()
    now += IDLE_S
    probe.begin()
    assert probe.first_token(0.4) is None
    probe.end()
    now += IDLE_S + 1
    probe.begin()
    assert probe.first_token(0.7) == 0.7
    assert probe.first_token(0.1) is None
    assert probe.probe_s == 0.7


def test_a_real_model_is_warmed_up(large: Path, tmp_path: Path):
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    weights = MappedWeights(folder)
    total = weights.nbytes
    warmer = PageWarmer(weights)
    warmer.start()
    assert warmer.wait_until_warm(PATIENCE_S)
    assert warmer.touched == total
    warmer.close()
    assert warmer.problem == ""
