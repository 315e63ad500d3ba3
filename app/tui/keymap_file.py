"""The keymap file: ``keymap.toml`` beside the settings changes the keys of actions.

    chat.beams = "ctrl+b"
    prompt.send = ["ctrl+d", "alt+enter"]

An entry names an action by its id, as the screen of keys lists them, and all keys that it is to have. What cannot be
used is said in one sentence, and the rest applies.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from textual.keys import _character_to_key, key_to_character

from app.files import read_whole
from app.text_safety import one_line
from app.tui.actions import Action, all_actions
from app.tui.keymap import HOMES, KEYMAP_FILE, defaults, readable

_MODIFIERS = frozenset(["ctrl", "alt", "shift", "super", "hyper", "meta"])
_SPELLINGS = {
    "control": "ctrl", "option": "alt", "opt": "alt", "cmd": "super", "command": "super", "esc": "escape",
    "return": "enter", "del": "delete", "ins": "insert", "pgup": "pageup", "pgdn": "pagedown", "pgdown": "pagedown",
    "page_up": "pageup", "page_down": "pagedown",
}  # fmt: skip
"""Names that people use for modifiers and keys, with Textual's."""
_NAMED = frozenset(
    [
        *("enter", "escape", "tab", "backspace", "delete", "insert", "home", "end", "pageup", "pagedown", "space"),
        *("up", "down", "left", "right"),
        *(f"f{number}" for number in range(1, 25)),
        *map(_character_to_key, string.punctuation),
    ]
)
_SAME = {
    "ctrl+i": "tab", "ctrl+m": "enter", "ctrl+h": "backspace", "ctrl+left_square_bracket": "escape",
}  # fmt: skip
"""Keys that terminals send as another key."""


class BadKey(ValueError):
    """The text says what is wrong with the key."""


def key_named(text: str) -> str:
    """Textual's name of the key that a person calls ``text``. Raises BadKey."""
    stripped = text.strip()
    plus = stripped == "+" or stripped.endswith("++")
    words = [*stripped[:-1].split("+"), "+"] if plus else stripped.split("+")
    *modifiers, base = [word.strip() for word in words if word.strip() or not plus]
    modifiers = sorted({_SPELLINGS.get(word.lower(), word.lower()) for word in modifiers})
    if len(base) == 1:
        if modifiers == ["shift"] and base.isalpha():
            modifiers, base = [], base.upper()
        base = base if base.isalnum() and not modifiers else _character_to_key(base.lower())
    else:
        base = _SPELLINGS.get(base.lower(), base.lower())
    known = base in _NAMED or (len(base) == 1 and base.isprintable() and not base.isspace())
    if not known or not _MODIFIERS.issuperset(modifiers):
        raise BadKey(f"there is no key {one_line(text)!r}")
    name = "+".join([*modifiers, base])
    if name == "ctrl+space":
        return "ctrl+at"
    if name in _SAME:
        raise BadKey(f"terminals send {readable(name)} as {readable(_SAME[name])}")
    return name


@dataclass(frozen=True)
class Assignments:
    """The entries of a keymap file: the keys of each id, as they were written; and what is wrong with it."""

    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read(path: Path) -> Assignments:
    """The entries of the file ``path``; none if there is no file."""
    try:
        return _assignments(tomllib.loads(read_whole(path)))
    except FileNotFoundError:
        return Assignments()
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except (OSError, ValueError) as error:
        reason = one_line(str(getattr(error, "strerror", None) or error))
    return Assignments(problems=(f"{KEYMAP_FILE} cannot be read: {reason}.",))


def _assignments(table: Mapping[str, Any], prefix: str = "") -> Assignments:
    """The entries of ``table``. ``chat.beams = "f4"`` is a table in a table, and is flattened."""
    keys: dict[str, Sequence[str]] = {}
    problems: list[str] = []
    for name, value in table.items():
        id = f"{prefix}{name}"
        match value:
            case dict():
                inner = _assignments(value, f"{id}.")
                keys |= inner.keys
                problems += inner.problems
            case str():
                keys[id] = [","] if value.strip() == "," else [word for word in value.split(",") if word.strip()]
            case list() if all(isinstance(word, str) for word in value):
                keys[id] = value
            case _:
                problems.append(f'{KEYMAP_FILE}: {one_line(id)} needs keys in quotes, such as "ctrl+b,f4".')
    return Assignments(keys, tuple(problems))


@dataclass(frozen=True)
class Keymap:
    """``keys``: the keys of all bindings that are to be replaced, by their ids. ``problems``: one sentence each."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def resolve(wanted: Assignments, actions: Sequence[Action]) -> Keymap:
    """The keys that ``actions`` get.

    Other bindings of a function follow the one that names it (:data:`HOMES`). A key that another action had goes over
    to the one that was given it, unless the other would have none left.
    """
    problems = list(wanted.problems)
    changed: dict[str, tuple[str, ...]] = {}
    for id, words in wanted.keys.items():
        same = [action for action in actions if action.id == id]
        if not same:
            near = get_close_matches(id, [action.id for action in actions], 1, 0.75)
            hint = f" Did you mean {near[0]}?" if near else " /keys lists the actions."
            problems.append(f"{KEYMAP_FILE}: there is no action {one_line(id)!r}.{hint}")
            continue
        keys, wrong = _usable(words, same)
        problems += [f"{KEYMAP_FILE}: {id}: {problem}." for problem in wrong]
        if keys:
            changed[id] = keys
        elif not wrong:
            problems.append(f"{KEYMAP_FILE}: {id} needs at least one key.")
    changed |= _followers(changed, actions)
    problems += _conflicts(changed, actions)
    return Keymap(_with_neighbours(changed, actions), tuple(problems))


def keymap_of(file: Path) -> Keymap:
    """The keys that ``file`` gives to the actions of all screens. Without it no screen is imported."""
    return resolve(read(file), all_actions()) if file.exists() else Keymap()


def _usable(words: Sequence[str], same: Sequence[Action]) -> tuple[tuple[str, ...], list[str]]:
    """The keys among ``words`` that the actions ``same``, which share an id, can have; and the problems."""
    keys: list[str] = []
    wrong: list[str] = []
    for word in words:
        try:
            key = key_named(word)
        except BadKey as error:
            wrong.append(str(error))
            continue
        character = key_to_character(key)
        typed = character is not None and character.isprintable() and key != "tab"
        if typed and any(action.priority or action.place == "Prompt" for action in same):
            wrong.append(f"{readable(key)} is typed into the prompt; use it with ctrl or alt")
        elif key not in keys:
            keys.append(key)
    return tuple(keys), wrong


def _followers(changed: Mapping[str, tuple[str, ...]], actions: Sequence[Action]) -> dict[str, tuple[str, ...]]:
    """The keys of bindings that share a function's keys, where the function's home was changed."""
    keys_by_action: dict[str, tuple[str, ...]] = {}
    for function, home in HOMES.items():
        if home not in changed:
            continue
        before = set(defaults(function))
        for action in actions:
            keys = keys_by_action.get(action.id, action.keys)
            named = len(before) > 1 or function in action.id.split(".")
            if action.id not in changed and named and before <= set(keys):
                rest = [key for key in keys if key not in before]
                keys_by_action[action.id] = tuple(dict.fromkeys([*rest, *changed[home]]))
    return keys_by_action


def _meet(first_action: Action, other: Action) -> bool:
    """Whether both can be reached at the same time, so that one key cannot mean both."""
    if first_action.place == other.place:
        return True
    places = {first_action.place, other.place}
    first = next((action for action in (first_action, other) if action.place in ("ChatApp", "ChatScreen")), None)
    if first is None or not first.priority or "LendingApp" in places:
        return False
    beside = other if first is first_action else first_action
    within = not beside.screen and beside.module.startswith(("app.tui.chat.", "app.tui.panels."))
    return first.place == "ChatApp" or within


def _conflicts(changed: dict[str, tuple[str, ...]], actions: Sequence[Action]) -> list[str]:
    """Give each key to one action only, in ``changed``; returns what was decided, one sentence each.

    An entry takes a key from an action that has no entry for it, and the first of two entries has it. An action keeps
    its only key. What is decided alike of bindings that share their functions' keys is told once, of their homes.
    """
    sentences: dict[str, None] = {}
    asked = dict(changed)
    order = {id: number for number, id in enumerate(asked)}
    for action in actions:
        for key in set(asked.get(action.id, ())) - set(action.keys):
            for other in actions:
                clash = key in changed.get(other.id, other.keys) and key in changed.get(action.id, action.keys)
                if other.id == action.id or not clash or not _meet(action, other):
                    continue
                was_first = key in asked.get(other.id, ()) and order[other.id] < order[action.id]
                loser, winner = (action, other) if was_first else (other, action)
                if set(changed.get(loser.id, loser.keys)) == {key}:
                    loser, winner = winner, loser
                left = tuple(name for name in changed.get(loser.id, loser.keys) if name != key)
                changed[loser.id] = left or loser.keys
                kept = " and ".join(map(readable, changed[loser.id]))
                one, two = (HOMES.get(id.rpartition(".")[2], id) for id in (winner.id, loser.id))
                sentences[f"{KEYMAP_FILE}: {readable(key)} is for {one}; {two} keeps {kept}."] = None
    return list(sentences)


def _with_neighbours(
    changed: Mapping[str, tuple[str, ...]], actions: Sequence[Action]
) -> Mapping[str, tuple[str, ...]]:
    """``changed`` with the unchanged keys of actions that shared one with a changed action of their class.

    The library takes a key that is changed away from all actions of the class.
    """
    result = dict(changed)
    for action in actions:
        if action.id not in changed:
            shared = any(
                set(other.keys) & set(action.keys)
                for other in actions
                if other.place == action.place and other.id in changed
            )
            if shared:
                result[action.id] = action.keys
    return result
