"""The screen of a lent machine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from textual.pilot import Pilot

from app.tui.lending import Events, LendingApp, LendingDetails, large, lending_view
from app.tui.screens.dialogues import Confirm
from engine.ipc.messages import LendingFacts, LinkFacts, NetworkState, OpenNetwork
from tests.app.fake_engine import ME, STUDIO, FakeEngine
from tests.app.tui.screen_helpers import wait_until
from tests.support.kept_screens import CheckScreen

LINK = LinkFacts(
    interface="en5", address="10.0.0.2:47821", latency_s=85e-6, bytes_per_s=2.3e9, others=["en0 192.168.1.7: 450 µs"]
)


SHARE = LendingFacts(
    head="desk", model="mixtral-8x7b", rank=1, nodes=2, experts=132, expert_bytes=43_100_000_000,
    stage="receiving weights", done=12_400_000_000, total=43_100_000_000, link=LINK,
)  # fmt: skip


ANSWERING = msgspec.structs.replace(SHARE, stage="answering", done=0, total=0, tokens=1834, busy=0.62, probe_s=0.041)


OPEN = NetworkState(me=ME, open=True, code="1234 5678", code_seconds=120, code_tries=3)


JOIN = OpenNetwork(id=0, lend=True)


@pytest.mark.parametrize("width", [20, 36, 76, 116])
@pytest.mark.parametrize("lending", [None, SHARE, ANSWERING])
def test_it_fits(width: int, lending: LendingFacts | None) -> None:
    state = msgspec.structs.replace(OPEN, lending=lending, peers=[STUDIO], problems=["No multicast \x1b[31mwas heard."])
    view = lending_view(state, True, width)
    assert "1234 5678" in view.plain and "\x1b" not in view.plain
    if lending is None and width > 40:
        assert all(len(line) <= width for line in view.plain.splitlines())


def test_large_digits_have_three_lines() -> None:
    lines = large("0123 4567-89")
    assert len(lines) == 3 and any("█" in line for line in lines)
    assert large("abc") == ["abc"]


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [("q", "y"), ("ctrl+c", "ctrl+c"), ("ctrl+q", "ctrl+q")], ids=" ".join)
async def test_leaving_a_ring_that_answers_is_asked_once(engine: FakeEngine, keys: tuple[str, str]) -> None:
    leave, confirm = keys
    engine.network.lending = ANSWERING
    app = LendingApp(engine, JOIN)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.lender.state is not None and app.lender.state.lending)
        await pilot.press("q")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("q", "n")
        await wait_until(pilot, lambda: not isinstance(app.screen, Confirm))
        assert engine.network.opened is not None
        await pilot.press(leave)
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press(confirm)
        await wait_until(pilot, lambda: app.return_value is not None)
    assert app.return_value == 0 and engine.network.opened is None


async def test_a_new_code_and_a_restart_are_shown(engine: FakeEngine) -> None:
    app = LendingApp(engine, JOIN, first_wait_s=0.05)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: engine.network.opened)
        await pilot.press("c")
        await wait_until(pilot, lambda: "1234-5678" in app.query_one(LendingDetails).render().plain)
        engine.start_gate = asyncio.Event()
        engine.die()
        await wait_until(pilot, lambda: "is restarting" in app.query_one(LendingDetails).render().plain)
        engine.start_gate.set()
        await wait_until(pilot, lambda: "can be used again" in app.query_one(Events).render().plain)
        assert "is restarting." not in app.query_one(LendingDetails).render().plain


async def test_a_machine_that_cannot_be_lent_says_why(engine: FakeEngine) -> None:
    engine.network.refusal = "Port 47820 is in use: choose another."
    app = LendingApp(engine, JOIN)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.return_value is not None)
    assert (app.return_value, app.problem) == (1, "Port 47820 is in use: choose another.")


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (40, 20)], ids=["80x24", "40x20"])
@pytest.mark.parametrize("stage", ["waiting", "answering"])
def test_how_it_looks(
    check_screen: CheckScreen, engine: FakeEngine, size: tuple[int, int], stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("app.tui.lending.time.strftime", lambda form: "12:00:00")
    engine.network.code = "1234 5678" if stage == "waiting" else ""
    engine.network.lending = ANSWERING if stage == "answering" else None
    app = LendingApp(engine, JOIN)

    async def before(pilot: Pilot[int]) -> None:
        await wait_until(pilot, lambda: "studio" in app.query_one(Events).render().plain)
        await pilot.pause()

    check_screen(app, size, before)
