"""What is measured while other programs are at work is shown, and not kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench.running import run_bench
from engine.calibration import memory_rate
from engine.calibration import samples as others
from engine.calibration.calibration_file import load_speed
from engine.calibration.samples import MOST_SHARE, OtherPrograms, ProcessorTimes, share_of_others, unsteady_reason
from engine.ipc.messages import Bench, BenchResult, Load
from engine.session.loading import load_session

pytestmark = pytest.mark.usefixtures("home")


QUIET, BUSY = ProcessorTimes(0.0, 0.0, 0.0), ProcessorTimes(10.0, 15.0, 9.0)


def test_the_share_of_others() -> None:
    assert share_of_others(QUIET, BUSY, processors=2) == pytest.approx(0.3)
    assert share_of_others(QUIET, ProcessorTimes(10.0, 9.0, 9.5), processors=2) == 0.0
    assert share_of_others(QUIET, QUIET, processors=2) == 0.0


@given(st.lists(st.floats(1e6, 1e12), max_size=9), st.floats(0.0, 1.0))
@settings(deadline=None)
def test_figures_are_kept_of_a_quiet_and_steady_machine_alone(samples: list[float], share: float) -> None:
    steady = not samples or max(samples) <= others.MOST_UNSTEADY * min(samples)
    assert (unsteady_reason(share, samples) == "") == (share <= MOST_SHARE and steady)


@pytest.mark.soak
def test_processors_that_others_keep_busy_are_noticed() -> None:
    """Two real processes, for as long as it takes to see them."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(psutil.cpu_count() or 1)]
    try:
        watched = OtherPrograms()
        before = psutil.Process(spinning[0].pid).cpu_times().user
        while psutil.Process(spinning[0].pid).cpu_times().user < before + 0.3:
            pass
        assert "other programs used" in watched.unsteady_reason([1.0])
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.soak
def test_a_busy_machine_leaves_what_was_known(
    tiny_model: Callable[..., Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("mixtral")
    load = Load(id=1, model=str(folder), cpu_threads=1)
    session = load_session(load, lambda *_: None, lambda: False, lambda: None, None)

    def measured(kind: str, even_if_busy: bool) -> BenchResult:
        request = Bench(id=2, kind=kind, load=load, rounds=1, even_if_busy=even_if_busy)  # type: ignore[arg-type]
        return run_bench(request, session, folder, lambda *_: None, lambda: False)

    monkeypatch.setattr(memory_rate, "available_bytes", lambda: 64 << 20)
    moments = iter([QUIET, BUSY] * 2)
    monkeypatch.setattr(ProcessorTimes, "now", lambda: next(moments))
    for kind in ("decode", "experts"):
        found = measured(kind, even_if_busy=False)
        assert any(note.startswith("Not kept for plans: other programs used") for note in found.notes)
        assert not list(home.rglob("calibration/*"))
    kept = measured("experts", even_if_busy=True)
    assert Path(kept.data["path"]).exists()
    assert load_speed(kept.data["calibration"]["machine"]) is not None
    session.close()
