"""Esc in a ring: all nodes stop, and the next question is answered as if nothing had been."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring

from engine.ipc.messages import BeamProgress, Cancel, Finished, Prefill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTLED_S = 0.5
LONG_PROMPT = [3 + (7 * place + place // 11) % 150 for place in range(3800)]
IDLE = 0.35
"""Of a core, which a node may use that has nothing to do: the heartbeats of all, and their answers."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ring]:
    with Ring(2) as ring:
        yield ring


def cancel(ring: Ring, asked: int) -> Finished:
    """Esc is pressed; the answer ends, and after that nobody works."""
    ring.engine.send(Cancel(id=ring.engine.new_id(), target=asked))
    found = ring.finished(asked)
    assert found.finish_reason == "cancelled"
    processes = [psutil.Process(machine.engine.process.pid) for machine in ring.machines]
    time.sleep(SETTLED_S)
    before = [sum(one.cpu_times()[:2]) for one in processes]
    time.sleep(1.0)
    spent = [sum(one.cpu_times()[:2]) - was for one, was in zip(processes, before, strict=True)]
    assert max(spent) < IDLE, f"seconds of CPU in a second in which nothing was to be done: {spent}"
    return found


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
def test_cancelled_in_an_answer(three: Ring, model: Path, alone: Oracle, mode: str) -> None:
    three.load(model, replace(EXACT, mode=mode))  # type: ignore[arg-type]
    undisturbed = three.answer(40, OTHER_PROMPT).token_ids
    asked = three.ask(1500)
    three.until_tokens(asked, 20)
    found = cancel(three, asked)
    assert 20 <= len(found.token_ids) < 1500
    again = three.answer(40, OTHER_PROMPT).token_ids
    assert again == undisturbed
    if mode == "exact":
        assert again == alone(40, OTHER_PROMPT).token_ids
        assert found.token_ids == alone(1500).token_ids[: len(found.token_ids)]


@pytest.mark.parametrize("mode", ["exact", "central"])
@pytest.mark.parametrize("chunk", [64, 4000])
def test_cancelled_in_a_long_prompt(three: Ring, model: Path, alone: Oracle, mode: str, chunk: int) -> None:
    """Between two chunks of the prompt, and in the middle of one that is all of it."""
    three.load(model, replace(EXACT, mode=mode), prefill_chunk=chunk)  # type: ignore[arg-type]
    asked = three.ask(40, LONG_PROMPT)
    three.engine.wait(
        lambda event: isinstance(event, Prefill) and event.id == asked and (event.done > 0 or chunk > 3000), 60
    )
    if chunk > 3000:
        time.sleep(0.2)
    found = cancel(three, asked)
    assert found.token_ids == []
    assert found.prefilled_tokens < len(LONG_PROMPT)
    after = three.answer(40, OTHER_PROMPT)
    assert len(after.token_ids) == 40
    if mode == "exact":
        assert after.token_ids == alone(40, OTHER_PROMPT).token_ids
        assert three.answer(8, LONG_PROMPT[:700]).token_ids == alone(8, LONG_PROMPT[:700]).token_ids


def test_cancelled_in_a_beam_search(three: Ring, model: Path, alone: Oracle) -> None:
    three.load(model)
    asked = three.ask(1500, beams=4)
    three.engine.wait(lambda event: isinstance(event, BeamProgress) and event.id == asked and event.step > 5, 60)
    cancel(three, asked)
    assert three.answer(40, OTHER_PROMPT).token_ids == alone(40, OTHER_PROMPT).token_ids


def test_cancelled_again_and_again(three: Ring, model: Path, alone: Oracle) -> None:
    """At any moment; the nodes stay in step."""
    three.load(model, prefill_chunk=64)
    for pause in (0.0, 0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3):
        asked = three.ask(500, LONG_PROMPT[:900])
        time.sleep(pause)
        three.engine.send(Cancel(id=three.engine.new_id(), target=asked))
        assert three.finished(asked).finish_reason == "cancelled"
    since = three.mark()
    assert three.answer(40, OTHER_PROMPT).token_ids == alone(40, OTHER_PROMPT).token_ids
    assert not three.notices(since)
