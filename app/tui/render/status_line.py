"""The status line: the activity and the model at the left, the figures at the right, as far as they fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from textual.content import Content

from app.chat.state import BUSY, Phase, Status
from app.chat.words import engine_name, rate, share_of_speed, size
from app.ring_words import latency, ring_name
from app.text_safety import one_line
from app.tui.keymap import key
from app.tui.render.formatting import bar
from engine.ipc.messages import MemoryUse, Progress, UnderWay

_DOTS = {
    Phase.READY: ("●", "$text-success"),
    Phase.UNAVAILABLE: ("✗", "$text-error"),
    Phase.STOPPING: ("◌", "$text-warning"),
    Phase.RESTARTING: ("↻", "$text-warning"),
}
_MUTED = "$foreground-muted"
_GAP = 2


@dataclass(frozen=True)
class StatusPart:
    """A part of the line in one or more lengths, the longest first.

    ``shorten``: for each length, how important it is not to go to the next one; the last one is for leaving the part
    out. Small numbers go first.
    """

    lengths: tuple[Content, ...]
    shorten: tuple[int, ...]
    right: bool = False


def status_line(status: Status, width: int) -> Content:
    """One line of at most ``width`` cells. If it does not fit, the least important parts are shortened or left out."""
    activity = _activity(status)
    chosen = fitted([*_details(status), *_figures(status)], width - activity.cell_length - _GAP)
    left = Content("  ").join([activity, *[text for part, text in chosen if not part.right]])
    right = Content("  ").join([text for part, text in chosen if part.right])
    if left.cell_length > width:
        return left.truncate(max(width, 0), ellipsis=True)
    return Content.assemble(left, " " * (width - left.cell_length - right.cell_length), right)


def fitted(parts: list[StatusPart], width: int) -> list[tuple[StatusPart, Content]]:
    """The parts that fit into ``width`` cells with a gap between any two, each in the length that is left to it."""
    lengths = [0] * len(parts)
    steps = sorted(
        (importance, index, length + 1)
        for index, part in enumerate(parts)
        for length, importance in enumerate(part.shorten)
    )
    while True:
        shown = [(part, part.lengths[at]) for part, at in zip(parts, lengths, strict=True) if at < len(part.lengths)]
        if not steps or sum(text.cell_length for _, text in shown) + _GAP * (len(shown) - 1) <= width:
            return shown
        _, index, length = steps.pop(0)
        lengths[index] = max(lengths[index], length)


def _part(*texts: str, shorten: tuple[int, ...], style: str = "", right: bool = False) -> StatusPart:
    return StatusPart(tuple(Content.styled(text, style) for text in texts), shorten, right)


def _activity(status: Status) -> Content:
    dot, colour = _DOTS.get(status.phase, ("◍", "$text-accent"))
    where = " in another chat" if status.elsewhere and status.phase in BUSY else ""
    text = Content.assemble((f"{dot} ", colour), f"{status.phase.value}{where}")
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


def _details(status: Status) -> list[StatusPart]:
    facts = status.facts
    name = facts.name if facts is not None else status.model
    parts = [_part(name, shorten=(70,), style=_MUTED)] if name else []
    if facts is None:
        return parts
    if facts.weights and facts.weights.casefold() not in name.casefold():
        parts.append(_part(facts.weights, shorten=(50,), style=_MUTED))
    if facts.ring is not None:
        ring = ring_name(facts.ring, status.away)
        # The ring and its lost machines are more important than long forms of the figures.
        parts.append(_part(ring, ring.partition(" · ")[0], shorten=(48, 75), style=_MUTED))
    parts.append(_part(engine_name(facts), shorten=(10,), style=_MUTED))
    return parts


def _figures(status: Status) -> list[StatusPart]:
    parts: list[StatusPart] = []
    if status.slowest:
        parts.append(_part(f"{status.slowest} ({key('timing')})", shorten=(12,), style="$text-warning", right=True))
    if status.beams > 1:
        parts.append(_part(f"{status.beams} beams", f"{status.beams}b", shorten=(42, 60), right=True))
    if status.warm_up is not None and status.warm_up.total:
        share = f"{100 * status.warm_up.done // status.warm_up.total}%"
        parts.append(_part(f"warming up {share}", f"warm {share}", shorten=(41, 65), style="$text-warning", right=True))
    elif status.memory is not None:
        parts.append(_memory(status.memory))
    first = status.ttft_s if status.ttft_s is not None else status.probe_s
    if first is not None and status.phase not in BUSY:
        took = latency(first)
        parts.append(_part(f"first token {took}", f"first {took}", shorten=(20, 30), style=_MUTED, right=True))
    if status.served_at:
        ports = ", ".join(dict.fromkeys(f":{urlsplit(url).port}" for url in status.served_at))
        parts.append(_part(f"serving {ports}", "serving", shorten=(15, 32), style=_MUTED, right=True))
    if status.draft_tokens:
        about = "" if status.draft_counted else "~"
        draft = (f"draft {about}{status.draft_tokens:,}", f"{about}{_thousands(status.draft_tokens)}")
        parts.append(_part(*draft, shorten=(40, 55), right=True))
    if status.facts is not None and status.facts.context_limit:
        parts.append(_context(status.context_used, status.facts.context_limit))
    speed = rate(status.tokens_per_s)
    if status.under_way is not None and status.phase in BUSY:
        parts.append(_shared(status.under_way))
    elif speed and (status.phase in BUSY or status.phase is Phase.READY):
        short = f"{status.tokens_per_s:.1f} t/s"
        parts.append(_part(speed, short, shorten=(46, 80), style="$text-success", right=True))
    if status.unsaved:
        parts.append(_part("not saved", "unsaved", shorten=(47, 90), style="$text-error", right=True))
    return parts


def _shared(under_way: UnderWay) -> StatusPart:
    """``3 answers · yours 9.8 of 24.1 tok/s``."""
    answers, share = f"{under_way.answers} answers", share_of_speed(under_way)
    if not share:
        return _part(answers, shorten=(80,), style="$text-success", right=True)
    short = f"{under_way.own_tokens_per_s:.1f} of {under_way.tokens_per_s:.1f} t/s"
    return _part(f"{answers} · yours {share}", short, shorten=(46, 80), style="$text-success", right=True)


def _memory(memory: MemoryUse) -> StatusPart:
    """``1.2 GB + 4.0 GB mapped``: the engine's own memory, and pages of files that the system can drop."""
    own = size(memory.own)
    if not memory.mapped:
        return _part(f"memory {own}", own, shorten=(15, 25), style=_MUTED, right=True)
    whole = f"memory {own} + {size(memory.mapped)} mapped"
    return _part(whole, size(memory.own + memory.mapped), shorten=(15, 25), style=_MUTED, right=True)


def _context(used: int | None, limit: int) -> StatusPart:
    share = 0.0 if used is None else used / limit
    colour = "$text-error" if share > 0.95 else "$text-warning" if share > 0.8 else ""
    texts = (f"context {'–' if used is None else f'{used:,}'}/{limit:,}", f"{_thousands(used)}/{_thousands(limit)}")
    if used is not None:
        texts = (f"{texts[0]} ({share:.0%})", texts[1])
    return _part(*texts, shorten=(45, 72 if share <= 0.8 else 85), style=colour, right=True)


def _thousands(count: int | None) -> str:
    return "–" if count is None else f"{count / 1000:.1f}k" if count >= 10_000 else str(count)
