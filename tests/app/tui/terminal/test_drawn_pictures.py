"""What is sent for a picture shows that picture, read as the protocols say."""

from __future__ import annotations

import re
import zlib
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorType

from app.tui.terminal.drawn_pictures import (
    SIXEL_COLOURS,
    Fit,
    SixelTable,
    fitted,
    kitty_picture,
    kitty_removal,
    kitty_rows,
    sixel_rows,
)
from app.tui.terminal.graphics import CellSize
from engine.pictures.picture import Picture
from tests.support.random_examples import examples

CELL = CellSize(10, 20)


def picture_of(height: int, width: int, colours: int = SIXEL_COLOURS, seed: int = 0) -> Picture:
    random = np.random.default_rng(seed)
    palette = random.integers(0, 256, (colours, 3), dtype=np.uint8)
    return Picture(height, width, palette[random.integers(0, colours, (height, width))].tobytes())


def painted(sixels: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The percentages [height, width, 3] that a terminal draws; -1 where it draws nothing."""
    head = re.fullmatch(r'\x1bP0;1q"1;1;(\d+);(\d+)(.*)\x1b\\', sixels, re.DOTALL)
    assert head is not None
    width, height = int(head[1]), int(head[2])
    drawn = np.full((-(-height // 6) * 6, width, 3), -1)
    palette: dict[int, list[int]] = {}
    x = y = number = 0
    for defined, chosen, count, repeated, single, other in re.findall(
        r"#(\d+;2;\d+;\d+;\d+)|#(\d+)|!(\d+)([?-~])|([?-~])|(.)", head[3], re.DOTALL
    ):
        if defined:
            number, _, *colour = map(int, defined.split(";"))
            palette[number] = colour
        elif chosen:
            number = int(chosen)
        elif other:
            x, y = 0, y + (6 if other == "-" else 0)
            assert other in "$-"
        else:
            bits, times = ord(repeated or single) - 63, int(count or 1)
            for bit in range(6):
                if bits >> bit & 1:
                    drawn[y + bit, x : x + times] = palette[number]
            x += times
            assert x <= width
    assert (drawn[height:] == -1).all()
    return drawn[:height]


@pytest.mark.parametrize(("height", "width"), [(20, 10), (53, 31), (1, 1), (6, 7), (61, 240)])
def test_sixels_are_the_picture_row_by_row(height: int, width: int) -> None:
    picture = picture_of(height, width)
    rows = sixel_rows(picture, CELL)
    assert len(rows) == -(-height // CELL.height)
    found = np.concatenate([painted(row) for row in rows])
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(height, width, 3)
    np.testing.assert_array_equal(found, np.round(pixels / 2.55).astype(int))


def test_too_many_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="65 colours"):
        sixel_rows(Picture(1, 65, bytes(range(195))), CELL)


def test_cells_become_the_row_they_stand_for_and_blanks_where_some_are_covered() -> None:
    table, fit = SixelTable(), Fit(3, 2, 30, 40)
    first, second = table.put(["FIRST", "SECOND"], fit)
    assert cell_len(first) == cell_len(second) == 3
    assert table.drawn(f"a\x1b[1m{first}\x1b[0mb{second}") == (
        "a\x1b[1m\x1b7   \x1b8FIRST\x1b8\x1b[3C\x1b[0mb\x1b7   \x1b8SECOND\x1b8\x1b[3C"
    )
    assert table.drawn(first + second) == table.drawn(first) + table.drawn(second)
    assert table.drawn(f"{first[:2]}x{first[1:]}y{first}{first[1:]}") == "  x  y     ", "what is covered is not drawn"
    table.clear()
    other = table.put(["OTHER"], fit)[0]
    assert "FIRST" not in table.drawn(first + "." + other) and first != other


def test_a_terminal_with_kittys_protocol_gets_the_pixels_once() -> None:
    picture, fit = picture_of(80, 120, 5000), Fit(12, 4, 120, 80)
    sent = kitty_picture(0x123456, picture, fit)
    messages = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", sent)
    assert sent == "".join(f"\x1b_G{keys};{data}\x1b\\" for keys, data in messages) and len(messages) > 2
    assert all(len(data) <= 4096 for _, data in messages) and all(len(data) % 4 == 0 for _, data in messages[:-1])
    first = dict(pair.split("=") for pair in messages[0][0].split(","))
    assert first == {
        "a": "T", "U": "1", "q": "2", "f": "24", "o": "z", "s": "120", "v": "80", "i": str(0x123456), "c": "12",
        "r": "4", "m": "1",
    }  # fmt: skip
    assert [keys for keys, _ in messages[1:]] == ["q=2,m=1"] * (len(messages) - 2) + ["q=2,m=0"]
    assert zlib.decompress(b64decode("".join(data for _, data in messages))) == picture.rgb
    assert kitty_removal(0x123456) == f"\x1b_Ga=d,d=I,q=2,i={0x123456}\x1b\\"


def test_cells_of_kittys_protocol_name_picture_row_and_column() -> None:
    rows = kitty_rows(0x123456, Fit(24, 4, 240, 80))
    assert len(rows) == 4 and all(cell_len(row.text) == row.cell_length == 24 for row in rows)
    for row in rows:
        assert row.style is not None and row.style.color is not None and row.style.color.type is ColorType.TRUECOLOR
        assert row.style.color.triplet == (0x12, 0x34, 0x56)
    # The numbers from 0 on, as kitty's documentation lists them.
    assert rows[0].text[:6] == "\U0010eeee\u0305\u0305\U0010eeee\u0305\u030d"
    assert rows[3].text.startswith("\U0010eeee\u0310\u0305")
    assert rows[1].text.endswith("\U0010eeee\u030d\u0369"), "column 23"


@settings(max_examples=examples(200))
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 40), st.integers(1, 80), st.integers(1, 4))
def test_a_picture_fits_and_keeps_its_proportions(
    width: int, height: int, cell_width: int, cell_height: int, rows: int
) -> None:
    cell = CellSize(cell_width, cell_height)
    fit = fitted(width, height, cell, 24, rows)
    assert 1 <= fit.columns <= 24 and 1 <= fit.rows <= rows
    assert 1 <= fit.width <= min(width, fit.columns * cell_width)
    assert 1 <= fit.height <= min(height, fit.rows * cell_height)
    if min(fit.width, fit.height) > 1:
        scale = min(1.0, 24 * cell_width / width, rows * cell_height / height)
        assert abs(fit.width - width * scale) < 1 and abs(fit.height - height * scale) < 1
