"""What the tests of the screen share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.pilot import Pilot
from textual.widgets import Static

from app.chat.controller import ChatController
from app.chat.state import Phase
from app.machine import Machine
from app.tui.application import ChatApp

MACHINE = Machine(system="linux", architecture="x86_64", gpu=False, torch=True, mlx=False)
MakeApp = Callable[..., ChatApp]


async def wait_until(pilot: Pilot[int], predicate: Callable[[], object], what: str = "it", steps: int = 20_000) -> None:
    """Let the application work until ``predicate`` holds; the number of steps is bounded, not the time.

    ``what`` names it if it never does.
    """
    for _ in range(steps):
        if predicate():
            await pilot.pause()
            return
        assert pilot.app._exception is None, "the application failed"
        await asyncio.sleep(0.005)
    raise AssertionError(f"{what} never came about")


async def until(predicate: Callable[[], object], steps: int = 10_000) -> None:
    """As ``wait_until`` where no application runs under a pilot."""
    for _ in range(steps):
        if predicate():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came about")


def controller(app: ChatApp) -> ChatController:
    assert app.chat is not None
    return app.chat.controller


async def ready(pilot: Pilot[int], app: ChatApp) -> None:
    await wait_until(pilot, lambda: app.chat is not None and controller(app).status.phase is Phase.READY)


async def ask(pilot: Pilot[int], app: ChatApp, text: str) -> None:
    """Type ``text``, send it, and wait for the answer."""
    assert app.chat is not None
    app.chat.prompt.focus()
    app.chat.prompt.fill(text)
    await pilot.pause()
    await pilot.press("enter")
    await wait_until(pilot, lambda: not controller(app).busy and controller(app).thread.path)
    await pilot.pause()


def shown(app: ChatApp) -> list[str]:
    """The messages as they are drawn."""
    assert app.chat is not None
    return [view.render().plain for view in app.chat.transcript.views]


def notice(app: ChatApp) -> str:
    assert app.chat is not None
    line = app.chat.query_one("#notice", Static)
    return str(line.visual) if line.display else ""
