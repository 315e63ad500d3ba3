"""The rows of predictions beside what was measured."""

from __future__ import annotations

from benchmarks.predictions import memory_row, speed_row


def test_ratios_of_speeds_are_of_the_rounds_own() -> None:
    rounds = [
        {"predicted": 10.0, "another": 5.0, "measured": 10.0},
        {"predicted": 30.0, "another": 20.0, "measured": 20.0},
        {"predicted": 20.0, "another": 10.0, "measured": 10.0},
    ]
    assert speed_row("a model", rounds) == ["a model", "20.0", "10.0", "1.50 (1.00–2.00)", "1.00 (0.50–1.00)"]


def test_predicted_memory_is_the_sum_of_the_parts() -> None:
    plan = {"trunk": 100e6, "experts": 700e6, "key_values": 150e6, "workspace": 50e6, "total": 9e9, "device": "CPU"}
    found = {"highest": 800e6, "loaded": 30e6, "second": 40e6}
    assert memory_row("a model", plan, found) == ["a model", "1000", "800", "1.250", "150", "30", "40"]
