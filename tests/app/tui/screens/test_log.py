"""The log screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from app.chat.state import Phase, Status
from app.chat.words import status_words
from app.log_tail import log_path, read_tail
from app.running_servers import RunningServer, announced, servers_folder
from app.tui.application import ChatApp
from app.tui.chat.status import StatusLine
from app.tui.render.status_line import status_line
from engine.ipc.messages import MemoryUse
from tests.app.fake_engine import FACTS
from tests.app.tui.screen_helpers import MakeApp, controller, ready, wait_until
from tests.app.tui.screens.test_screens_pictures import app_of
from tests.support.kept_screens import CheckScreen


def write_log(text: str, log: str = "engine") -> Path:
    path = log_path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(app: ChatApp) -> str:
    return str(app.screen.query_one("#log-lines", Static).visual)


def test_only_whole_safe_lines_of_the_end_are_read(home: Path) -> None:
    path = write_log("first\nsecond \x1b[31mred\x1b]0;title\x07\r\nthird\n")
    assert read_tail(path) == "first\nsecond red\nthird\n"
    assert read_tail(path, most=8) == "third\n"
    assert read_tail(home / "none") == ""


async def test_the_log_follows_until_the_reader_scrolls_up(make_app: MakeApp) -> None:
    path = write_log("".join(f"line {number}\n" for number in range(100)))
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.action_command("log")
        await wait_until(pilot, lambda: bool(app.screen.query("#log-lines")) and "line 99" in shown(app))
        lines = app.screen.query_one("#log")
        assert str(path) in str(app.screen.query_one("#log-path", Static).visual).replace("\n", "")
        await wait_until(pilot, lambda: lines.scroll_offset.y == lines.max_scroll_y > 0)
        with path.open("a") as file:
            file.write("a new line\n")
        await wait_until(pilot, lambda: "a new line" in shown(app) and lines.scroll_offset.y == lines.max_scroll_y)
        await pilot.press("home")
        await wait_until(pilot, lambda: lines.scroll_offset.y == 0)
        with path.open("a") as file:
            file.write("another\n")
        await wait_until(pilot, lambda: "another" in shown(app))
        assert lines.scroll_offset.y == 0
        await pilot.press("f")
        await wait_until(pilot, lambda: lines.scroll_offset.y == lines.max_scroll_y)
        await pilot.press("l")
        await wait_until(pilot, lambda: shown(app) == "Nothing has been logged.")
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)


FULL = Status(
    phase=Phase.READY, facts=msgspec.structs.replace(FACTS, weights="Q4_K_M"), context_used=512, tokens_per_s=12.3,
    ttft_s=0.21, memory=MemoryUse(own=1_200_000_000, mapped=4_000_000_000), beams=4, unsaved="The disk is full.",
)  # fmt: skip


async def test_a_server_is_shown_while_it_runs(make_app: MakeApp) -> None:
    app = make_app()
    server = RunningServer(
        pid=1, url="http://127.0.0.1:8777/v1", host="127.0.0.1", port=8777, model="m", since=0.0, tls=False, key=False,
        token="t",
    )  # fmt: skip

    def line() -> str:
        return status_line(controller(app).status, 120).plain

    async with app.run_test(size=(120, 24)) as pilot:
        await ready(pilot, app)
        with announced(servers_folder(), server):
            await wait_until(pilot, lambda: "serving :8777" in line())
            assert "serving :8777" in app.screen.query_one(StatusLine).render().plain
            assert "http://127.0.0.1:8777/v1" in " ".join(status_words(controller(app).status))
        await wait_until(pilot, lambda: "serving" not in line())


@pytest.mark.parametrize("what", ["status", "log"])
def test_pictures(check_screen: CheckScreen, make_app: MakeApp, home: Path, what: str) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        app = app_of(pilot)
        await ready(pilot, app)
        assert app.chat is not None
        for name, value in vars(FULL).items():
            setattr(controller(app).status, name, value)
        write_log("".join(f"21:40:{number:02} a line of the log\n" for number in range(30)))
        app.chat.action_command(what)
        await pilot.pause()
        if what == "log":
            app.screen.query_one("#log-path", Static).update("/home/you/.local/state/privatellm/engine.log")
            lines = app.screen.query_one("#log")
            await wait_until(pilot, lambda: lines.scroll_offset.y == lines.max_scroll_y > 0)

    check_screen(make_app(), (80, 24), before)
