"""Modal screens: help, a question for one line of text, a question for yes or no."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input, Static

from app.chat.commands.table import COMMANDS
from app.tui.actions import title_of, why_not
from app.tui.keymap import bound, keys_of, readable, with_keys
from app.tui.render.key_footer import KeyFooter
from app.tui.render.markdown import HEADINGS, render_markdown, render_table
from app.tui.render.rendered import Rendered
from app.tui.render.text_field import TextField

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
| ? | the keys that count where the focus is (not where text is typed) |
| {quit} | quit; all chats are saved |
| {help} | this help, beginning with the focused part |
"""


def help_text(focused: Widget | None) -> str:
    """The help as Markdown: that of the focused widget or its nearest ancestor with one, keys, commands."""
    own = ""
    if focused is not None:
        own = next((node.HELP for node in focused.ancestors_with_self if getattr(node, "HELP", None)), "") or ""
        own = _with_changed_keys(own, focused)
    commands = "\n".join(f"| {command.usage} | {command.help} |" for command in COMMANDS)
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


NOT_NOW = "Not now"
"""Title of the keys that do nothing at present."""


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark," + bound("help"), "dismiss(None)", "Close", key_display="esc", id="help.close")
    ]

    def __init__(self, focused: Widget | None) -> None:
        super().__init__()
        self._text = help_text(focused)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help"):
            yield _HelpText(self._text)
        yield KeyFooter()


class _KeysOfPlace(Rendered):
    """The keys of ``screen`` where the focus is: those of the focused widget, of what is around it, and the others."""

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__(classes="help-text")
        self._of = screen

    def make(self, width: int) -> Content:
        lines: list[Content] = []
        for title, rows in keys_here(self._of).items():
            style = "$foreground-muted" if title == NOT_NOW else "bold"
            cells = [[Content.styled(" ".join(keys), style), about] for keys, about in rows]
            lines += [*([Content()] if lines else []), Content.styled(title, HEADINGS[1])]
            lines += render_table([], cells, ["left", "left"], width)
        return Content("\n").join(lines)


def keys_here(screen: Screen[Any]) -> dict[str, list[tuple[list[str], Content]]]:
    """The keys that count on ``screen`` now, and what each does, by where they come from.

    Those that do nothing at present come last, with the reason.
    """
    active = {name: at for name, at in screen.active_bindings.items() if not _scrolls_nothing(at.node, at.binding)}
    impossible: dict[tuple[DOMNode, str], tuple[list[str], Content]] = {}
    told: set[str] = set()
    rows_by_place: dict[str, dict[tuple[DOMNode, str], tuple[list[str], Content]]] = {}
    for node, bindings in screen._modal_binding_chain:
        place = "Everywhere" if isinstance(node, App) else "On this screen" if isinstance(node, Screen) else "Here"
        for name, binding in bindings:
            at = active.get(name)
            if not binding.description or binding.system or (at is not None and at.binding is not binding):
                continue
            if at is None and (name in told or _scrolls_nothing(node, binding)):
                continue
            about, rows = Content(title_of(binding)), rows_by_place.setdefault(place, {})
            if at is None:
                told.add(name)
                rows = impossible
                _, action, parameters = screen.app._parse_action(binding.action, node)
                why = why_not(node, action, parameters) or "Not possible now."
                about = Content.styled(f"{title_of(binding)}: {why}", "$foreground-muted")
            keys, _ = rows.setdefault((node, binding.action), ([], about))
            keys.append(readable(name))
    return {place: list(rows.values()) for place, rows in {**rows_by_place, NOT_NOW: impossible}.items() if rows}


def _scrolls_nothing(node: DOMNode, binding: Binding) -> bool:
    """Whether ``binding`` scrolls to the side, and there is nothing: the library's containers have it all the same."""
    sideways = binding.action in ("scroll_left", "scroll_right")
    return sideways and isinstance(node, Widget) and not node.allow_horizontal_scroll


class KeySheet(HelpScreen):
    """The keys of ``screen``, the one below."""

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__(screen.focused)
        self._of = screen

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help"):
            yield _KeysOfPlace(self._of)
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


# --- a text of several lines -----------------------------------------------------------------------------------------


class EditText(ModalScreen[str | None]):
    """Asks for a text of several lines. The result is None if the person left without saving.

    ``hint`` is a line below the title.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True, id="text.save"),
        Binding("escape", "leave", "Cancel", id="text.leave"),
    ]

    def __init__(self, title: str, text: str, hint: str = "") -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._hint = hint
        self._warned = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue text-dialogue"):
            yield Static(self._title, markup=False, classes="dialogue-title")
            yield Static(self._hint, markup=False, classes="dialogue-hint")
            yield TextField(self._text, compact=True, highlight_cursor_line=False, tab_behavior="focus")
        yield KeyFooter()

    def on_mount(self) -> None:
        area = self.query_one(TextField)
        area.move_cursor(area.document.end)
        area.focus()

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextField).text)

    def action_leave(self) -> None:
        text = self.query_one(TextField).text
        if text not in (self._text, self._warned):
            self._warned = text
            self.notify("Not saved. Esc again discards the changes.", severity="warning")
            return
        self.dismiss(None)
