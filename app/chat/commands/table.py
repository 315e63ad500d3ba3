"""All commands of the chat. Slash commands, keys, completion, the palette and the help are made from this table.

The names of keys are needed by every screen, so what a command works with is imported when it is first run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.chat.commands.command import Command, Front, Shortcut
from app.text_safety import one_line

if TYPE_CHECKING:
    from app.settings.personas import Persona

MOST_AT_ONCE = 8
"""Maximum number of answers to one question that are asked for at once."""
MOST_BEAMS = 16
"""Largest beam width."""
NO_PERSONA = "none"
"""The word that stands for no persona, unless there is a persona of that name."""
_MOST_SHOWN = 80
"""Number of characters of a system prompt that are shown beside the persona's name."""


# --- chats, models --------------------------------------------------------------------------------------------------


def _new(front: Front, _: str) -> None:
    front.hide_notice()
    front.call(front.controller.new_conversation)
    front.to_prompt()
    front.say("", in_lines="New chat.")


def _temporary(front: Front, _: str) -> None:
    front.hide_notice()
    front.call(lambda: front.controller.new_conversation(temporary=True))
    front.to_prompt()
    front.say("", in_lines="Temporary chat: nothing of it is saved.")


def use_model(front: Front, name: str) -> None:
    """Answer with the model ``name`` from now on; the one in use is loaded again."""
    controller = front.controller
    if name == controller.options.model and controller.is_saved("model"):
        front.call(lambda: controller.load_again(fetch=True))
    else:
        front.say(front.call(controller.change_settings, {"model": name}), "error")
    front.say("", in_lines=f"The next question is answered by {one_line(controller.options.model)}.")


def _model(front: Front, name: str) -> None:
    if name:
        use_model(front, name)
    else:
        front.models()


def _model_names() -> Iterable[tuple[str, str]]:
    from app.chat.model_choices import model_options
    from engine.errors import ModelError

    try:
        return [(row.name, one_line(row.figures) if row.here else "not downloaded") for row in model_options()]
    except (ModelError, OSError):
        return []  # the list of models says what is wrong


# --- setup of the chat ----------------------------------------------------------------------------------------------


def use_beams(front: Front, width: int) -> None:
    """Use beams of this ``width`` in the shown chat."""
    front.call(front.controller.setup.change, {"beams": width})
    front.say(f"This chat's next question uses {width} beam{'' if width == 1 else 's'}.")


def _beams(front: Front, width: str) -> None:
    if not width:
        front.beams()
        return
    number = int(width) if width.isascii() and width.isdecimal() else 0
    if 1 <= number <= MOST_BEAMS:
        use_beams(front, number)
        front.to_prompt()
    else:
        front.say(f"The beam width must be a number from 1 to {MOST_BEAMS}, not {one_line(width)}.", "warning")


def _beam_widths() -> Iterable[tuple[str, str]]:
    return [(str(width), "one beam" if width == 1 else f"{width} beams") for width in range(1, MOST_BEAMS + 1)]


def use_persona(front: Front, persona: Persona | None) -> None:
    """Give the chat ``persona``, or the setup of a new chat."""
    setup = front.controller.setup
    if persona is None:
        front.call(setup.leave_persona)
        front.say("This chat has no persona now.")
        return
    before = front.controller.options.model
    problem = front.call(setup.use_persona, persona)
    if problem:
        front.say(problem, "error")
        return
    text = f"This chat's persona is {one_line(persona.name)}."
    loads = f" {persona.model} is loaded for it." if persona.model not in ("", before) else ""
    front.say(text + loads, in_lines=text)


def choose_persona(front: Front, name: str) -> None:
    """Give the chat the persona ``name``; without a name, one of a list."""
    if not name:
        front.personas()
        return
    from app.settings.fields import SettingError
    from app.settings.personas import open_personas

    file = open_personas()
    for notice in file.notices:
        front.say("", "warning", in_lines=notice)
    try:
        use_persona(front, file.find(name))
    except SettingError as error:
        if name.casefold() == NO_PERSONA:
            use_persona(front, None)
        else:
            front.say(" ".join([str(error), *file.notices]), "warning", in_lines=str(error))


def _persona_names() -> Iterable[tuple[str, str]]:
    from app.settings.personas import open_personas

    personas = [(persona.name, one_line(persona.system)[:_MOST_SHOWN]) for persona in open_personas().read()]
    return [*personas, (NO_PERSONA, "the setup of a new chat")]


def _system(front: Front, text: str) -> None:
    setup = front.controller.setup

    def in_lines() -> str:
        if setup.system:
            return f"The system prompt of this chat: {one_line(setup.system)}"
        return "This chat has no system prompt. /system TEXT sets one."

    def use(text: str) -> None:
        front.call(setup.set_system, text)
        has = "its own system prompt" if setup.system else "no system prompt"
        front.say(f"This chat has {has} now.", in_lines=in_lines())

    if text:
        use(text)
    else:
        hint = "For this chat only, from the next question on. An empty text removes it."
        front.change("System prompt", setup.system, hint, use, in_lines=in_lines())


def _sampling(front: Front, preset: str) -> None:
    if not preset:
        front.sampling()
        return
    from app.settings.fields import SettingError
    from app.settings.layers import preset_named

    try:
        front.call(front.controller.setup.use_preset, preset_named(preset))
    except SettingError as error:
        front.say(str(error), "warning")
    else:
        front.sampling(preset_named(preset).name)


def _preset_names() -> Iterable[tuple[str, str]]:
    from app.settings.layers import PRESETS

    return [(preset.name, preset.about) for preset in PRESETS]


def _set(front: Front, argument: str) -> None:
    """``NAME VALUE``, ``NAME`` to see one value, or nothing to see all."""
    from app.settings.fields import SettingError

    name, _, text = argument.partition(" ")
    if not name:
        front.sampling()
        return
    try:
        front.say(front.call(front.controller.setup.change_typed, name, text))
    except SettingError as error:
        sentence = str(error)[:1].upper() + str(error)[1:]
        front.say(sentence if sentence.endswith(".") else f"{sentence}.", "warning", in_lines=str(error))


def _value_names() -> Iterable[tuple[str, str]]:
    from app.settings.layers import ADJUSTABLE

    return [(setting.key, one_line(setting.help)) for setting in ADJUSTABLE]


# --- messages -------------------------------------------------------------------------------------------------------


def _several(front: Front, argument: str) -> None:
    """``COUNT [QUESTION]``, or nothing to see the answers again"""
    count, _, question = argument.partition(" ")
    if not argument:
        front.several()
        return
    number = int(count) if count.isascii() and count.isdecimal() and len(count) == 1 else 0
    if not 2 <= number <= MOST_AT_ONCE:
        front.say(f"The number of answers must be from 2 to {MOST_AT_ONCE}, not {one_line(count[:20])}.", "warning")
        return
    front.hide_notice()
    if front.call(front.controller.ask_several, number, question.strip()):
        front.write_answer()
        front.several()


def _again(front: Front, _: str) -> None:
    front.hide_notice()
    front.call(front.controller.regenerate)
    front.write_answer()


def _continue(front: Front, _: str) -> None:
    front.hide_notice()
    front.call(front.controller.continue_answer)
    front.to_prompt(end=True)
    front.write_answer()


def _edit(front: Front, _: str) -> None:
    questions = [entry for entry in front.controller.thread.path if entry.role == "user"]
    if questions:
        front.edit(questions[-1])
    else:
        front.say("There is no question to edit yet.", "warning")


# --- the chat as a whole --------------------------------------------------------------------------------------------


def _rename(front: Front, title: str) -> None:
    controller = front.controller
    if title:
        front.call(controller.rename, title)
    else:
        front.ask(
            "Title of the chat",
            lambda title: front.call(controller.rename, title),
            text=controller.thread.title,
            in_lines="Title of the chat",
        )


def _toggle(front: Front, flag: Literal["pinned", "archived"]) -> None:
    from app.chat.saving import toggle

    front.run(toggle(front.controller, flag))


def _import(front: Front, file: str) -> None:
    from app.chat.saving import import_file

    if file:
        front.run(import_file(front.controller, file))
    else:
        front.ask(
            "Import chats from file (JSON, ZIP, or logs.db of llm)",
            lambda file: front.run(import_file(front.controller, file)),
            in_lines="File to import: JSON, ZIP, or logs.db of llm",
        )


def _export(front: Front, argument: str) -> None:
    """``[--thoughts] [file]``"""
    from app.chat.thread import export_thread
    from app.conversations.exporting import export_problem, suggested_path
    from app.conversations.store import StoreError

    flag, _, rest = argument.partition(" ")
    thoughts = flag == "--thoughts"
    name = rest.strip() if thoughts else argument
    thread = front.controller.thread
    if thread.conversation is None and not thread.path:
        front.say("There is nothing to export yet.", "warning")
        return

    def export(name: str) -> None:
        thread, file = front.controller.thread, Path(name).expanduser()
        try:
            written = export_thread(front.controller.store, thread, file, thoughts=thoughts)
        except (OSError, StoreError) as error:
            front.say(export_problem(Path(name), error), "error")
        else:
            front.say(f"Exported to {written}.")

    if name:
        export(name)
    else:
        front.ask("Export to file (.md or .json)", export, text=str(suggested_path(thread.title)))


def _export_flags() -> Iterable[tuple[str, str]]:
    return [("--thoughts", "with the model's thoughts")]


def _status(front: Front, _: str) -> None:
    from app.chat.words import status_words

    front.tell("Status", status_words(front.controller.status))


# --- the table ------------------------------------------------------------------------------------------------------

COMMANDS: tuple[Command, ...] = (
    Command("help", "Help", "Keys and commands", lambda front, _: front.help(),
            shortcut=Shortcut("chat.help", ("f1", "ctrl+underscore")), aliases=("?",)),
    Command("new", "New chat", "Start an empty chat", _new, shortcut=Shortcut("chat.new", ("ctrl+n",), label="New")),
    Command("temporary", "Temporary chat", "Start a chat of which nothing is saved", _temporary),
    Command("chats", "Chats", "Search, open, pin, rename, export or delete chats", lambda front, _: front.chats(),
            shortcut=Shortcut("chat.conversations", ("f2", "ctrl+o"), shown=True), aliases=("resume",)),
    Command("model", "Model", "Choose, download or load a model", _model, "[name]",
            shortcut=Shortcut("chat.model", ("f3", "ctrl+g"), shown=True), values=_model_names, values_are_slow=True),
    Command("beams", "Beams", "Set the beam width; see the candidates", _beams, "[width]",
            shortcut=Shortcut("chat.beams", ("f4", "ctrl+b"), shown=True), values=_beam_widths),
    Command("persona", "Persona", "Choose, save or edit personas; /persona none", choose_persona, "[name]",
            values=_persona_names),
    Command("system", "System prompt", "See and change this chat's system prompt", _system, "[text]"),
    Command("sampling", "Sampling", "See and change this chat's sampling", _sampling, "[preset]",
            shortcut=Shortcut("chat.sampling", ("f7", "ctrl+backslash")), values=_preset_names),
    Command("set", "Set a value", "Set a value of this chat: /set temperature 0.2, /set seed reset", _set,
            "[name [value]]", values=_value_names),
    Command("timing", "Timing", "See where each token's time goes", lambda front, _: front.timing(),
            shortcut=Shortcut("chat.timing", ("f5", "ctrl+t"), shown=True)),
    Command("thoughts", "Thoughts", "Show or fold what the model thought before its answers",
            lambda front, _: front.thoughts(), shortcut=Shortcut("chat.thoughts", ("f9", "ctrl+right_square_bracket")),
            help_in_lines="Print what the model thought before its last answer"),
    Command("status", "Status", "Model, engine, context, memory and speed in words", _status),
    Command("log", "Log", "See what the engine and the screen have logged", lambda front, _: front.log()),
    Command("machines", "Machines", "Find, pair and forget machines; form a ring", lambda front, _: front.machines(),
            shortcut=Shortcut("chat.machines", ("f8", "ctrl+l"), shown=True), aliases=("peers",)),
    Command("keys", "Keys", "Try keys, and see all actions with their keys", lambda front, _: front.keys(),
            help_in_lines="What the keys do here"),
    Command("settings", "Settings", "Change the settings", lambda front, _: front.settings(),
            shortcut=Shortcut("chat.settings", ("ctrl+s",), shown=True)),
    Command("again", "Regenerate", "Answer the last question again; the old answer stays", _again,
            shortcut=Shortcut("chat.again", ("ctrl+r",)), aliases=("retry", "regenerate")),
    Command("n", "Several answers", "Ask several times at once: /n 4 Why?; /n 4 asks the last question again",
            _several, "[count [question]]"),
    Command("continue", "Continue the answer", "Let the model go on with its last answer; with m any answer", _continue,
            help_in_lines="Let the model go on with its last answer"),
    Command("delete", "Delete the last message", "Delete the last message, with x any; /delete chat: the whole chat",
            lambda front, what: front.call(front.controller.deletions.named, what), "[chat]",
            help_in_lines="Delete the last message, or with chat the whole chat; /undo brings it back"),
    Command("undo", "Undo a deletion", "Bring back what was deleted last, here or in the chats",
            lambda front, _: front.call(front.controller.deletions.undo)),
    Command("edit", "Edit the last question", "Ask the last question in other words; the old one stays", _edit),
    Command("history", "Earlier questions", "Find a question of any chat by its words",
            lambda front, words: front.history(words), "[words]"),
    Command("editor", "Editor", "Write the draft in your own editor: VISUAL or EDITOR", lambda front, _: front.editor(),
            shortcut=Shortcut("prompt.editor", ("ctrl+x",)),
            help_in_lines="Write a question in your own editor: VISUAL or EDITOR"),
    Command("find", "Find in the chat", "Find a text in the chat; in the messages also with /",
            lambda front, text: front.find(text), "[text]",
            help_in_lines="Print the lines of the chat that have a text"),
    Command("copy", "Copy the last answer", "Copy the last answer as Markdown",
            lambda front, _: front.copying.last_answer()),
    Command("code", "Copy the last code block", "Copy the last block of code in the chat",
            lambda front, _: front.copying.last_code()),
    Command("rename", "Rename the chat", "Give the chat a title", _rename, "[title]"),
    Command("pin", "Pin the chat", "Keep the chat at the top of the list, or no longer",
            lambda front, _: _toggle(front, "pinned")),
    Command("archive", "Archive the chat", "Put the chat away from the list, or back",
            lambda front, _: _toggle(front, "archived")),
    Command("import", "Import chats", "Take in chats of privatellm, ChatGPT, Claude, Open WebUI or llm", _import,
            "[file]"),
    Command("export", "Export the chat",
            "Write the chat to a Markdown or JSON file; --thoughts: with the model's thoughts", _export,
            "[--thoughts] [file]", values=_export_flags),
    Command("stop", "Stop the answer", "Stop the answer and keep its text", lambda front, _: front.stop(),
            shortcut=Shortcut("chat.stop", ("escape",)),
            help_in_lines="ctrl+c stops an answer while it is written, and keeps its text"),
    Command("suspend", "Suspend", "Go back to the shell; fg continues", lambda front, _: front.suspend()),
    Command("quit", "Quit", "Leave; all chats are saved", lambda front, _: front.quit(),
            shortcut=Shortcut("app.quit", ("ctrl+q",)), aliases=("exit",)),
)  # fmt: skip

BY_NAME = {command.name: command for command in COMMANDS}
"""The commands by their own names, without aliases."""
_BY_WORD = BY_NAME | {alias: command for command in COMMANDS for alias in command.aliases}


# --- what is typed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A command and the argument that was typed after it."""

    command: Command
    argument: str = ""


class UnknownCommand(ValueError):
    """The text is one sentence for the person."""


def parse(text: str) -> Call | None:
    """The command that ``text`` calls; None if it is a question. Raises UnknownCommand.

    A question may begin with a slash if it does not look like a command: a path, several lines, or ``//``.
    """
    if not text.startswith("/") or "\n" in text:
        return None
    word, _, argument = text[1:].partition(" ")
    if not word or "/" in word:
        return None
    command = _BY_WORD.get(word.lower())
    if command is None:
        near = [name for name in _BY_WORD if name.startswith(word.lower()[:2])]
        hint = f"did you mean /{near[0]}?" if near else "/help lists all commands."
        raise UnknownCommand(f"There is no command /{word}; {hint}")
    if argument.strip() and not command.argument:
        raise UnknownCommand(f"/{command.name} takes no arguments.")
    return Call(command, argument.strip())


def unescaped(text: str) -> str:
    """The question that ``text`` asks: ``//help`` asks ``/help``. Every other text is asked as it stands."""
    return text[1:] if text.startswith("//") and text[2:].lower() in _BY_WORD else text
