"""Completion of slash commands and of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from app.tui.chat.completion import Completion, Suggestion
from app.tui.keymap import COMMANDS, ChatCommand, aliases

Values = Callable[[], Iterable[tuple[str, str]]]
"""The values that an argument can have, each with what is said of it."""


class SlashCommands:
    """The source for ``/`` at the beginning of the prompt. ``values``: those of arguments, by the command's name."""

    def __init__(self, values: Mapping[str, Values] | None = None) -> None:
        self._values = dict(values or {})

    def complete(self, before: str, after: str) -> Completion | None:
        if not before.startswith("/") or "\n" in before or after.strip():
            return None
        word, space, argument = before[1:].partition(" ")
        if not space:
            return None if "/" in word else Completion(0, tuple(map(_line, matching(word.lower()))))
        values = self._values.get(word.lower())
        if values is None:
            return None
        typed = argument.strip().casefold()
        found = sorted(
            (_rank(value.casefold(), typed), number, value, detail) for number, (value, detail) in enumerate(values())
        )
        lines = [
            Suggestion(value, detail, f"/{word} {value}", sends=True)
            for rank, _, value, detail in found
            if rank < _NONE
        ]
        return Completion(0, tuple(lines), preselected=False)


_NONE = 4


def _rank(name: str, typed: str) -> int:
    """How well ``typed`` fits ``name``: 0 is the name itself, 4 does not fit."""
    if name == typed:
        return 0
    if name.startswith(typed):
        return 1
    return 2 if typed in name else _NONE


def matching(typed: str) -> list[ChatCommand]:
    """The commands whose name, alias, title or key fits ``typed``, best first; all of them for an empty text."""
    ranked = []
    for number, command in enumerate(COMMANDS):
        names = [command.name, *aliases(command)]
        title = command.title.casefold()
        ranks = [
            *(_rank(name, typed) if _rank(name, typed) < 2 else _NONE for name in names),
            2 if any(part.startswith(typed) for part in title.split()) else _NONE,
            2 if command.key == typed else _NONE,
            3 if len(typed) > 1 and typed in command.name else _NONE,
        ]
        ranked.append((min(ranks) if typed else 0, number, command))
    return [command for rank, _, command in sorted(ranked, key=lambda found: found[:2]) if rank < _NONE]


def _line(command: ChatCommand) -> Suggestion:
    """Enter runs the command; tab leaves room for its argument."""
    name = f"/{command.name}"
    key = f" ({command.key})" if command.key else ""
    return Suggestion(
        f"{name} {command.argument}".rstrip(), command.help + key, f"{name} " if command.argument else name, sends=True
    )
