"""Separates a model's thoughts from its answer while both stream."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.generation.text import overlap
from engine.models.text.reasoning_formats import ReasoningFormat

RECIPIENT, MESSAGE = "<|recipient|>", "<|message|>"
"""Marks around the name of the tool to which a part of an answer is addressed."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGUN_RECIPIENT = re.compile(r"\s*(t(o(=[^\s<]*\s*)?)?)?")
"""Possible beginning of a part whose header the prompt has begun, up to the header's next mark."""

_BEFORE_QUOTED = frozenset("`'\"“”‘’«»‹›„‚*_([{</|=")
"""Characters before a mark that is only mentioned."""
_NO_TOOLS = ("assistant", "user")
"""Recipients of a part that are not tools."""


class _AnswerPart(enum.Enum):
    ANSWER = enum.auto()
    THOUGHTS = enum.auto()
    HEADER = enum.auto()
    """The name of a part, between its marks."""


@dataclass(frozen=True)
class Separated:
    """New text of the thoughts and of the answer."""

    thoughts: str = ""
    answer: str = ""
    withdrawn: bool = False
    """Whether the answer before this text was in fact thoughts, of which only the end was marked."""


LONGEST_NAME = 200
"""Maximum characters of a part's name. Longer text is an answer whose mark is missing."""


class ReasoningParser:
    """Separates thoughts from the answer in a stream, by the marks of ``form``. Marks may arrive in pieces.

    ``prompt`` is the rendered prompt: a template may itself begin the thoughts, or say that there are none. A mark
    within the answer is plain text, unless the answer's parts have names. A lone end mark at the beginning of a line,
    or right after a word, makes the text before it thoughts. White space around the thoughts is left out, and an empty
    line separates two parts of the same kind.

    ``answering``: an answer that had begun is continued. ``recipients``: a part for a tool begins with the tool's name,
    between marks of :mod:`engine.generation.tool_calls`.
    """

    def __init__(
        self, form: ReasoningFormat, prompt: str = "", answering: bool = False, recipients: bool = False
    ) -> None:
        self._form = form
        self._recipients = recipients
        end = prompt.rstrip()
        begun = bool(form.begin) and not answering and end.endswith(form.begin)
        self._state = _AnswerPart.THOUGHTS if begun else _AnswerPart.ANSWER
        self._answering = answering
        self._settled = not form.headers and (answering or end.endswith(form.end))
        """Whether no more marks of thoughts are expected."""
        self._held = ""
        """Text that may be the beginning of a mark."""
        self._space = ""
        """White space that is left out unless more text of the same part follows."""
        self._blank = not answering
        """Whether the part has no text yet."""
        self._header = ""
        """Text since the beginning of the part, with the marks after it."""
        self._named = False
        """Whether the text belongs to a part whose name was read."""
        self.for_user = False
        """Whether the text belongs to a part that is addressed to the user and so contains no calls."""
        self._thought = begun
        self._filled: set[_AnswerPart] = set()
        self._opened = False
        """Whether the first of the hidden marks was found, so that the second is expected."""
        self._unmarked = ""
        """Text of the answer while its beginning may still turn out to be thoughts."""
        self._header_begun = bool(form.headers) and not answering and self._begins_header(end)
        """Whether the prompt has begun the name of the first part, and nothing of it was read yet."""

    def _begins_header(self, prompt: str) -> bool:
        form = self._form
        _, found, header = prompt.rpartition(form.headers[0])
        return bool(found) and form.body not in header and form.end not in header

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._state is _AnswerPart.THOUGHTS

    @property
    def answer_may_begin(self) -> bool:
        """Whether the next text may be the answer's: it is outside the thoughts, and after a part's name if parts have
        names."""
        return self._state is _AnswerPart.ANSWER and (self._named or not self._form.headers)

    @property
    def in_name(self) -> bool:
        """Whether the next text belongs to the name of a part."""
        return self._state is _AnswerPart.HEADER

    @property
    def has_parts(self) -> bool:
        """Whether the parts of the answer have names."""
        return bool(self._form.headers)

    @property
    def name_ends(self) -> tuple[str, ...]:
        """The marks that end the name of a part."""
        return (self._form.body,) if self._form.headers else ()

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks that may come next, before the answer has begun."""
        form = self._form
        if form.headers:
            return () if self._named else form.headers
        hidden = form.hidden[:1] if not self._opened else ()
        thoughts = (form.begin,) if form.begin and not self._without_thoughts else ()
        return () if self._state is _AnswerPart.THOUGHTS else (*thoughts, *hidden)

    @property
    def has_thought(self) -> bool:
        """Whether there were thoughts, perhaps empty ones. An empty line may follow them."""
        return self._thought

    def push(self, piece: str) -> Separated:
        """Read ``piece``. Returns the text that certainly belongs to no mark."""
        self._held += piece
        separated: list[Separated] = []
        while (met := self._next_mark()) is not None:
            at, mark = met
            rest = self._held[at:]
            if any(other != rest and other.startswith(rest) for other in self._expected()):
                # It may become a longer mark.
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            separated += [self._text(before), self._marked(mark)]
        keep = max((overlap(self._held, mark) for mark in self._expected()), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return _joined([*separated, self._text(ready)])

    def flush(self) -> Separated:
        """The text that was held back. Call it once, at the end."""
        held, self._held = self._held, ""
        self._header_begun = False
        for mark in self._form.stray:
            held = held.replace(mark, "")
        found = self._text(held)
        still_blank = self._blank and self._state is _AnswerPart.ANSWER and _AnswerPart.ANSWER not in self._filled
        if still_blank and self._without_thoughts and not self._form.headers:
            return Separated(answer=self._space)
        return found

    @property
    def _without_thoughts(self) -> bool:
        """Whether no more thoughts may begin."""
        return self._thought or self._settled

    def _expected(self) -> Sequence[str]:
        """The marks that have a meaning now, or somewhere in the held text."""
        form = self._form
        if form.headers:
            return (*form.marks, *form.within)
        if form.stray:
            return (form.begin, form.end, *form.stray)
        if self._state is _AnswerPart.THOUGHTS:
            # A model may repeat the beginning that its template wrote.
            return (form.end, form.begin) if self._blank else (form.end,)
        hidden = form.hidden[1:] if self._opened else form.hidden[:1] if self._blank else ()
        if self._without_thoughts:
            return hidden
        return (form.begin, form.end, *hidden)

    def _next_mark(self) -> tuple[int, str] | None:
        """Position and text of the first expected mark; the longer of two at the same position."""
        found = [(at, mark) for mark in self._expected() if (at := self._place(mark)) >= 0]
        return min(found, key=lambda place: (place[0], -len(place[1])), default=None)

    def _place(self, mark: str) -> int:
        """Index of ``mark`` in the held text; -1 if it is missing, or only mentioned as a word."""
        form, held = self._form, self._held
        at = held.find(mark)
        if form.headers or form.stray:
            return at
        if mark == form.end and self._state is _AnswerPart.ANSWER:
            while at >= 0 and not self._is_lone_end(at):
                at = held.find(mark, at + 1)
            return at
        if mark == form.begin or (form.hidden and mark == form.hidden[0] and not self._opened):
            return at if at >= 0 and self._blank and not held[:at].strip() else -1
        return at

    def _is_lone_end(self, at: int) -> bool:
        before = self._unmarked + self._space + self._held[:at]
        if not before.strip():
            # The thoughts are empty.
            return True
        if self._form.begin in before:
            return False
        # Within a line a mark that is spoken of stands after a space or a quotation mark.
        return before.endswith("\n") or not (before[-1].isspace() or before[-1] in _BEFORE_QUOTED)

    def _marked(self, mark: str) -> Separated:
        form = self._form
        if mark in form.headers:
            # The recipient may stand before a further mark of the same header.
            header = "" if mark == form.headers[0] else self._header
            self._state, self._header, self._named = _AnswerPart.HEADER, header + mark, False
            self._header_begun = self.for_user = False
        elif mark in form.within:
            self._header += " " if self._header else ""
        elif mark == form.body:
            header = self._header
            self._named, self._header_begun = True, False
            words = re.split("|".join(map(re.escape, form.headers)), header)[-1].split()
            recipient = _RECIPIENT.search(header)
            self.for_user = recipient is not None and recipient[1] == "user"
            recipient = recipient if self._recipients else None
            recipient = None if recipient is not None and recipient[1] in _NO_TOOLS else recipient
            self._begin(
                _AnswerPart.ANSWER if recipient or set(words).isdisjoint(form.thoughts) else _AnswerPart.THOUGHTS
            )
            if recipient is not None:
                return Separated(answer=f"{RECIPIENT}{recipient[1]}{MESSAGE}")
        elif mark == form.begin:
            self._unmarked = ""
            if self._state is not _AnswerPart.THOUGHTS:
                self._begin(_AnswerPart.THOUGHTS)
        elif mark in form.stray and (mark != form.end or self._state is _AnswerPart.ANSWER):
            pass
        elif mark == form.end:
            withdrawn, self._unmarked = "" if form.headers else self._unmarked.strip(), ""
            if withdrawn:
                self._filled = {_AnswerPart.THOUGHTS}
            self._thought = self._thought or not form.headers
            self._named = self.for_user = False
            self._begin(_AnswerPart.ANSWER)
            return Separated(withdrawn, withdrawn=bool(withdrawn))
        else:
            self._opened = not self._opened
            if self._blank:
                self._space = ""
        return Separated()

    def _begin(self, state: _AnswerPart) -> None:
        self._state, self._blank, self._header = state, True, ""
        self._space = "\n\n" if state in self._filled else ""
        self._thought = self._thought or state is _AnswerPart.THOUGHTS

    def _text(self, text: str) -> Separated:
        if self._state is _AnswerPart.HEADER:
            self._header += text
            if len(self._header) <= LONGEST_NAME:
                return Separated()
            text = self._without_marks(self._header)
            self._begin(_AnswerPart.ANSWER)
        elif self._form.headers and not self._named and self._blank:
            text, self._header = self._header + text, ""
            if self._header_begun and len(text) <= LONGEST_NAME and _BEGUN_RECIPIENT.fullmatch(text):
                self._header = text
                return Separated()
        if self._state is _AnswerPart.THOUGHTS:
            return self._thoughts(text)
        if self._blank:
            mark_may_follow = not self._without_thoughts or (bool(self._form.hidden) and not self._opened)
            if (self._without_thoughts or self._opened) and not (mark_may_follow and self._space):
                text = text.lstrip("\n")
            if mark_may_follow and not text.strip():
                # Before a mark it is not part of the answer.
                self._space += text
                return Separated()
        if not text:
            return Separated()
        text, self._blank, self._space = self._space + text, False, ""
        self._filled.add(_AnswerPart.ANSWER)
        if not self._thought and not self._settled:
            self._unmarked += text
        return Separated(answer=text)

    def _without_marks(self, header: str) -> str:
        for mark in self._form.headers:
            header = header.replace(mark, "")
        return header

    def _thoughts(self, text: str) -> Separated:
        if self._blank:
            text = text.lstrip()
        if not text:
            return Separated()
        text, self._blank = self._space + text, False
        self._filled.add(_AnswerPart.THOUGHTS)
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return Separated(thoughts=kept)


def separate(parser: ReasoningParser, text: str) -> Separated:
    """The thoughts and the answer in the whole of ``text``."""
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
