"""The completion of slash commands and of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from textual.fuzzy import Matcher
from textual.worker import get_current_worker

from app.chat.commands.command import Command
from app.chat.commands.table import COMMANDS
from app.tui.chat.completion import Completion, Suggestion
from app.tui.chat.prompt import Prompt
from app.tui.keymap import hint
from app.tui.ranking import recent_first, score

Values = Callable[[], Iterable[tuple[str, str]]]
"""The values that an argument can have, each with what is said of it."""


def slash_commands(prompt: Prompt, recent: Sequence[str]) -> SlashCommands:
    """The source of slash commands for ``prompt``. ``recent``: titles of the commands run last."""
    offered = {command: command.values for command in COMMANDS if command.values is not None}
    return SlashCommands(
        {
            command.name: LookedUp(prompt, values) if command.values_are_slow else values
            for command, values in offered.items()
        },
        recent,
    )


class LookedUp:
    """Values that are looked up when they are first asked for.

    Looking reads the disk, so that it is done in a thread; ``prompt`` is told when the values are known.
    """

    def __init__(self, prompt: Prompt, values: Values) -> None:
        self._prompt = prompt
        self._values = values
        self._found: list[tuple[str, str]] | None = None

    def __call__(self) -> Iterable[tuple[str, str]]:
        if self._found is None:
            self._found = []
            self._prompt.run_worker(self._look, thread=True, group="names", exit_on_error=False)
        return self._found

    def _look(self) -> None:
        found = list(self._values())
        if not get_current_worker().is_cancelled:
            self._prompt.app.call_from_thread(self._show, found)

    def _show(self, found: list[tuple[str, str]]) -> None:
        self._found = found
        self._prompt.completer.forget()
        self._prompt.show_completions()


# --- slash commands --------------------------------------------------------------------------------------------------


class SlashCommands:
    """The source for ``/`` at the beginning of the prompt.

    ``values``: those of arguments, by the command's name. ``recent``: titles of the commands run last.
    """

    def __init__(self, values: Mapping[str, Values] | None = None, recent: Sequence[str] = ()) -> None:
        self._values = dict(values or {})
        self._recent = recent

    def complete(self, before: str, after: str) -> Completion | None:
        if before == "?" and not after:
            # It may be a question. Enter asks it.
            return Completion(0, tuple(map(_line, matching("help")[:1])), preselected=False)
        if not before.startswith("/") or "\n" in before or after.strip():
            return None
        word, space, argument = before[1:].partition(" ")
        if not space:
            if "/" in word:
                return None
            commands = matching(word.lower(), self._recent)
            # What has the letters only somewhere is not what enter would run.
            sure = bool(commands) and _fit(commands[0], word.lower()) < _NONE
            return Completion(0, tuple(map(_line, commands)), preselected=sure)
        values = self._values.get(word.lower())
        if values is None:
            return None
        typed = argument.strip().casefold()
        candidates = sorted(
            (_rank(value.casefold(), typed), number, value, detail) for number, (value, detail) in enumerate(values())
        )
        lines = [
            Suggestion(value, detail, f"/{word} {value}", sends=True)
            for rank, _, value, detail in candidates
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


def _fit(command: Command, typed: str) -> int:
    """How well ``typed`` is the beginning of a name, an alias or a word of the title, or the key: from 0 to 4."""
    names = [_rank(name, typed) for name in (command.name, *command.aliases)]
    by_word = any(word.startswith(typed) for word in command.title.casefold().split()) or hint(command) == typed
    return min(*names, 2 if by_word else _NONE)


def matching(typed: str, recent: Sequence[str] = ()) -> list[Command]:
    """The commands that fit ``typed``, best first; among equals, and for an empty text, those run last."""
    commands = recent_first(COMMANDS, recent)
    if not typed:
        return commands
    matcher = Matcher(typed)
    found = [(_fit(command, typed), score(matcher, command), command) for command in commands]
    fitting = [entry for entry in found if entry[0] < _NONE or (entry[1] and len(typed) > 1)]
    ranked = sorted(fitting, key=lambda entry: (entry[0], 0 if entry[0] < _NONE else -entry[1]))
    return [command for _, _, command in ranked]


def _line(command: Command) -> Suggestion:
    """Enter runs the command; tab leaves room for its argument."""
    name = f"/{command.name}"
    key = f" ({hint(command)})" if command.shortcut is not None else ""
    return Suggestion(command.usage, command.help + key, f"{name} " if command.argument else name, sends=True)
