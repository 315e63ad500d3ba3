"""The screen of ``privatellm join``: this machine, its code, and what it does for a ring."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from importlib.resources import files
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Footer, Static

from app.engine_client import Engine, EngineClient, EngineDied
from app.lending import FIRST_WAIT_S, Lender
from app.network import NetworkProblem
from app.text_safety import one_line
from app.tui.chat.rendered import Rendered
from app.tui.screens.asking import Confirm
from app.tui.screens.lending_view import leaving_question, lending_view
from app.tui.terminal.application import TerminalApp
from engine.ipc.messages import NetworkState, OpenNetwork

_MESSAGES = 200
"""Lines of what happened that are kept."""


class Told(Message):
    """Something happened: a line, or (empty) another state."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


class Lent(Rendered):
    """Who this machine is and what it does."""

    state: NetworkState | None = None
    restarting = False

    def make(self, width: int) -> Content:
        return lending_view(self.state, self.restarting, width)


class Events(Rendered):
    """What happened, the newest last."""

    def __init__(self) -> None:
        super().__init__(id="events")
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MESSAGES)

    def add(self, line: str) -> None:
        self._lines.append((time.strftime("%H:%M:%S"), one_line(line)))
        self.remake()

    def make(self, width: int) -> Content:
        return Content("\n").join(
            [Content.assemble((f"{when} ", "$foreground-muted"), line) for when, line in self._lines]
        )


class LendingApp(TerminalApp):
    """Lends this machine until the person leaves. Ends with status 1 if it cannot be lent at all."""

    TITLE = "privatellm join"
    CSS_PATH: ClassVar[str] = str(files("assets") / "styles" / "lending.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+q", "leave", "Leave", key_display="q", priority=True, id="lending.leave"),
        Binding("c", "code", "New code", id="lending.code"),
        Binding("ctrl+c", "leave", "Leave", show=False, system=True, id="lending.interrupt"),
    ]

    def __init__(self, engine: Engine, wanted: OpenNetwork, *, first_wait_s: float = FIRST_WAIT_S) -> None:
        super().__init__()
        self.lender = Lender(engine, wanted, self._say, self._changed, first_wait_s=first_wait_s)
        self.problem = ""
        """Why this machine could not be lent."""
        self._asking = False

    def compose(self) -> ComposeResult:
        yield Static("Lending this machine", classes="screen-title", markup=False)
        with VerticalScroll(id="lent", can_focus=True):
            yield Lent()
        with VerticalScroll(id="log", can_focus=True):
            yield Events()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._lend()

    def _say(self, line: str) -> None:
        self.post_message(Told(line))

    def _changed(self) -> None:
        self.post_message(Told(""))

    def on_told(self, event: Told) -> None:
        if event.line:
            self.query_one(Events).add(event.line)
            self.query_one("#log", VerticalScroll).scroll_end(animate=False)
        lent = self.query_one(Lent)
        lent.state, lent.restarting = self.lender.state, self.lender.restarting
        lent.remake()

    @work(group="lending", exit_on_error=False)
    async def _lend(self) -> None:
        try:
            await self.lender.run()
        except (NetworkProblem, EngineDied) as problem:
            self.problem = str(problem)
            self.exit(1)

    @work(group="code", exclusive=True, exit_on_error=False)
    async def action_code(self) -> None:
        try:
            await self.lender.new_code()
        except (NetworkProblem, EngineDied) as problem:
            self.query_one(Events).add(str(problem))

    @work(group="leave", exit_on_error=False)
    async def action_leave(self) -> None:
        """Leave; asked once if a ring would miss this machine."""
        if self._asking:
            return
        state = self.lender.state
        question = leaving_question(state.lending if state is not None else None)
        if question:
            self._asking = True
            leave = await self.push_screen_wait(Confirm(question))
            self._asking = False
            if not leave:
                return
        await self.keep()
        self.exit(0)

    async def keep(self) -> None:
        """Leave the ring, so that its other machines need not find out."""
        self.workers.cancel_group(self, "lending")
        await self.lender.leave()


def run_lending(wanted: OpenNetwork) -> int:
    """Lend this machine on this terminal until the person leaves; the exit status."""
    from app.commands.output import complain
    from app.tui.output_guard import guarded_output

    with guarded_output():
        status, problem = asyncio.run(_run(wanted))
    if problem:
        complain(problem)
    return status


async def _run(wanted: OpenNetwork) -> tuple[int, str]:
    engine = EngineClient()
    app = LendingApp(engine, wanted)
    return await app.run_to_end(engine), app.problem
