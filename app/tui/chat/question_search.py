"""Completion of ``/history words``: earlier questions of all conversations that have the words."""

from __future__ import annotations

from collections.abc import Callable

from app.text_safety import one_line
from app.tui.chat.completion import Completion, Suggestion

COMMAND = "/history "
_SEARCHED = 500
"""Number of the newest questions that are searched."""
_MOST = 50
"""Maximum number of candidates."""
_LONGEST = 300
"""Maximum characters of a question that are shown: more than a line of any terminal."""


class QuestionSearch:
    """The source for ``/history``. ``questions`` gives at most so many questions that begin with a text, newest first.

    The question that is taken replaces the command.
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
