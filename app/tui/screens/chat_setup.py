"""The commands that change the shown chat's setup: system prompt, persona, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.settings.fields import SettingError
from app.settings.layers import preset_named
from app.settings.personas import Persona, open_personas
from app.tui.screens.command_host import CommandHost

if TYPE_CHECKING:
    from app.tui.screens.personas import Chosen

NO_PERSONA = "none"
"""The word that stands for no persona, unless there is a persona of that name."""


class SetupCommands:
    """What ``/system``, ``/set``, ``/sampling`` and ``/persona`` do on the chat screen."""

    def __init__(self, screen: CommandHost) -> None:
        self._screen = screen
        self._setup = screen.controller.setup

    def system(self, text: str = "") -> None:
        """Use ``text`` as the chat's system prompt; without one, edit it in a dialogue."""
        if text:
            self._use_system(text)
            return
        from app.tui.screens.dialogues import EditText

        def edited(result: str | None) -> None:
            if result is not None and result != self._setup.system:
                self._use_system(result)
            self._screen.focus_prompt()

        hint = "For this chat only, from the next question on. An empty text removes it."
        self._screen.app.push_screen(EditText("System prompt", self._setup.system, hint), edited)

    def set_value(self, argument: str = "") -> None:
        """``NAME VALUE``, ``NAME`` to see one value, or nothing to see all."""
        name, _, text = argument.partition(" ")
        if not name:
            self.sampling()
            return
        try:
            self._screen.show_notice(self._setup.change_typed(name, text))
        except SettingError as error:
            self._screen.show_notice(_sentence(str(error)), "warning")

    def sampling(self, preset: str = "") -> None:
        """Use the preset of that name; without one, show all values."""
        if preset:
            try:
                self._setup.use_preset(preset_named(preset))
            except SettingError as error:
                self._screen.show_notice(str(error), "warning")
            else:
                self._screen.show_notice(f"The sampling of this chat is {preset_named(preset).name}.")
            return
        from app.tui.screens.sampling import SamplingScreen

        self._screen.app.push_screen(
            SamplingScreen(self._screen.controller), lambda result: self._screen.focus_prompt()
        )

    def persona(self, name: str = "") -> None:
        """Give the chat the persona ``name``; without a name, choose one in a list."""
        if not name:
            self._choose()
            return
        file = open_personas()
        try:
            self.use(file.find(name))
        except SettingError as error:
            if name.casefold() == NO_PERSONA:
                self.use(None)
            else:
                self._screen.show_notice(" ".join([str(error), *file.notices]), "warning")

    def use(self, persona: Persona | None) -> None:
        """Give the chat ``persona``, or the setup of a new chat."""
        if persona is None:
            self._setup.leave_persona()
            self._screen.show_notice("This chat has no persona now.")
            return
        before = self._screen.controller.options.model
        problem = self._setup.use_persona(persona)
        if problem:
            self._screen.show_notice(problem, "error")
            return
        loads = f" {persona.model} is loaded for it." if persona.model not in ("", before) else ""
        self._screen.show_notice(f"This chat's persona is {persona.name}.{loads}")

    def _choose(self) -> None:
        from app.tui.screens.personas import PersonasScreen

        def chosen(result: Chosen | None) -> None:
            if result is not None:
                self.use(result.persona)
            self._screen.focus_prompt()

        self._screen.app.push_screen(PersonasScreen(self._screen.controller, open_personas()), chosen)

    def _use_system(self, text: str) -> None:
        self._setup.set_system(text)
        has = "its own system prompt" if self._setup.system else "no system prompt"
        self._screen.show_notice(f"This chat has {has} now.")


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."
