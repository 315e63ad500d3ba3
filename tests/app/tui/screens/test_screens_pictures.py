"""How the screens look, at three sizes. `pytest --update-screens` takes what is drawn now as right."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, RadioSet, Static

from app.chat.state import Phase
from app.tui.application import ChatApp
from app.tui.panels.beam_panel import Candidates
from app.tui.screens.settings import Prediction, SettingRow
from engine.ipc.messages import Beam, DeviceMemory, ExpertMovement, LayerTimes, PhaseTimes, PlannedChoice, Timing
from tests.app.fake_engine import PLANNED, FakeEngine
from tests.app.tui.screen_helpers import MACHINE, MakeApp, wait_until
from tests.support.kept_screens import CheckScreen

Test = TypeVar("Test", bound=Callable[..., None])


def at_sizes(*sizes: Any) -> Callable[[Test], Test]:
    """In `make test` a screen is drawn at one of the sizes."""
    cases = pytest.mark.parametrize("size", sizes, ids=lambda size: f"{size[0]}x{size[1]}")
    return lambda test: pytest.mark.sampled(cases(test))


sizes = at_sizes((80, 24), (120, 40), (40, 20))

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
_PARIS = _SAME + "Paris, in the north of the country, with two million people and a great many museums, of which "
BEAMS = [
    Beam(_PARIS + "the Louvre is the largest.", [1], -0.312, True),
    Beam(_PARIS + "several are free on the first Sunday of each month.", [2], -0.498),
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
    await wait_until(pilot, lambda: chat.controller.status.phase is Phase.READY)


async def ask(pilot: Pilot[int], text: str) -> None:
    chat = app_of(pilot).chat
    assert chat is not None
    chat.controller.submit(text)
    await wait_until(pilot, lambda: not chat.controller.busy)
    await wait_until(pilot, lambda: not chat.transcript.query_one(".tail").display)
    await wait_until(pilot, lambda: not app_of(pilot).highlighter.busy)
    await pilot.pause()


@sizes
def test_first_start(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    check_screen(make_app(), size, ready)


@sizes
def test_loading_with_a_question_that_waits(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.load_gate = asyncio.Event()

    async def before(pilot: Pilot[int]) -> None:
        chat = app_of(pilot).chat
        assert chat is not None
        await wait_until(pilot, lambda: chat.controller.status.progress is not None)
        chat.controller.submit("Are you there?")
        await wait_until(pilot, lambda: chat.transcript.query_one(".tail").display)

    check_screen(make_app(), size, before)


@sizes
def test_streaming(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["A finished paragraph.\n\n- a list\n- that is **still", "** growing"]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.submit("Tell me")
        await wait_until(pilot, lambda: chat.transcript.views and chat.controller.thread.path[-1].content)
        await wait_until(pilot, lambda: "still" in str(chat.transcript.query_one(".tail").render()))

    check_screen(make_app(), size, before)


@sizes
def test_finished_answer(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What are stacks and queues?")

    check_screen(make_app(), size, before)


def test_finished_answer_on_a_light_theme(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What are stacks and queues?")

    check_screen(make_app(theme="textual-light"), (80, 36), before)


@sizes
def test_a_message_with_the_focus(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
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

    check_screen(make_app(), size, before)


@sizes
def test_beams(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
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

    check_screen(make_app(beams=4), size, before)


@sizes
def test_several_answers(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press(*"/n 4 Which city?", "enter")
        app = app_of(pilot)
        chat = app.chat
        assert chat is not None
        await wait_until(pilot, lambda: not chat.controller.busy and app.screen is not chat)
        await pilot.press("right")
        await pilot.pause()

    check_screen(make_app(), size, before)


@sizes
def test_a_temporary_chat(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.action_command("temporary")
        await ask(pilot, "What is the capital?")

    check_screen(make_app(), size, before)


@sizes
def test_finding(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.answer = lambda request: [ANSWER]

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What are stacks and queues?")
        chat = app_of(pilot).chat
        assert chat is not None
        chat.action_command("find", "last")
        await wait_until(pilot, lambda: "of 3" in str(pilot.app.screen.query_one("#find-count", Static).visual))
        await pilot.press("down")
        await wait_until(pilot, lambda: "2 of 3" in str(pilot.app.screen.query_one("#find-count", Static).visual))
        await pilot.pause()

    check_screen(make_app(), size, before)


@sizes
def test_timing(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.timing = TIMING

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, "What is the capital?")
        app = app_of(pilot)
        await wait_until(pilot, lambda: "Expert use" in str(app.screen.query_one(".experts").render()))

    check_screen(make_app(), size, before)


def test_timing_scrolled_to_the_heat_map(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine) -> None:
    engine.timing = TIMING

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, "What is the capital?")
        app = app_of(pilot)
        await wait_until(pilot, lambda: "Expert use" in str(app.screen.query_one(".experts").render()))
        await pilot.press("end")
        await pilot.pause()

    check_screen(make_app(), (80, 24), before)


@pytest.mark.parametrize("size", [(130, 60), (70, 60)], ids=["beside", "alone"])
def test_timing_of_shared_experts(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    moved = ExpertMovement(
        tokens=384, weight_bytes=4_720_000_000, activation_bytes=63_000_000, hits=3900, misses=2244, moved=700,
        cpu_s=9.1, gpu_s=8.2, both_s=6.9, total_s=11.3,
    )  # fmt: skip
    resident = [[expert for expert in range(8) if (layer + expert) % 3 == 0] for layer in range(8)]
    engine.timing = msgspec.structs.replace(TIMING, movement=moved, resident=resident)

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, "What is the capital?")
        app = app_of(pilot)
        await wait_until(pilot, lambda: "in GPU memory" in str(app.screen.query_one(".experts").render()))

    check_screen(make_app(), size, before)


@pytest.mark.soak
@sizes
def test_settings(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: pilot.app.screen.query(Prediction))
        prediction = pilot.app.screen.query_one(Prediction)
        await wait_until(pilot, lambda: "96.4 tok/s" in str(prediction.render()))
        pilot.app.screen.set_focus(None)
        await pilot.pause()

    check_screen(make_app(), size, before)


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
@pytest.mark.parametrize("size", [(80, 24), (40, 20)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_settings_that_do_not_fit(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    gpu = DeviceMemory(
        device="Some GPU 24 GB", total=25_700_000_000, free=24_100_000_000, trunk=3_200_000_000,
        experts=22_800_000_000, key_values=700_000_000, workspace=600_000_000,
    )  # fmt: skip
    policy = PlannedChoice("policy", "balanced", "measured on this machine")
    engine.planned = msgspec.structs.replace(
        PLANNED, model="large-moe", fits=False, shortfall=3_200_000_000, memory=[gpu, *PLANNED.memory],
        tokens_per_s=8.4, choices=[*PLANNED.choices, policy], basis="the calibration of this machine",
    )  # fmt: skip

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: pilot.app.screen.query(Prediction))
        prediction = pilot.app.screen.query_one(Prediction)
        rows = {row.setting.key: row for row in pilot.app.screen.query(SettingRow)}
        rows["policy"].query_one(RadioSet).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "3.2 GB are missing" in str(prediction.render()))
        await wait_until(pilot, lambda: "Pending changes" in str(prediction.render()))
        await wait_until(pilot, lambda: not [worker for worker in pilot.app.workers if worker.group == "prediction"])
        await pilot.pause()

    app = make_app()
    app.machine = dataclasses.replace(MACHINE, gpu=True)
    check_screen(app, size, before)


@sizes
def test_models(
    check_screen: CheckScreen,
    make_app: MakeApp,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
) -> None:
    from app.chat.model_choices import ModelOption
    from app.tui.screens import models

    rows = [
        ModelOption(
            "starter", True, "754 MB", "4 GB", "about 190 tokens/s", False, "Apache-2.0", "mixtral · prepared",
            "Small, for trying things out.",
        ),
        ModelOption(
            "some-moe", False, "2.7 GB", "8 GB", "about 22 tokens/s", False, "Apache-2.0", "",
            "Fits any laptop. For 8 GB of memory. 1.3 B parameters, 0.4 B active · Apache-2.0",
        ),
        ModelOption(
            "large-moe", False, "about 93.4 GB", "128 GB", "needs 128 GB", True, "Apache-2.0", "",
            "Eight large ones. For 128 GB of memory. 46.7 B parameters, 12.9 B active · Apache-2.0",
        ),
    ]  # fmt: skip
    monkeypatch.setattr(models, "model_options", lambda machine: rows)
    engine.pull_gate = asyncio.Event()

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f3")
        await wait_until(pilot, lambda: pilot.app.screen.query("#models"))
        picker = pilot.app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: picker.option_count == 3)
        picker.highlighted = 1
        await pilot.press("enter")
        await wait_until(
            pilot, lambda: "downloading" in str(pilot.app.screen.query_one("#model-details Static", Static).visual)
        )

    check_screen(make_app(), size, before)


@sizes
def test_the_engine_died(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    engine.dies_at = 3

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await ask(pilot, "What is the capital?")
        chat = app_of(pilot).chat
        assert chat is not None
        await wait_until(pilot, lambda: chat.query_one("#notice").display and engine.starts == 2)
        await wait_until(pilot, lambda: chat.controller.status.phase is Phase.READY)

    check_screen(make_app(), size, before)


@sizes
def test_no_model(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    engine.load_error = "There is no model called 'nosuch'; did you mean starter?"

    async def before(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
        assert app.chat is not None
        chat = app.chat
        await wait_until(pilot, lambda: chat.controller.status.phase is Phase.UNAVAILABLE)

    check_screen(make_app(model="nosuch"), size, before)


@sizes
def test_help(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f1")
        await wait_until(pilot, lambda: pilot.app.screen.query(".help-text"))
        await pilot.pause()

    check_screen(make_app(), size, before)
