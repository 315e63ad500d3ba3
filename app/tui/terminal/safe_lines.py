"""The last border before the terminal: Textual passes control characters of any text through as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from app.text_safety import UNSAFE


class SafeLines(LineFilter):
    """Takes out of each line that is drawn what acts on a terminal. Widths stay as they were laid out."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if not any(UNSAFE.search(segment.text) for segment in segments):
            return segments
        return [Segment(UNSAFE.sub(_blank, segment.text), segment.style) for segment in segments]


def _blank(unsafe: re.Match[str]) -> str:
    return " " * cell_len(unsafe.group())


_SAFE_LINES = SafeLines()


def with_safe_lines(filters: Sequence[LineFilter]) -> list[LineFilter]:
    """``filters`` and :class:`SafeLines`, for ``App.get_line_filters``."""
    return [_SAFE_LINES, *filters]
