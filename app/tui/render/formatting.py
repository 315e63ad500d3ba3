"""Figures and one-line texts as the screen shows them. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from app.chat.state import TOO_LONG, Entry
from app.chat.words import rate, thought_figures
from app.conversations.groups import local_date
from app.conversations.records import Thoughts

_MUTED = "$foreground-muted"


def bar(done: float, total: float, width: int) -> Content:
    """A progress bar of ``width`` cells."""
    full = round(width * min(1.0, done / total)) if total > 0 else 0
    return Content.assemble(("━" * full, "$primary"), ("─" * (width - full), _MUTED))


def flowing(items: Sequence[Content], width: int) -> Content:
    """``items`` side by side on as many lines of ``width`` cells as they need. No item is split."""
    lines: list[Content] = []
    for item in items:
        if lines and lines[-1].cell_length + 2 + item.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], "  ", item)
        else:
            lines.append(item)
    return Content("\n").join(lines)


# --- around a message ---------------------------------------------------------------------------------------------


def heading(entry: Entry, time: str = "") -> Content:
    """The speaker, which of the alternatives is shown, and the ``time`` if it is given."""
    name = ("You", "bold $text-primary") if entry.role == "user" else (entry.model or "Model", "bold $text-secondary")
    parts: list[Content | tuple[str, str]] = [name]
    if entry.siblings > 1:
        parts.append((f"  ‹ {entry.sibling_index + 1}/{entry.siblings} ›", "$text-accent"))
    if entry.role == "assistant" and entry.state != "writing" and entry.tokens:
        figures = " · ".join(
            filter(None, [f"{entry.tokens:,} token{'' if entry.tokens == 1 else 's'}", rate(entry.tokens_per_s)])
        )
        parts.append((f"  {figures}", _MUTED))
    if time:
        parts.append((f"  {time}", _MUTED))
    if entry.record is None:
        parts.append(("  not saved", "$text-error"))
    return Content.assemble(*parts)


LINES, CHARACTERS = 40, 4_000
"""Maximum lines and characters of a question that is shown as it is."""
_BEGINNING, _END = (6, 600), (3, 300)
"""Maximum lines and characters that are shown of both ends of a longer one."""


@dataclass(frozen=True)
class Folded:
    """The ends of a long question, and how much it has in all and between them: ``10,000 lines``."""

    beginning: str
    end: str
    whole: str
    between: str

    def line(self, is_open: bool) -> Content:
        """``▸ 9,991 more lines``: the line that stands for what is left out, or above all of it."""
        return Content.styled(f"▾ {self.whole}" if is_open else f"▸ {self.between}", f"italic {_MUTED}")


def fold(question: str) -> Folded | None:
    """The folded form of a long question; None if it is short."""
    lines = question.count("\n") + 1
    if lines <= LINES and len(question) <= CHARACTERS:
        return None
    beginning = "\n".join(question[: _BEGINNING[1]].split("\n")[: _BEGINNING[0]])
    end = "\n".join(question[-_END[1] :].rstrip().split("\n")[-_END[0] :])
    if lines > LINES:
        left_out = lines - beginning.count("\n") - end.count("\n") - 2
        return Folded(beginning, end, f"{lines:,} lines", f"{left_out:,} more lines")
    left_out = len(question) - len(beginning) - len(end)
    return Folded(beginning, end, f"{len(question):,} characters", f"{left_out:,} more characters")


def thoughts_line(thoughts: Thoughts, is_open: bool, live: bool = False) -> Content:
    """``▸ Thought for 12 s, 340 tokens``: the line that stands for a model's thoughts, or above them."""
    figures = thought_figures(thoughts)
    word = "Thinking" if live else "Thought"
    text = f"{word} for {figures}" if figures else f"{word}…" if live else "Thoughts"
    return Content.styled(f"{'▾' if is_open else '▸'} {text}", f"italic {_MUTED}")


def footing(entry: Entry) -> Content | None:
    """The line below a message; None if there is none."""
    parts: list[Content] = []
    if entry.generation.edited:
        parts.append(Content.styled("edited by you", f"italic {_MUTED}"))
    if entry.note:
        style = "$text-error" if entry.state == "failed" else "$text-warning" if entry.state == "stopped" else _MUTED
        parts.append(Content.styled(entry.note, style))
    elif entry.role == "assistant" and entry.state == "stopped":
        parts.append(Content.styled("Stopped.", "$text-warning"))
    elif entry.role == "assistant" and entry.finish_reason == TOO_LONG:
        parts.append(
            Content.styled("The question did not fit in the context. Later questions leave it out.", "$text-error")
        )
    elif entry.role == "assistant" and entry.state == "failed":
        parts.append(Content.styled("The answer is not complete.", "$text-error"))
    if not parts:
        return None
    return Content.styled(" · ", _MUTED).join(parts)


# --- times of messages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stamp:
    """``time``: ``14:05``. ``day``: ``Monday, 3 May 2027``; empty if it is that of the message before."""

    time: str
    day: str = ""


def stamp(created: float, before: float | None) -> Stamp | None:
    """The stamp of a message that was ``created`` then, after one of ``before`` if there is one.

    Both are in seconds since the epoch. None if the time is not known.
    """
    day = local_date(created) if created > 0 else None
    if day is None:
        return None
    other = before is None or local_date(before) != day
    return Stamp(time.strftime("%H:%M", time.localtime(created)), f"{day:%A}, {day.day} {day:%B %Y}" if other else "")
