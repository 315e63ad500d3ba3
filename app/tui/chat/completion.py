"""Completion in the prompt: sources that offer candidates for what is typed, and the popup that shows them.

A source is pure and quick, because it is asked at every key. One that has to read the disk does so in the background
and calls :meth:`Completer.forget` and the prompt's ``show_completions`` when it knows more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from textual import on
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from app.attachments.listing import best, entries_of, files_below, fitting, folders_of
from app.attachments.references import reference_to
from app.text_safety import one_line, sanitize, visible

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
        """Names found in each folder, by the folder as typed. Empty: files below the current folder."""
        self._asked: set[str] = set()
        self._narrowed: tuple[str, list[str]] = "", []
        """The text typed last, and the names that fit it. Names that fit a longer text are among them."""

    def complete(self, before: str, after: str) -> Completion | None:
        match = _TYPED.search(before)
        if match is None or after[:1].strip():
            self._forget()
            return None
        typed = match[1] if match[1] is not None else match[2]
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
        return Completion(match.start(), tuple(map(_candidate, names)), preselected=sure)

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
    """The names that can be typed below ``folder``, without names that contain invisible or terminal control
    characters."""
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


_MOST_LINES = 8
"""Maximum number of candidates that are visible at once; the others are scrolled to."""
_LABEL_CELLS = 20
"""Maximum width in cells of the column of labels. The detail of a longer label begins further right."""


@dataclass(frozen=True)
class Suggestion:
    """One line of the popup.

    ``replacement`` takes the place of the text from :attr:`Completion.start` to the cursor. ``sends``: enter sends the
    prompt with it; otherwise enter only inserts it.
    """

    label: str
    detail: str
    replacement: str
    sends: bool = False


@dataclass(frozen=True)
class Completion:
    """An offer of a source: ``candidates``, best first, for the text from offset ``start`` to the cursor.

    ``preselected``: enter takes the first candidate. Otherwise enter keeps the typed text until a candidate was chosen
    with an arrow key, and only tab takes the first.
    """

    start: int
    candidates: tuple[Suggestion, ...]
    preselected: bool = True


class CompletionSource(Protocol):
    """Offers candidates."""

    def complete(self, before: str, after: str) -> Completion | None:
        """Candidates for the prompt with the text ``before`` and ``after`` the cursor; None if this source has none."""
        ...


class Completer:
    """The sources' offers at the cursor, the marked candidate, and whether the person closed the popup.

    The sources are asked in order, and the first offer is taken.
    """

    def __init__(self, sources: Sequence[CompletionSource] = ()) -> None:
        self.sources = list(sources)
        self._text: tuple[str, str] | None = None
        self._completion: Completion | None = None
        self._source: CompletionSource | None = None
        self._marked: int | None = None
        self._closed: tuple[CompletionSource, int] | None = None

    def at(self, before: str, after: str) -> Completion | None:
        """The completion for the cursor between ``before`` and ``after``; None if there is none or it was closed."""
        if self._text != (before, after):
            self._ask(before, after)
        if self._completion is None or (self._source, self._completion.start) == self._closed:
            return None
        return self._completion

    @property
    def marked(self) -> int | None:
        """Index of the marked candidate; None if nothing is marked."""
        return self._marked

    def mark(self, index: int) -> None:
        self._marked = index

    def move(self, offset: int) -> None:
        """Mark the next (1) or the previous (-1) candidate; after the last comes the first."""
        if self._completion is not None:
            count = len(self._completion.candidates)
            start = (-1 if offset > 0 else count) if self._marked is None else self._marked
            self._marked = (start + offset) % count

    def close(self) -> None:
        """Offer nothing more for the word at the cursor."""
        if self._source is not None and self._completion is not None:
            self._closed = self._source, self._completion.start

    def forget(self) -> None:
        """Ask the sources again, because one knows more now."""
        self._text = None

    def _ask(self, before: str, after: str) -> None:
        self._text = before, after
        self._completion, self._source, self._marked = None, None, None
        for source in self.sources:
            found = source.complete(before, after)
            if found is not None and found.candidates:
                self._completion, self._source = found, source
                self._marked = 0 if found.preselected else None
                break
        if self._completion is None or (self._source, self._completion.start) != self._closed:
            self._closed = None


class CompletionPopup(OptionList, can_focus=False):
    """The candidates above the prompt. The prompt keeps the focus and passes on its keys."""

    class Picked(Message):
        """The person clicked the candidate ``index``."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, id: str) -> None:
        super().__init__(id=id, markup=False)
        self.display = False
        self._shown: Completion | None = None

    def show(self, completion: Completion | None, marked: int | None) -> None:
        """Show ``completion`` with the candidate ``marked``; None hides the popup."""
        if completion is not self._shown:
            self._shown = completion
            if completion is not None:
                self.set_options([Option(line) for line in popup_lines(completion.candidates)])
                self.styles.height = min(_MOST_LINES, len(completion.candidates)) + 2
        if completion is not None:
            self.highlighted = marked
        if self.display != (completion is not None):
            self.display = completion is not None

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Picked(event.option_index))


def popup_lines(candidates: Sequence[Suggestion]) -> list[Content]:
    """One line for each candidate: labels in a column, then the details."""
    labels = [Content(one_line(candidate.label)) for candidate in candidates]
    column = max((label.cell_length for label in labels if label.cell_length <= _LABEL_CELLS), default=0)
    return [
        Content.assemble(
            (label.plain, "bold"),
            " " * max(0, column - label.cell_length),
            (f"  {one_line(candidate.detail)}" if candidate.detail else "", "$foreground-muted"),
        )
        for label, candidate in zip(labels, candidates, strict=True)
    ]


# --- earlier questions -----------------------------------------------------------------------------------------------


COMMAND = "/history "
_SEARCHED = 500
"""Number of the newest questions that are searched."""
_LONGEST = 300
"""Maximum characters of a question that are shown: more than a line of any terminal."""


class QuestionSearch:
    """The source for ``/history``.

    ``questions`` gives earlier questions that begin with a text, up to a limit, newest first. The chosen question
    replaces the command.
    """

    def __init__(self, questions: Callable[[str, int], list[str]]) -> None:
        self._questions = questions
        self._known: list[tuple[str, str]] | None = None
        """The questions with their text for comparisons; None until they are needed."""

    def complete(self, before: str, after: str) -> Completion | None:
        if not before.startswith(COMMAND) or "\n" in before or after.strip():
            self._known = None
            return None
        if self._known is None:
            self._known = [(question.casefold(), question) for question in self._questions("", _SEARCHED)]
        words = before[len(COMMAND) :].casefold().split()
        found = [question for text, question in self._known if all(word in text for word in words)]
        return Completion(0, tuple(Suggestion(one_line(text[:_LONGEST]), "", text) for text in found[:_MOST]))
