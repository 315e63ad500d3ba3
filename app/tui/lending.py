"""The screen of ``privatellm join``: this machine, its code, and its work for a ring."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import ClassVar

from textual import work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from app.chat.words import size
from app.engine_client import Engine, EngineClient, EngineDied
from app.lending import FIRST_WAIT_S, LendingService
from app.network import NetworkProblem
from app.ring_words import fingerprint, latency, link_words, other_link, place_words, short_id
from app.text_safety import one_line
from app.tui.keymap import KEYMAP_FILE, use
from app.tui.keymap_file import keymap_of
from app.tui.palette import RankedCommands, screen_commands
from app.tui.render.formatting import bar, flowing
from app.tui.render.key_footer import KeyFooter
from app.tui.render.rendered import Rendered
from app.tui.render.ring_view import peer_lines
from app.tui.screens.dialogues import Confirm
from app.tui.terminal.application import TerminalApp
from engine.ipc.messages import LendingFacts, LinkFacts, NetworkState, OpenNetwork
from engine.system.locations import locate

_MESSAGES = 200
"""Maximum lines of events that are kept."""


class LendingChanged(Message):
    """A line about an event; empty if only the state changed."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line


class LendingDetails(Rendered):
    """This machine: its name, its code, and its work for a ring."""

    state: NetworkState | None = None
    restarting = False

    def make(self, width: int) -> Content:
        return lending_view(self.state, self.restarting, width)


class Events(Rendered):
    """The lines about events, the newest last."""

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
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {RankedCommands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Leave", id="lending.leave"),
        Binding("ctrl+q", "leave", "Leave", show=False, priority=True, id="lending.quit"),
        Binding("c", "code", "New code", id="lending.code"),
        Binding("ctrl+p", "command_palette", "Menu", priority=True, id="lending.menu"),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, id="lending.suspend"),
        Binding("ctrl+c", "leave", "Leave", show=False, priority=True, system=True, id="lending.interrupt"),
    ]

    def __init__(self, engine: Engine, wanted: OpenNetwork, *, first_wait_s: float = FIRST_WAIT_S) -> None:
        super().__init__()
        self.lender = LendingService(engine, wanted, self._post_line, self._changed, first_wait_s=first_wait_s)
        self.problem = ""
        """Why this machine could not be lent; empty if it could."""
        self._asking = False

    def compose(self) -> ComposeResult:
        yield Static("Lending this machine", classes="screen-title", markup=False)
        with VerticalScroll(id="lent", can_focus=True):
            yield LendingDetails()
        with VerticalScroll(id="log", can_focus=True):
            yield Events()
        yield KeyFooter()

    def on_mount(self) -> None:
        keymap = keymap_of(locate("config") / KEYMAP_FILE)
        use(keymap.keys)
        self.set_keymap({id: ",".join(keys) for id, keys in keymap.keys.items()})
        for problem in keymap.problems:
            self.query_one(Events).add(problem)
        self._lend()

    def _post_line(self, line: str) -> None:
        self.post_message(LendingChanged(line))

    def _changed(self) -> None:
        self.post_message(LendingChanged(""))

    def on_lending_changed(self, event: LendingChanged) -> None:
        if event.line:
            self.query_one(Events).add(event.line)
            self.query_one("#log", VerticalScroll).scroll_end(animate=False)
        lent = self.query_one(LendingDetails)
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
        """Leave. The person is asked first if a ring uses this machine; the key once more says yes."""
        if self._asking:
            if isinstance(self.screen, Confirm):
                self.screen.dismiss(True)
            return
        state = self.lender.state
        question = leaving_question(state.lending if state is not None else None)
        if question:
            self._asking = True
            leave = await self.push_screen_wait(Confirm(question))
            self._asking = False
            if not leave:
                return
        self.leave_in_time()
        await self.keep()
        self.exit(0)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from screen_commands(screen, ["suspend_process"])
        yield from super().get_system_commands(screen)

    async def keep(self) -> None:
        """Leave the ring, so that its other machines know at once."""
        self.workers.cancel_group(self, "lending")
        await self.lender.leave()


def run_lending(wanted: OpenNetwork) -> tuple[int, str]:
    """Lend this machine on this terminal until the person leaves.

    Returns the exit status, and why the machine could not be lent (empty if it could).
    """
    from app.tui.terminal.output import guarded_output

    with guarded_output():
        return asyncio.run(_run(wanted))


async def _run(wanted: OpenNetwork) -> tuple[int, str]:
    engine = EngineClient()
    app = LendingApp(engine, wanted)
    return await app.run_to_end(engine), app.problem


# --- drawing -------------------------------------------------------------------------------------------------------

_MUTED = "$foreground-muted"
_LABEL = 9
_BAR = 20

_DIGITS = {
    "0": "█▀█ █ █ ▀▀▀", "1": "▀█   █  ▀▀▀", "2": "▀▀█ █▀▀ ▀▀▀", "3": "▀▀█ ▀▀█ ▀▀▀", "4": "█ █ ▀▀█   ▀",
    "5": "█▀▀ ▀▀█ ▀▀▀", "6": "█▀▀ █▀█ ▀▀▀", "7": "▀▀█   █   ▀", "8": "█▀█ █▀█ ▀▀▀", "9": "█▀█ ▀▀█ ▀▀▀",
    "-": "    ▀▀▀    ", " ": "           ",
}  # fmt: skip
"""Glyph of each digit: three lines of three cells, of half blocks."""


def large(text: str) -> list[str]:
    """``text`` in three lines of large digits; in one ordinary line if it has other characters."""
    if any(character not in _DIGITS for character in text):
        return [text]
    glyphs = [_DIGITS[character] for character in text]
    return [" ".join(glyph[4 * line : 4 * line + 3].ljust(3) for glyph in glyphs).rstrip() for line in range(3)]


def lending_view(state: NetworkState | None, restarting: bool, width: int) -> Content:
    """The screen without the lines about events."""
    if state is None:
        return Content.styled("Starting the engine…", _MUTED)
    paired = [peer for peer in state.peers if peer.name]
    # The most important comes first: on a small terminal the rest is below the edge.
    parts = [_me(state, width)]
    if restarting:
        parts.append(Content.styled("The engine ended and is restarting.", "$text-warning bold"))
    parts += [Content.styled(f"! {one_line(problem)}", "$text-warning") for problem in state.problems]
    if state.lending is not None:
        parts.append(_lending(state.lending, width))
    if state.code:
        parts.append(_code(state, width))
    parts.append(_where(state, width))
    if state.lending is None and state.open:
        waiting = "Waiting for a head to form a ring." if paired else "Waiting to be paired."
        parts.append(Content.styled(waiting, _MUTED))
    if paired and state.lending is None:
        heads = [peer_lines(peer, width, of_head=True) for peer in paired]
        parts.append(Content("\n").join([Content.styled("Paired", "bold"), *heads]))
    return Content("\n\n").join(parts)


def _me(state: NetworkState, width: int) -> Content:
    me = state.me
    items = [Content.styled(one_line(me.name) or short_id(me.node_id), "bold $text-primary")]
    if me.words:
        items.append(Content.styled(fingerprint(me.words), "$text-accent"))
    return flowing(items, width)


def _where(state: NetworkState, width: int) -> Content:
    me = state.me
    where = ", ".join(map(one_line, me.listening))
    items = [Content.styled((where and f"listening on {where}") or "no socket is open", _MUTED)]
    if me.key_storage:
        items.append(Content.styled(f"key stored in {one_line(me.key_storage)}", _MUTED))
    return flowing(items, width)


def _code(state: NetworkState, width: int) -> Content:
    tries = f"{state.code_tries} tr{'y' if state.code_tries == 1 else 'ies'}"
    lines = large(one_line(state.code))
    if max(map(len, lines)) > width:
        lines = []
    left = f"valid for {state.code_seconds} s, {tries} left; press c for a new one"
    typed = Content.assemble(("Type this code on the machine with the chat: ", ""), (one_line(state.code), "bold"))
    return Content("\n").join(
        [
            typed,
            *[Content.styled(line, "bold $text-success") for line in ("", *lines) if len(lines) > 1],
            Content.styled(left, _MUTED),
        ]
    )


def _lending(facts: LendingFacts, width: int) -> Content:
    # Before the ring is formed only what this machine will receive is known.
    place = f", {place_words(facts)}" if facts.nodes else ""
    amount = f", {size(facts.expert_bytes)}" if facts.expert_bytes else ""
    rows = [("Ring of", Content.assemble((one_line(facts.head), "bold"), place))]
    if facts.model:
        rows.append(("Model", Content(one_line(facts.model))))
    if facts.experts:
        rows.append(("Share", Content(f"{facts.experts:,} experts{amount}")))
    rows += [
        ("Stage", _stage(facts)),
        ("Load", Content.assemble(bar(facts.busy, 1.0, _BAR), f" {min(1.0, facts.busy):.0%}")),
        ("Tokens", Content(f"{facts.tokens:,}")),
    ]
    if facts.link is not None:
        rows.append(("Link", _link(facts.link, max(8, width - _LABEL))))
    if facts.probe_s is not None:
        rows.append(("Probe", Content(f"first token {latency(facts.probe_s)}")))
    return Content("\n").join([_row(label, value) for label, value in rows])


def _row(label: str, value: Content) -> Content:
    first, *others = value.split("\n")
    lines = [Content.assemble((f"{label:{_LABEL}}", _MUTED), first)]
    return Content("\n").join([*lines, *[Content.assemble(" " * _LABEL, line) for line in others]])


def _stage(facts: LendingFacts) -> Content:
    colour = "$text-success" if facts.stage in ("ready", "answering") else "$text-warning"
    stage = Content.styled(one_line(facts.stage), colour)
    if not facts.total:
        return stage
    share = min(100, 100 * facts.done // facts.total)
    return Content.assemble(stage, " ", bar(facts.done, facts.total, _BAR), f" {share}%")


def _link(link: LinkFacts, width: int) -> Content:
    items = [
        Content(link_words(link)),
        *[Content.styled(f"slower: {other_link(other)}", _MUTED) for other in link.others],
    ]
    return flowing(items, width)


def leaving_question(facts: LendingFacts | None) -> str:
    """The question before leaving; empty if no ring uses this machine."""
    if facts is None:
        return ""
    what = "is answering" if facts.stage == "answering" else f"uses this machine ({one_line(facts.stage)})"
    return f"The ring of {one_line(facts.head)} {what}. Leave it?"
