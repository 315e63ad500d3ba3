"""On a GPU only a few steps a second are measured: each waits for the GPU after every part of every layer.

There is no Metal here: mlx is only told that its device is a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.controls import Watching

mx = pytest.importorskip("mlx.core")

from engine.ipc.messages import AnyEvent, Generate, Timing  # noqa: E402
from engine.moe.timing import Recorder  # noqa: E402
from engine.session.sharing import PassLog  # noqa: E402
from engine.session.turn import TIMING_INTERVAL_S, Turn  # noqa: E402
from tests.engine.runtimes.mlx_oracle import load, prompt_of, write_comparable  # noqa: E402

STEP_S = 0.01


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def turn_of(recorder: Recorder, events: list[AnyEvent], clock: Clock) -> Turn:
    request = Generate(id=1, prompt_ids=[1])
    return Turn(request, recorder, PassLog(), events.append, Watching(), clock, prompt_tokens=1)


@pytest.mark.parametrize("sampled", [True, False])
def test_at_most_four_steps_a_second(sampled: bool) -> None:
    clock, events = Clock(), []
    recorder = Recorder(1, [], 0, clock)
    recorder.sampled = sampled
    turn = turn_of(recorder, events, clock)
    measured = 0
    for step in range(200):
        turn.watch()
        measured += recorder.enabled
        clock.now += STEP_S
        turn.show_timing()
        if step == 0:
            assert recorder.enabled, "the prompt's first chunk"
        if step <= 1:
            turn.count_token()
    seconds = 200 * STEP_S
    frames = [event for event in events if isinstance(event, Timing)]
    assert all(frame.sampled == sampled for frame in frames)
    if sampled:
        assert seconds / TIMING_INTERVAL_S * 0.9 <= measured <= seconds / TIMING_INTERVAL_S + 2
        assert len(frames) == measured, "what was measured is shown"
    else:
        assert measured == 200


def test_steps_between_two_samples_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    model = load(write_comparable(tmp_path, "mixtral"))
    assert model.recorder.sampled
    waits, real = [0], mx.eval

    def counted(*arrays: object) -> None:
        waits[0] += 1
        real(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    clock = Clock()
    turn = turn_of(model.recorder, [], clock)
    rows = model.start()
    turn.watch()
    rows.extend(prompt_of(5))
    turn.count_token()
    measured, plain = [], []
    for _ in range(60):
        turn.watch()
        before = waits[0]
        rows.step([5])
        (measured if model.recorder.enabled else plain).append(waits[0] - before)
        clock.now += STEP_S
    assert len(measured) <= 4
    assert min(measured) > 3 * model.facts.layers
    assert max(plain) <= 1, "the caches, once a step"
