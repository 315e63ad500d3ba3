"""A table as lines of ``Content`` that fit a width: the widest columns give way first, cells are wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from textual.content import Content

Alignment = Literal["left", "right", "center"]

_GAP = "  "
_NARROWEST_COLUMN = 5
_RULE = "$foreground-muted"


def render_table(
    header: Sequence[Content], rows: Sequence[Sequence[Content]], alignments: Sequence[Alignment], width: int
) -> list[Content]:
    """Lines at most ``width`` cells wide: columns side by side, or, where they do not fit, one field to a line."""
    count = max([len(header), *(len(row) for row in rows)], default=0)
    if not count:
        return []
    wanted = [max([cell.cell_length for cell in _column(header, rows, index)], default=0) for index in range(count)]
    widths = column_widths(wanted, width - len(_GAP) * (count - 1))
    if widths is None:
        return _as_fields(header, rows, width)
    lines: list[Content] = []
    if any(cell.plain for cell in header):
        lines += _row([cell.stylize_before("bold") for cell in header], widths, alignments)
        lines.append(Content.styled(_GAP.join("─" * column for column in widths), _RULE))
    for row in rows:
        lines += _row(row, widths, alignments)
    return lines


def column_widths(wanted: Sequence[int], available: int) -> list[int] | None:
    """What each column gets of ``available`` cells; None if that is too little to read."""
    widths = [max(1, column) for column in wanted]
    floor = [min(column, _NARROWEST_COLUMN) for column in widths]
    if sum(floor) > available:
        return None
    while sum(widths) > available:
        widest = max(range(len(widths)), key=lambda index: widths[index] - floor[index])
        # Down to the next widest column at once would be faster; tables of a chat are small.
        widths[widest] -= 1
    return widths


def _column(header: Sequence[Content], rows: Sequence[Sequence[Content]], index: int) -> list[Content]:
    return [row[index] for row in (header, *rows) if index < len(row)]


def _row(cells: Sequence[Content], widths: Sequence[int], alignments: Sequence[Alignment]) -> list[Content]:
    wrapped = [
        [_aligned(line.rstrip(), width, alignment) for line in cell.wrap(width)] or [Content(" " * width)]
        for cell, width, alignment in zip_longest(cells, widths, alignments[: len(widths)], fillvalue=None)
        if cell is not None and width is not None
        for alignment in [alignment or "left"]
    ]
    height = max((len(lines) for lines in wrapped), default=0)
    blank = [Content(" " * width) for width in widths]
    return [
        Content(_GAP).join(
            lines[index] if index < len(lines) else empty for lines, empty in zip(wrapped, blank, strict=False)
        )
        for index in range(height)
    ]


def _aligned(line: Content, width: int, alignment: Alignment) -> Content:
    gap = max(0, width - line.cell_length)
    if alignment == "right":
        return line.pad_left(gap)
    if alignment == "center":
        return line.pad_left(gap // 2).pad_right(gap - gap // 2)
    return line.pad_right(gap)


def _as_fields(header: Sequence[Content], rows: Sequence[Sequence[Content]], width: int) -> list[Content]:
    lines: list[Content] = []
    for row in rows:
        if lines:
            lines.append(Content.styled("─" * width, _RULE))
        for name, cell in zip_longest(header, row, fillvalue=Content()):
            label = name.stylize_before("bold") + ": " if name.plain else Content()
            lines += [line.rstrip() for line in (label + cell).wrap(width)]
    return lines
