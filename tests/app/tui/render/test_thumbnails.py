"""Pictures in a text: decoded elsewhere, drawn when they are there, forgotten when they are old."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.segment import Segment
from textual.strip import Strip

from app.attachments.attachment import AttachedPicture, Attachment
from app.tui.render import thumbnails as module
from app.tui.render.thumbnails import COLUMNS, ROWS, PictureBlock, Thumbnails
from app.tui.terminal.drawn_pictures import SixelTable
from app.tui.terminal.graphics import Graphics
from engine.pictures.decoding import PictureDecoder
from tests.app.tui.screen_helpers import until
from tests.support.tiny_seeing import png, random_picture

KITTY = ("\x1b[6;20;10t", "\x1b_Gi=31;OK\x1b\\")
SIXEL = ("\x1b[6;20;10t", "\x1b[?62;4c")


def graphics(*reports: str) -> Graphics:
    made = Graphics(true_colours=True)
    for report in reports:
        made.take(report)
    return made


def attached(height: int, width: int, seed: int = 0) -> Attachment:
    return Attachment(f"{seed}.png", picture=AttachedPicture(png(random_picture(height, width, seed)), width, height))


class Shown:
    """A widget with pictures."""

    is_mounted = True

    def __init__(self, make: Callable[[Shown], PictureBlock | None]) -> None:
        self._make = make
        self.made: list[PictureBlock | None] = []

    def remake(self) -> None:
        self.made.append(self._make(self))

    def line(self, row: int, width: int = 80) -> Strip:
        block = self.made[-1]
        assert block is not None
        return block.over(row, Strip([Segment(" " * width)]))


def made(reports: tuple[str, ...]) -> tuple[Thumbnails, list[str], SixelTable]:
    sent: list[str] = []
    table = SixelTable()
    thumbnails = Thumbnails(sent.append, table)
    thumbnails.use(graphics(*reports))
    return thumbnails, sent, table


@pytest.mark.parametrize("reports", [KITTY, SIXEL], ids=["kitty", "sixel"])
async def test_pictures_stand_side_by_side_when_they_are_decoded(reports: tuple[str, ...]) -> None:
    thumbnails, sent, table = made(reports)
    files = [attached(120, 200), Attachment("a.py", "text"), attached(300, 100, 1), attached(100, 900, 2)]
    view = Shown(lambda view: thumbnails.block(files, 44, view))
    view.remake()
    block = view.made[0]
    assert block is not None and block.rows == ROWS
    assert view.line(0).text == " " * 80, "the lines are there before the pictures"
    await until(lambda: len(view.made) >= 3)
    assert [(each.column, each.fit.columns) for each in block.placed] == [(0, 14), (16, 3)], "the third is too wide"
    line = view.line(0)
    assert line.cell_length == 80 and sum(segment.cell_length for segment in line) == 80
    if reports is KITTY:
        assert len(sent) == len(block.placed) and all("a=T,U=1" in each for each in sent)
        assert len(re.findall("\U0010eeee", line.text)) == sum(each.fit.columns for each in block.placed)
    else:
        drawn = table.drawn(line.text)
        assert not sent and drawn.count("\x1bP0;1q") == len(block.placed)
        assert len(re.sub(r"\x1b8.*?\x1b\\\x1b8\x1b\[\d+C|\x1b7", "", drawn, flags=re.DOTALL)) == 80
    await thumbnails.close()
    assert (len([each for each in sent if "a=d" in each]) == len(block.placed)) == (reports is KITTY)
    assert thumbnails.block(files, 44, view) is None


async def test_what_is_drawn_is_what_the_sandbox_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    preview = PictureDecoder.preview

    def seen(self: PictureDecoder, data: bytes, width: int, height: int, colours: int = 0) -> object:
        asked.append((width, height, colours))
        return preview(self, data, width, height, colours)

    monkeypatch.setattr(PictureDecoder, "preview", seen)
    thumbnails, sent, _ = made(KITTY)
    damaged = Attachment("x.png", picture=AttachedPicture(b"\x89PNG\r\n\x1a\n nothing more", 100, 100))
    view = Shown(lambda view: thumbnails.block([damaged, attached(50, 50)], 80, view))
    view.remake()
    await until(lambda: len(sent) == 1 and len(view.made) >= 3)
    assert asked == [(80, 80, 0), (50, 50, 0)]
    line = view.line(0).text
    assert line[:10] == " " * 10 and line[10] == "\U0010eeee", "the place of a damaged picture stays blank"
    view.remake()
    assert len(asked) == 2, "each is decoded once"
    thumbnails.use(graphics(*SIXEL))
    view.remake()
    await until(lambda: len(asked) == 4)
    assert asked[2:] == [(80, 80, 64), (50, 50, 64)]
    await thumbnails.close()


async def test_old_pictures_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    thumbnails, sent, _ = made(KITTY)
    for seed in range(3):
        view = Shown(lambda view, seed=seed: thumbnails.block([attached(20, 20, seed)], 80, view))  # type: ignore[misc]
        view.remake()
        await until(lambda view=view: len(view.made) == 2)  # type: ignore[misc]
    numbers = [found[1] for each in sent if (found := re.search(r"a=T.*?i=(\d+)", each))]
    assert len(set(numbers)) == 3 and sent[-1] == f"\x1b_Ga=d,d=I,q=2,i={numbers[0]}\x1b\\"
    await thumbnails.close()


@pytest.mark.parametrize(
    ("reports", "files", "width", "rows"),
    [
        ((), [attached(50, 50)], 80, ROWS),
        (KITTY, [Attachment("a.py", "text")], 80, ROWS),
        (KITTY, [attached(50, 50)], 4, ROWS),
        (KITTY, [attached(50, 50)], 80, 0),
    ],
)
async def test_nothing_is_drawn(reports: tuple[str, ...], files: list[Attachment], width: int, rows: int) -> None:
    thumbnails, sent, _ = made(reports)
    view = Shown(lambda view: thumbnails.block(files, width, view, rows))
    view.remake()
    assert view.made == [None] and not sent
    await thumbnails.close()


async def test_a_block_is_as_high_as_it_may_be() -> None:
    thumbnails, _, _ = made(SIXEL)
    view = Shown(lambda view: thumbnails.block([attached(1000, 1000)], 80, view, 2))
    view.remake()
    block = view.made[0]
    assert block is not None and block.rows == 2 and block.placed[0].fit.columns <= COLUMNS
    await thumbnails.close()
