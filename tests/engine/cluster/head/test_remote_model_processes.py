"""One machine of two is much faster: by real engine processes, the model runs there and answers as it would here."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from engine.ipc.messages import Cancel, Finished, Notice, Piece
from engine.moe.kernels.bindings import choose
from tests.engine.cluster import machine_hooks
from tests.engine.cluster.real_rings import ANSWER, Machine, RealRing
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

LONG = 100
"""Tokens of an answer in which there is time to kill a process."""
SLOW = Machine(arguments=hooked(machine_hooks.slow))
"""A machine on which a token takes seconds, as it measures itself."""


def fast(folder: Path) -> Machine:
    """Another machine. While ``folder``/slow exists its prompts stay at a layer until they are stopped: then it writes
    ``folder``/begun and ``folder``/stopped."""
    return Machine(arguments=hooked(machine_hooks.another, stopping=str(folder)))


def appears(path: Path) -> bool:
    by = time.monotonic() + 120
    while not path.exists() and time.monotonic() < by:
        time.sleep(0.02)
    return path.exists()


@pytest.mark.parametrize("stored", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_the_faster_machine_answers_and_its_death_is_survived(tmp_path: Path, stored: str) -> None:
    if not choose(stored).native:  # type: ignore[arg-type]
        pytest.skip("the native kernels are not built")
    model = write_tiny_model(tmp_path / "tiny", "qwen3_moe", dtype=stored)
    with RealRing(tmp_path / "ring", [SLOW, fast(tmp_path)]) as ring:
        ring.alone(model, "native", stored)
        alone, beams, longer = ring.answer(), ring.beams(), ring.answer(LONG)
        assert len(alone) == ANSWER
        loaded = ring.load(model, "native", dtype=stored, even_if_slower=False)
        found = loaded.facts.ring
        assert found is not None
        assert found.elsewhere, found
        assert (found.nodes[0].experts, found.nodes[0].trunk_bytes) == (0, 0)
        assert found.nodes[1].node_id == ring.ids[1]
        assert loaded.facts.device == "node 1"
        assert ring.answer() == alone
        again = ring.beams()
        assert [(beam.token_ids, beam.score) for beam in again] == [(beam.token_ids, beam.score) for beam in beams]

        (tmp_path / "slow").touch()
        stopped = msgspec.structs.replace(ring.question(), prompt_ids=[3, 4, 5, 6])
        ring.head.send(stopped)
        assert appears(tmp_path / "begun")
        ring.head.send(Cancel(id=ring.head.new_id(), target=stopped.id))
        finished = ring.head.wait(lambda event: isinstance(event, Finished) and event.id == stopped.id, 60)
        assert isinstance(finished, Finished)
        assert finished.finish_reason == "cancelled"
        assert appears(tmp_path / "stopped")
        (tmp_path / "slow").unlink()
        assert ring.answer() == alone

        asked = ring.question(LONG)
        since = len(ring.head.events)
        ring.head.send(asked)
        ring.head.wait(lambda event: isinstance(event, Piece) and event.id == asked.id, 60, since)
        ring.engines[1].process.kill()
        finished = ring.head.wait(lambda event: isinstance(event, Finished) and event.id == asked.id, 120, since)
        assert isinstance(finished, Finished)
        assert finished.token_ids == longer
        assert ring.answer() == alone
        said = " ".join(event.text for event in ring.head.events[since:] if isinstance(event, Notice))
        assert "oing on with this machine alone" in said
