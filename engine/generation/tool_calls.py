"""Separates tool calls from the text of an answer while it streams.

A call is returned as soon as it is complete. Text that looks like a call but cannot be read stays text, so nothing is
lost.
"""

from __future__ import annotations

import copy
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.generation.argument_stream import ArgumentStream, TaggedStream
from engine.generation.call_shapes import Called, CallReader
from engine.generation.reasoning import MESSAGE, RECIPIENT
from engine.generation.text import overlap
from engine.ipc.messages import Tool, ToolCall
from engine.models.text.tool_formats import ToolFormat

_LETTERS = string.ascii_lowercase + string.digits
ID_LETTERS = 9
"""Number of letters in a call's id. Some templates accept no other length."""

LONGEST_OPENING = 2000
"""Maximum characters within which a call's name and the beginning of its arguments must be read."""
MOST_TRIES = 16
"""Maximum marks at the end of an answer that are tried as the beginning of a call."""
MOST_READ = 20_000_000
"""Maximum characters of an answer's calls that are read, counted again for each end mark that is tried."""
_LOOKED_AT = 200
"""Characters after a mark that decide whether it may begin a call."""


@dataclass(frozen=True)
class WithCalls:
    """New text of the answer, and the calls that became complete."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass
class BegunCall:
    """A call that is certain, while it is being written."""

    id: str
    name: str
    arguments: ArgumentStream | TaggedStream
    read: int
    """Number of the call's characters that were read."""


class ToolCallParser:
    """Separates calls of ``tools`` in ``form`` from text. Marks may arrive in pieces. At most ``most`` calls are
    returned.

    ``prompt`` is the rendered prompt: a template may itself begin a call.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], most: int | None = None, prompt: str = "") -> None:
        self._form = form
        self._reader = CallReader(form, tools)
        self._most = most
        first = (RECIPIENT, "") if form.shape == "parts" else (form.begin, form.end)
        otherwise = (form.begin.replace('"', "'"), form.end)
        self._ends = {begin: end for begin, end in (first, *form.also, otherwise) if begin}
        """End mark of a call by its first mark; empty: it ends at the next call or the answer's end."""
        self._held = form.begin if form.begin and prompt.endswith(form.begin) else ""
        self._space = ""
        """White space that is left out if a call follows."""
        self._mark: str | None = None
        """The mark of the call at which ``_held`` begins; None outside of calls."""
        self._left = MOST_READ
        """Characters that may still be read in search of a call's end."""
        self._tried = 0
        """Number of characters of ``_held`` without an end mark that ends the call."""
        self._begun = False
        """Whether there was any text or call."""
        self._after_call = False
        """Whether no text followed the last call."""
        self._end_may_follow = False
        """Whether the last call lacked its first mark, so that its end mark may still follow."""
        self.calls: list[ToolCall] = []
        """The calls so far."""
        self.begun: BegunCall | None = None
        """The call that is being written, once its name and the beginning of its arguments are read. It will become one
        of the calls, with arguments that start with the certain ones."""

    def again(self) -> ToolCallParser:
        """A new parser like this one. Neither has read anything."""
        other = copy.copy(self)
        other.calls = []
        return other

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks at which a call may begin."""
        return () if self._form.shape == "parts" else (*self._ends, *self._form.hidden)

    def push(self, piece: str) -> WithCalls:
        """Read ``piece``. Returns the text that certainly belongs to no call, and the complete calls.

        The text is read letter by letter, so that early decisions, such as that a call has begun, do not depend on the
        stream's pieces.
        """
        before = len(self.calls)
        text = "".join(map(self._read_letter, piece))
        return WithCalls(text, self.calls[before:])

    def pass_on(self, piece: str) -> str:
        """The text to show for ``piece``, which contains no call, and for what was held before it. A begun call ends
        before it."""
        if not piece:
            return ""
        self._take_begun()
        held = self._as_text(len(self._held)) if self._held else ""
        return held + self._spaced(piece)

    def _read_letter(self, letter: str) -> str:
        """Read ``letter``. Returns the text that is certain afterwards."""
        self._held += letter
        text = ""
        while True:
            text += self._text_before_call()
            if self._mark is None:
                return text
            if self._is_hopeless(self._mark):
                text += self._as_text(len(self._mark))
            elif not self._read_call(last=False):
                self._go_on()
                return text

    def flush(self, cut: bool = False) -> WithCalls:
        """The text and calls held back. Call it once, at the end.

        ``cut``: the answer reached its limit. A call in progress is then returned as far as it was written, with
        incomplete JSON, as OpenAI's servers do.
        """
        before, text = len(self.calls), self._text_before_call(last=True)
        tries = 0
        while self._mark is not None:
            hopeless = self.begun is None and self._is_hopeless(self._mark)
            if hopeless or not (self._read_call(last=True) or self._take_begun() or (cut and self._take_beginning())):
                # What begins here is no call, but one may begin behind it.
                tries += not hopeless
                text += self._as_text(max(1, len(self._mark)) if tries < MOST_TRIES else len(self._held))
            text += self._text_before_call(last=True)
        text += "" if self._after_call else self._space
        self._space = ""
        return WithCalls(text, self.calls[before:])

    # --- text -----------------------------------------------------------------------------------------------------

    def _text_before_call(self, last: bool = False) -> str:
        """The text that is ready. Afterwards ``_held`` begins with a call's mark, or with what may become one."""
        text = ""
        while self._mark is None:
            hidden = (*self._form.hidden, self._form.end) if self._end_may_follow else self._form.hidden
            marks = [mark for mark in (*self._ends, *hidden) if mark]
            openings = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if self._form.bare and not self._begun and self._held.lstrip()[:1] in ("{", "["):
                openings.append((len(self._held) - len(self._held.lstrip()), 0, ""))
            at, _, mark = min(openings, default=(len(self._held), 0, ""))
            longer = any(len(other) > len(self._held) - at and other.startswith(self._held[at:]) for other in marks)
            if not openings or (longer and not last):
                keep = max((overlap(self._held, mark) for mark in marks), default=0) if not last else 0
                at = min(at, len(self._held) - keep)
                ready, self._held = self._held[:at], self._held[at:]
                return text + self._spaced(ready)
            text += self._spaced(self._held[:at])
            if mark and mark in hidden:
                self._held = self._held[at + len(mark) :]
            else:
                self._held, self._mark, self._tried = self._held[at:], mark, len(mark)
        return text

    def _spaced(self, text: str) -> str:
        """``text`` without white space at its end, which waits for more text. After a call all white space is left
        out."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if not stripped:
            return ""
        if self._after_call:
            stripped = stripped.lstrip()
        self._begun, self._after_call, self._end_may_follow = True, False, False
        return stripped

    def _as_text(self, count: int) -> str:
        """The first ``count`` held characters, which belong to no call. The name of a part is not text."""
        text, self._held, self._mark = self._held[:count], self._held[count:], None
        if self._form.shape == "parts":
            self._held = self._held.partition(MESSAGE)[2]
            return ""
        return self._spaced(text)

    def _is_hopeless(self, mark: str) -> bool:
        return self._reader.is_hopeless(self._held[len(mark) : len(mark) + _LOOKED_AT])

    # --- calls ----------------------------------------------------------------------------------------------------

    def _read_call(self, last: bool) -> bool:
        """Read the call at which ``_held`` begins. Returns False if it is incomplete, or not a call.

        An end mark inside an argument does not end the call. ``last``: no more text follows.
        """
        assert self._mark is not None
        end = self._ends.get(self._mark, "")
        until = end or self._mark
        while until and self._left > 0 and (at := self._held.find(until, self._tried)) >= 0:
            self._left -= at
            if self._take(self._held[len(self._mark) : at], at):
                return True
            # More text makes no call of what is none up to here. A model may repeat the mark for ever.
            self._tried = at + 1
        self._tried = max(self._tried, len(self._held) - len(until) + 1)
        return last and self._take(self._held[len(self._mark) :], len(self._held), last=True)

    def _take(self, body: str, at: int, last: bool = False) -> bool:
        """Add the calls in ``body``, which ends at ``at``. Returns False if there are none."""
        assert self._mark is not None
        calls = self._reader.read(body, last)
        if calls is None:
            return False
        end, rest = self._ends.get(self._mark, ""), calls.rest
        behind = self._held[at + len(end) :]
        if self._mark and rest.lstrip().startswith(self._mark):
            # The end mark was forgotten before the next call.
            behind = self._held[at:]
        elif rest.strip() and (end or not self._mark):
            # Only a call without an end mark has text behind it.
            if not last or not end.startswith(rest.strip()):
                return False
            rest = ""
        self._end_may_follow = self._mark not in ("", self._form.begin)
        self._over(rest + behind)
        for each in calls.calls:
            self._add(each)
        return True

    def _go_on(self) -> None:
        """Continue reading the call at which ``_held`` begins, as far as it is certain."""
        assert self._mark is not None
        at = len(self._mark)
        if self.begun is None and self._most != len(self.calls):
            found = self._reader.opening(self._held[at : at + LONGEST_OPENING])
            if found is not None:
                self.begun = BegunCall(new_id(), found[0], found[1], at + found[2])
        if self.begun is not None:
            self.begun.arguments.push(self._held[self.begun.read :])
            self.begun.read = len(self._held)

    def _take_begun(self) -> bool:
        """Add the call in progress as far as it was written. Returns False if there is none."""
        if self.begun is None or self._mark is None:
            return False
        self._go_on()
        name, arguments = self.begun.name, self.begun.arguments
        end = self._ends.get(self._mark, "")
        at = self._held.find(end or self._mark, len(self._mark)) if end or self._mark else -1
        until = (end or self._mark) if at >= 0 else ""
        self._over(arguments.behind(until) + (self._held[at + len(end) :] if at >= 0 else ""))
        self._add(Called(name, arguments.begun(until)))
        return True

    def _take_beginning(self) -> bool:
        """Add the call whose beginning is held. Returns False if no tool's name is complete yet."""
        assert self._mark is not None
        found = self._reader.begun(self._held[len(self._mark) :])
        if found is None:
            return False
        self._over("")
        self._add(found)
        return True

    def _over(self, behind: str) -> None:
        self._mark, self._held, self._space = None, behind, ""
        self._begun = self._after_call = True

    def _add(self, called: Called) -> None:
        begun, self.begun = self.begun, None
        if begun is not None:
            # What was said of it cannot be taken back.
            same = called.name == begun.name and called.arguments.startswith(begun.arguments.text)
            arguments = called.arguments if same else begun.arguments.closed()
            self.calls.append(ToolCall(id=begun.id, name=begun.name, arguments=arguments))
        elif self._most is None or len(self.calls) < self._most:
            self.calls.append(ToolCall(id=new_id(), name=called.name, arguments=called.arguments))


def new_id() -> str:
    """A new id for a call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(ID_LETTERS))


# --- calls inside thoughts -------------------------------------------------------------------------------------------


class CallsInThoughts:
    """Passes thoughts on until a possible call. ``parser`` reads the calls of the answer, and has read none yet."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._held = ""
        """White space and a possible beginning of a mark; after a mark, all that may be a call."""
        self._trial: ToolCallParser | None = None
        """Parser for the held text, if it begins with a mark."""

    @property
    def holding(self) -> bool:
        """Whether held text may be a call."""
        return self._trial is not None

    def push(self, thoughts: str) -> str:
        """Read ``thoughts``. Returns the text that is certainly not a call."""
        if self._trial is None:
            return self._before_call(thoughts)
        self._held += thoughts
        return self._checked(thoughts)

    def closed(self) -> str:
        """The held text, once the end of the thoughts is marked."""
        held, self._held, self._trial = self._held, "", None
        return held

    def flush(self, cut: bool) -> tuple[str, str]:
        """The held text at the end of the stream: the rest of the thoughts, or an answer that begins with a call.

        ``cut``: the answer reached its limit. A call in progress then counts if its tool's name is complete.
        """
        trial, held = self._trial, self.closed()
        if trial is None:
            return held, ""
        trial.flush(cut)
        return ("", held.lstrip()) if trial.calls else (held, "")

    def _before_call(self, text: str) -> str:
        self._held += text
        openings = [at for mark in self._parser.openers if (at := self._held.find(mark)) >= 0]
        if not openings:
            keep = max((overlap(self._held, mark) for mark in self._parser.openers), default=0)
            ready = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(ready) :]
            return ready
        before = self._held[: min(openings)]
        ready = before.rstrip()
        self._held = self._held[len(ready) :]
        self._trial = self._parser.again()
        return ready + self._checked(self._held)

    def _checked(self, new: str) -> str:
        """All held text if ``new`` shows that it is not a call, up to a possible next call."""
        assert self._trial is not None
        if not self._trial.push(new).text.strip() or self._trial.calls:
            return ""
        held = self.closed()
        # The mark itself is no call; another may follow.
        start = len(held) - len(held.lstrip()) + 1
        return held[:start] + self._before_call(held[start:])
