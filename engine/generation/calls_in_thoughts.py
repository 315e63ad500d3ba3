"""A call of a tool that ends thoughts whose end was never marked.

Models forget the end of their thoughts before a call. What looks like a call is therefore held back until the thoughts
end: if their end is marked, it was part of them; if the answer ends first, it is the call.
"""

from __future__ import annotations

from engine.generation.text import overlap
from engine.generation.tool_calls import ToolCallParser


class CallsInThoughts:
    """Passes thoughts on up to what may be a call. ``parser`` reads the calls of the answer, and has read none yet."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._held = ""
        """White space and what may become a call's mark; behind a mark, all that may be a call."""
        self._trial: ToolCallParser | None = None
        """Reads what is held, if it begins with a mark."""

    @property
    def holding(self) -> bool:
        """Whether there is something that may be a call."""
        return self._trial is not None

    def push(self, thoughts: str) -> str:
        """What is certainly no call."""
        if self._trial is None:
            return self._before_call(thoughts)
        self._held += thoughts
        return self._checked(thoughts)

    def closed(self) -> str:
        """What was held back, as the end of the thoughts is marked."""
        held, self._held, self._trial = self._held, "", None
        return held

    def flush(self, cut: bool) -> tuple[str, str]:
        """What was held back: the rest of the thoughts, or an answer that begins with a call, as the text is over.

        ``cut``: it reached its limit. A call that it was in then counts if its tool's name is there.
        """
        trial, held = self._trial, self.closed()
        if trial is None:
            return held, ""
        trial.flush(cut)
        return ("", held.lstrip()) if trial.calls else (held, "")

    def _before_call(self, text: str) -> str:
        self._held += text
        found = [at for mark in self._parser.openers if (at := self._held.find(mark)) >= 0]
        if not found:
            keep = max((overlap(self._held, mark) for mark in self._parser.openers), default=0)
            ready = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(ready) :]
            return ready
        before = self._held[: min(found)]
        ready = before.rstrip()
        self._held = self._held[len(ready) :]
        self._trial = self._parser.again()
        return ready + self._checked(self._held)

    def _checked(self, new: str) -> str:
        """All that is held if ``new`` shows that it is no call, up to what may be the next one."""
        assert self._trial is not None
        if not self._trial.push(new).text.strip() or self._trial.calls:
            return ""
        held = self.closed()
        # The mark itself is no call; another may follow.
        start = len(held) - len(held.lstrip()) + 1
        return held[:start] + self._before_call(held[start:])
