"""The rate at which memory is read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine import process_life
from engine.calibration.memory_rate import StreamingRead


def test_the_streaming_rate_is_that_of_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibration.memory_rate.available_bytes", lambda: 0)
    monkeypatch.setattr("engine.calibration.memory_rate.native_pool", lambda threads: None)
    times = iter([0.0, 9.0, 9.0, 18.0, 0.0, 4.0, 4.0, 6.0])
    read = StreamingRead(threads=3, clock=lambda: next(times))
    assert read.rate() == pytest.approx(64 * 2**20 / 2.0, rel=0.01)


def test_the_streaming_rate_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibration.memory_rate.available_bytes", lambda: 0)
    assert StreamingRead(threads=2).rate() > 1e6


def test_measuring_the_memory_leaves_no_thread_busy() -> None:
    """In the engine's process: what is measured next has the cores for itself."""
    program = (
        "import time; from engine.calibration.memory_rate import StreamingRead\n"
        "StreamingRead(2, nbytes=1 << 26).rate()\n"
        "begun = time.process_time(); time.sleep(0.2); print(time.process_time() - begun)"
    )
    settings = {**os.environ, **process_life.environment(2)}
    said = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=True)
    assert float(said.stdout) < 0.05, "numpy's threads took 0.1 s of the processor after the product"
