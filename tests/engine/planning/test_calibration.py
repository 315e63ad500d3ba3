"""Curves between and beyond their points, and calibrations from rates alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.calibration import (
    CALIBRATION_VERSION,
    Calibration,
    Curve,
    ExpertShape,
    Processor,
    estimated,
)

SHAPE = ExpertShape(hidden=4096, ffn=14336, dtype="BF16", expert_bytes=352_321_536)


def test_a_curve_goes_through_its_points_and_straight_between_them() -> None:
    curve = Curve((1, 4, 8), (1.0, 1.3, 2.5))
    assert [curve.at(tokens) for tokens in (1, 4, 8)] == [1.0, 1.3, 2.5]
    assert curve.at(2) == pytest.approx(1.1)
    assert curve.at(6) == pytest.approx(1.9)
    assert curve.at(12) == pytest.approx(3.7)
    assert curve.at(0) == curve.at(-1) == 0.0


def test_beyond_the_last_point_a_curve_never_falls() -> None:
    assert Curve((1, 2), (2.0, 1.0)).at(100) == 1.0
    assert Curve((1,), (2.0,)).at(100) == 2.0


@given(st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=6), st.integers(1, 10_000))
def test_a_rising_curve_rises_everywhere(steps: list[float], tokens: int) -> None:
    seconds = tuple(sum(steps[: place + 1]) for place in range(len(steps)))
    curve = Curve(tuple(4**place for place in range(len(steps))), seconds)
    assert 0 < curve.at(tokens) <= curve.at(tokens + 1)


def test_an_estimate_reads_the_weights_once_and_computes_when_that_takes_longer() -> None:
    made = estimated(SHAPE, cpu=Processor(20e9, 200e9), gpu=Processor(600e9, 50e12, 30e-6), pcie_rate=16e9)
    assert made.version == CALIBRATION_VERSION
    assert made.cpu.at(1) == pytest.approx(352_321_536 / 20e9)
    assert made.cpu.at(4) == made.cpu.at(1)
    assert made.cpu.at(64) == pytest.approx(64 * 352_321_536 / 200e9)
    assert made.gpu is not None
    assert made.gpu.at(1) == pytest.approx(30e-6 + 352_321_536 / 600e9)
    assert made.weight_copy == pytest.approx(352_321_536 / 16e9)
    assert made.activation_copy is not None
    assert made.activation_copy.at(512) > made.activation_copy.at(1) > 0
    assert made.cpu_overlapped == made.copy_overlapped == 1.0


def test_an_estimate_without_a_gpu_has_none() -> None:
    made = estimated(SHAPE, cpu=Processor(20e9, 200e9))
    assert (made.gpu, made.activation_copy, made.weight_copy) == (None, None, 0.0)
    with pytest.raises(ValueError, match="rate to copy"):
        estimated(SHAPE, cpu=Processor(20e9, 200e9), gpu=Processor(600e9, 50e12))


def test_a_calibration_survives_json() -> None:
    made = estimated(SHAPE, cpu=Processor(20e9, 200e9), gpu=Processor(600e9, 50e12, 30e-6), pcie_rate=16e9)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Calibration) == made


def test_the_line_through_zero_is_fitted_to_few_tokens() -> None:
    assert Curve((1, 2, 64), (3.0, 6.0, 9.0)).slope(32) == pytest.approx(3.0)
    assert Curve((1, 2), (1.0, 1.0)).slope(32) == pytest.approx(3 / 5)
    assert Curve((64,), (32.0,)).slope(32) == pytest.approx(0.5)
