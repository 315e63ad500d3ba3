"""The papers' blocks run by the product's backend: equal to a plain reference, and about what the simulation says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.near_executed import RUN_AS, run_block
from benchmarks.papers.near_settings import CHOSEN_INPUTS
from benchmarks.papers.near_workflows import NLLB_DECODER, NLLB_ENCODER, SWITCH_DECODER, SWITCH_ENCODER

SHORT = replace(CHOSEN_INPUTS, sentence={NLLB_ENCODER.name: 12, SWITCH_ENCODER.name: 30})


@pytest.mark.parametrize("workflow", RUN_AS)
@pytest.mark.parametrize("stack", [SWITCH_ENCODER, NLLB_ENCODER, SWITCH_DECODER, NLLB_DECODER], ids=lambda s: s.name)
def test_a_workflow_gives_what_a_plain_reference_gives(stack: object, workflow: str) -> None:
    run = run_block(stack, 1 if stack in (SWITCH_ENCODER, NLLB_ENCODER) else 4, workflow, SHORT)  # type: ignore[arg-type]
    assert run.error < 1e-5
    assert run.seconds > 0
    assert 0.5 < run.seconds / run.simulated_s < 1.6
