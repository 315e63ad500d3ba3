"""The rows of the MoNDE paper: exact ones are equal, bands hold what the paper prints, directions hold or say not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.papers.findings import Findings, Row
from benchmarks.papers.near_data_device import NearSystem
from benchmarks.papers.near_rows import near_rows
from benchmarks.papers.near_settings import BATCHES, CHOSEN_INPUTS, NOMINAL, STACKS, layers_of, measure, points
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_ENCODER,
    activation_movement,
    load_balanced,
    parameter_movement,
    several_gpus,
)


@pytest.fixture(scope="module")
def found() -> Findings:
    return near_rows()


def of(found: Findings, where: str) -> list[Row]:
    return [row for row in found.rows if row.where.startswith(where)]


def test_exact_rows_are_equal(found: Findings) -> None:
    exact = [row for row in found.rows if row.tag == "exact"]
    assert len(exact) == 12
    assert [row.what for row in exact if not row.equal] == ["notation"]


def test_the_bands_hold_what_the_paper_prints_but_for_the_decoders_largest_gain(found: Findings) -> None:
    banded = [row for row in found.rows if row.covered is not None and "nominal" not in row.where]
    assert len(banded) == 9
    assert sum(row.note.startswith("does not come out") for row in banded) == 1
    assert [row.what for row in banded if not row.covered] == ["decoders, the largest gain"]
    assert all(row.low is not None and row.high is not None and row.high < 9 * row.low for row in banded)


def test_what_was_chosen_with_figure_6_known_counts_for_nothing(found: Findings) -> None:
    measured = of(found, "figure 6, chosen inputs")
    assert len(measured) == 6
    assert all(row.fitted_on and row.deviation is None for row in measured)
    nominal = {row.what: row.deviation for row in of(found, "figure 6, nominal")}
    assert abs(nominal["NLLB-MoE encoder, MD+LB over GPU+PM"] or 1.0) < 0.15
    assert sum((each or 0.0) > 1.0 for each in nominal.values()) == 3


def test_the_page_is_current(found: Findings, not_on_the_page: Callable[[Sequence[Row]], list[str]]) -> None:
    assert not_on_the_page(found.rows) == []


def test_directions(found: Findings) -> None:
    stated = [row for row in found.rows if row.note.startswith(("holds", "does not hold"))]
    assert len(stated) == 13
    gap, more = [row for row in stated if row.note.startswith("does not")]
    assert gap.where == "figure 7(b)" and gap.what.startswith("NLLB-MoE decoder") and "MD+LB over MD+AM" in gap.what
    assert more.where == "figure 9" and more.what.startswith("NLLB-MoE decoder, batch 16")


def test_experts_are_few_at_every_batch(found: Findings) -> None:
    assert all((row.low or 0.0) > 0.5 for row in of(found, "figure 3"))


def test_every_input_has_a_source(found: Findings) -> None:
    assert all(each.where and each.value for each in found.inputs)
    assert sum(each.source == "chosen" for each in found.inputs) == 7


def test_host_time_hides_behind_copies_and_nowhere_else() -> None:
    tokens = [40, 9, 3, 1]
    plain, slow = NearSystem(2048, 8192), NearSystem(2048, 8192, host_s=1e-4)
    assert parameter_movement(slow, tokens) - parameter_movement(plain, tokens) == pytest.approx(1e-4)
    for devices in (1, 2):
        more = activation_movement(slow, tokens, devices=devices) - activation_movement(plain, tokens, devices=devices)
        assert more == pytest.approx(4e-4)
    assert load_balanced(slow, tokens, 0) == activation_movement(slow, tokens)
    assert load_balanced(slow, tokens, 4) == parameter_movement(slow, tokens)
    assert several_gpus(plain, tokens, 2) == plain.gpu_expert(40) + plain.gpu_expert(3)
    assert several_gpus(plain, [], 2) == 0.0


def test_a_decoders_rows_resemble_one_another() -> None:
    for setting, most in ((NOMINAL, 32), (CHOSEN_INPUTS, 8)):
        for layer in layers_of(NLLB_DECODER, 16, setting, 2, 0):
            assert sum(layer) == 32
            assert len(layer) <= most
    assert CHOSEN_INPUTS.rows(NLLB_ENCODER, 4) == 160
    assert CHOSEN_INPUTS.rows(SWITCH_ENCODER, 4) == 2048
    assert NOMINAL.rows(NLLB_DECODER, 4) == 4
    with pytest.raises(ValueError, match="not 0"):
        measure(NLLB_DECODER, 0, NOMINAL)


def test_both_at_once_are_at_least_as_fast_as_either_and_ideal_is_fastest() -> None:
    for point in points(NOMINAL, STACKS[2:]).values():
        assert 0 < point.seconds["MD+LB"] <= 1.01 * min(point.seconds["GPU+PM"], point.seconds["MD+AM"])
        assert point.seconds["Ideal"] <= point.seconds["GPU+PM"]
    assert len(BATCHES) == 3
