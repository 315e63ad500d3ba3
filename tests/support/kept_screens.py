"""Screens as text: what stands in each cell, and in which style.

A file of `__screens__` holds the lines of a screen. Behind each one stand the letter of its commonest style and, for
every run of cells in another one, that style's letter and the first and last column, from 0. The styles follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from string import ascii_letters
from typing import Any

from rich.cells import cell_len
from rich.style import Style
from textual._compositor import LayoutUpdate
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip

Before = Callable[[Pilot[Any]], Awaitable[object]]
CheckScreen = Callable[[App[int], tuple[int, int], Before], None]
"""``check_screen(app, size, before)`` runs ``app`` in a terminal of that width and height, awaits ``before`` with its
pilot, and fails unless the screen is as it was kept."""
SEEN_ON_BLANKS = {"underline", "underline2", "reverse", "strike", "overline"}
ATTRIBUTES = ("bold", "dim", "italic", "blink", "blink2", *sorted(SEEN_ON_BLANKS))


def described(style: Style | None, blank: bool) -> str:
    """What can be seen of ``style``: of blanks the background alone, unless they are underlined or the like."""
    style = style or Style.null()
    attributes = [name for name in ATTRIBUTES if getattr(style, name)]
    paper = f"on {style.bgcolor.name if style.bgcolor else 'default'}"
    if blank and not SEEN_ON_BLANKS.intersection(attributes):
        return paper
    return " ".join([style.color.name if style.color else "default", *attributes, paper])


def joined(one: str, other: str) -> str | None:
    """The style of two runs side by side that look as one run does: blanks are in the style of the text beside them."""
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    blanks = shorter.startswith("on ") and longer.endswith(f" {shorter}")
    return longer if one == other or (blanks and not SEEN_ON_BLANKS.intersection(longer.split())) else None


def runs_of(line: Strip) -> list[tuple[str, int]]:
    """Each run of one style, with its number of cells."""
    runs: list[tuple[str, int]] = []
    for segment in line:
        for text in re.findall(r"\s+|\S+", segment.text):
            style, cells = described(segment.style, text.isspace()), cell_len(text)
            both = joined(runs[-1][0], style) if runs else None
            if both is not None:
                cells += runs.pop()[1]
            runs.append((both or style, cells))
    return runs


def screen_text(lines: Iterable[Strip]) -> str:
    """What a file of `__screens__` holds for these lines."""
    letters: dict[str, str] = {}
    drawn = []
    for line in lines:
        runs, cells_of, column, others = runs_of(line), Counter[str](), 0, []
        for style, cells in runs:
            cells_of[style] += cells
            letters.setdefault(style, ascii_letters[len(letters)])
        plain = max(cells_of, key=lambda style: cells_of[style])
        for style, cells in runs:
            if style != plain:
                others.append(f" {letters[style]}{column}-{column + cells - 1}")
            column += cells
        drawn.append(f"{line.text}┃{letters[plain]}{''.join(others)}")
    return "\n".join([*drawn, "", *(f"{letter}  {style}" for style, letter in letters.items()), ""])


def differing(app: App[int], size: tuple[int, int], before: Before, kept: str) -> tuple[str, str] | None:
    """The screen of ``app`` after ``before``, as text and as an SVG, unless its text is ``kept``."""
    found: list[tuple[str, str]] = []

    async def drive(pilot: Pilot[object]) -> None:
        await before(pilot)
        await pilot.wait_for_scheduled_animations()
        await pilot.pause()
        # Private, as Textual offers the screen with those below it as a picture only.
        drawn = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
        assert isinstance(drawn, LayoutUpdate)
        text = screen_text(Strip.join(parts) for parts in drawn.strips)
        if text != kept:
            found.append((text, app.export_screenshot()))
        app.exit(0)

    assert app.run(headless=True, auto_pilot=drive, size=size) == 0, "the application failed"
    return found[0] if found else None
