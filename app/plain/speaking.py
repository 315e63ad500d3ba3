"""The conversation as lines: who speaks is said in words, and an answer is written by whole sentences and lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.attachments.attachment import Attachment
from app.attachments.figures import figures, tokens_of
from app.chat.state import TOO_LONG, Entry, Phase, Status, UserNotice
from app.chat.words import size, thought_figures
from app.plain.console import Console
from app.text_safety import one_line, visible
from engine.ipc.messages import ModelFacts

LONGEST_WAIT = 240
"""Characters of an unfinished sentence that are written at its last space, so that a long one does not seem stuck."""

_ENDS = re.compile(r"\n|(?<=[^\W\d_]{2})[.!?…:;]+[\"'”’»)\]*_]*[ \t]+|[。！？]")
"""The end of a line or a sentence. A number with a point (a list's) is none."""

_LIKE_OWN = re.compile(
    r"^(?=[^\S\n]*(?:You|Model|Notice|Warning|Error|Attached|Chat|Thoughts(?: ?\([^\n)]{0,60}\))?)[^\S\n]{0,3}[:：])",
    re.IGNORECASE | re.MULTILINE,
)
"""The beginning of a line that looks like one of those that say who speaks."""


def quoted(text: str, before: str) -> str:
    """``text`` of a message, with ``>`` before its lines that look like the chat's own. ``before``: what it goes on."""
    text = visible(text, before[-2:])
    first, end, rest = ("", "", text) if before.endswith("\n") else text.partition("\n")
    return first + end + _LIKE_OWN.sub("> ", rest)


def spoken_length(text: str, start: int) -> int:
    """Up to where ``text``, written up to ``start``, can be written now: the end of its last whole sentence or line."""
    ends = [found.end() for found in _ENDS.finditer(text, start)]
    if ends:
        return ends[-1]
    if len(text) - start > LONGEST_WAIT:
        return max(start, text.rfind(" ", start) + 1)
    return start


class Speaker:
    """Writes messages, answers as they grow, notices, and what the engine does meanwhile."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._answer: Entry | None = None
        self._written = ""
        self._begun = False
        self._told_thoughts = False
        self._doing = ""

    def notice(self, notice: UserNotice) -> None:
        """An error is called so."""
        mark = {"error": "Error", "warning": "Warning"}.get(notice.severity, "Notice")
        self.say(one_line(notice.text), mark)

    def say(self, text: str, mark: str = "Notice") -> None:
        """Write ``text`` as lines of its own, after the word for what it is."""
        self._console.write_line(f"{mark}: {quoted(text, mark)}")

    def message(self, entry: Entry) -> None:
        """Write a whole message of the past."""
        self._console.write_line(f"{speaker(entry)}: {quoted(entry.content, speaker(entry))}")
        self.files(entry.attachments)
        self._say_ending(entry)

    def files(self, attachments: Sequence[Attachment], facts: ModelFacts | None = None) -> None:
        """Name the files that are attached to a question. ``facts``: of the model that will see the pictures."""
        for file, tokens in zip(attachments, tokens_of(attachments, facts), strict=True):
            self.say(", ".join([file.name, *figures(file, tokens, "about ")]), "Attached")

    def begin(self, answer: Entry) -> None:
        """The next :meth:`grow` is of ``answer``."""
        self._answer, self._written, self._begun, self._told_thoughts = answer, "", False, False
        self._doing = ""

    def grow(self, answer: Entry, *, streams: bool) -> None:
        """Write what can be written by now of ``answer``. ``streams`` False: its text may change until its end."""
        if answer is not self._answer or not streams:
            return
        if answer.thoughts.text and not self._told_thoughts:
            self._told_thoughts = True
            if not answer.content:
                self.say("The model is thinking.")
        text = answer.content
        if not text.startswith(self._written):
            self.say("The model counts the text above among its thoughts. Its answer follows.")
            self._written, self._begun = "", False
        self._write(answer, text[: spoken_length(text, len(self._written))])

    def end(self, answer: Entry) -> None:
        """Write the rest of ``answer``, and how it ended."""
        if answer is not self._answer:
            return
        if not answer.content.startswith(self._written):
            self._console.end_line()
            self._written, self._begun = "", False
        self._write(answer, answer.content)
        self._console.end_line()
        self._say_ending(answer)
        self._answer = None

    def doing(self, status: Status) -> None:
        """Say what keeps an answer waiting. Each thing is said once, downloads at every quarter."""
        if status.phase not in (Phase.STARTING, Phase.FETCHING, Phase.LOADING, Phase.RESTARTING):
            return
        text = f"{status.phase.value.capitalize()}."
        if status.phase is Phase.FETCHING:
            progress = status.progress
            if progress is None or not progress.total:
                return
            quarter = 25 * (4 * progress.done // progress.total)
            text = f"Downloading the model: {quarter} % of {size(progress.total)}."
        if text != self._doing:
            self._doing = text
            self.say(text)

    def _say_ending(self, entry: Entry) -> None:
        ending = ending_of(entry)
        if ending:
            self.say(ending, "Error" if entry.state == "failed" else "Notice")

    def _write(self, answer: Entry, text: str) -> None:
        new = text[len(self._written) :]
        if not new:
            return
        if not self._begun:
            self._begun = True
            if answer.thoughts.text:
                self.say("/thoughts prints them.", thoughts_mark(answer))
            self._console.end_line()
            self._console.write(f"{speaker(answer)}: ")
        self._console.write(quoted(new, self._written))
        self._written = text


def speaker(entry: Entry) -> str:
    """``You`` or ``Model``."""
    return "You" if entry.role == "user" else "Model"


def thoughts_mark(entry: Entry) -> str:
    """``Thoughts (12 s, 340 tokens)``"""
    figures = thought_figures(entry.thoughts)
    return f"Thoughts ({figures})" if figures else "Thoughts"


def ending_of(entry: Entry) -> str:
    """What is to be said below a message; empty if there is nothing."""
    if entry.note:
        return entry.note
    if entry.role != "assistant":
        return ""
    if entry.state == "stopped":
        return "Stopped."
    if entry.finish_reason == TOO_LONG:
        return "The question did not fit in the context. Later questions leave it out."
    return "The answer is not complete." if entry.state == "failed" else ""
