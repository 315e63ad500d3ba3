"""Terminals with sixteen colours, or with none: all can be read there, and what colours tell has another mark."""

from __future__ import annotations

import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem
from textual.color import Color
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection

from app.tui.application import ChatApp
from app.tui.chat.prompt import Prompt
from app.tui.render.markdown import EDGE
from app.tui.terminal.colours import LEAST_CONTRAST, contrast
from tests.app.fake_engine import FakeEngine
from tests.app.tui.every_screen import SCREENS, back, prepare
from tests.app.tui.screen_helpers import MakeApp, ask, ready
from tests.app.tui.terminal.test_colours_contrast import XTERM

VGA = {
    "black": (0, 0, 0), "red": (170, 0, 0), "green": (0, 170, 0), "yellow": (170, 85, 0), "blue": (0, 0, 170),
    "magenta": (170, 0, 170), "cyan": (0, 170, 170), "white": (170, 170, 170), "bright_black": (85, 85, 85),
    "bright_red": (255, 85, 85), "bright_green": (85, 255, 85), "bright_yellow": (255, 255, 85),
    "bright_blue": (85, 85, 255), "bright_magenta": (255, 85, 255), "bright_cyan": (85, 255, 255),
    "bright_white": (255, 255, 255),
}  # fmt: skip
"""The palette of the Linux console, which is dark."""
LEAST_OF_LINES = 1.5
"""Ratio of luminances at least between a line or a block and its background."""
PAPER = {"textual-dark": Color(0, 0, 0), "textual-light": Color(255, 255, 255)}


def of_sixteen(color: RichColor | None, palette: dict[str, tuple[int, int, int]], default: Color) -> Color:
    """What a terminal with ``palette`` shows for ``color``."""
    number = None if color is None else color.downgrade(ColorSystem.STANDARD).number
    return default if number is None else Color(*palette[list(VGA)[number]])


def weak_pairs(app: ChatApp, palette: dict[str, tuple[int, int, int]], paper: Color) -> set[tuple[str, str, str]]:
    """What is drawn on the top screen and cannot be seen, with its two colours."""
    found = set()
    ink = paper.inverse
    for segment in (segment for strip in app.screen._compositor.render_strips() for segment in strip):
        style, text = segment.style, segment.text.strip()
        if style is None or not text:
            continue
        ratio = contrast(of_sixteen(style.color, palette, ink), of_sixteen(style.bgcolor, palette, paper))
        if ratio < (LEAST_CONTRAST if any(map(str.isalnum, text)) else LEAST_OF_LINES):
            found.add((text, str(style.color), str(style.bgcolor)))
    return found


@pytest.mark.parametrize(
    ("theme", "palettes"),
    [("textual-dark", (XTERM, VGA)), ("textual-light", (XTERM,))],
)
@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_everything_can_be_seen_in_sixteen_colours(
    make_app: MakeApp,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    theme: str,
    palettes: tuple[dict[str, tuple[int, int, int]], ...],
) -> None:
    monkeypatch.setenv("TERM", "xterm-16color")
    monkeypatch.delenv("COLORTERM")
    prepare(engine)
    app = make_app(theme=theme)
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks")
        assert app.theme == theme, "what was chosen stays chosen for terminals with more colours"
        for name, open in SCREENS.items():
            await open(pilot, app)
            await pilot.pause()
            for palette in palettes:
                weak = weak_pairs(app, palette, PAPER[theme])
                assert not weak, f"{name}: {weak}"
            await back(pilot, app)


@pytest.mark.parametrize(
    ("term", "colorterm", "theme"),
    [
        ("linux", "", "ansi-dark"), ("xterm-16color", "", "ansi-dark"), ("xterm-256color", "", "nord"),
        ("xterm", "truecolor", "nord"),
    ],
)  # fmt: skip
def test_a_theme_is_made_of_the_colours_that_the_terminal_has(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, term: str, colorterm: str, theme: str
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLORTERM", colorterm)
    found = make_app().get_theme("nord")
    assert found is not None and found.name == theme


Drawn = tuple[tuple[tuple[str, int], ...], ...]


def without_colours(app: ChatApp) -> Drawn:
    """The top screen as it is drawn: its texts and their attributes."""
    return tuple(
        tuple((text, style._attributes & style._set_attributes if style else 0) for text, style, _ in strip.simplify())
        for strip in app.screen._compositor.render_strips()
    )


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_where_the_focus_is_can_be_seen_without_colours(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    prepare(engine)
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks")
        for name, open in SCREENS.items():
            await open(pilot, app)
            await pilot.pause()
            before = app.focused
            seen: dict[Drawn, str] = {}
            for widget in app.screen.focus_chain:
                app.screen.set_focus(widget)
                await pilot.pause()
                assert app.focused is widget
                same = seen.setdefault(without_colours(app), str(widget))
                assert same == str(widget), f"{name}: the focus of {widget} looks as that of {same}"
            app.screen.set_focus(before)
            await back(pilot, app)


async def test_cursor_and_selection_can_be_seen_without_colours(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for field in ("prompt", "other"):
            if field == "other":
                await pilot.press("f3", "tab")
            await pilot.press(*"abc")
            drawn = [without_colours(app)]
            for key in ("left", "shift+left"):
                await pilot.press(key)
                drawn.append(without_colours(app))
            assert len(set(drawn)) == 3, field


async def _answered(pilot: Pilot[int], app: ChatApp, engine: FakeEngine, answer: str) -> None:
    engine.answer = lambda request: [answer]
    await ready(pilot, app)
    await ask(pilot, app, "Code?")


async def test_code_has_an_edge_where_it_has_no_background(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _answered(pilot, app, engine, "```\nprint(1)\n```")
        variables = app.theme_variables
        assert variables["code-edge"] == variables["code-background"], "a background needs no edge"
        assert app.chat is not None
        view = app.chat.transcript.views[-1]
        assert EDGE in view.render().plain
        copied = view.get_selection(Selection(Offset(0, 0), None))
        assert copied is not None and "print(1)" in copied[0] and EDGE not in copied[0]
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _answered(pilot, app, engine, "```\nprint(1)\n```")
        assert any(f"{EDGE}print(1)" in "".join(text for text, _ in line) for line in without_colours(app))
        assert isinstance(app.focused, Prompt)
