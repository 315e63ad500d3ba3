"""The values that arguments of slash commands can have, for their completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.worker import get_current_worker

from app.settings.layers import ADJUSTABLE, PRESETS
from app.text_safety import one_line
from app.tui.chat.prompt import Prompt
from app.tui.chat.slash import SlashCommands

MOST_BEAMS = 16
"""Largest beam width."""
_MOST_SHOWN = 80
"""Number of characters of a system prompt that are shown beside the persona's name."""


def slash_commands(prompt: Prompt, recent: Sequence[str]) -> SlashCommands:
    """The source of slash commands for ``prompt``. ``recent``: titles of the commands run last."""
    return SlashCommands(
        {
            "model": ModelNames(prompt),
            "beams": beam_widths,
            "persona": persona_names,
            "sampling": preset_names,
            "set": value_names,
            "export": export_flags,
        },
        recent,
    )


def beam_widths() -> Iterable[tuple[str, str]]:
    return [(str(width), "one beam" if width == 1 else f"{width} beams") for width in range(1, MOST_BEAMS + 1)]


def export_flags() -> Iterable[tuple[str, str]]:
    return [("--thoughts", "with the model's thoughts")]


def persona_names() -> Iterable[tuple[str, str]]:
    from app.settings.personas import open_personas
    from app.tui.screens.chat_setup import NO_PERSONA

    personas = [(persona.name, one_line(persona.system)[:_MOST_SHOWN]) for persona in open_personas().read()]
    return [*personas, (NO_PERSONA, "the setup of a new chat")]


def value_names() -> Iterable[tuple[str, str]]:
    return [(setting.key, one_line(setting.help)) for setting in ADJUSTABLE]


def preset_names() -> Iterable[tuple[str, str]]:
    return [(preset.name, preset.about) for preset in PRESETS]


class ModelNames:
    """The models on this machine and those of the catalogue. They are looked for when they are first asked for.

    Looking reads the disk, so that it is done in a thread; ``prompt`` is told when the names are known.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._names: list[tuple[str, str]] | None = None

    def __call__(self) -> Iterable[tuple[str, str]]:
        if self._names is None:
            self._names = []
            self._prompt.run_worker(self._look, thread=True, group="names", exit_on_error=False)
        return self._names

    def _look(self) -> None:
        from app.chat.model_choices import model_options
        from engine.errors import ModelError

        try:
            found = [(row.name, one_line(row.figures) if row.here else "not downloaded") for row in model_options()]
        except (ModelError, OSError):
            return  # the list of models says what is wrong
        if not get_current_worker().is_cancelled:
            self._prompt.app.call_from_thread(self._found, found)

    def _found(self, found: list[tuple[str, str]]) -> None:
        self._names = found
        self._prompt.completer.forget()
        self._prompt.show_completions()
