"""The screen of machines: those that were found, paired or form a ring; pairing, forming and forgetting."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from app.chat.controller import ChatController
from app.chat.state import NetworkChanged, StatusChanged, Update
from app.engine_client import EngineDied
from app.network import NetworkProblem
from app.ring_words import fingerprint, machine_name, short_id
from app.settings.fields import ItemError, check_item
from app.text_safety import one_line
from app.tui.keymap import bound
from app.tui.render.formatting import flowing
from app.tui.render.key_footer import KeyFooter
from app.tui.render.rendered import Rendered
from app.tui.render.ring_view import peer_lines, ring_lines
from app.tui.screens.dialogues import AskText, Confirm
from engine.ipc.messages import NetworkState, PeerFacts
from engine.planning.ring_words import absent_lines

_MUTED = "$foreground-muted"
_CLOSED = "Press l to look for machines first. No socket is open before that."
_ANOTHER = "add a machine by its address…"


class MachinesScreen(Screen[None]):
    """Shows the state of the network; its keys send requests to the engine."""

    HELP = (
        "Machines that can answer together with this one. `l` starts or stops looking for machines; no socket is "
        "open before that. `p` or `enter` pairs with the marked machine: run `privatellm join` there and type the "
        "code that it shows. `c` shows a code here, to be typed on the other machine. `f` forms a ring with the "
        "paired machines that can be reached, or leaves it. `r` forms the ring again, with machines that came "
        "later. `x` forgets a machine: it is no longer trusted, and its connection is closed. The name of a "
        "machine is known only after pairing."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape," + bound("machines"), "dismiss(None)", "Close", key_display="esc", id="machines.close"),
        Binding("l", "look", "Look", id="machines.look"),
        Binding("p", "pair", "Pair", id="machines.pair"),
        Binding("f", "form", "Form ring", id="machines.form"),
        Binding("f", "leave_ring", "Leave", id="machines.leave_ring"),
        Binding("r", "form_anew", "Form again", id="machines.form_anew"),
        Binding("x", "forget", "Forget", id="machines.forget"),
        Binding("c", "code", "Code", id="machines.code"),
        Binding(bound("help"), "app.help", "Help", id="machines.help"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._peers: list[PeerFacts] = []

    def compose(self) -> ComposeResult:
        yield Static("Machines", classes="screen-title", markup=False)
        with VerticalScroll(id="machines-about", can_focus=False):
            yield Here(self._controller)
        yield OptionList(id="machines")
        yield Static("", id="machines-problem", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._show_network()
        self._refresh()

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""
        if isinstance(update, StatusChanged | NetworkChanged):
            self._show_network()

    def _show_network(self) -> None:
        self.query_one(Here).remake()
        self._draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    # --- drawing --------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> NetworkState | None:
        return self._controller.link.network.state

    def _draw(self) -> None:
        machines = self.query_one(OptionList)
        marked, on_another = self._marked(), bool(self._peers) and machines.highlighted == len(self._peers)
        self._peers = list(self._state.peers) if self._state is not None else []
        width = max(20, machines.size.width - 4)
        prompts = [peer_lines(peer, width) for peer in self._peers]
        machines.set_options([*map(Option, prompts), Option(Content.styled(f"+ {_ANOTHER}", _MUTED))])
        known = [peer.node_id for peer in self._peers]
        if marked is not None:
            machines.highlighted = known.index(marked.node_id) if marked.node_id in known else 0
        else:
            machines.highlighted = len(known) if on_another else 0
        self.refresh_bindings()

    def _marked(self) -> PeerFacts | None:
        index = self.query_one(OptionList).highlighted
        return self._peers[index] if index is not None and index < len(self._peers) else None

    def _show(self, text: str, *, problem: bool = True) -> None:
        line = self.query_one("#machines-problem", Static)
        line.update(Content(one_line(text)))
        line.set_class(problem, "problem")

    # --- keys -----------------------------------------------------------------------------------------------------

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_pair()

    @work(group="network", exit_on_error=False)
    async def _refresh(self) -> None:
        await self._do("", self._controller.link.list_machines())

    @work(group="network", exit_on_error=False)
    async def action_look(self) -> None:
        """Open the network, or close it again."""
        link, options = self._controller.link, self._controller.options
        if not link.network.is_open:
            await self._do("Looking for machines…", link.look_for_machines(options))
        elif options.partitioning == "ring":
            self._show("The ring needs the network. Press f to leave the ring first.")
        else:
            await self._do("", link.stop_looking(options))

    @work(group="network", exit_on_error=False)
    async def action_pair(self) -> None:
        peer = self._marked()
        if not self._controller.link.network.is_open:
            self._show(_CLOSED)
            return
        if peer is not None and peer.name:
            self._show(f"{machine_name(peer)} is already paired. Press x to forget it.", problem=False)
            return
        target = peer.node_id if peer is not None else await self._ask_for_address()
        if not target:
            return
        shown = f"{short_id(target)} ({fingerprint(peer.words)})" if peer is not None else one_line(target)
        code = await self.app.push_screen_wait(AskText(f"Code shown by {shown}"))
        if code:
            await self._do("Pairing…", self._pair(target, code))

    async def _ask_for_address(self) -> str:
        """The typed address; empty if none was typed or it cannot be used, which is shown."""
        typed = await self.app.push_screen_wait(AskText("Address (HOST:PORT) shown by privatellm join"))
        if not typed:
            return ""
        try:
            return check_item("address", typed)
        except ItemError:
            self._show(f"“{one_line(typed)}” is not an address. Type HOST:PORT, such as 192.168.1.7:47820.")
            return ""

    async def _pair(self, target: str, code: str) -> str:
        try:
            name = await self._controller.link.network.pair(target, code)
        except (NetworkProblem, EngineDied) as problem:
            return str(problem)
        self.notify(f"Paired with {one_line(name)}.", markup=False)
        return ""

    @work(group="network", exit_on_error=False)
    async def action_code(self) -> None:
        if not self._controller.link.network.is_open:
            self._show(_CLOSED)
            return
        await self._do("", self._quietly(self._controller.link.network.show_code()))

    @work(group="network", exit_on_error=False)
    async def action_forget(self) -> None:
        peer = self._marked()
        if peer is None or not peer.name:
            self._show("Only a paired machine can be forgotten.")
            return
        question = f"Forget {machine_name(peer)}?"
        detail = "It will no longer be trusted, and its connection is closed. To use it again, pair it again."
        if await self.app.push_screen_wait(Confirm(question, detail)):
            await self._do("", self._quietly(self._controller.link.network.forget(peer.node_id)))

    def action_form(self) -> None:
        """Load the model on a ring of the paired machines."""
        if not self._controller.link.network.is_open:
            self._show(_CLOSED)
            return
        if not any(peer.state == "ready" and peer.lends for peer in self._peers):
            self._show(
                " ".join(absent_lines(self._peers, [], [])) or "No other machine was found. Press p to pair one."
            )
            return
        self._load_with("ring")

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """Why a key does nothing now."""
        return "This machine is part of no ring." if action != "form" else "A ring is formed already."

    def action_leave_ring(self) -> None:
        """Load the model on this machine alone again."""
        self._load_with("auto")

    def _load_with(self, partitioning: str) -> None:
        problem = self._controller.change_settings({"partitioning": partitioning})
        if problem:
            self._show(problem)
        else:
            self.dismiss(None)

    def action_form_anew(self) -> None:
        """Load the model again, on a ring of all machines that are there now."""
        self._controller.load_again()
        self.dismiss(None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        chosen = self._controller.options.partitioning == "ring"
        return {"form": not chosen, "leave_ring": chosen, "form_anew": chosen}.get(action, True)

    @staticmethod
    async def _quietly(asked: Awaitable[None]) -> str:
        try:
            await asked
        except (NetworkProblem, EngineDied) as problem:
            return str(problem)
        return ""

    async def _do(self, busy: str, asked: Awaitable[str]) -> None:
        """Show ``busy``, wait for ``asked``, show what went wrong."""
        self._show(busy, problem=False)
        problem = await asked
        if self.is_mounted:
            self._show(problem)
            self._show_network()


class Here(Rendered):
    """This machine, its valid code, problems of the network, and the ring."""

    def __init__(self, controller: ChatController) -> None:
        super().__init__(classes="here")
        self._controller = controller

    def make(self, width: int) -> Content:
        state = self._controller.link.network.state
        facts = self._controller.status.facts
        if state is None:
            return Content.styled("Asking the engine…", _MUTED)
        # What one acts on comes first: on a small terminal the rest is below the edge.
        lines = [flowing(_me(state), width)]
        if not state.open:
            lines.append(Content.styled("No socket is open. Press l to look for machines.", _MUTED))
        if state.code:
            tries = f"{state.code_tries} tr{'y' if state.code_tries == 1 else 'ies'}"
            left = f"  valid for {state.code_seconds} s, {tries}. Type it on the other machine."
            lines.append(Content.assemble("Code ", (f" {one_line(state.code)} ", "bold reverse"), (left, _MUTED)))
        lines += [Content.styled(f"! {one_line(problem)}", "$text-warning") for problem in state.problems]
        if facts is not None and facts.ring is not None:
            lines += ring_lines(facts.ring, width, me=state.me.node_id)
        if where := _where(state):
            lines.append(flowing(where, width))
        return Content("\n").join(lines)


def _me(state: NetworkState) -> list[Content]:
    me = state.me
    parts = [Content.assemble("This machine: ", (one_line(me.name) or short_id(me.node_id), "bold"))]
    if me.words:
        parts.append(Content.styled(fingerprint(me.words), "$text-accent"))
    return parts


def _where(state: NetworkState) -> list[Content]:
    me, parts = state.me, []
    if me.listening:
        parts.append(Content.styled(f"listening on {', '.join(map(one_line, me.listening))}", _MUTED))
    if me.key_storage:
        parts.append(Content.styled(f"key stored in {one_line(me.key_storage)}", _MUTED))
    return parts
