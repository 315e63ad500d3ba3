"""Warm-up and standby: in which order, how often, and never while somebody is answered."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.planning import residency as deciding
from engine.residency import page_warmer as keeping
from engine.residency.mapped import MappedWeights
from engine.residency.page_warmer import IDLE_S, IdleProbe, PageWarmer

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]


PATIENCE_S = 120.0


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
