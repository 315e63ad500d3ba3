"""Figures and one-line texts as the screen shows them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from app.chat.state import BUSY, TOO_LONG, Entry, Phase, Status
from app.chat.words import engine_name, rate, size, thought_figures
from app.conversations.store import Thoughts
from app.ring_words import latency, ring_name
from app.text_safety import one_line
from engine.ipc.messages import Progress

_DOTS = {
    Phase.READY: ("●", "$text-success"),
    Phase.UNAVAILABLE: ("✗", "$text-error"),
    Phase.STOPPING: ("◌", "$text-warning"),
    Phase.RESTARTING: ("↻", "$text-warning"),
}
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


def status_line(status: Status, width: int) -> Content:
    """One line of at most ``width`` cells: the activity at the left, the figures at the right.

    If it does not fit, the least important parts are left out first.
    """
    left = _activity(status)
    details = _details(status)
    figures = _figures(status)
    on_a_ring = status.facts is not None and status.facts.ring is not None
    choices = [details[:keep] for keep in range(len(details), -1, -1)]
    if on_a_ring and len(details) > 1:
        choices.insert(-2, [details[0], details[1].partition(" · ")[0]])
    for chosen in choices:
        middle = [Content.styled(text, _MUTED) for text in chosen]
        short = [figure.short for figure in figures]
        fewer = [figure.short for figure in figures if not figure.spare]
        for shown in (figures, short, fewer, short[-1:], []):
            right = Content("  ").join([item if isinstance(item, Content) else item.long for item in shown])
            line = Content("  ").join([left, *middle])
            gap = width - line.cell_length - right.cell_length
            if gap >= 2 or (gap >= 0 and not right.plain):
                return Content.assemble(line, " " * gap, right)
            # The ring and its lost machines are more important than long forms of the figures.
            if chosen and (shown is fewer or not on_a_ring):
                break
    return left.truncate(max(width, 0), ellipsis=True)


class _Figure:
    """A figure of the status line in two lengths. ``spare``: it is left out before the ring's description."""

    def __init__(self, long: str, short: str, style: str = "", spare: bool = False) -> None:
        self.long = Content.styled(long, style)
        self.short = Content.styled(short, style)
        self.spare = spare


def _activity(status: Status) -> Content:
    dot, colour = _DOTS.get(status.phase, ("◍", "$text-accent"))
    text = Content.assemble((f"{dot} ", colour), status.phase.value)
    progress, prefill = status.progress, status.prefill
    if progress is not None and status.phase in (Phase.READING, Phase.THINKING, Phase.ANSWERING, Phase.FETCHING):
        # Also while a ring is formed again during an answer.
        text = Content.assemble((f"{dot} ", colour), one_line(progress.stage))
        return Content.assemble(text, _done(progress))
    if progress is not None and status.phase is Phase.LOADING:
        if progress.stage != status.phase.value:
            text = Content.assemble(text, f": {one_line(progress.stage)}")
        return Content.assemble(text, _done(progress))
    if status.phase is Phase.READING and prefill is not None and prefill.total:
        share = f" {prefill.done}/{prefill.total}"
        return Content.assemble(text, " ", bar(prefill.done, prefill.total, 10), share)
    waiting = status.waiting + status.queued
    if waiting:
        return Content.assemble(text, (f" · {waiting} waiting", "$text-warning"))
    return text


def _done(progress: Progress) -> Content:
    """A space and the part that is done; empty if the total is not known."""
    if not progress.total:
        return Content()
    share = f" {100 * progress.done // progress.total}%"
    amount = f" of {size(progress.total)}" if progress.unit == "bytes" else ""
    return Content.assemble(" ", bar(progress.done, progress.total, 10), share, amount)


def _details(status: Status) -> list[str]:
    facts = status.facts
    details = [facts.name if facts is not None else status.model]
    if facts is not None:
        details.append(engine_name(facts) if facts.ring is None else ring_name(facts.ring, status.away))
        if facts.ring is not None:
            details.append(engine_name(facts))
    return [detail for detail in details if detail]


def _figures(status: Status) -> list[_Figure]:
    figures: list[_Figure] = []
    if status.beams > 1:
        figures.append(_Figure(f"{status.beams} beams", f"{status.beams}b"))
    if status.warm_up is not None and status.warm_up.total:
        share = f"{100 * status.warm_up.done // status.warm_up.total}%"
        figures.append(_Figure(f"warming up {share}", f"warm {share}", "$text-warning"))
    elif status.probe_s is not None:
        idle = latency(status.probe_s)
        figures.append(_Figure(f"first token {idle}", f"first {idle}", _MUTED, spare=True))
    if status.draft_tokens:
        figures.append(_Figure(f"draft ~{status.draft_tokens:,}", f"~{_thousands(status.draft_tokens)}", spare=True))
    if status.facts is not None and status.facts.context_limit:
        figures.append(_context(status.context_used, status.facts.context_limit))
    speed = rate(status.tokens_per_s)
    if speed and (status.phase in BUSY or status.phase is Phase.READY):
        figures.append(_Figure(speed, f"{status.tokens_per_s:.1f} t/s", "$text-success"))
    if status.unsaved:
        figures.append(_Figure("not saved", "unsaved", "$text-error"))
    return figures


def _context(used: int | None, limit: int) -> _Figure:
    share = 0.0 if used is None else used / limit
    colour = "$text-error" if share > 0.95 else "$text-warning" if share > 0.8 else ""
    if used is None:
        return _Figure(f"context –/{limit:,}", f"–/{_thousands(limit)}")
    return _Figure(f"context {used:,}/{limit:,} ({share:.0%})", f"{_thousands(used)}/{_thousands(limit)}", colour)


def _thousands(count: int) -> str:
    return f"{count / 1000:.1f}k" if count >= 10_000 else str(count)


# --- around a message ---------------------------------------------------------------------------------------------


def heading(entry: Entry) -> Content:
    """The speaker, and which of the alternatives is shown."""
    name = ("You", "bold $text-primary") if entry.role == "user" else (entry.model or "Model", "bold $text-secondary")
    parts: list[Content | tuple[str, str]] = [name]
    if entry.siblings > 1:
        parts.append((f"  ‹ {entry.sibling_index + 1}/{entry.siblings} ›", "$text-accent"))
    if entry.role == "assistant" and entry.state != "writing" and entry.tokens:
        figures = " · ".join(filter(None, [f"{entry.tokens:,} tokens", rate(entry.tokens_per_s)]))
        parts.append((f"  {figures}", _MUTED))
    if entry.record is None:
        parts.append(("  not saved", "$text-error"))
    return Content.assemble(*parts)


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
