"""Esc in a ring: all nodes stop, and the next question is answered as if nothing had been."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from engine.ipc.messages import BeamProgress, Cancel, Finished, Prefill
from engine.ipc.messages.ring import RingMode
from tests.faults.ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring
from tests.support.eventually import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

LONG_PROMPT = [3 + (7 * place + place // 11) % 150 for place in range(3000)]
LOOK_S = 0.3
IDLE = 0.35
"""Of a core, which a node may use that has nothing to do: the heartbeats of all, and their answers."""


def cancel(ring: Ring, asked: int) -> Finished:
    """Esc is pressed; the answer ends, and after that nobody works."""
    ring.engine.send(Cancel(id=ring.engine.new_id(), target=asked))
    found = ring.finished(asked)
    assert found.finish_reason == "cancelled"
    eventually(lambda: max(spent(ring)) < IDLE * LOOK_S, why="a node works although nothing is to be done")
    return found


def spent(ring: Ring) -> list[float]:
    """Seconds of processor time of each process, while nothing is asked."""
    processes = [psutil.Process(machine.engine.process.pid) for machine in ring.machines]
    before = [sum(one.cpu_times()[:2]) for one in processes]
    time.sleep(LOOK_S)
    return [sum(one.cpu_times()[:2]) - was for one, was in zip(processes, before, strict=True)]


@pytest.mark.parametrize("mode", ["exact", pytest.param("fast", marks=pytest.mark.soak), "central"])
def test_cancelled_in_an_answer(three: Ring, model: Path, alone: Oracle, mode: RingMode) -> None:
    three.whole(model, replace(EXACT, mode=mode))
    undisturbed = three.answer(20, OTHER_PROMPT).token_ids
    asked = three.ask(1500)
    three.until_tokens(asked, 20)
    found = cancel(three, asked)
    assert 20 <= len(found.token_ids) < 1500
    again = three.answer(20, OTHER_PROMPT).token_ids
    assert again == undisturbed
    if mode == "exact":
        assert again == alone(20, OTHER_PROMPT).token_ids
        assert found.token_ids == alone(len(found.token_ids)).token_ids


@pytest.mark.parametrize(
    ("mode", "chunk"),
    [
        ("exact", 4000),
        ("central", 64),
        *(pytest.param(*row, marks=pytest.mark.soak) for row in (("exact", 64), ("central", 4000))),
    ],
)
def test_cancelled_in_a_long_prompt(three: Ring, model: Path, alone: Oracle, mode: RingMode, chunk: int) -> None:
    """Between two chunks of the prompt, and in the middle of one that is all of it."""
    three.whole(model, replace(EXACT, mode=mode), prefill_chunk=chunk)
    for number, pause in enumerate((0.1, 0.05, 0.02, 0.0, 0.0, 0.0)):
        asked = three.ask(1000, [3 + number, *LONG_PROMPT])
        three.engine.wait(
            lambda event, asked=asked: (
                isinstance(event, Prefill) and event.id == asked and (event.done > 0 or chunk > 3000)
            ),
            PATIENCE_S,
        )
        if chunk > 3000:
            time.sleep(pause)
        found = cancel(three, asked)
        if found.prefilled_tokens < len(LONG_PROMPT):
            break  # else the prompt was read before Esc was pressed
    assert found.token_ids == []
    assert found.prefilled_tokens < len(LONG_PROMPT)
    after = three.answer(20, OTHER_PROMPT)
    assert len(after.token_ids) == 20
    if mode == "exact":
        assert after.token_ids == alone(20, OTHER_PROMPT).token_ids


def test_cancelled_in_a_beam_search(three: Ring, model: Path, alone: Oracle) -> None:
    asked = three.ask(1500, beams=4)
    three.engine.wait(
        lambda event: isinstance(event, BeamProgress) and event.id == asked and event.step > 5, PATIENCE_S
    )
    cancel(three, asked)
    assert three.answer(20, OTHER_PROMPT).token_ids == alone(20, OTHER_PROMPT).token_ids


def test_cancelled_again_and_again(three: Ring, model: Path, alone: Oracle) -> None:
    """At any moment; the nodes stay in step."""
    three.whole(model, prefill_chunk=64)
    for pause in (0.0, 0.01, 0.03, 0.1, 0.2):
        asked = three.ask(500, LONG_PROMPT[:900])
        time.sleep(pause)
        three.engine.send(Cancel(id=three.engine.new_id(), target=asked))
        assert three.finished(asked).finish_reason == "cancelled"
    since = three.mark()
    assert three.answer(20, OTHER_PROMPT).token_ids == alone(20, OTHER_PROMPT).token_ids
    assert not three.notices(since)
