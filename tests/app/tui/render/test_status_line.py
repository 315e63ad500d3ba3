"""The status line: what is left out where it is narrow."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.state import Phase, Status
from app.tui.chat.status import StatusLine
from app.tui.render.status_line import status_line
from engine.ipc.messages import (
    MemoryUse,
    Prefill,
    Progress,
    UnderWay,
)
from tests.app.fake_engine import FACTS, FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, wait_until
from tests.app.tui.screens.test_screens_pictures import TIMING

_STATUSES = [
    Status(),
    Status(phase=Phase.LOADING, model="starter", progress=Progress(stage="weights", done=63, total=100)),
    Status(phase=Phase.READING, prefill=Prefill(done=512, total=4000), facts=FACTS),
    Status(phase=Phase.ANSWERING, facts=FACTS, context_used=1900, tokens_per_s=12.3, beams=4, unsaved="full"),
    Status(phase=Phase.UNAVAILABLE, model="a-model-with-a-long-name" * 4, problem="x"),
]


@pytest.mark.parametrize("status", _STATUSES)
@given(width=st.integers(0, 200))
def test_the_status_line_fits(status: Status, width: int) -> None:
    assert status_line(status, width).cell_length <= max(width, 0)


def test_what_is_loaded_is_said_beside_how_much() -> None:
    sending = Progress(stage="sending weights to attic", done=10**8, total=10**9, unit="bytes")
    line = status_line(Status(phase=Phase.LOADING, model="starter", progress=sending), 120).plain
    assert "loading: sending weights to attic ━───────── 10% of 1.0 GB" in line


def test_the_status_line_leaves_out_what_matters_least() -> None:
    wide = status_line(_STATUSES[3], 120).plain
    assert all(text in wide for text in ("answering", "starter", "local", "context 1,900/2,048", "12.3 tok/s"))
    narrow = status_line(_STATUSES[3], 40).plain
    assert "answering" in narrow
    assert "unsaved" in narrow


_FULL = Status(
    phase=Phase.READY, model="some-moe",
    facts=msgspec.structs.replace(FACTS, name="some-moe", weights="Q4_K_M", context_limit=32_768),
    context_used=12_345, tokens_per_s=12.3, ttft_s=0.21, memory=MemoryUse(own=1_200_000_000, mapped=4_000_000_000),
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "● ready  some-moe  12.3k/32.8k  12.3 t/s"),
        (60, "● ready  some-moe  Q4_K_M  12.3k/32.8k  12.3 tok/s"),
        (80, "● ready  some-moe  Q4_K_M  first 210 ms  context 12,345/32,768 (38%)  12.3 tok/s"),
        (
            120,
            "● ready  some-moe  Q4_K_M  memory 1.2 GB + 4.0 GB mapped  first token 210 ms  "
            "context 12,345/32,768 (38%)  12.3 tok/s",
        ),
        (
            200,
            "● ready  some-moe  Q4_K_M  torch · local (torch, cpu)  memory 1.2 GB + 4.0 GB mapped  first token 210 ms  "
            "context 12,345/32,768 (38%)  12.3 tok/s",
        ),
    ],
)
def test_what_the_status_line_shows_at_each_width(width: int, line: str) -> None:
    drawn = status_line(_FULL, width).plain
    assert len(drawn) <= width
    assert re.sub(" {2,}", "  ", drawn) == line


def test_a_name_that_tells_the_number_format_is_enough() -> None:
    facts = msgspec.structs.replace(FACTS, name="owner/some:Q4_K_M", weights="Q4_K_M")
    assert status_line(Status(phase=Phase.READY, facts=facts), 120).plain.count("Q4_K_M") == 1


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "◍ answering  1900/2048  9.8 of 24.1 t/s"),
        (80, "◍ answering  starter  1900/2048  3 answers · yours 9.8 of 24.1 tok/s"),
    ],
)
def test_the_own_part_of_what_is_generated_stands_in_place_of_the_speed(width: int, line: str) -> None:
    shared = UnderWay(answers=3, own_tokens_per_s=9.8, tokens_per_s=24.1)
    status = Status(phase=Phase.ANSWERING, facts=FACTS, context_used=1900, tokens_per_s=9.5, under_way=shared)
    drawn = status_line(status, width).plain
    assert re.sub(" {2,}", "  ", drawn) == line and len(drawn) <= width
    status.under_way = UnderWay(answers=2)
    assert status_line(status, 80).plain.endswith("  2 answers"), "nothing is generated yet"
    status.phase = Phase.READY
    assert status_line(status, 80).plain.endswith("  9.5 tok/s")


async def test_other_answers_are_told_of_while_one_is_written(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate, engine.under_way = asyncio.Event(), UnderWay(answers=2, own_tokens_per_s=5.0, tokens_per_s=12.0)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press(*"Why?", "enter")
        line = app.screen.query_one("#status", StatusLine)
        await wait_until(pilot, lambda: "2 answers · yours 5.0 of 12.0 tok/s" in str(line.render()))
        engine.gate.set()
        await wait_until(pilot, lambda: "8.1 tok/s" in str(line.render()))
        assert "2 answers" not in str(line.render())


async def test_the_slowest_layer_is_on_the_status_line_while_times_are_measured(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    engine.timing = TIMING
    app = make_app()
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot, app)
        status = controller(app).status
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, app, "Why?")
        assert "Layer 4 takes longest: experts 8.0 of 9.8 ms (f5)" in status_line(status, 160).plain
        await pilot.press("f5", "f5")
        await wait_until(pilot, lambda: not engine.watching)
        assert "takes longest" not in status_line(status, 160).plain
