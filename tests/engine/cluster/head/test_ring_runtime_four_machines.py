"""Four engine processes of unlike size in one ring: the answer of one machine, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ipc.messages import Load
from engine.runtimes.model_headers import read_headers
from tests.engine.cluster.real_rings import ANSWER, Machine, RealRing
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.soak]

AS_PEOPLE_START_IT = Machine(arguments=("-m", "engine.host"))
"""It measures as much as it does for people."""
EXPERTS = 16
PER_LAYER = (6, 2, 3, 5)
"""Experts of each layer that each of the four has room for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe", num_experts=EXPERTS)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRing]:
    with RealRing(tmp_path_factory.mktemp("ring"), [AS_PEOPLE_START_IT] * 4) as made:
        yield made


def test_four_processes_of_unlike_size_answer_as_one(four: RealRing, model: Path) -> None:
    layers = len(four.alone(model, "native").facts.moe_layers)
    alone, beams = four.answer(), four.beams()
    assert len(alone) == ANSWER
    slab = read_headers(model, Load(id=0, model=str(model), dtype="float32")).sizes.slab_bytes
    shares = {node_id: each * layers * slab for node_id, each in zip(four.ids, PER_LAYER, strict=True)}
    formed = four.form(model, "native", followers=3, mode="exact", shares=shares)
    assert {share.node_id: share.experts for share in formed.nodes} == {
        node_id: each * layers for node_id, each in zip(four.ids, PER_LAYER, strict=True)
    }
    assert formed.mode == "exact"
    assert four.answer() == alone
    assert [(beam.token_ids, beam.score) for beam in four.beams()] == [(beam.token_ids, beam.score) for beam in beams]
