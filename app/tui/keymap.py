"""The keys of functions that are named in hints, and the table of commands. No Textual.

Slash commands, the command palette and the help are made from the one table. Each function has a key that every
terminal sends.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass

KEYMAP_FILE = "keymap.toml"
"""Name of the file with the person's keys, beside the settings."""

TERMINAL_APP = frozenset(
    [
        *string.ascii_letters,
        *string.digits,
        *(f"ctrl+{letter}" for letter in string.ascii_lowercase if letter not in "him"),
        *("enter", "escape", "tab", "shift+tab", "backspace", "space", "up", "down", "left", "right"),
        *("ctrl+underscore", "ctrl+right_square_bracket", "ctrl+backslash"),
        *("question_mark", "slash", "left_square_bracket", "right_square_bracket"),
        *("left_curly_bracket", "right_curly_bracket"),
    ]
)  # fmt: skip
"""Keys that Terminal.app of macOS sends in its default configuration without ``fn``, by Textual's names.

Left out is what it does not send: ctrl with an arrow belongs to the system, shift is removed from arrows, and page up,
page down, home and end scroll its own window. ctrl+h, ctrl+i and ctrl+m are the same as backspace, tab and enter."""

_KEYS: dict[str, tuple[str, ...]] = {
    "help": ("f1", "ctrl+underscore"),
    "menu": ("ctrl+p",),
    "chats": ("f2", "ctrl+o"),
    "model": ("f3", "ctrl+g"),
    "beams": ("f4", "ctrl+b"),
    "timing": ("f5", "ctrl+t"),
    "machines": ("f8", "ctrl+l"),
    "thoughts": ("f9", "ctrl+right_square_bracket"),
    "sampling": ("f7", "ctrl+backslash"),
    "settings": ("ctrl+s",),
    "new": ("ctrl+n",),
    "again": ("ctrl+r",),
    "stop": ("escape",),
    "quit": ("ctrl+q",),
    "undo": ("f6", "ctrl+r"),
    "group": ("f7", "ctrl+n"),
    "newest": ("ctrl+end", "ctrl+f"),
    "messages": ("shift+up", "shift+tab", "ctrl+up"),
    "send": ("enter",),
    "editor": ("ctrl+x",),
    "newline": ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter"),
    "page_up": ("pageup", "u"),
    "page_down": ("pagedown", "d"),
}

HOMES = {
    "help": "chat.help", "menu": "chat.menu", "chats": "chat.conversations", "model": "chat.model",
    "beams": "chat.beams", "sampling": "chat.sampling", "timing": "chat.timing", "machines": "chat.machines",
    "thoughts": "chat.thoughts", "settings": "chat.settings", "new": "chat.new", "again": "chat.again",
    "stop": "chat.stop", "quit": "app.quit", "undo": "settings.undo", "group": "settings.group",
    "newest": "chat.end", "messages": "prompt.messages", "send": "prompt.send", "newline": "prompt.newline",
    "editor": "prompt.editor",
    "page_up": "message.page_up", "page_down": "message.page_down",
}  # fmt: skip
"""The id of the binding that names a function's keys: if the person changes its keys, hints name the new ones."""

_changed: dict[str, tuple[str, ...]] = {}


def use(changed: Mapping[str, tuple[str, ...]]) -> None:
    """Use the person's keys from now on, by the ids of their bindings. All others are as they were at first."""
    _changed.clear()
    _changed.update(changed)


def defaults(function: str, system: str = sys.platform) -> tuple[str, ...]:
    """The keys of ``function`` that the program comes with. On a Mac those that need no ``fn`` come first."""
    return tuple(sorted(_KEYS[function], key=lambda key: system == "darwin" and key not in TERMINAL_APP))


def keys(function: str, system: str = sys.platform) -> tuple[str, ...]:
    """The keys of ``function`` by Textual's names, as the person wants them."""
    return _changed.get(HOMES[function]) or defaults(function, system)


def keys_of(id: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of the binding ``id``, which the program comes with the keys ``usual`` for."""
    return _changed.get(id, usual)


def is_unsent(key: str, environment: Mapping[str, str]) -> bool:
    """Is it known of the terminal of ``environment`` that it does not send ``key``, by Textual's name?"""
    if environment.get("TERM_PROGRAM") == "Apple_Terminal":
        return key not in TERMINAL_APP and len(key) > 1
    term = environment.get("TERM", "")
    if not environment.get("TMUX") and any(name in term for name in ("kitty", "ghostty", "foot")):
        return False
    *modifiers, base = key.split("+")
    if {"super", "hyper", "meta"} & set(modifiers):
        return True
    if base in ("enter", "tab", "backspace", "escape", "space"):
        return bool(modifiers) and key not in ("alt+enter", "shift+tab", "alt+backspace")
    return "ctrl" in modifiers and (base.isdigit() or (len(base) == 1 and "shift" in modifiers))


def bound(*functions: str) -> str:
    """The keys of all ``functions`` that the program comes with, in the form that a Binding takes."""
    return ",".join(key for function in functions for key in defaults(function))


def key(function: str, system: str = sys.platform) -> str:
    """The first key of ``function``, for a hint. Hints are made when they are shown, as keys can be changed."""
    return readable(keys(function, system)[0])


def either(function: str, system: str = sys.platform) -> str:
    """The first two keys of ``function``: ``f2 or ctrl+o``."""
    return " or ".join(map(readable, keys(function, system)[:2]))


_PLACE = re.compile(r"\{(\w+)\}")


def with_keys(text: str) -> str:
    """``text`` with the keys of a function in the place of its name in braces: ``{chats}``."""
    return _PLACE.sub(lambda found: either(found[1]) if found[1] in _KEYS else found[0], text)


_PRINTED = {
    "underscore": "_", "question_mark": "?", "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/",
    "left_curly_bracket": "{", "right_curly_bracket": "}",
    "backslash": "\\", "full_stop": ".", "comma": ",", "escape": "esc", "minus": "-", "at": "@",
}  # fmt: skip


def readable(name: str) -> str:
    """A key's name as printed on the keyboard."""
    modifiers, plus, base = name.rpartition("^" if name.startswith("^") else "+")
    return f"{modifiers}{plus}{_PRINTED.get(base, base)}"


@dataclass(frozen=True)
class ChatCommand:
    """A command of the chat. ``action`` is an action of the chat screen or of the application (``app.quit_chat``), or a
    method of what the chat screen has for a concern (``setup.persona``).

    ``function`` is the one whose keys call it too. ``argument`` is the argument's name in the help; a command without
    one takes no argument.
    """

    name: str
    title: str
    help: str
    action: str
    function: str = ""
    argument: str = ""

    @property
    def key(self) -> str:
        """Its first key, for a hint; empty if it has none."""
        return key(self.function) if self.function else ""


COMMANDS: tuple[ChatCommand, ...] = (
    ChatCommand("help", "Help", "Keys and commands", "app.help", "help"),
    ChatCommand("new", "New chat", "Start an empty chat", "new", "new"),
    ChatCommand("temporary", "Temporary chat", "Start a chat of which nothing is saved", "temporary"),
    ChatCommand("chats", "Chats", "Search, open, pin, rename, export or delete chats", "chats", "chats"),
    ChatCommand("model", "Model", "Choose, download or load a model", "model", "model", "[name]"),
    ChatCommand("beams", "Beams", "Set the beam width; see the candidates", "beams", "beams", "[width]"),
    ChatCommand("persona", "Persona", "Choose, save or edit personas; /persona none", "setup.persona", "", "[name]"),
    ChatCommand("system", "System prompt", "See and change this chat's system prompt", "setup.system", "", "[text]"),
    ChatCommand("sampling", "Sampling", "See and change this chat's sampling", "sampling", "sampling", "[preset]"),
    ChatCommand(
        "set",
        "Set a value",
        "Set a value of this chat: /set temperature 0.2, /set seed reset",
        "setup.set_value",
        "",
        "[name [value]]",
    ),
    ChatCommand("timing", "Timing", "See where each token's time goes", "timing", "timing"),
    ChatCommand(
        "thoughts", "Thoughts", "Show or fold what the model thought before its answers", "thoughts", "thoughts"
    ),
    ChatCommand("status", "Status", "Model, engine, context, memory and speed in words", "opener.status"),
    ChatCommand("log", "Log", "See what the engine and the screen have logged", "opener.log"),
    ChatCommand("machines", "Machines", "Find, pair and forget machines; form a ring", "machines", "machines"),
    ChatCommand("keys", "Keys", "Try keys, and see all actions with their keys", "opener.keys"),
    ChatCommand("settings", "Settings", "Change the settings", "settings", "settings"),
    ChatCommand("again", "Regenerate", "Answer the last question again; the old answer stays", "again", "again"),
    ChatCommand(
        "continue",
        "Continue the answer",
        "Let the model go on with its last answer; with m any answer",
        "continue_last",
    ),
    ChatCommand(
        "delete",
        "Delete the last message",
        "Delete the last message, with x any; /delete chat: the whole chat",
        "conversations.delete",
        "",
        "[chat]",
    ),
    ChatCommand("undo", "Undo a deletion", "Bring back what was deleted last, here or in the chats", "undo"),
    ChatCommand(
        "edit",
        "Edit the last question",
        "Ask the last question in other words; the old one stays",
        "editing.last_question",
    ),
    ChatCommand(
        "history", "Earlier questions", "Find a question of any chat by its words", "drafting.history", "", "[words]"
    ),
    ChatCommand("editor", "Editor", "Write the draft in your own editor: VISUAL or EDITOR", "editor", "editor"),
    ChatCommand(
        "find", "Find in the chat", "Find a text in the chat; in the messages also with /", "find", "", "[text]"
    ),
    ChatCommand("copy", "Copy the last answer", "Copy the last answer as Markdown", "copying.last_answer"),
    ChatCommand("code", "Copy the last code block", "Copy the last block of code in the chat", "copying.last_code"),
    ChatCommand("rename", "Rename the chat", "Give the chat a title", "conversations.rename", "", "[title]"),
    ChatCommand("pin", "Pin the chat", "Keep the chat at the top of the list, or no longer", "conversations.pin"),
    ChatCommand("archive", "Archive the chat", "Put the chat away from the list, or back", "conversations.archive"),
    ChatCommand(
        "import",
        "Import chats",
        "Take in chats of privatellm, ChatGPT, Claude, Open WebUI or llm",
        "conversations.take_in",
        "",
        "[file]",
    ),
    ChatCommand(
        "export",
        "Export the chat",
        "Write the chat to a Markdown or JSON file; --thoughts: with the model's thoughts",
        "conversations.export",
        "",
        "[--thoughts] [file]",
    ),
    ChatCommand("stop", "Stop the answer", "Stop the answer and keep its text", "stop", "stop"),
    ChatCommand("suspend", "Suspend", "Go back to the shell; fg continues", "app.suspend_process"),
    ChatCommand("quit", "Quit", "Leave; all chats are saved", "app.quit_chat", "quit"),
)

_ALIASES = {
    "exit": "quit", "resume": "chats", "retry": "again", "regenerate": "again", "peers": "machines", "?": "help",
}  # fmt: skip


def aliases(command: ChatCommand) -> list[str]:
    """Other names of ``command``."""
    return [alias for alias, name in _ALIASES.items() if name == command.name]


_BY_NAME = {command.name: command for command in COMMANDS} | {
    alias: command for alias, name in _ALIASES.items() for command in COMMANDS if command.name == name
}


@dataclass(frozen=True)
class Call:
    """A command and the argument that was typed after it."""

    command: ChatCommand
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
    command = _BY_NAME.get(word.lower())
    if command is None:
        near = [name for name in _BY_NAME if name.startswith(word.lower()[:2])]
        hint = f"did you mean /{near[0]}?" if near else "/help lists all commands."
        raise UnknownCommand(f"There is no command /{word}; {hint}")
    if argument.strip() and not command.argument:
        raise UnknownCommand(f"/{command.name} takes no arguments.")
    return Call(command, argument.strip())


def unescaped(text: str) -> str:
    """The question that ``text`` asks: ``//help`` asks ``/help``. Every other text is asked as it stands."""
    return text[1:] if text.startswith("//") and text[2:].lower() in _BY_NAME else text
