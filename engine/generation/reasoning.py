"""Separates a model's thoughts from its answer while both stream."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from engine.generation.text import overlap
from engine.models.reasoning_formats import ReasoningFormat


class _State(enum.Enum):
    ANSWER = enum.auto()
    THOUGHTS = enum.auto()
    HEADER = enum.auto()
    """In the name of a part."""


@dataclass(frozen=True)
class Separated:
    """New text of the thoughts and of the answer."""

    thoughts: str = ""
    answer: str = ""
    withdrawn: bool = False
    """Whether the answer before this text turned out to be thoughts, because only their end was marked."""


class ReasoningParser:
    """Separates a stream of text by the marks of ``form``. Marks may arrive in pieces.

    ``prompt`` is the rendered prompt: a template may itself begin the thoughts, or say that there are none. A mark
    within the answer is text unless the parts of the answer have names. White space around the thoughts is left out,
    and an empty line stands between two parts of the same kind. ``answering``: an answer that had begun is continued.
    """

    def __init__(self, form: ReasoningFormat, prompt: str = "", answering: bool = False) -> None:
        self._form = form
        end = prompt.rstrip()
        begun = bool(form.begin) and not answering and end.endswith(form.begin)
        self._state = _State.THOUGHTS if begun else _State.ANSWER
        self._settled = not form.headers and (answering or end.endswith(form.end))
        """Whether no mark of thoughts is expected any more."""
        self._held = ""
        """Text that may be the beginning of a mark."""
        self._space = ""
        """White space that is left out unless more text of the same part follows."""
        self._blank = True
        """Whether the part has no text yet."""
        self._header = ""
        self._thought = begun
        self._filled: set[_State] = set()
        self._unmarked = ""
        """The answer while its beginning may still turn out to be thoughts."""

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._state is _State.THOUGHTS

    def push(self, piece: str) -> Separated:
        """The text that certainly belongs to no mark."""
        self._held += piece
        found: list[Separated] = []
        while mark := self._next_mark():
            at = self._held.index(mark)
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            found += [self._text(before), self._marked(mark)]
        keep = max((overlap(self._held, mark) for mark in self._expected()), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return _joined([*found, self._text(ready)])

    def flush(self) -> Separated:
        """The text that was held back. Must be called once, at the end."""
        held, self._held = self._held, ""
        return self._text(held)

    def _expected(self) -> Sequence[str]:
        """The marks that mean something now."""
        form = self._form
        if form.headers:
            return form.marks
        if self._state is _State.THOUGHTS:
            return (form.end, *form.hidden)
        if self._settled or self._thought:
            return form.hidden
        # Thoughts come first, so a later beginning is only spoken of. A lone end marks what was before it as thoughts.
        return (form.end, *form.hidden) if self._unmarked else (form.begin, form.end, *form.hidden)

    def _next_mark(self) -> str | None:
        """The expected mark that comes first in the text; of two at the same place the longer one."""
        places = [(self._held.find(mark), -len(mark), mark) for mark in self._expected()]
        found = sorted(place for place in places if place[0] >= 0)
        return next((mark for at, _, mark in found if mark != self._form.begin or not self._held[:at].strip()), None)

    def _marked(self, mark: str) -> Separated:
        form = self._form
        if mark in form.headers:
            self._state, self._header = _State.HEADER, ""
        elif mark == form.body:
            name = (self._header.split() or [""])[0]
            self._begin(_State.THOUGHTS if name in form.thoughts else _State.ANSWER)
        elif mark == form.begin:
            self._begin(_State.THOUGHTS)
        elif mark == form.end:
            withdrawn, self._unmarked = self._unmarked.strip(), ""
            if withdrawn:
                self._filled = {_State.THOUGHTS}
            self._thought = True
            self._begin(_State.ANSWER)
            return Separated(withdrawn, withdrawn=bool(withdrawn))
        return Separated()

    def _begin(self, state: _State) -> None:
        self._state, self._blank = state, True
        self._space = "\n\n" if state in self._filled else ""
        self._thought = self._thought or state is _State.THOUGHTS

    def _text(self, text: str) -> Separated:
        if self._state is _State.HEADER:
            self._header += text
            return Separated()
        if self._blank and not self._settled:
            text = text.lstrip()
        if not text:
            return Separated()
        text, self._blank, self._space = self._space + text, False, ""
        self._filled.add(self._state)
        if self._state is _State.ANSWER:
            if not self._thought and not self._settled:
                self._unmarked += text
            return Separated(answer=text)
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return Separated(thoughts=kept)


def separate(parser: ReasoningParser, text: str) -> Separated:
    """All of ``text`` at once: its thoughts and its answer."""
    found = _joined([parser.push(text), parser.flush()])
    return Separated(found.thoughts, found.answer)


def _joined(parts: Sequence[Separated]) -> Separated:
    thoughts = answer = ""
    withdrawn = False
    for part in parts:
        if part.withdrawn:
            answer, withdrawn = "", True
        thoughts += part.thoughts
        answer += part.answer
    return Separated(thoughts, answer, withdrawn)
