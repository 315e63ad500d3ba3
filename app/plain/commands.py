"""The commands of the chat in lines: all of :data:`app.tui.keymap.COMMANDS`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat.model_choices import model_options
from app.chat.saving import import_file, toggle
from app.chat.thread import export_thread
from app.chat.words import status_words, timing_words
from app.conversations.exporting import export_problem, suggested_path
from app.conversations.records import Conversation
from app.conversations.store import StoreError
from app.log_tail import LOGS, log_path, read_tail
from app.plain import setup_commands, text_commands
from app.plain.speaking import speaker, thoughts_mark
from app.ring_words import machine_name, state_words
from app.settings.fields import SettingError
from app.settings.schema import SCHEMA, setting_named
from app.text_safety import one_line
from app.tui.keymap import COMMANDS, parse
from engine.errors import ModelError

if TYPE_CHECKING:
    from app.plain.chat import PlainChat

_MOST_LISTED = 20
"""Number of conversations in a list to pick from."""
_LOG_LINES = 20
"""Number of lines of each log that are printed."""
_KEYS = (
    'Several lines: begin and end with """, or end each line but the last with \\.',
    "Up brings back earlier questions of all chats.",
    "ctrl+c stops an answer and keeps its text. ctrl+d leaves. ctrl+z goes back to the shell.",
)
_HELP = {
    "thoughts": "Print what the model thought before its last answer",
    "keys": "What the keys do here",
    "continue": "Let the model go on with its last answer",
    "delete": "Delete the last message, or with chat the whole chat; /undo brings it back",
    "editor": "Write a question in your own editor: VISUAL or EDITOR",
    "find": "Print the lines of the chat that have a text",
    "stop": "ctrl+c stops an answer while it is written, and keeps its text",
}
"""Help where a command does something else than on the screen."""


def run_command(chat: PlainChat, text: str) -> bool:
    """Run ``text`` if it is a command. Returns False if it is a question. Raises UnknownCommand, EOFError."""
    call = parse(text)
    if call is None:
        return False
    ACTIONS[call.command.name](chat, call.argument)
    return True


def _help(chat: PlainChat, _: str) -> None:
    for command in COMMANDS:
        name = " ".join(filter(None, [f"/{command.name}", command.argument]))
        chat.console.write_line(f"{name}: {_HELP.get(command.name, command.help)}.")
    _keys(chat, "")


def _keys(chat: PlainChat, _: str) -> None:
    for line in _KEYS:
        chat.console.write_line(line)


def _new(chat: PlainChat, _: str) -> None:
    chat.call(chat.controller.new_conversation)
    chat.speaker.say("New chat.")


def _chats(chat: PlainChat, words: str) -> None:
    store = chat.controller.store
    try:
        if words:
            found = list({hit.conversation.id: hit.conversation for hit in store.search(words)}.values())
        else:
            found = store.conversations()
    except StoreError as error:
        chat.speaker.say(str(error), "Error")
        return
    if not found:
        chat.speaker.say("No chat was found." if words else "There are no chats yet.")
        return
    picked = _pick(chat, [_chat_line(known) for known in found[:_MOST_LISTED]], "Number, or words to search for")
    if isinstance(picked, str):
        _chats(chat, picked)
    elif picked is not None and chat.call(chat.controller.open_conversation, found[picked].id):
        chat.speaker.say(one_line(found[picked].title), "Chat")
        chat.show_conversation()


def _chat_line(conversation: Conversation) -> str:
    day = datetime.fromtimestamp(conversation.updated).strftime("%Y-%m-%d %H:%M")
    return f"{one_line(conversation.title) or 'Untitled'}, {day}"


def _model(chat: PlainChat, name: str) -> None:
    if not name:
        try:
            options = model_options()
        except (ModelError, OSError) as error:
            chat.speaker.say(one_line(str(error)), "Error")
            return
        here = [option for option in options if option.here]
        current = chat.controller.options.model
        lines = [f"{one_line(known.name)}, {known.figures}{', in use' * (known.name == current)}" for known in here]
        chat.speaker.say("Models on this machine. `privatellm models pull` downloads others.")
        picked = _pick(chat, lines, "Number, or the name of another model")
        if picked is None:
            return
        name = picked if isinstance(picked, str) else here[picked].name
    if name == chat.controller.options.model:
        chat.call(chat.controller.load_again)
    else:
        _tell_problem(chat, chat.call(chat.controller.change_settings, {"model": name}))
    chat.speaker.say(f"The next question is answered by {one_line(chat.controller.options.model)}.")


def _beams(chat: PlainChat, width: str) -> None:
    controller = chat.controller
    if width:
        number = int(width) if width.isascii() and width.isdecimal() else 0
        if not 1 <= number <= 16:
            chat.speaker.say(f"The beam width must be a number from 1 to 16, not {one_line(width)}.", "Warning")
            return
        chat.call(controller.setup.change, {"beams": number})
        chat.speaker.say(f"This chat's next question uses {number} beam{'' if number == 1 else 's'}.")
        return
    candidates = controller.beams
    chat.speaker.say(f"The beam width is {controller.setup.options.beams}. /beams WIDTH changes it, from 1 to 16.")
    if not candidates:
        return
    lines = [f"score {beam.score:.3f}: {one_line(beam.text) or '(empty)'}" for beam in candidates]
    picked = _pick(chat, lines, "Number of the candidate to use")
    if isinstance(picked, int):
        chat.call(controller.pick_beam, picked)
        chat.speaker.message(controller.thread.path[-1])
    elif picked:
        chat.speaker.say("There is no such candidate.", "Warning")


def _thoughts(chat: PlainChat, _: str) -> None:
    answers = [entry for entry in chat.controller.thread.path if entry.thoughts.text]
    if answers:
        chat.speaker.say(answers[-1].thoughts.text, thoughts_mark(answers[-1]))
    else:
        chat.speaker.say("No answer here has thoughts.")


def _status(chat: PlainChat, _: str) -> None:
    for line in status_words(chat.controller.status):
        chat.console.write_line(line)


def _timing(chat: PlainChat, _: str) -> None:
    timing = chat.controller.timing
    if not chat.controller.link.watching:
        chat.background.run(chat.controller.link.watch(True))
        chat.speaker.say("Times are measured from the next answer on. /timing prints them.")
    elif timing is None:
        chat.speaker.say("Nothing has been measured yet.")
    for line in timing_words(timing) if timing is not None else []:
        chat.console.write_line(line)


def _log(chat: PlainChat, _: str) -> None:
    for log in LOGS:
        lines = read_tail(log_path(log)).splitlines()[-_LOG_LINES:]
        chat.speaker.say(str(log_path(log)), f"Log of the {log}")
        for line in lines:
            chat.console.write_line(line)


def _machines(chat: PlainChat, _: str) -> None:
    problem = chat.background.run(chat.controller.link.list_machines())
    if problem:
        chat.speaker.say(problem, "Error")
        return
    state = chat.controller.link.network.state
    peers = state.peers if state is not None else []
    for peer in peers:
        chat.console.write_line(f"{machine_name(peer)}: {state_words(peer)}.")
    if not peers:
        chat.speaker.say("No machine is paired.")
    chat.speaker.say("`privatellm peers pair` pairs a machine, /settings partitioning ring uses them.")


def _settings(chat: PlainChat, _: str) -> None:
    options = chat.controller.options
    changed = [known for known in SCHEMA if options.value(known.key) != known.default]
    for known in changed:
        chat.console.write_line(f"{known.key} {_shown(options.value(known.key))}: {known.label}.")
    if not changed:
        chat.speaker.say("All settings have their defaults.")
    line = chat.console.read_line(
        "A setting and its value, such as temperature 0.7; ? lists all; empty: back. "
    ).strip()
    if line == "?":
        for known in SCHEMA:
            value = _shown(options.value(known.key))
            chat.console.write_line(f"{known.key} {value}: {known.label}. {known.help} {known.allowed.capitalize()}.")
        return
    key, _, value = line.partition(" ")
    if not key:
        return
    try:
        wanted = setting_named(key).parse(value)
    except SettingError as error:
        chat.speaker.say(f"{one_line(str(error))}.", "Warning")
        return
    _tell_problem(chat, chat.call(chat.controller.change_settings, {key: wanted}))
    chat.speaker.say(f"{key} is now {_shown(chat.controller.options.value(key))}.")


def _shown(value: object) -> str:
    if value is None or value == "":
        return "(empty)"
    return one_line(str(value).lower() if isinstance(value, bool) else str(value))


def _again(chat: PlainChat, _: str) -> None:
    if not chat.controller.thread.path:
        chat.speaker.say("There is no answer to regenerate yet.", "Warning")
        return
    chat.call(chat.controller.regenerate)
    chat.follow()


def _continue(chat: PlainChat, _: str) -> None:
    chat.call(chat.controller.continue_answer)
    if chat.controller.busy:
        chat.follow()


def _temporary(chat: PlainChat, _: str) -> None:
    chat.background.call(lambda: chat.controller.new_conversation(temporary=True))
    chat.speaker.say("Temporary chat: nothing of it is saved.")


def _delete(chat: PlainChat, what: str) -> None:
    chat.call(chat.controller.deletions.named, what)


def _undo(chat: PlainChat, _: str) -> None:
    chat.call(chat.controller.deletions.undo)


def _edit(chat: PlainChat, _: str) -> None:
    questions = [entry for entry in chat.controller.thread.path if entry.role == "user"]
    if not questions:
        chat.speaker.say("There is no question to edit yet.", "Warning")
        return
    chat.speaker.say(questions[-1].content, "The last question")
    text = chat.console.read_text("In its place; empty: back. ")
    attachments = chat.attached(text, questions[-1].attachments) if text.strip() else None
    if attachments is not None:
        chat.call(chat.controller.edit, questions[-1], text, attachments)
        chat.follow()


def _find(chat: PlainChat, words: str) -> None:
    words = words or chat.console.read_line("Find; empty: back. ").strip()
    if not words:
        return
    hits = [
        f"{speaker(entry)}, message {number}: {line.strip()}"
        for number, entry in enumerate(chat.controller.thread.path, start=1)
        for line in entry.content.splitlines()
        if words.casefold() in line.casefold()
    ]
    chat.speaker.say(f"{len(hits)} line{'' if len(hits) == 1 else 's'} found.")
    for hit in hits:
        chat.console.write_line(hit)


def _rename(chat: PlainChat, title: str) -> None:
    title = title or chat.console.read_line("Title of the chat; empty: back. ").strip()
    if title:
        chat.call(chat.controller.rename, title)


def _export(chat: PlainChat, argument: str) -> None:
    thread = chat.controller.thread
    if thread.conversation is None and not thread.path:
        chat.speaker.say("There is nothing to export yet.", "Warning")
        return
    flag, _, rest = argument.partition(" ")
    thoughts = flag == "--thoughts"
    name = rest.strip() if thoughts else argument
    file = Path(name).expanduser() if name else suggested_path(thread.title)
    try:
        written = export_thread(chat.controller.store, thread, file, thoughts=thoughts)
    except (OSError, StoreError) as error:
        chat.speaker.say(export_problem(file, error), "Error")
    else:
        chat.speaker.say(f"Exported to {written}.")


def _import(chat: PlainChat, file: str) -> None:
    file = file or chat.console.read_line("File to import: JSON, ZIP, or logs.db of llm; empty: back. ").strip()
    if file:
        chat.background.run(import_file(chat.controller, file))


def _stop(chat: PlainChat, _: str) -> None:
    chat.speaker.say("No answer is being written. ctrl+c stops one while it is.")


def _suspend(chat: PlainChat, _: str) -> None:
    if not chat.console.interactive or os.getpgrp() == os.getsid(0):
        chat.speaker.say("There is no shell to go back to.", "Warning")
    else:
        signal.raise_signal(signal.SIGTSTP)


def _quit(chat: PlainChat, _: str) -> None:
    raise EOFError


ACTIONS: dict[str, Callable[[PlainChat, str], None]] = {
    "help": _help,
    "new": _new,
    "chats": _chats,
    "model": _model,
    "beams": _beams,
    "persona": lambda chat, name: setup_commands.persona(chat, name, _pick),
    "system": setup_commands.system,
    "sampling": setup_commands.sampling,
    "set": setup_commands.set_value,
    "thoughts": _thoughts,
    "machines": _machines,
    "status": _status,
    "timing": _timing,
    "log": _log,
    "settings": _settings,
    "again": _again,
    "continue": _continue,
    "temporary": _temporary,
    "delete": _delete,
    "undo": _undo,
    "edit": _edit,
    "find": _find,
    "rename": _rename,
    "pin": lambda chat, _: chat.background.run(toggle(chat.controller, "pinned")),
    "archive": lambda chat, _: chat.background.run(toggle(chat.controller, "archived")),
    "history": lambda chat, words: text_commands.history(chat, words, _pick),
    "editor": text_commands.editor,
    "copy": text_commands.copy_answer,
    "code": text_commands.copy_code,
    "keys": _keys,
    "stop": _stop,
    "suspend": _suspend,
    "export": _export,
    "import": _import,
    "quit": _quit,
}
"""What each command does here, by its name."""


def _pick(chat: PlainChat, lines: Sequence[str], what: str) -> int | str | None:
    """Write ``lines`` with numbers from 1 and read one. Returns its index, other words as typed, None for nothing."""
    for number, line in enumerate(lines, start=1):
        chat.console.write_line(f"{number}. {line}")
    word = chat.console.read_line(f"{what}; empty: back. ").strip()
    if word.isascii() and word.isdecimal() and 1 <= int(word) <= len(lines):
        return int(word) - 1
    return word or None


def _tell_problem(chat: PlainChat, problem: object) -> None:
    if problem:
        chat.speaker.say(str(problem), "Error")
