"""A list of an answer's values, which are changed in place. The screens of sampling and of personas share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.settings.fields import Setting, SettingError, Value
from app.settings.layers import shown
from app.text_safety import one_line

_MUTED = "$foreground-muted"
_LABEL, _VALUE, _NARROW_VALUE = 19, 11, 6
"""Widths of the columns in cells. The narrow one is for a terminal with fewer than :data:`_WIDE` columns."""
_WIDE = 60


@dataclass(frozen=True)
class ValueRow:
    """One value. ``source``: words for where it comes from, with a mark before them if it is ``changed``."""

    setting: Setting
    value: Value
    source: str
    changed: bool = False
    idle: bool = False
    """True if the value has no effect at present."""


class Values(Protocol):
    """The values that are shown and changed."""

    def rows(self) -> Sequence[ValueRow]:
        """One row for each value, always the same settings in the same order."""
        ...

    def change(self, key: str, value: Value) -> None:
        """``value`` is allowed for the setting."""
        ...

    def reset(self, key: str) -> None: ...


class _ValueList(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Change", id="values.change")]


class ValueEditor(Vertical):
    """The list, the help of the marked value, and a field where a new value is typed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", "Previous choice", show=False, id="values.previous"),
        Binding("right", "turn(1)", "Next choice", show=False, id="values.next"),
        Binding("backspace,delete", "reset", "Reset", key_display="⌫", id="values.reset"),
        Binding("escape", "leave_field", "Cancel", id="values.cancel"),
    ]

    def __init__(self, values: Values) -> None:
        super().__init__(classes="value-editor")
        self._values = values
        self._list = _ValueList(classes="values")
        self._field = Input(classes="value-field", select_on_focus=False)
        self._field.display = False

    def compose(self) -> ComposeResult:
        yield self._list
        yield Static("", classes="value-help", markup=False)
        yield self._field

    def on_mount(self) -> None:
        self.draw()
        self._list.highlighted = 0

    @property
    def marked(self) -> ValueRow:
        return self._values.rows()[self._list.highlighted or 0]

    @property
    def is_typing(self) -> bool:
        """Is a new value being typed?"""
        return self._field.display

    def focus_list(self) -> None:
        self._list.focus()

    def draw(self) -> None:
        """Show the values as they are now."""
        rows, narrow = self._values.rows(), self.app.size.width < _WIDE
        if self._list.option_count != len(rows):
            self._list.set_options([Option(_line(row, narrow)) for row in rows])
        else:
            for index, row in enumerate(rows):
                self._list.replace_option_prompt_at_index(index, _line(row, narrow))
        if not self.is_typing:
            self._tell()

    def on_resize(self) -> None:
        self.draw()

    def _tell(self, problem: str = "") -> None:
        line = self.query_one(".value-help", Static)
        setting = self.marked.setting
        line.set_class(bool(problem), "problem")
        line.update(Content(one_line(problem) if problem else f"{setting.help} {_capital(setting.allowed)}."))

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self._tell()

    # --- changes --------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.is_typing == (action == "leave_field")

    def on_key(self, event: events.Key) -> None:
        """A figure that is typed begins a new value."""
        figure = event.character is not None and event.character in "0123456789.-"
        if figure and not self.is_typing and not self.marked.setting.choices:
            event.stop()
            self._open(event.character or "")

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        row = self.marked
        if row.setting.choices:
            self.action_turn(1)
        else:
            self._open("" if row.value is None else shown(row.setting, row.value), select=True)

    def action_turn(self, step: int) -> None:
        """Take the next choice of the marked value, after the last the first."""
        row = self.marked
        choices = [choice.value for choice in row.setting.choices]
        if choices:
            place = choices.index(str(row.value)) if row.value in choices else 0
            self._values.change(row.setting.key, choices[(place + step) % len(choices)])
            self.draw()

    def action_reset(self) -> None:
        self._values.reset(self.marked.setting.key)
        self.draw()

    def _open(self, text: str, *, select: bool = False) -> None:
        field, setting = self._field, self.marked.setting
        field.border_title = setting.label
        field.placeholder = f"{setting.allowed}"
        field.value = text
        field.display = True
        field.focus()
        field.cursor_position = len(text)
        if select:
            field.select_all()

    def action_leave_field(self) -> None:
        self._field.display = False
        self._tell()
        self._list.focus()

    @on(Input.Submitted)
    def _typed(self, event: Input.Submitted) -> None:
        event.stop()
        setting = self.marked.setting
        try:
            value = setting.parse(event.value)
        except SettingError as error:
            self._tell(str(error).replace(setting.key, setting.label, 1))
            return
        self._values.change(setting.key, value)
        self.action_leave_field()
        self.draw()


def _line(row: ValueRow, narrow: bool) -> Content:
    """The row's label, value and source. What is set here is bold; what has no effect is muted as a whole."""
    width = _NARROW_VALUE if narrow else _VALUE
    value = one_line("–" if row.value is None else shown(row.setting, row.value))
    text, source = ("bold", "$text-accent") if row.changed else ("", _MUTED)
    if row.idle:
        text = source = _MUTED
    return Content.assemble(
        (f"{row.setting.label:<{_LABEL}}", text), (f"{value:<{width}}", text), (one_line(row.source), source)
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
