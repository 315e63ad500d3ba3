"""The personas: choosing one for the shown chat, saving the chat as one, editing and deleting them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.chat.controller import ChatController
from app.settings.fields import SettingError, Value
from app.settings.layers import ADJUSTABLE, shown
from app.settings.personas import Persona, PersonasFile
from app.settings.schema import setting_named
from app.text_safety import one_line
from app.tui.keymap import bound, key
from app.tui.render.key_footer import KeyFooter
from app.tui.render.text_field import TextField
from app.tui.screens.dialogues import AskText, Confirm
from app.tui.screens.value_editor import ValueEditor, ValueRow

_MUTED = "$foreground-muted"
_NONE_YET = "There are no personas yet. Save this chat's system prompt and values as one, or begin an empty one."


@dataclass(frozen=True)
class Chosen:
    """The persona to use; None: none."""

    persona: Persona | None


class PersonasScreen(Screen[Chosen | None]):
    """Screen whose result is the choice, None if the person left."""

    HELP = (
        "A persona is a system prompt with a model and sampling values under a name. `enter` gives the chat the marked "
        "one; the chat keeps its values when the persona is changed later. Type to search. `ctrl+s` saves this chat's "
        "system prompt, model and values as a persona, `ctrl+n` begins an empty one, `ctrl+e` edits or renames the "
        "marked one. `ctrl+d` deletes it, and {undo} brings it back. They are kept in `personas.toml` beside "
        "the settings, which can be edited by hand."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Use", priority=True, id="personas.use"),
        Binding("ctrl+s", "save_chat", "Save this chat as", priority=True, id="personas.save"),
        Binding("ctrl+e", "edit", "Edit", priority=True, id="personas.edit"),
        Binding("ctrl+n", "new", "New", priority=True, id="personas.new"),
        Binding("ctrl+d", "delete", "Delete", priority=True, id="personas.delete"),
        Binding(bound("undo"), "undo", "Undo", priority=True, id="personas.undo"),
        Binding("up", "move(-1)", "Up", show=False, priority=True, id="personas.up"),
        Binding("down", "move(1)", "Down", show=False, priority=True, id="personas.down"),
        Binding("escape", "dismiss(None)", "Close", key_display="esc", id="personas.close"),
        Binding(bound("help"), "app.help", "Help", id="personas.help"),
    ]

    def __init__(self, controller: ChatController, file: PersonasFile) -> None:
        super().__init__()
        self._controller = controller
        self._file = file
        self._rows: list[Persona | None] = []
        self._deleted: list[Persona] = []

    def compose(self) -> ComposeResult:
        yield Static("Personas", classes="screen-title", markup=False)
        yield Input(placeholder="Type to search", id="persona-search")
        yield OptionList(id="personas")
        yield Static(_NONE_YET, id="personas-hint", markup=False)
        yield Static("", id="personas-problem", classes="problem", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#personas").can_focus = False
        self.query_one("#persona-search").focus()
        self._tell(" ".join(self._file.notices))
        self._draw(self._controller.setup.values.persona)

    def _draw(self, marked: str = "", place: int = 0) -> None:
        """Show the personas that are searched for. The one called ``marked`` is highlighted, else that at ``place``."""
        wanted = self.query_one("#persona-search", Input).value.casefold().split()
        matching = [
            persona
            for persona in self._file.personas
            if all(word in f"{persona.name} {persona.model} {persona.system}".casefold() for word in wanted)
        ]
        self._rows = [*matching, *([] if wanted else [None])]
        current = self._controller.setup.values.persona
        personas = self.query_one("#personas", OptionList)
        self.query_one("#personas-hint").display = not self._file.personas
        personas.set_options([Option(_prompt(row, current)) for row in self._rows])
        at = (index for index, row in enumerate(self._rows) if row is not None and row.name == marked)
        if self._rows:
            personas.highlighted = next(at, min(place, len(self._rows) - 1))
        self.refresh_bindings()

    def _tell(self, problem: str) -> None:
        line = self.query_one("#personas-problem", Static)
        line.update(Content(one_line(problem)))
        line.display = bool(problem)

    @property
    def _marked(self) -> Persona | None:
        place = self.query_one("#personas", OptionList).highlighted if self.is_mounted else None
        return self._rows[place] if place is not None and place < len(self._rows) else None

    @on(Input.Changed)
    def _searched(self) -> None:
        self._draw()

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(Chosen(self._rows[event.option_index]))

    # --- keys -----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        match action:
            case "undo":
                return bool(self._deleted)
            case "edit" | "delete":
                return self._marked is not None
        return True

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """Why a key does nothing now."""
        return "No persona was deleted that could be brought back." if action == "undo" else "No persona is marked."

    def action_choose(self) -> None:
        if self._rows:
            self.dismiss(Chosen(self._marked))

    def action_move(self, step: int) -> None:
        personas = self.query_one("#personas", OptionList)
        if step < 0:
            personas.action_cursor_up()
        else:
            personas.action_cursor_down()
        self.refresh_bindings()

    def action_save_chat(self) -> None:
        """Save the chat's setup as a persona, whose name is asked for."""

        def named(name: str | None) -> None:
            if name is None:
                return
            taken = next((one for one in self._file.personas if one.name.casefold() == name.casefold()), None)
            if taken is None:
                self._save_chat(name, "")
                return
            question = f"Replace the persona {one_line(taken.name)}?"
            self.app.push_screen(
                Confirm(question, "Chats that have it keep their values."),
                lambda yes: self._save_chat(name, taken.name) if yes else None,
            )

        self.app.push_screen(AskText("Save this chat as persona", self._controller.setup.values.persona), named)

    def _save_chat(self, name: str, old: str) -> None:
        setup = self._controller.setup
        try:
            saved = self._file.put(setup.as_persona(name), old)
        except SettingError as error:
            self._tell(str(error))
            return
        setup.call(saved.name)
        self._changed(saved.name)

    def action_new(self) -> None:
        self.app.push_screen(PersonaEditor(self._file, Persona(""), ""), self._changed)

    def action_edit(self) -> None:
        if self._marked is not None:
            old = self._marked.name
            self.app.push_screen(PersonaEditor(self._file, self._marked, old), lambda name: self._edited(old, name))

    def _edited(self, old: str, name: str | None) -> None:
        """The persona ``old`` is called ``name`` now; None: it was not changed."""
        setup = self._controller.setup
        if name is not None and setup.values.persona == old != name:
            setup.call(name)
        self._changed(name)

    def action_delete(self) -> None:
        persona, place = self._marked, self.query_one("#personas", OptionList).highlighted
        if persona is None:
            return
        try:
            self._file.delete(persona.name)
        except SettingError as error:
            self._tell(str(error))
            return
        self._deleted.append(persona)
        self._tell(" ".join(self._file.notices))
        self._draw(place=place or 0)
        self.notify(f"{one_line(persona.name)} is deleted. {key('undo')} brings it back.", markup=False)

    def action_undo(self) -> None:
        """Save the persona again that was deleted last."""
        persona = self._deleted[-1]
        try:
            self._file.put(persona)
        except SettingError as error:
            self._tell(str(error))
            return
        self._deleted.pop()
        self._changed(persona.name)

    def _changed(self, name: str | None) -> None:
        """The file changed. ``name``: the persona to mark; None: nothing changed."""
        if name is not None:
            self._tell(" ".join(self._file.notices))
            self._draw(name)


def _prompt(persona: Persona | None, current: str) -> Content:
    """Two lines about ``persona``, with a dot if it is the ``current`` one."""
    name = persona.name if persona is not None else ""
    dot = ("● ", "$text-success") if name == current else ("  ", "")
    if persona is None:
        about = "The settings' system prompt and values."
        return Content.assemble(dot, ("No persona\n", "bold"), (f"  {about}", _MUTED))
    known = ((setting_named(key), value) for key, value in persona.values.items())
    facts = [persona.model, *[f"{setting.label.lower()} {shown(setting, value)}" for setting, value in known]]
    figures = one_line(" · ".join(filter(None, facts)))
    system = one_line(persona.system[:400]) or "No system prompt."
    return Content.assemble(
        dot, (one_line(name), "bold"), (f"  {figures}\n" if figures else "\n", _MUTED), (f"  {system}", _MUTED)
    )


class _PersonaValues:
    """A persona's values for a ValueEditor."""

    def __init__(self, persona: Persona) -> None:
        self.values: dict[str, Value] = dict(persona.values)

    def rows(self) -> Sequence[ValueRow]:
        return [
            ValueRow(setting, self.values.get(setting.key), self._words(setting.key), setting.key in self.values)
            for setting in ADJUSTABLE
        ]

    def _words(self, key: str) -> str:
        if key not in self.values:
            return "  settings"
        return "● persona" if self.values[key] is not None else "● model"

    def change(self, key: str, value: Value) -> None:
        self.values[key] = value

    def reset(self, key: str) -> None:
        self.values.pop(key, None)


class PersonaEditor(Screen[str | None]):
    """All of one persona. Its result is the name it was saved by, None if it was not."""

    HELP = (
        "`tab` goes from field to field. An empty model means whichever is in use. Values without `●` are those of the "
        "settings. `ctrl+s` saves the persona; chats that have it already keep their values."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True, id="persona.save"),
        Binding("tab", "app.focus_next", "Next", id="persona.next"),
        Binding("shift+tab", "app.focus_previous", "Previous", show=False, id="persona.previous"),
        Binding("escape", "leave", "Cancel", key_display="esc", id="persona.leave"),
        Binding(bound("help"), "app.help", "Help", id="persona.help"),
    ]

    def __init__(self, file: PersonasFile, persona: Persona, old: str) -> None:
        super().__init__()
        self._file = file
        self._persona = persona
        self._old = old
        self._values = _PersonaValues(persona)
        self._warned: Persona | None = None

    def compose(self) -> ComposeResult:
        yield Static(f"Persona {one_line(self._old)}".strip(), classes="screen-title", markup=False)
        with VerticalScroll(classes="persona", can_focus=False):
            name = Input(self._persona.name, id="persona-name")
            model = Input(self._persona.model, id="persona-model", placeholder="whichever is in use")
            system = TextField(
                self._persona.system,
                id="persona-system",
                compact=True,
                tab_behavior="focus",
                highlight_cursor_line=False,
            )
            name.border_title, model.border_title, system.border_title = "Name", "Model", "System prompt"
            yield name
            yield model
            yield system
            yield ValueEditor(self._values)
        yield Static("", id="personas-problem", classes="problem", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#personas-problem").display = False
        self.query_one("#persona-name").focus()

    @property
    def _edited(self) -> Persona:
        return replace(
            self._persona,
            name=self.query_one("#persona-name", Input).value,
            system=self.query_one("#persona-system", TextField).text,
            model=self.query_one("#persona-model", Input).value,
            values=dict(self._values.values),
        )

    def action_save(self) -> None:
        try:
            saved = self._file.put(self._edited, self._old)
        except SettingError as error:
            line = self.query_one("#personas-problem", Static)
            line.update(Content(one_line(str(error))))
            line.display = True
            return
        self.dismiss(saved.name)

    def action_leave(self) -> None:
        edited = self._edited
        if edited not in (self._persona, self._warned):
            self._warned = edited
            self.notify("Not saved. Esc again discards the changes.", severity="warning")
            return
        self.dismiss(None)
