"""The order of commands, in the palette and after a slash: what was run last, and how well what is typed fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from textual.fuzzy import Matcher

_MOST_RECENT = 5
"""Maximum commands that stand first because they were run last."""
_IN_HELP = 0.5
"""Score of a match in a command's description, as a share of one in its title."""


class Described(Protocol):
    """A command that can be run."""

    @property
    def title(self) -> str: ...

    @property
    def help(self) -> str: ...


Command = TypeVar("Command", bound=Described)


def recent_first(commands: Iterable[Command], recent: Sequence[str]) -> list[Command]:
    """``commands``, those with the titles ``recent`` before the others, which keep their order."""
    places = {title: place for place, title in enumerate(recent)}
    return sorted(commands, key=lambda command: places.get(command.title, _MOST_RECENT))


def remember(recent: list[str], title: str) -> None:
    """Put ``title`` first among the ``recent`` ones, of which the oldest are left out."""
    recent[:] = [title, *(other for other in recent if other != title)][:_MOST_RECENT]


def score(matcher: Matcher, command: Described) -> float:
    """How well ``command`` fits what is typed; 0 if it does not."""
    return max(matcher.match(command.title), _IN_HELP * matcher.match(command.help))
