"""Figures of repeated measurements."""

from __future__ import annotations

import pytest

from engine.calibration.samples import Spread, figure, milliseconds, per_second


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (-12.34, "-12.3"), (0, "0.000")],
)
def test_figures_have_three_digits_that_mean_something(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_spread_is_a_median_and_its_range() -> None:
    assert str(milliseconds([0.010, 0.012, 0.011])) == "11.0 (10.0–12.0)"
    assert per_second([0.5, 0.25], 1.0) == Spread(median=1 / 0.375, low=2.0, high=4.0)
    assert per_second([0.0], 1.0).median == 0.0
    with pytest.raises(ValueError, match="no value"):
        Spread.of([])
