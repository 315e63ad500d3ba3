"""Earlier questions, recalled in the prompt: those that begin with what is typed, newest first. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

MOST_RECALLED = 100
"""Maximum number of questions that one search goes through."""
SEARCHED = 500
"""Number of the newest questions in which words are searched for."""


def with_words(questions: Callable[[str, int], Sequence[str]], words: str, most: int) -> list[str]:
    """At most ``most`` of the newest ``questions`` that have all ``words``, whatever their case, newest first."""
    wanted = words.casefold().split()
    found = (question for question in questions("", SEARCHED) if all(word in question.casefold() for word in wanted))
    return list(islice(found, most))


class QuestionHistory:
    """Goes through earlier questions: those sent with this prompt and those of a ``source``."""

    def __init__(self) -> None:
        self.source: Callable[[str, int], list[str]] = lambda beginning, limit: []
        """Called with a text and a limit. Returns at most so many questions that begin with the text, newest first."""
        self._sent: list[str] = []
        self._found: list[str] = []
        self._typed = ""
        self._position = -1

    @property
    def recalled(self) -> str | None:
        """The question that was recalled last; None if none is."""
        return self._found[self._position] if self._position >= 0 else None

    def sent(self, question: str) -> None:
        """``question`` was sent. It need not be in the store yet."""
        self._sent = [question, *(other for other in self._sent if other != question)][:MOST_RECALLED]
        self.leave()

    def leave(self) -> None:
        """Go through nothing any more."""
        self._found, self._position = [], -1

    def back(self, typed: str) -> str | None:
        """The question before the one recalled last; None if there is none.

        With none recalled, the newest that begins with ``typed``.
        """
        if self._position < 0:
            self._typed = typed
            own = [question for question in self._sent if question.startswith(typed)]
            found = dict.fromkeys([*own, *self.source(typed, MOST_RECALLED)])
            self._found = [question for question in found if question.strip() and question != typed]
        if self._position + 1 >= len(self._found):
            return None
        self._position += 1
        return self._found[self._position]

    def forward(self) -> str:
        """The question after the one recalled last; after the newest, what was typed."""
        self._position = max(-1, self._position - 1)
        return self._typed if self._position < 0 else self._found[self._position]
