"""The list of models as columns: what each width has room for."""

from __future__ import annotations

import pytest

from app.chat.model_choices import ModelOption
from app.chat.offers import MachineFigures, speed_or_why_not
from app.tui.render.model_table import model_table
from engine.models.store.catalogue import offered

ROWS = [
    ModelOption("starter", True, "754 MB", "4 GB", "about 190 tokens/s", licence="Apache-2.0"),
    ModelOption("ollama:ein-sehr-langer-名前-of-a-model:latest", True, "12.3 GB", "", "does not run", True),
    ModelOption("gpt-oss-120b", False, "about 65 GB", "128 GB", "needs 128 GB", True, "Apache-2.0"),
]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (100, ["model", "size", "memory", "predicted", "licence"]),
        (76, ["model", "size", "memory", "predicted"]),
        (66, ["model", "size", "predicted"]),
        (50, ["model", "predicted"]),
        (33, ["model", "predicted"]),
    ],
)
def test_columns_are_left_out_from_the_right_but_the_speed_stays(width: int, titles: list[str]) -> None:
    head, lines = model_table(ROWS, "starter", {}, width)
    assert head.plain.split() == titles
    assert all(line.cell_length <= width and "\n" not in line.plain for line in (head, *lines))
    assert len({line.cell_length for line in (head, *lines)}) == 1
    marks = [line.plain[0] for line in lines]
    assert marks == ["●", " ", "↓"]
    for line, speed in zip(lines, ("190 tokens/s", "does not run", "needs 128 GB"), strict=True):
        assert speed in line.plain


def test_a_download_stands_in_place_of_the_speed() -> None:
    _, lines = model_table(ROWS, "", {"gpt-oss-120b": "42 %"}, 80)
    assert "42 %" in lines[2].plain and "needs" not in lines[2].plain and lines[0].plain[0] == " "


def test_no_models_are_no_lines() -> None:
    assert model_table([], "", {}, 80)[1] == []


def test_the_catalogue_has_room_on_a_narrow_screen() -> None:
    machine = MachineFigures(16 * 10**9, 24e9, 10**12)
    rows = [ModelOption(entry.name, False, speed=speed_or_why_not(entry, machine)) for entry in offered(apple=False)]
    _, lines = model_table(rows, "", {}, 33)
    for row, line in zip(rows, lines, strict=True):
        assert row.name[:16] in line.plain and row.speed.removeprefix("about ") in line.plain
