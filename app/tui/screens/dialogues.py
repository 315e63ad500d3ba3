"""Modal screens: help, a question for one line of text, a question for yes or no."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from app.tui.keymap import COMMANDS, bound, keys_of, readable, with_keys
from app.tui.render.key_footer import KeyFooter
from app.tui.render.markdown import render_markdown
from app.tui.render.rendered import Rendered

KEYS = """
| Key | Action |
|---|---|
| {send} | send |
| {newline} | start a new line |
| {stop} | stop the answer and keep its text |
| up | recall earlier questions that begin so |
| {messages} | go to the messages: copy, edit, regenerate |
| {page_up}, {page_down} | scroll (letters in the messages only) |
| {newest} | go to the newest text |
| {again} | regenerate the answer |
| {new} | new chat |
| {chats} | chats |
| {model} | model |
| {beams} | beams |
| {timing} | timing |
| {machines} | machines: find, pair, form a ring |
| {sampling} | sampling of this chat |
| {settings} | settings |
| {menu} | menu of all commands |
| {quit} | quit; all chats are saved |
| {help} | this help, beginning with the focused part |
"""


def help_text(focused: Widget | None) -> str:
    """The help as Markdown: that of the focused widget or its nearest ancestor with one, keys, commands."""
    own = ""
    if focused is not None:
        own = next((node.HELP for node in focused.ancestors_with_self if getattr(node, "HELP", None)), "") or ""
        own = _with_changed_keys(own, focused)
    commands = "\n".join(
        f"| {' '.join(filter(None, [f'/{command.name}', command.argument]))} | {command.help} |" for command in COMMANDS
    )
    parts = ["# Here", own] if own else []
    parts += ["# Keys", KEYS, "# Commands", f"| Command | Action |\n|---|---|\n{commands}"]
    return with_keys("\n\n".join(parts))


def _with_changed_keys(text: str, focused: Widget) -> str:
    """``text`` with the person's keys for those that the bindings around ``focused`` come with: `` `ctrl+s` ``."""
    changed: dict[str, str] = {}
    for node in focused.ancestors_with_self:
        kinds = [kind for kind in type(node).__mro__ if "BINDINGS" in vars(kind)]
        for binding in Binding.make_bindings([declared for kind in kinds for declared in vars(kind)["BINDINGS"]]):
            keys = keys_of(binding.id or "", (binding.key,))
            if binding.key not in keys:
                changed.setdefault(readable(binding.key), readable(keys[0]))
    return re.sub(r"`([^`]+)`", lambda found: f"`{changed.get(found[1], found[1])}`", text)


class _HelpText(Rendered):
    def __init__(self, text: str) -> None:
        super().__init__(classes="help-text")
        self._text = text

    def make(self, width: int) -> Content:
        return render_markdown(self._text, width)


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q," + bound("help"), "dismiss(None)", "Close", key_display="esc", id="help.close")
    ]

    def __init__(self, focused: Widget | None) -> None:
        super().__init__()
        self._text = help_text(focused)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help"):
            yield _HelpText(self._text)
        yield KeyFooter()


class AskText(ModalScreen[str | None]):
    """Asks for a line of text. The result is None if the person left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", id="asking.leave")]

    def __init__(self, label: str, text: str = "") -> None:
        super().__init__()
        self._label = label
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue"):
            yield Static(self._label, markup=False, classes="dialogue-title")
            yield Input(self._text, select_on_focus=True)
        yield KeyFooter()

    @on(Input.Submitted)
    def _done(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or None)


class Tell(ModalScreen[None]):
    """Tells something that is read and closed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "Close", key_display="esc", id="telling.close")
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._told = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialogue telling"):
            yield Static(self._told[0], markup=False, classes="dialogue-title")
            yield Static(self._told[1], markup=False)
        yield KeyFooter()


class Confirm(ModalScreen[bool]):
    """Asks before something that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes", id="confirm.yes"),
        Binding("n,escape", "dismiss(False)", "No", id="confirm.no"),
    ]

    def __init__(self, question: str, detail: str = "") -> None:
        super().__init__()
        self._question = question
        self._detail = detail

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue"):
            yield Static(self._question, markup=False, classes="dialogue-title")
            if self._detail:
                yield Static(self._detail, markup=False)
        yield KeyFooter()
