"""Text can be read in every theme that is offered: by its colours, and as it is drawn on the screens."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
from textual.color import Color
from textual.pilot import Pilot
from textual.theme import BUILTIN_THEMES

from app.settings.schema import THEMES
from app.tui.application import ChatApp
from app.tui.terminal.colours import (
    EDGES,
    FIELDS,
    HEATS,
    LEAST_CONTRAST,
    LEAST_EDGE,
    MOST_FOOTER,
    PAIRS,
    TEXTS,
    contrast,
    legible,
    seen,
)
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, wait_until
from tests.app.tui.screens.test_screens_pictures import ANSWER, TIMING

XTERM = {
    "default": None, "black": (0, 0, 0), "red": (205, 0, 0), "green": (0, 205, 0), "yellow": (205, 205, 0),
    "blue": (0, 0, 238), "magenta": (205, 0, 205), "cyan": (0, 205, 205), "white": (229, 229, 229),
    "bright_black": (127, 127, 127), "bright_red": (255, 0, 0), "bright_green": (0, 255, 0),
    "bright_yellow": (255, 255, 0), "bright_blue": (92, 92, 255), "bright_magenta": (255, 0, 255),
    "bright_cyan": (0, 255, 255), "bright_white": (255, 255, 255),
}  # fmt: skip
"""The palette that xterm begins with; the colour named default is black or white."""


def variables(theme: str) -> dict[str, str]:
    found = BUILTIN_THEMES[theme]
    return legible({**found.to_color_system().generate(), **found.variables}, dark=found.dark)


def color(value: str, field: Color, default: Color) -> Color:
    if not value.startswith("ansi_"):
        return seen(value, field)
    known = XTERM[value.removeprefix("ansi_")]
    return default if known is None else Color(*known)


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_stands_out_from_what_it_is_drawn_on(theme: str) -> None:
    found = variables(theme)
    black, white = Color(0, 0, 0), Color(255, 255, 255)
    paper, ink = (black, white) if BUILTIN_THEMES[theme].dark else (white, black)
    heats = [(f"heat-text-{step}", f"heat-{step}") for step in range(HEATS)]
    for text, field in [*itertools.product(TEXTS, FIELDS), *PAIRS, *heats]:
        on = color(found[field], paper, paper)
        ratio = contrast(color(found[text], on, ink), on)
        assert ratio >= LEAST_CONTRAST, f"{theme}: {text} on {field}: {ratio:.2f}"


@pytest.mark.parametrize("theme", [theme for theme in THEMES if not theme.startswith("ansi")])
def test_edges_are_seen_and_the_line_of_keys_is_calm(theme: str) -> None:
    found = variables(theme)
    paper = Color.parse(found["background"])
    dark = BUILTIN_THEMES[theme].dark
    for name in EDGES:
        edge = Color.parse(found[name])
        assert contrast(edge, paper) >= LEAST_EDGE, name
        assert (edge.brightness > paper.brightness) == dark, name
    footer = Color.parse(found["footer-background"])
    assert contrast(footer, paper) <= MOST_FOOTER
    assert found["footer-key-foreground"] != found["footer-description-foreground"]


def test_what_already_stands_out_stays_as_it_is() -> None:
    before = BUILTIN_THEMES["textual-dark"].to_color_system().generate()
    after = variables("textual-dark")
    assert after["foreground"] == before["foreground"] and after["text-success"] == before["text-success"]
    assert after["text-secondary"] != before["text-secondary"]


@pytest.mark.parametrize(
    ("one", "other", "ratio"), [("#000", "#fff", 21.0), ("#777", "#fff", 4.48), ("#ff0000", "#ff0000", 1.0)]
)
def test_contrast_is_that_of_the_guidelines(one: str, other: str, ratio: float) -> None:
    assert contrast(Color.parse(one), Color.parse(other)) == pytest.approx(ratio, abs=0.01)
    assert contrast(Color.parse(other), Color.parse(one)) == contrast(Color.parse(one), Color.parse(other))


def drawn(app: ChatApp) -> Iterator[tuple[str, Color, Color]]:
    """Each text of the top screen with its colours. Lines and blocks are no text."""
    over = [widget.region for widget in app.screen.query("CommandPalette > Vertical, HelpScreen > *")]
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        shown = [strip.crop(region.x, region.right) for region in over if region.y <= y < region.bottom]
        for segment in itertools.chain.from_iterable(shown if over else [strip]):
            style = segment.style
            if style is None or style.color is None or style.bgcolor is None or not any(map(str.isalnum, segment.text)):
                continue
            pair = Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor)
            yield segment.text, *(pair[::-1] if style.reverse else pair)


Open = Callable[[Pilot[int], ChatApp], Awaitable[None]]


async def chat(pilot: Pilot[int], app: ChatApp) -> None:
    await ask(pilot, app, "Explain stacks")
    await ask(pilot, app, "")
    assert app.chat is not None
    app.chat.show_notice("Something went wrong.", "error")


async def timing(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f5")
    await ask(pilot, app, "Explain queues")


async def beams(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f4")


async def models(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f3")
    await wait_until(pilot, lambda: app.screen.query("#models"))


async def chats(pilot: Pilot[int], app: ChatApp) -> None:
    await ask(pilot, app, "One")
    await pilot.press("f2")


async def settings(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("ctrl+s")


async def machines(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f8")


async def shortcuts(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f1")


async def palette(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("ctrl+p")


async def sampling(pilot: Pilot[int], app: ChatApp) -> None:
    assert app.chat is not None
    app.chat.action_command("sampling")


async def personas(pilot: Pilot[int], app: ChatApp) -> None:
    assert app.chat is not None
    app.chat.action_command("persona")


async def completion(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("/")


SCREENS = (chat, timing, beams, models, chats, settings, machines, shortcuts, palette, sampling, personas, completion)
HARDEST = (("textual-dark", "textual-light"), ("atom-one-dark", "catppuccin-latte"))
"""Themes that were the least readable, a dark and a light one for each screen in turn."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("screen", "themes"),
    [
        *(pytest.param(screen, HARDEST[number % 2], id=screen.__name__) for number, screen in enumerate(SCREENS)),
        *(pytest.param(each, THEMES, marks=pytest.mark.soak, id=f"{each.__name__}-all themes") for each in SCREENS),
    ],
)
@pytest.mark.usefixtures("few_settings")
async def test_every_text_that_is_drawn_stands_out(
    make_app: MakeApp, engine: FakeEngine, screen: Open, themes: Sequence[str]
) -> None:
    engine.answer = lambda request: [ANSWER]
    engine.timing = TIMING
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await screen(pilot, app)
        await pilot.pause()
        assert controller(app).status.facts is not None
        for theme in themes:
            if theme.startswith("ansi"):
                continue  # the terminal's own colours, whose values only it knows
            app.theme = theme
            await pilot.pause()
            weak = {
                (text.strip(), fore.hex, back.hex, round(contrast(fore, back), 2))
                for text, fore, back in drawn(app)
                if contrast(fore, back) < LEAST_CONTRAST
            }
            assert not weak, f"{theme}: {weak}"
