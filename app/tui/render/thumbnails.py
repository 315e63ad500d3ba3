"""Small drawings of attached pictures between the lines of a text, on terminals that can.

The pixels come from the process that decodes pictures; this one never opens a picture's file.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.segment import Segment
from textual.strip import Strip

from app.attachments.attachment import AttachedPicture, Attachment
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
from app.tui.terminal.graphics import USUAL_CELL, CellSize, Graphics
from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.pictures.decoding import PictureDecoder

ROWS, COLUMNS = 4, 24
"""Maximum lines and columns of a drawn picture."""
_GAP = 2
"""Columns between two pictures."""
_KEPT = 64
"""Maximum number of pictures that are kept as they were drawn."""

_Key = tuple[str, Fit]
"""The digest of a picture's file, and its size."""


class PictureWaiter(Protocol):
    """A widget that shows pictures."""

    @property
    def is_mounted(self) -> bool: ...

    def remake(self) -> None:
        """A picture that it asked for can be drawn."""
        ...


@dataclass(frozen=True)
class _Placed:
    """A picture at a ``column`` of its lines."""

    column: int
    fit: Fit
    rows: Sequence[Segment]
    """The cells of each row; none before they are known."""


@dataclass(frozen=True)
class PictureBlock:
    """Pictures side by side."""

    placed: tuple[_Placed, ...]

    @property
    def rows(self) -> int:
        """The number of lines."""
        return max(each.fit.rows for each in self.placed)

    def over(self, row: int, line: Strip) -> Strip:
        """The blank ``line`` with a row of the pictures over it."""
        for placed in self.placed:
            if row < len(placed.rows):
                end = placed.column + placed.fit.columns
                line = line.extend_cell_length(end)
                rest = line.crop(end, line.cell_length)
                line = Strip([*line.crop(0, placed.column), placed.rows[row], *rest], line.cell_length)
        return line


class Thumbnails:
    """The drawn pictures. Belongs to one event loop.

    ``write`` sends sequences to the terminal, and ``sixels`` has the rows that it draws.
    """

    def __init__(self, write: Callable[[str], None], sixels: SixelTable) -> None:
        self._write = write
        self._sixels = sixels
        self._graphics = Graphics()
        self._known: OrderedDict[_Key, Sequence[Segment]] = OrderedDict()
        self._numbers: dict[_Key, int] = {}
        """The numbers of the pictures that a terminal with kitty's protocol has."""
        self._next = 1 + secrets.randbelow(1 << 23)
        self._wanted: dict[_Key, tuple[AttachedPicture, list[PictureWaiter]]] = {}
        self._task: asyncio.Task[None] | None = None

    def use(self, graphics: Graphics) -> None:
        """Draw as ``graphics`` says from now on."""
        self.forget()
        self._graphics = graphics

    def forget(self) -> None:
        """Forget all pictures, here and in the terminal."""
        self._wanted.clear()
        self._known.clear()
        for number in self._numbers.values():
            self._write(kitty_removal(number))
        self._numbers.clear()
        self._sixels.clear()

    async def close(self) -> None:
        """Forget all. No waiter is called any more."""
        self._graphics = Graphics()
        self.forget()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def block(
        self, attachments: Sequence[Attachment], width: int, waiter: PictureWaiter, rows: int = ROWS
    ) -> PictureBlock | None:
        """The pictures among ``attachments``, as many as fit in ``width`` columns, in at most ``rows`` lines; None if
        none is drawn.

        ``waiter.remake`` is called when those that are not known yet can be drawn.
        """
        if self._graphics.protocol is None or rows < 1:
            return None
        placed: list[_Placed] = []
        column = 0
        for attachment in attachments:
            if attachment.picture is None:
                continue
            picture = attachment.picture
            fit = fitted(picture.width, picture.height, self._cell, COLUMNS, rows)
            if column + fit.columns > width:
                break
            placed.append(_Placed(column, fit, self._rows(attachment.digest, picture, fit, waiter)))
            column += fit.columns + _GAP
        return PictureBlock(tuple(placed)) if placed else None

    @property
    def _cell(self) -> CellSize:
        return self._graphics.cell or USUAL_CELL

    def _rows(self, digest: str, picture: AttachedPicture, fit: Fit, waiter: PictureWaiter) -> Sequence[Segment]:
        """The rows of ``picture``; none if they are not known yet, or cannot be had."""
        key = digest, fit
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        self._wanted.setdefault(key, (picture, []))[1].append(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="pictures")
        return ()

    async def _work(self) -> None:
        from engine.pictures.decoding import PictureDecoder  # only where pictures are drawn

        decoder = await asyncio.to_thread(PictureDecoder)
        try:
            while self._wanted:
                key = next(iter(self._wanted))
                graphics = self._graphics
                found = await asyncio.to_thread(self._drawn, decoder, self._wanted[key][0], key[1], graphics)
                if key in self._wanted and graphics is self._graphics:
                    _, waiters = self._wanted.pop(key)
                    self._keep(key, *found)
                    for waiter in dict.fromkeys(waiters):
                        if waiter.is_mounted:
                            waiter.remake()
        finally:
            decoder.close()

    def _drawn(
        self, decoder: PictureDecoder, picture: AttachedPicture, fit: Fit, graphics: Graphics
    ) -> tuple[int, str, Sequence[Segment]]:
        """The number of a picture for the terminal, what it is sent, and the cells of its rows. In a thread."""
        with suppress(ModelError, ValueError):
            colours = 0 if graphics.protocol == "kitty" else SIXEL_COLOURS
            pixels = decoder.preview(picture.data, fit.width, fit.height, colours)
            if graphics.protocol == "kitty":
                self._next = self._next % ((1 << 24) - 1) + 1
                number = self._next
                return number, kitty_picture(number, pixels, fit), kitty_rows(number, fit)
            if graphics.cell is not None:
                return 0, "", [Segment(cells) for cells in self._sixels.put(sixel_rows(pixels, graphics.cell), fit)]
        return 0, "", ()

    def _keep(self, key: _Key, number: int, sent: str, rows: Sequence[Segment]) -> None:
        if number:
            self._numbers[key] = number
            self._write(sent)
        self._known[key] = rows
        while len(self._known) > _KEPT:
            old, _ = self._known.popitem(last=False)
            if old in self._numbers:
                self._write(kitty_removal(self._numbers.pop(old)))
