"""Charts of times, routes and memory, at every width."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from app.tui.panels import charts
from engine.ipc.messages import (
    ExpertMovement,
    LayerTimes,
    PhaseTimes,
    Timing,
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.integers(0, 200))
def test_cells_add_up(values: list[float], width: int) -> None:
    cells = charts.cells(values, width)
    assert sum(cells) == (width if sum(values) > 0 else 0)
    assert all(count >= 0 for count in cells)


def test_bars_can_be_told_apart_without_colour() -> None:
    fills = [fill for _, fill, _ in charts.PARTS]
    assert len(set(fills)) == len(fills)
    bar = charts.stacked([1, 1, 1, 1, 1, 1], 12).plain
    assert bar == "██▚▚▓▓▒▒░░··"


@given(st.integers(1, 12), st.integers(1, 300), st.integers(8, 140))
def test_a_heat_map_fits(layers: int, experts: int, width: int) -> None:
    use = [[1 + (layer * 7 + expert * 3) % 11 for expert in range(experts)] for layer in range(layers)]
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=list(range(layers)), expert_use=use)
    lines = charts.heat_map(timing, width).split("\n")
    rows = [line for line in lines if not line.plain.startswith("Each")]
    assert all(line.cell_length <= width for line in rows)


def test_the_busiest_expert_is_one() -> None:
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3, 5], expert_use=[[5, 10], [20, 0]])
    lines = charts.heat_map(timing, 60).plain.splitlines()
    assert lines[1].split() == ["3", ".25", ".50"]
    assert lines[2].split() == ["5", "1.00", ".00"]


def test_joined_columns_show_the_busiest_of_their_group() -> None:
    row = [charts.Cell(1), charts.Cell(5, True), charts.Cell(2), charts.Cell(3), charts.Cell(9)]
    assert charts.group_columns([row], 3) == ([[row[1], row[3], row[4]]], 2)
    assert charts.group_columns([[charts.Cell(4), charts.Cell(4, True)]], 1) == ([[charts.Cell(4, True)]], 2)


@pytest.mark.parametrize(("width", "expected"), [(60, ".25 1.0▪ .10"), (5, "·92")])
def test_what_is_in_gpu_memory_is_marked_without_colour(width: int, expected: str) -> None:
    timing = Timing(
        prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3], expert_use=[[5, 20, 4 if width == 5 else 2]],
        resident=[[1, 2] if width == 5 else [1]],
    )  # fmt: skip
    row = next(line for line in charts.heat_map(timing, width).plain.splitlines() if line.startswith("3"))
    assert " ".join(row.split()) == f"3 {expected}"


def test_the_legend_explains_the_marks_where_there_are_any() -> None:
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=[3], expert_use=[[5, 20]], resident=[[1]])
    assert "in GPU memory: 1 of 2 experts" in charts.heat_legend(timing, 100).plain
    assert "GPU" not in charts.heat_legend(msgspec.structs.replace(timing, resident=[]), 100).plain


@given(st.integers(1, 6), st.integers(1, 300), st.integers(8, 140), st.data())
def test_a_heat_map_with_residents_fits(layers: int, experts: int, width: int, data: st.DataObject) -> None:
    resident = [data.draw(st.lists(st.integers(0, experts - 1), unique=True)) for _ in range(layers)]
    timing = Timing(
        prefill=PhaseTimes(), decode=PhaseTimes(), moe_layers=list(range(layers)),
        expert_use=[[(layer + expert) % 5 for expert in range(experts)] for layer in range(layers)], resident=resident,
    )  # fmt: skip
    rows = [line for line in charts.heat_map(timing, width).split("\n") if not line.plain.startswith("Each")]
    assert all(line.cell_length <= width for line in rows)


def test_what_was_moved_is_said_for_a_token() -> None:
    moved = ExpertMovement(
        tokens=10, weight_bytes=123_000_000, activation_bytes=820_000, hits=60, misses=40, moved=10, cpu_s=0.7,
        gpu_s=0.5, both_s=0.25, total_s=1.0,
    )  # fmt: skip
    text = charts.movement(moved, 200).plain
    assert "weights 12.3 MB" in text and "activations 82 kB" in text
    assert "hit rate 60%" in text and "25% of misses copied" in text
    assert "GPU busy 50%  CPU busy 70%  both busy 25%" in text
    assert all(len(line) <= 40 for line in charts.movement(moved, 40).plain.splitlines())
    assert "hit rate" not in charts.movement(ExpertMovement(), 80).plain


def test_phases_are_kept_apart() -> None:
    phase = PhaseTimes(layers=[LayerTimes(1, 0, 3)], per_token=5.0, steps=2, tokens=2, outside_layers=1.0)
    text = charts.phase_summary("Decode", phase, 40).plain
    assert "5.00 ms" in text
    assert "200.0 tok/s" in text
    assert "not measured" in charts.phase_summary("Prefill", PhaseTimes(), 40).plain
    assert isinstance(charts.layer_bars([], 40), Content)


def test_a_legend_is_never_broken_between_a_fill_and_its_name() -> None:
    layers = [LayerTimes(attention=2, router=1, experts=7, exchange=1, wait=1, other=1)]
    for width in range(16, 90):
        phase = PhaseTimes(tokens=320, layers=layers, per_token=13)
        for line in charts.phase_summary("Prefill", phase, width).wrap(width):
            assert line.plain.strip() not in [fill for _, fill, _ in charts.PARTS]
