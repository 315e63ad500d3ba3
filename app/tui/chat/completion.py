"""Completion in the prompt: sources that offer candidates for what is typed, and the popup that shows them.

A source is pure and quick, because it is asked at every key. One that has to read the disk does so in the background
and calls :meth:`Completer.forget` and the prompt's ``show_completions`` when it knows more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from textual import on
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from app.text_safety import one_line

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
    """What a source offers: ``candidates``, best first, for the text from offset ``start`` to the cursor.

    ``preselected``: enter takes the first candidate. Otherwise enter keeps what was typed until a candidate was chosen
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
    """What the sources offer at the cursor, which candidate is marked, and whether the person closed the popup.

    The sources are asked in their order; the first that offers something is taken.
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
