"""The commands of the chat in lines that change the chat's setup: system prompt, persona, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from app.settings.fields import SettingError
from app.settings.layers import ADJUSTABLE, PRESETS, preset_named, shown, value_in_effect
from app.settings.personas import Persona, open_personas
from app.text_safety import one_line

if TYPE_CHECKING:
    from app.plain.chat import PlainChat

Pick = Callable[["PlainChat", Sequence[str], str], int | str | None]
"""Lets the person pick one of some lines."""

_SOURCES = {"chat": ", of this chat", "persona": ", of the persona", "settings": ", of the settings", "default": ""}


def system(chat: PlainChat, text: str) -> None:
    setup = chat.controller.setup
    if text:
        chat.call(setup.set_system, text)
    if setup.system:
        chat.speaker.say(f"The system prompt of this chat: {one_line(setup.system)}")
    else:
        chat.speaker.say("This chat has no system prompt. /system TEXT sets one.")


def set_value(chat: PlainChat, argument: str) -> None:
    name, _, text = argument.partition(" ")
    if not name:
        sampling(chat, "")
        return
    try:
        chat.speaker.say(str(chat.call(chat.controller.setup.change_typed, name, text)))
    except SettingError as error:
        chat.speaker.say(str(error), "Warning")


def sampling(chat: PlainChat, preset: str) -> None:
    """Use the preset of that name if there is one, and write all values."""
    setup = chat.controller.setup
    if preset:
        try:
            chat.call(setup.use_preset, preset_named(preset))
        except SettingError as error:
            chat.speaker.say(str(error), "Warning")
            return
    facts = chat.controller.status.facts
    for setting in ADJUSTABLE:
        source = _SOURCES[setup.values.source(setting.key, chat.controller.options)]
        value = value_in_effect(setting.key, setup.options, facts.sampling if facts is not None else None)
        chat.console.write_line(f"{setting.label}: {shown(setting, value)}{source}")
    names = ", ".join(known.name for known in PRESETS)
    chat.speaker.say(f"/set NAME VALUE changes one for this chat. /sampling sets several by a preset: {names}.")


def persona(chat: PlainChat, name: str, pick: Pick) -> None:
    """Give the chat the persona ``name``; without a name, one that is picked."""
    file = open_personas()
    for notice in file.notices:
        chat.speaker.say(notice, "Warning")
    if not name:
        if not file.personas:
            chat.speaker.say(f"There are no personas yet. They are kept in {file.path}.")
            return
        lines = [f"{one_line(known.name)}: {one_line(known.system)}" for known in file.personas]
        picked = pick(chat, lines, "Number of the persona, or none")
        if picked is None:
            return
        name = picked if isinstance(picked, str) else file.personas[picked].name
    try:
        found: Persona | None = file.find(name)
    except SettingError as error:
        if name.casefold() != "none":
            chat.speaker.say(str(error), "Warning")
            return
        found = None
    if found is None:
        chat.call(chat.controller.setup.leave_persona)
        chat.speaker.say("This chat has no persona now.")
        return
    problem = chat.call(chat.controller.setup.use_persona, found)
    if problem:
        chat.speaker.say(str(problem), "Error")
    else:
        chat.speaker.say(f"This chat's persona is {one_line(found.name)}.")
