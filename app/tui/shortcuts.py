"""Which keys do what, where a function has more than one: each has one that every terminal sends. No Textual."""

from __future__ import annotations

import string
import sys

TERMINAL_APP = frozenset(
    [
        *string.ascii_letters,
        *string.digits,
        *(f"ctrl+{letter}" for letter in string.ascii_lowercase if letter not in "him"),
        *("enter", "escape", "tab", "shift+tab", "backspace", "space", "up", "down", "left", "right"),
        *("ctrl+underscore", "question_mark", "left_square_bracket", "right_square_bracket"),
    ]
)  # fmt: skip
"""What Terminal.app of macOS sends as it comes, without a function key, by Textual's names. It does not send what is
left out: it keeps ctrl and the arrows for the system, strips shift from them, and scrolls by itself with page up, page
down, home and end; ctrl+h, ctrl+i and ctrl+m are backspace, tab and enter."""

_KEYS: dict[str, tuple[str, ...]] = {
    "help": ("f1", "ctrl+underscore"),
    "chats": ("f2", "ctrl+o"),
    "model": ("f3", "ctrl+g"),
    "beams": ("f4", "ctrl+b"),
    "timing": ("f5", "ctrl+t"),
    "machines": ("f8", "ctrl+l"),
    "undo": ("f6", "ctrl+r"),
    "group": ("f7", "ctrl+n"),
    "newest": ("ctrl+end", "ctrl+f"),
    "messages": ("shift+up", "shift+tab", "ctrl+up"),
    "newline": ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter"),
    "page_up": ("pageup", "u"),
    "page_down": ("pagedown", "d"),
}


def keys(function: str, system: str = sys.platform) -> tuple[str, ...]:
    """The keys of ``function``, by Textual's names; on a Mac those first that need no further key."""
    return tuple(sorted(_KEYS[function], key=lambda key: system == "darwin" and key not in TERMINAL_APP))


def bound(*functions: str) -> str:
    """The same of all ``functions``, as a Binding takes them."""
    return ",".join(key for function in functions for key in keys(function))


def key(function: str, system: str = sys.platform) -> str:
    """The first of them, for a hint."""
    return readable(keys(function, system)[0])


def either(function: str, system: str = sys.platform) -> str:
    """``f2 or ctrl+o``: the first two of them."""
    return " or ".join(map(readable, keys(function, system)[:2]))


def readable(name: str) -> str:
    """A key's name as it stands on the keyboard."""
    return name.replace("underscore", "_").replace("question_mark", "?")
