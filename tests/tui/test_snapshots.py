"""How the screens look, at three sizes. `pytest --snapshot-update` takes what is drawn now as right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fake_engine import FakeEngine
from screen_helpers import MakeApp, wait_until
from textual.pilot import Pilot
from textual.widgets import OptionList, TextArea

from app.tui.application import ChatApp
from app.tui.state import Phase
from app.tui.widgets.beam_panel import Candidates
from engine.messages import Beam, LayerTimes, PhaseTimes, Timing

SIZES = [(80, 24), (120, 40), (40, 20)]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
Compare = Callable[..., bool]
Before = Callable[[Pilot[int]], Awaitable[None]]

ANSWER = """\
## Stacks and queues

A **stack** gives back what was put in *last*, a queue what was put in `first`:

- push, then pop
- a longer item, which has to be wrapped where the terminal is narrow, and stays indented
  1. nested
  2. twice

> Both are lists with manners.

```python
def pop(items: list[int]) -> int:
    # the last one
    return items.pop()
```

| structure | order | cost |
|---|:-:|--:|
| stack | last in | 1 |
| queue | first in | 2 |
"""

LAYERS = [LayerTimes(1.0 + 0.1 * layer, 0.15, 2.0 + (layer * 5) % 7, 0.0, 0.3 * (layer % 2), 0.2) for layer in range(8)]
TIMING = Timing(
    prefill=PhaseTimes(layers=LAYERS[::-1], outside_layers=1.5, per_token=41.5, steps=2, tokens=320),
    decode=PhaseTimes(layers=LAYERS, outside_layers=2.5, per_token=57.2, steps=64, tokens=64),
    moe_layers=list(range(8)),
    expert_use=[[(expert * 31 + layer * 17) % 97 + 3 for expert in range(8)] for layer in range(8)],
)
_SAME = "The city you ask about is, as most people would tell you, the city of "
BEAMS = [
    Beam(_SAME + "Paris, which lies on the Seine.", [1], -0.312, True),
    Beam(_SAME + "Paris, in the north of the country, with two million people and a great many museums.", [2], -0.498),
    Beam(_SAME + "Lyon.", [3], -1.274, True),
    Beam(_SAME + "Marseille, by the sea.", [4], -1.51),
]


def app_of(pilot: Pilot[int]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


async def ready(pilot: Pilot[int]) -> None:
    app = app_of(pilot)
    await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
    assert app.chat is not None
    chat = app.chat
    app.screen.query_one(TextArea).cursor_blink = False
    await wait_until(pilot, lambda: chat.controller.status.phase is Phase.READY)


async def ask(pilot: Pilot[int], text: str) -> None:
    chat = app_of(pilot).chat
    assert chat is not None
    chat.controller.submit(text)
    await wait_until(pilot, lambda: not chat.controller.busy)
    await wait_until(pilot, lambda: not chat.transcript.query_one(".tail").display)
    await pilot.pause()


@sizes
def test_first_start(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(), terminal_size=size, run_before=ready)


@sizes
def test_loading_with_a_question_that_waits(
    snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.load_gate = asyncio.Event()

    async def before(pilot: Pilot[int]) -> None:
        chat = app_of(pilot).chat
        assert chat is not None
        await wait_until(pilot, lambda: chat.controller.status.progress is not None)
        chat.prompt.cursor_blink = False
        chat.controller.submit("Are you there?")
        await wait_until(pilot, lambda: chat.transcript.query_one(".tail").display)

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_streaming(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["A finished paragraph.\n\n- a list\n- that is **still", "** growing"]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.submit("Tell me")
        await wait_until(pilot, lambda: chat.transcript.views and chat.controller.thread.path[-1].content)
        await wait_until(pilot, lambda: "still" in str(chat.transcript.query_one(".tail").render()))

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_finished_answer(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What are stacks and queues?")

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


def test_finished_answer_on_a_light_theme(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What are stacks and queues?")

    assert snap_compare(make_app(theme="textual-light"), terminal_size=(80, 36), run_before=before)


@sizes
def test_a_message_with_the_focus(
    snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What is the capital?")
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.regenerate()
        await wait_until(pilot, lambda: not chat.controller.busy)
        await pilot.press("shift+up")
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_beams(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.beam_steps = [BEAMS]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What is the capital?")
        await pilot.press("f4")
        app = app_of(pilot)
        await wait_until(pilot, lambda: app.screen.query(".widths"))
        widths = app.screen.query_one(".widths")
        await wait_until(pilot, lambda: "of 2.4 GB free" in str(widths.render()))
        app.screen.query_one(Candidates).focus()
        await pilot.press("down")
        await pilot.pause()

    assert snap_compare(make_app(beams=4), terminal_size=size, run_before=before)


@sizes
def test_timing(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.timing = TIMING

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, "What is the capital?")
        app = app_of(pilot)
        await wait_until(pilot, lambda: "Use of the experts" in str(app.screen.query_one(".timing").render()))

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


def test_timing_scrolled_to_the_heat_map(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine) -> None:
    engine.timing = TIMING

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, "What is the capital?")
        app = app_of(pilot)
        await wait_until(pilot, lambda: "Use of the experts" in str(app.screen.query_one(".timing").render()))
        await pilot.press("end")
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=(80, 24), run_before=before)


@sizes
def test_settings(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: pilot.app.screen.query(".settings"))
        pilot.app.screen.set_focus(None)
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_conversations(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        for text in ("Why is the sky blue?", "What are stacks and queues?"):
            await pilot.press("ctrl+n")
            await ask(pilot, text)
        await pilot.press("f2")
        await wait_until(pilot, lambda: pilot.app.screen.query("#conversations"))
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_models(
    snap_compare: Compare,
    make_app: MakeApp,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
) -> None:
    from app.tui.screens import models

    rows = [
        models.Row("starter", "754 MB · mixtral · prepared", "Small, for trying things out.", True),
        models.Row("some-moe", "2.7 GB · 1.3 B parameters, 0.4 B active · Apache-2.0", "Fits any laptop.", False),
        models.Row("large-moe", "93.4 GB · 46.7 B parameters, 12.9 B active · Apache-2.0", "Eight large ones.", False),
    ]
    monkeypatch.setattr(models, "rows", lambda: rows)
    engine.pull_gate = asyncio.Event()

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f3")
        await wait_until(pilot, lambda: pilot.app.screen.query("#models"))
        picker = pilot.app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: picker.option_count == 3)
        picker.highlighted = 1
        await pilot.press("enter")
        await wait_until(pilot, lambda: "downloading" in str(picker.get_option_at_index(1).prompt))

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_the_engine_died(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.dies_at = 3

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What is the capital?")
        chat = app_of(pilot).chat
        assert chat is not None
        await wait_until(pilot, lambda: chat.query_one("#notice").display and engine.starts == 2)
        await wait_until(pilot, lambda: chat.controller.status.phase is Phase.READY)

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@sizes
def test_no_model(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.load_error = "There is no model called 'nosuch'; did you mean starter?"

    async def before(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
        assert app.chat is not None
        chat = app.chat
        chat.prompt.cursor_blink = False
        await wait_until(pilot, lambda: chat.controller.status.phase is Phase.UNAVAILABLE)

    assert snap_compare(make_app(model="nosuch"), terminal_size=size, run_before=before)


@sizes
def test_help(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f1")
        await wait_until(pilot, lambda: pilot.app.screen.query(".help-text"))
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)
