"""The settings screen, made from the schema of :mod:`app.settings`."""

from __future__ import annotations

from typing import ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Input, RadioButton, RadioSet, Select, Static, Switch, TextArea

from app.settings import GROUPS, SCHEMA, Setting, SettingError, Value
from app.tui.hosting import ChatHost

_MOST_BUTTONS = 6
"""Choices that are all shown; more go into a list that opens."""


class SettingRow(Vertical):
    """One setting: its name, its control, and what it means or what is wrong with the value."""

    def __init__(self, setting: Setting, app: ChatHost) -> None:
        super().__init__(classes=f"setting {setting.kind}")
        self.setting = setting
        self._chat_app = app
        self._control = self._make_control(app.settings.value(setting.key))

    def compose(self) -> ComposeResult:
        with Horizontal(classes="setting-line"):
            yield Static(self.setting.label, classes="setting-label", markup=False)
            with Vertical(classes="setting-control"):
                yield self._control
                yield Static(self._help(), classes="setting-help", markup=False)

    def _help(self) -> Content:
        help = self.setting.help
        return Content(f"{help} Loads the model again." if self.setting.takes_effect == "reload" else help)

    def _make_control(self, value: Value) -> Widget:
        setting = self.setting
        match setting.kind:
            case "flag":
                return Switch(bool(value))
            case "choice" if len(setting.choices) <= _MOST_BUTTONS:
                return RadioSet(*[self._button(choice.value, choice.label, value) for choice in setting.choices],
                                compact=True)  # fmt: skip
            case "choice":
                return Select(
                    [(choice.label, choice.value) for choice in setting.choices],
                    value=str(value), allow_blank=False, compact=True,
                )  # fmt: skip
            case "lines":
                return TextArea(str(value or ""), compact=True, placeholder="none")
            case _:
                return Input(_shown(value), placeholder=_placeholder(setting), compact=True)

    def _button(self, choice: str, label: str, value: Value) -> RadioButton:
        reason = self.setting.unavailable(choice, self._chat_app.machine)
        muted = "$foreground-muted"
        text = Content.assemble((label, muted), (f"  – {reason}", f"italic {muted}")) if reason else Content(label)
        # A choice that was made where it could be had is still shown as chosen.
        return RadioButton(text, value=choice == value, disabled=bool(reason) and choice != value, name=choice)

    def take(self, value: object) -> None:
        """Apply ``value``, as typed or chosen, and say what is wrong with it."""
        setting = self.setting
        line = self.query_one(".setting-help", Static)
        try:
            checked = setting.parse(value) if isinstance(value, str) else setting.check(value)
        except SettingError as error:
            self._complain(line, str(error))
            return
        if checked == self._chat_app.settings.value(setting.key):
            self._settle(line)
            return
        problem = self._chat_app.change_setting(setting.key, checked)
        if problem:
            self._complain(line, problem)
        else:
            self._settle(line)

    def _complain(self, line: Static, problem: str) -> None:
        line.update(Content(problem))
        line.add_class("problem")

    def _settle(self, line: Static) -> None:
        line.update(self._help())
        line.remove_class("problem")


class SettingsScreen(Screen[None]):
    HELP = (
        "Every setting takes effect and is saved when it is changed; a field when you leave it or press `enter`. What "
        "cannot be had on this machine is greyed, with the reason. An empty field leaves it to the model."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+s", "leave", "Close", key_display="esc", id="settings.close"),
        Binding("tab", "app.focus_next", "Next", id="settings.next"),
        Binding("shift+tab", "app.focus_previous", "Previous", show=False, id="settings.previous"),
        Binding("f1", "app.help", "Help", id="settings.help"),
    ]

    def compose(self) -> ComposeResult:
        app = cast(ChatHost, self.app)
        yield Static("Settings", classes="screen-title", markup=False)
        with VerticalScroll(classes="settings", can_focus=False):
            for group, title in GROUPS.items():
                yield Static(title, classes="group-title", markup=False)
                for setting in SCHEMA:
                    if setting.group == group:
                        yield SettingRow(setting, app)
        yield Footer(compact=True, show_command_palette=False)

    @staticmethod
    def _row(control: Widget) -> SettingRow:
        return next(node for node in control.ancestors if isinstance(node, SettingRow))

    @on(Input.Submitted)
    def _typed(self, event: Input.Submitted) -> None:
        self._row(event.input).take(event.value)

    @on(Input.Blurred)
    def _left(self, event: Input.Blurred) -> None:
        self._row(event.input).take(event.value)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        if isinstance(event.widget, TextArea):
            self._row(event.widget).take(event.widget.text)

    @on(Switch.Changed)
    def _switched(self, event: Switch.Changed) -> None:
        self._row(event.switch).take(event.value)

    @on(RadioSet.Changed)
    def _chosen(self, event: RadioSet.Changed) -> None:
        self._row(event.radio_set).take(event.pressed.name or "")

    @on(Select.Changed)
    def _selected(self, event: Select.Changed) -> None:
        if isinstance(event.value, str):
            self._row(event.select).take(event.value)

    def action_leave(self) -> None:
        # A field that still has the focus is taken as it stands.
        for row in self.query(SettingRow):
            control = row.query("Input, TextArea").first() if row.query("Input, TextArea") else None
            if isinstance(control, Input):
                row.take(control.value)
            elif isinstance(control, TextArea):
                row.take(control.text)
        self.dismiss(None)


def _shown(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _placeholder(setting: Setting) -> str:
    return "not set" if setting.optional else setting.allowed
