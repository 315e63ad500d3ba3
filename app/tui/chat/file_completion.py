"""Completion of ``@file``: the files below the current folder, and paths from elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path

from app.attachments.listing import best, entries_of, files_below, fitting, folders_of
from app.attachments.references import reference_to
from app.text_safety import sanitize, visible
from app.tui.chat.completion import Completion, Suggestion

_MOST = 50
"""Maximum number of candidates."""
_TYPED = re.compile(r"""(?<![^\s([{"',;:])@(?:"([^"\n]*)|([^\s"@]*))$""")
_ELSEWHERE = re.compile(r"(~?/|\.\.?/|~[^/]*/)")
Run = Callable[[Coroutine[None, None, None]], object]


class FileReferences:
    """The source for ``@`` at the beginning of a word.

    Folders are listed in threads. ``run`` runs a coroutine in the background, and ``listed`` is called when there may
    be more candidates.
    """

    def __init__(self, run: Run, listed: Callable[[], None]) -> None:
        self._run = run
        self._listed = listed
        self._names: dict[str, list[str]] = {}
        """What was found, by folder as it is typed; empty text: below the current folder."""
        self._asked: set[str] = set()
        self._narrowed: tuple[str, list[str]] = "", []
        """The names that fit the text typed last. Those that fit a longer one are among them."""

    def complete(self, before: str, after: str) -> Completion | None:
        found = _TYPED.search(before)
        if found is None or after[:1].strip():
            self._forget()
            return None
        typed = found[1] if found[1] is not None else found[2]
        folder = typed[: typed.rfind("/") + 1] if _ELSEWHERE.match(typed) else ""
        if folder not in self._asked:
            self._asked.add(folder)
            self._run(self._list(folder))
        names = self._fitting(folder, typed)
        if not names or (names[0] == typed and not typed.endswith("/")):
            return None
        names = [name for name in names if name != typed]
        # Enter sends what only resembles a file: a name that is mentioned, or Python's ``@property``.
        sure = bool(names) and typed.casefold() in names[0].casefold()
        return Completion(found.start(), tuple(map(_candidate, names)), preselected=sure)

    def _fitting(self, folder: str, typed: str) -> list[str]:
        if folder:
            rest = typed[len(folder) :]
            return [folder + name for name in _best(rest, fitting(rest, self._names.get(folder, [])))]
        before, narrowed = self._narrowed
        names = narrowed if before and typed.startswith(before) else self._names.get("", [])
        found = fitting(typed, names)
        self._narrowed = typed, [name for _, _, name in found]
        return _best(typed, found)

    async def _list(self, folder: str) -> None:
        names = await asyncio.to_thread(_names_in, folder, Path())
        if folder in self._asked:
            self._names[folder] = names
            self._narrowed = "", []
            self._listed()

    def _forget(self) -> None:
        """The next reference lists anew: files come and go."""
        self._names.clear()
        self._asked.clear()
        self._narrowed = "", []


def _names_in(folder: str, current: Path) -> list[str]:
    """What can be typed below ``folder``. Not offered are names with a character that acts on a terminal or is not
    seen."""
    return [name for name in _all_names_in(folder, current) if visible(sanitize(name)) == name and "\n" not in name]


def _all_names_in(folder: str, current: Path) -> list[str]:
    if not folder:
        files = files_below(current)
        return [*folders_of(files), *files]
    try:
        there = current / Path(folder).expanduser()
    except RuntimeError:
        return []
    return entries_of(there)


def _best(typed: str, found: list[tuple[int, int, str]]) -> list[str]:
    """The first names of ``found`` by rank; without a text the first that are not hidden, in their order."""
    if typed:
        return best(found, _MOST)
    return [name for _, _, name in found if not name.startswith(".")][:_MOST]


def _candidate(name: str) -> Suggestion:
    """Behind a file comes a space, so that it is a whole word; behind a folder its files are offered."""
    if name.endswith("/"):
        return Suggestion(name, "folder", reference_to(name))
    return Suggestion(name, "", f"{reference_to(name)} ")
