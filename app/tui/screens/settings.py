"""The settings screen, made from the schema of :mod:`app.settings.schema`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.lazy import Lazy
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Input, RadioButton, RadioSet, Select, Static, Switch

from app.chat.controller import ChatController
from app.chat.state import FellBack, Update
from app.chat.words import rate, size
from app.machine import Machine
from app.settings.fields import GROUPS, Setting, SettingError, Value
from app.settings.schema import SCHEMA
from app.text_safety import one_line
from app.tui.keymap import bound, key
from app.tui.render.formatting import bar, flowing
from app.tui.render.key_footer import KeyFooter
from app.tui.render.rendered import Rendered
from app.tui.render.ring_view import ring_lines
from app.tui.render.text_field import TextField
from engine.ipc.messages import DeviceMemory, Planned

_MOST_BUTTONS = 7
"""Maximum choices that are shown as buttons. More become a list that opens."""
DEBOUNCE_S = 0.3
"""Seconds from the last change of a value to the request for a prediction."""
NO_ENGINE_S = 0.5
"""Seconds between two requests while no engine is running."""
_AT_ONCE_S = 0.01


class Pending(dict[str, Value]):
    """Chosen values, not applied yet, of settings that load the model again."""


class ChoiceButton(RadioButton):
    """A radio button whose mark is another one when it is on: Textual's differs by its colour only."""

    BUTTON_LEFT = BUTTON_RIGHT = ""

    @property
    def _button(self) -> Content:
        folded = isinstance(self.parent, Choices) and not self.parent.has_focus
        self.BUTTON_INNER = "▾" if folded else "●" if self.value else "○"
        return super()._button


class Choices(RadioSet):
    """Radio buttons of which the one that is on is shown, and all of them while they have the focus."""

    def on_focus(self) -> None:
        for _ in self.children:
            if self._selected != self.pressed_index:
                self.action_next_button()
        self._draw_buttons()

    def on_blur(self) -> None:
        self._draw_buttons()

    def _draw_buttons(self) -> None:
        for button in self.children:
            button.refresh()


class OnOff(Switch):
    """A switch that says its state in a word: Textual's is told by where its slider is, and by colours."""

    def render(self) -> Content:
        return Content("● on " if self.value else "○ off")

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return 5


class SettingRow(Horizontal):
    """One setting: its name, its control, and its help or what is wrong with its value.

    A value that loads the model again goes into ``draft``. Others take effect at once.
    """

    def __init__(self, setting: Setting, controller: ChatController, machine: Machine | None, draft: Pending) -> None:
        super().__init__(classes=f"setting {setting.kind}")
        self.setting = setting
        self._controller = controller
        self._machine = machine
        self._draft = draft
        self.set_class(setting.key in draft, "-drafted")
        self._without_effect = setting.without_effect(machine)
        value = controller.options.value(setting.key)
        self._control = self._make_control(draft.get(setting.key, value))
        # A value that was set where it has an effect can be reset here.
        self._control.disabled = bool(self._without_effect) and value == setting.default

    def compose(self) -> ComposeResult:
        yield Static(self.setting.label, classes="setting-label", markup=False)
        with Vertical(classes="setting-control"):
            yield self._control
            yield Static(self._help(), classes="setting-help", markup=False)

    def _help(self) -> Content:
        help = self.setting.help
        if self._without_effect:
            return Content.assemble((f"No effect here: {self._without_effect}. ", "italic"), help)
        if self.setting.takes_effect == "now":
            return Content(help)
        return Content.assemble(help, (" ↻", "$text-warning"))

    def _make_control(self, value: Value) -> Widget:
        setting = self.setting
        if self._without_effect and value == setting.default and setting.kind == "choice":
            # What cannot be chosen from is one line.
            labels = {choice.value: choice.label for choice in setting.choices}
            return Static(labels.get(str(value), str(value)), classes="only-choice", markup=False)
        match setting.kind:
            case "flag":
                return OnOff(bool(value), animate=False)
            case "choice" if len(setting.choices) <= _MOST_BUTTONS:
                return Choices(*[self._button(choice.value, choice.label, value) for choice in setting.choices],
                               compact=True)  # fmt: skip
            case "choice":
                return Select(
                    [(choice.label, choice.value) for choice in setting.choices],
                    value=str(value), allow_blank=False, compact=True,
                )  # fmt: skip
            case "lines":
                return TextField(str(value or ""), compact=True, placeholder="none")
            case _:
                return Input(_shown(value), placeholder=_placeholder(setting), compact=True)

    def _button(self, choice: str, label: str, value: Value) -> RadioButton:
        reason = None if self._without_effect else self.setting.unavailable(choice, self._machine)
        muted = "$foreground-muted"
        text = Content.assemble((label, muted), (f"  – {reason}", f"italic {muted}")) if reason else Content(label)
        # A choice that was made where it was available is still shown as chosen.
        return ChoiceButton(text, value=choice == value, disabled=bool(reason) and choice != value, name=choice)

    def take(self, value: object) -> bool:
        """Apply ``value``, as typed or chosen. Returns False, and shows why, if it is not allowed."""
        setting = self.setting
        line = self.query_one(".setting-help", Static)
        try:
            checked = setting.parse(value) if isinstance(value, str) else setting.check(value)
        except SettingError as error:
            # Here it is known by its label; the key is the file's.
            self._complain(line, str(error).replace(setting.key, setting.label, 1))
            return False
        same = checked == self._controller.options.value(setting.key)
        if setting.takes_effect == "reload":
            self._draft.pop(setting.key, None)
            if not same:
                self._draft[setting.key] = checked
            self.set_class(not same, "-drafted")
        if same or setting.takes_effect == "reload":
            self._settle(line)
            return True
        problem = self._controller.change_settings({setting.key: checked})
        if problem:
            self._complain(line, problem)
        else:
            self._settle(line)
        return not problem

    def take_field(self) -> bool:
        """Apply the text of the field by :meth:`take`. Returns True if there is no field."""
        match self._control:
            case Input():
                return self.take(self._control.value)
            case TextField():
                return self.take(self._control.text)
        return True

    @property
    def can_be_set(self) -> bool:
        return not self._control.disabled

    def focus_control(self) -> None:
        self._control.focus()

    def _complain(self, line: Static, problem: str) -> None:
        line.update(Content(problem))
        line.add_class("problem")

    def _settle(self, line: Static) -> None:
        line.update(self._help())
        line.remove_class("problem")


class SearchField(Input):
    """The words that the shown settings have. Its texts are no setting's."""

    class Wanted(Message):
        """Other words were typed."""

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Wanted())

    @on(Input.Submitted)
    def _done(self, event: Input.Submitted) -> None:
        event.stop()
        self.screen.focus_next()

    @on(Input.Blurred)
    def _left(self, event: Input.Blurred) -> None:
        event.stop()


class Prediction(Rendered):
    """Predicted memory and speed of the values shown, and a note that they are not applied yet."""

    def __init__(self) -> None:
        super().__init__(classes="prediction-text")
        self._planned: Planned | str | None = None
        self._asking = True
        self._note = ""

    def show(self, planned: Planned | str | None) -> None:
        """Show a prediction, or why there is none. None: no engine is running yet."""
        self._planned, self._asking = planned, False
        self.remake()

    def asking(self, note: str) -> None:
        """Another prediction was requested. The old one stays until it arrives, with ``note`` before it."""
        if (note, True) != (self._note, self._asking):
            self._note, self._asking = note, True
            self.remake()

    def make(self, width: int) -> Content:
        if self._planned is None:
            waits = "Predicting…" if self._asking else "The prediction appears when the engine is running."
            text = Content.styled(waits, "$foreground-muted")
        else:
            text = prediction(self._planned, width)
        return Content.assemble((self._note + "\n", "$text-warning"), text) if self._note else text


class SettingsScreen(Screen[str]):
    """Screen whose result is the problem of applying the changes, or an empty text."""

    HELP = (
        "A setting is saved and used as soon as you change it, a field when you leave it or press `enter`. "
        "Settings marked ↻ load the model again, so they wait until you close this screen. Until then the bottom "
        "of the screen shows the expected memory and speed, and {undo} discards the changes. "
        "{group} goes to the next group. `ctrl+f`, and outside of a field `/`, finds settings by words of their "
        "names, help and choices. A choice that is not available on this machine is grey, with the reason beside it. "
        "An empty field means the default."
    )
    AUTO_FOCUS = "SettingRow *"  # the field for the search has no place yet, and would take it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+s", "leave", "Close", key_display="esc", id="settings.close"),
        # With priority over a text area, which uses these two keys for something else.
        Binding(bound("undo"), "undo", "Undo", priority=True, id="settings.undo"),
        Binding(bound("group"), "group", "Group", priority=True, id="settings.group"),
        Binding("tab", "app.focus_next", "Next", id="settings.next"),
        Binding("shift+tab", "app.focus_previous", "Previous", show=False, id="settings.previous"),
        Binding("ctrl+f", "search", "Search", priority=True, id="settings.search"),
        Binding("slash", "search", "Search", show=False, id="settings.search_outside"),  # typed in a field, it is text
        Binding(bound("help"), "app.help", "Help", id="settings.help"),
    ]

    def __init__(self, controller: ChatController, machine: Machine | None) -> None:
        super().__init__()
        self._controller = controller
        self._machine = machine
        self._draft = Pending()
        self._timer: Timer | None = None
        self._warned = False
        self._shown_before = False

    def compose(self) -> ComposeResult:
        yield Static("Settings · ↻ reloads the model or the ring", classes="screen-title", markup=False)
        yield SearchField(placeholder="Type to search", id="setting-search")
        yield Static("No setting has these words. esc shows all of them.", id="no-settings", markup=False)
        with VerticalScroll(classes="settings", can_focus=False):
            for place, (group, title) in enumerate(GROUPS.items()):
                # The first group is shown while the others are made.
                with Vertical(classes="setting-group") if not place else Lazy(Vertical(classes="setting-group")):
                    yield Static(title, id=f"group-{group}", classes="group-title", markup=False)
                    for setting in SCHEMA:
                        if setting.group == group:
                            yield SettingRow(setting, self._controller, self._machine, self._draft)
        with VerticalScroll(id="prediction"):
            yield Prediction()
        yield KeyFooter()
        self.call_after_refresh(self._predict_soon, _AT_ONCE_S)

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        # Its widgets were styled when they were mounted; to style these hundreds again would take as long once more.
        event.refresh_styles, self._shown_before = self._shown_before, True

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""
        if isinstance(update, FellBack):
            self.refresh(recompose=True)

    # --- the prediction -------------------------------------------------------------------------------------------

    def _predict_soon(self, wait: float = DEBOUNCE_S) -> None:
        if self._timer is not None:
            self._timer.stop()
        self.query_one(Prediction).asking(self._note())
        self._timer = self.set_timer(wait, self._predict)

    def _note(self) -> str:
        if not self._draft:
            return ""
        stops = " The current answer is stopped then." if self._controller.busy else ""
        return f"Pending changes: esc applies them, {key('undo')} discards them.{stops}"

    @work(group="prediction", exclusive=True, exit_on_error=False)
    async def _predict(self) -> None:
        options = replace(self._controller.options, **cast(dict[str, Any], {**self._draft, **self._typing()}))
        planned = await self._controller.link.plan(options)
        self.query_one(Prediction).show(planned)
        if planned is None:
            self._timer = self.set_timer(NO_ENGINE_S, self._predict)

    def _typing(self) -> dict[str, Value]:
        """The value in the focused field, if the prediction depends on it."""
        if not isinstance(self.focused, Input) or isinstance(self.focused, SearchField):
            return {}
        setting = self._row(self.focused).setting
        if setting.takes_effect != "reload":
            return {}
        try:
            return {setting.key: setting.parse(self.focused.value)}
        except SettingError:
            return {}

    def _take(self, control: Widget, value: object) -> None:
        before = dict(self._draft)
        self._row(control).take(value)
        if self._draft != before:
            self.refresh_bindings()
            self._predict_soon()

    @on(Input.Changed)
    def _being_typed(self, event: Input.Changed) -> None:
        if self._row(event.input).setting.takes_effect == "reload" and event.input.has_focus:
            self._predict_soon()

    # --- the search -----------------------------------------------------------------------------------------------

    def action_search(self) -> None:
        field = self.query_one(SearchField)
        field.display = True
        # At once: what was typed just behind the key is no setting's value.
        self.set_focus(field)

    @on(SearchField.Wanted)
    def _search(self) -> None:
        """Show the settings that have all the words, and the groups that have such a setting."""
        words = self.query_one(SearchField).value.casefold().split()
        for row in self.query(SettingRow):
            row.display = _has(row.setting, words)
        groups = list(self.query(".setting-group"))
        for group in groups:
            group.display = any(row.display for row in group.query(SettingRow))
        self.query_one("#no-settings").display = not any(group.display for group in groups)

    def _end_search(self) -> bool:
        """Show all settings again. Returns False if no search was open."""
        field = self.query_one(SearchField)
        if not field.display:
            return False
        field.value = ""
        field.display = False
        return True

    # --- changes --------------------------------------------------------------------------------------------------

    @staticmethod
    def _row(control: Widget) -> SettingRow:
        return next(node for node in control.ancestors if isinstance(node, SettingRow))

    @on(Input.Submitted)
    def _typed(self, event: Input.Submitted) -> None:
        self._take(event.input, event.value)

    @on(Input.Blurred)
    def _left(self, event: Input.Blurred) -> None:
        self._take(event.input, event.value)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        if isinstance(event.widget, TextField):
            self._take(event.widget, event.widget.text)

    @on(Switch.Changed)
    def _switched(self, event: Switch.Changed) -> None:
        self._take(event.switch, event.value)

    @on(RadioSet.Changed)
    def _chosen(self, event: RadioSet.Changed) -> None:
        self._take(event.radio_set, event.pressed.name or "")

    @on(Select.Changed)
    def _selected(self, event: Select.Changed) -> None:
        if isinstance(event.value, str):
            self._take(event.select, event.value)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self._draft) if action == "undo" else True

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """Why a key does nothing now."""
        return "Nothing was changed that could be undone." if action == "undo" else ""

    def action_undo(self) -> None:
        """Show the values in effect again."""
        self._draft.clear()
        self._close_network()
        self.refresh(recompose=True)
        self.refresh_bindings()

    def action_group(self) -> None:
        """Go to the first setting of the next group, after the last to the first."""
        rows = list(self.query(SettingRow).results(SettingRow))
        groups = list(dict.fromkeys(row.setting.group for row in rows if row.can_be_set and row.display))
        here = next((row.setting.group for row in rows if row.has_focus_within), None)
        if not groups:
            return
        index = groups.index(here) + 1 if here in groups else 0
        group = groups[index % len(groups)]
        next(row for row in rows if row.setting.group == group and row.can_be_set and row.display).focus_control()
        # The focus brings the control into view; afterwards the title of the group is brought into view too.
        title = self.query_one(f"#group-{group}")
        self.call_after_refresh(title.scroll_visible, animate=False, top=True)

    def action_leave(self) -> None:
        if self._end_search():
            return
        # The text of a field that still has the focus is applied too.
        refused = [row for row in self.query(SettingRow) if not row.take_field()]
        if refused and not self._warned:
            self._warned = True
            refused[0].focus_control()
            self.notify("Invalid value. Esc again discards it.", severity="warning")
            return
        problem = self._controller.change_settings(self._draft) if self._draft else ""
        self._close_network()
        self.dismiss(problem)

    def _close_network(self) -> None:
        """Close the network if it was opened only to predict a ring."""
        controller = self._controller
        self.app.run_worker(controller.link.close_unless_wanted(controller.options), exit_on_error=False)


def _has(setting: Setting, words: list[str]) -> bool:
    """Whether each of ``words``, in lower case, is in what is shown of ``setting`` or in its key."""
    choices = [text for choice in setting.choices for text in (choice.value, choice.label)]
    text = " ".join([setting.label, setting.key, setting.help, *choices]).casefold()
    return all(word in text for word in words)


def _shown(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _placeholder(setting: Setting) -> str:
    # What is allowed for a list is longer than a field; the help below says it.
    return "not set" if setting.optional or setting.kind == "items" else setting.allowed


# --- drawing the prediction ----------------------------------------------------------------------------------------

_MUTED = "$foreground-muted"
_BAR = 12


def prediction(planned: Planned | str, width: int) -> Content:
    """``planned`` in a few lines: the shortfall if there is one, the speed, each device's memory, the reasons."""
    if isinstance(planned, str):
        return Content.assemble(("No prediction: ", "bold"), (one_line(planned), "$text-error"))
    lines = [_speed(planned, width), *[_memory(device, width) for device in planned.memory]]
    if planned.ring is not None:
        # The speed of the plan is the ring's, so it is shown once, with what each machine holds.
        lines = [*ring_lines(planned.ring, width), *lines[1:]]
        if planned.basis:
            lines.append(Content.styled(one_line(planned.basis), _MUTED))
    if not planned.fits:
        lines.insert(0, _shortfall(planned))
    lines += [
        Content.assemble(
            (f"{one_line(choice.what)}: ", _MUTED), one_line(choice.choice), (_reason(choice.reason), _MUTED)
        )
        for choice in planned.choices
    ]
    return Content("\n").join(lines)


def _shortfall(planned: Planned) -> Content:
    missing = f"{size(planned.shortfall)} are missing" if planned.shortfall else "see the reasons below"
    return Content.styled(f"{one_line(planned.model)} does not fit in memory: {missing}.", "$text-error bold")


def _speed(planned: Planned, width: int) -> Content:
    basis = Content.styled(one_line(planned.basis), _MUTED)
    if planned.tokens_per_s is None:
        items = [Content.styled("No predicted speed", "bold"), basis]
    else:
        items = [
            Content.assemble(("Predicted ", "bold"), (f"about {rate(planned.tokens_per_s)}", "bold $text-success"))
        ]
        if planned.prefill_tokens_per_s:
            items.append(Content(f"prompts at {rate(planned.prefill_tokens_per_s)}"))
        items.append(basis)
    return flowing([item for item in items if item.plain], width)


def _memory(device: DeviceMemory, width: int) -> Content:
    parts = {
        "trunk": device.trunk,
        "experts": device.experts,
        "KV cache": device.key_values,
        "workspace": device.workspace,
    }
    used = sum(parts.values())
    amount = f" {size(used)} of {size(device.total)}" if device.total else f" {size(used)}"
    head = [Content.assemble((one_line(device.device), "bold"), (amount, "$text-error" if used > device.free else ""))]
    if device.total:
        head.append(bar(used, device.total, _BAR))
        head.append(Content(f"{size(device.free)} free"))
    share = [f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes]
    return flowing([*head, Content.styled(" · ".join(share), _MUTED)] if share else head, width)


def _reason(reason: str) -> str:
    return f" – {one_line(reason)}" if reason else ""
