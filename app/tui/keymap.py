"""The keys of functions that have more than one, and the table of commands. No Textual.

Slash commands, the command palette and the help are made from the one table. Each function has a key that every
terminal sends.
"""

from __future__ import annotations

import string
import sys
from dataclasses import dataclass

TERMINAL_APP = frozenset(
    [
        *string.ascii_letters,
        *string.digits,
        *(f"ctrl+{letter}" for letter in string.ascii_lowercase if letter not in "him"),
        *("enter", "escape", "tab", "shift+tab", "backspace", "space", "up", "down", "left", "right"),
        *("ctrl+underscore", "ctrl+right_square_bracket", "ctrl+backslash"),
        *("question_mark", "slash", "left_square_bracket"),
        "right_square_bracket",
    ]
)  # fmt: skip
"""Keys that Terminal.app of macOS sends in its default configuration without ``fn``, by Textual's names.

Left out is what it does not send: ctrl with an arrow belongs to the system, shift is removed from arrows, and page up,
page down, home and end scroll its own window. ctrl+h, ctrl+i and ctrl+m are the same as backspace, tab and enter."""

_KEYS: dict[str, tuple[str, ...]] = {
    "help": ("f1", "ctrl+underscore"),
    "chats": ("f2", "ctrl+o"),
    "model": ("f3", "ctrl+g"),
    "beams": ("f4", "ctrl+b"),
    "timing": ("f5", "ctrl+t"),
    "machines": ("f8", "ctrl+l"),
    "thoughts": ("f9", "ctrl+right_square_bracket"),
    "sampling": ("f7", "ctrl+backslash"),
    "undo": ("f6", "ctrl+r"),
    "group": ("f7", "ctrl+n"),
    "newest": ("ctrl+end", "ctrl+f"),
    "messages": ("shift+up", "shift+tab", "ctrl+up"),
    "newline": ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter"),
    "page_up": ("pageup", "u"),
    "page_down": ("pagedown", "d"),
}


def keys(function: str, system: str = sys.platform) -> tuple[str, ...]:
    """The keys of ``function`` by Textual's names. On a Mac those that need no ``fn`` come first."""
    return tuple(sorted(_KEYS[function], key=lambda key: system == "darwin" and key not in TERMINAL_APP))


def bound(*functions: str) -> str:
    """The keys of all ``functions``, in the form that a Binding takes."""
    return ",".join(key for function in functions for key in keys(function))


def key(function: str, system: str = sys.platform) -> str:
    """The first key of ``function``, for a hint."""
    return readable(keys(function, system)[0])


def either(function: str, system: str = sys.platform) -> str:
    """The first two keys of ``function``: ``f2 or ctrl+o``."""
    return " or ".join(map(readable, keys(function, system)[:2]))


def readable(name: str) -> str:
    """A key's name as printed on the keyboard."""
    for word, sign in (("underscore", "_"), ("question_mark", "?"), ("right_square_bracket", "]"), ("backslash", "\\")):
        name = name.replace(word, sign)
    return name


@dataclass(frozen=True)
class ChatCommand:
    """A command of the chat. ``action`` is an action of the chat screen, or of the application (``app.quit_chat``).

    ``argument`` is the argument's name in the help; a command without one takes no argument.
    """

    name: str
    title: str
    help: str
    action: str
    key: str = ""
    argument: str = ""


COMMANDS: tuple[ChatCommand, ...] = (
    ChatCommand("help", "Help", "Keys and commands", "app.help", key("help")),
    ChatCommand("new", "New chat", "Start an empty chat", "new", "ctrl+n"),
    ChatCommand("temporary", "Temporary chat", "Start a chat of which nothing is saved", "temporary"),
    ChatCommand("chats", "Chats", "Open, search, rename, export or delete chats", "chats", key("chats")),
    ChatCommand("model", "Model", "Choose, download or load a model", "model", key("model"), "[name]"),
    ChatCommand("beams", "Beams", "Set the beam width; see the candidates", "beams", key("beams"), "[width]"),
    ChatCommand("persona", "Persona", "Choose, save or edit personas; /persona none", "persona", "", "[name]"),
    ChatCommand("system", "System prompt", "See and change this chat's system prompt", "system", "", "[text]"),
    ChatCommand("sampling", "Sampling", "See and change this chat's sampling; presets", "sampling", key("sampling")),
    ChatCommand(
        "set", "Set a value", "Set a value for this chat, as in /set temperature 0.2", "set_value", "", "[name [value]]"
    ),
    ChatCommand("timing", "Timing", "See where each token's time goes", "timing", key("timing")),
    ChatCommand(
        "thoughts", "Thoughts", "Show or fold what the model thought before its answers", "thoughts", key("thoughts")
    ),
    ChatCommand("machines", "Machines", "Find, pair and forget machines; form a ring", "machines", key("machines")),
    ChatCommand("settings", "Settings", "Change the settings", "settings", "ctrl+s"),
    ChatCommand("again", "Regenerate", "Answer the last question again; the old answer stays", "again", "ctrl+r"),
    ChatCommand(
        "continue", "Continue the answer", "Let the model go on from its end; with m any answer", "continue_last"
    ),
    ChatCommand("delete", "Delete the last message", "With x any message; it can be brought back", "delete_last"),
    ChatCommand("undo", "Undo a deletion", "Bring back what was deleted last, here or in the chats", "undo"),
    ChatCommand("edit", "Edit the last question", "The old question stays as an alternative", "edit_last"),
    ChatCommand("find", "Find in the chat", "In the messages also with /", "find", "", "[text]"),
    ChatCommand("copy", "Copy the last answer", "As Markdown, to the clipboard", "copy_last"),
    ChatCommand("code", "Copy the last code block", "To the clipboard", "copy_code"),
    ChatCommand("rename", "Rename the chat", "Give the chat a title", "rename", "", "[title]"),
    ChatCommand(
        "export",
        "Export the chat",
        "To a Markdown or JSON file; --thoughts: with the model's thoughts",
        "export",
        "",
        "[--thoughts] [file]",
    ),
    ChatCommand("stop", "Stop the answer", "Keep the text so far", "stop", "escape"),
    ChatCommand("quit", "Quit", "All chats are saved", "app.quit_chat", "ctrl+q"),
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
