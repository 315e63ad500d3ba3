"""The keys of functions that are named in hints: those of commands and some others. No Textual.

Each function has a key that every terminal sends.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Mapping

from app.chat.commands.command import Command
from app.chat.commands.table import COMMANDS

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

_OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "menu": ("chat.menu", ("ctrl+p",)),
    "undo": ("settings.undo", ("f6", "ctrl+r")),
    "group": ("settings.group", ("f7", "ctrl+n")),
    "newest": ("chat.end", ("ctrl+end", "ctrl+f")),
    "messages": ("prompt.messages", ("shift+up", "shift+tab", "ctrl+up")),
    "send": ("prompt.send", ("enter",)),
    "newline": ("prompt.newline", ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter")),
    "page_up": ("message.page_up", ("pageup", "u")),
    "page_down": ("message.page_down", ("pagedown", "d")),
}
"""The functions that are no commands: the id of the binding and the keys."""
_FUNCTIONS = {
    command.name: (command.shortcut.id, command.shortcut.keys) for command in COMMANDS if command.shortcut is not None
} | _OTHERS

HOMES = {function: id for function, (id, _) in _FUNCTIONS.items()}
"""The id of the binding that names a function's keys: if the person changes its keys, hints name the new ones."""

_changed: dict[str, tuple[str, ...]] = {}


def use(changed: Mapping[str, tuple[str, ...]]) -> None:
    """Use the person's keys from now on, by the ids of their bindings. All others are as they were at first."""
    _changed.clear()
    _changed.update(changed)


def defaults(function: str, system: str = sys.platform) -> tuple[str, ...]:
    """The keys of ``function`` that the program comes with. On a Mac those that need no ``fn`` come first."""
    return tuple(sorted(_FUNCTIONS[function][1], key=lambda key: system == "darwin" and key not in TERMINAL_APP))


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


def hint(command: Command) -> str:
    """The first key of ``command``; empty if it has none."""
    return key(command.name) if command.shortcut is not None else ""


def either(function: str, system: str = sys.platform) -> str:
    """The first two keys of ``function``: ``f2 or ctrl+o``."""
    return " or ".join(map(readable, keys(function, system)[:2]))


_PLACE = re.compile(r"\{(\w+)\}")


def with_keys(text: str) -> str:
    """``text`` with the keys of a function in the place of its name in braces: ``{chats}``."""
    return _PLACE.sub(lambda found: either(found[1]) if found[1] in HOMES else found[0], text)


_PRINTED = {
    "underscore": "_", "question_mark": "?", "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/",
    "left_curly_bracket": "{", "right_curly_bracket": "}",
    "backslash": "\\", "full_stop": ".", "comma": ",", "escape": "esc", "minus": "-", "at": "@",
}  # fmt: skip


def readable(name: str) -> str:
    """A key's name as printed on the keyboard."""
    modifiers, plus, base = name.rpartition("^" if name.startswith("^") else "+")
    return f"{modifiers}{plus}{_PRINTED.get(base, base)}"
