"""The beam panel: the number of candidates, its cost, and the candidates themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from app.chat.controller import ChatController
from app.chat.state import BeamsChanged, StatusChanged, Update
from app.chat.words import rate, size
from app.text_safety import one_line
from app.tui.panels.panel import Panel
from app.tui.render.rendered import Rendered
from engine.ipc.messages import Beam, BeamEstimate, BeamEstimates

WIDEST = 16
PARTING = "┃"
"""The mark before the first word in which candidates differ."""
_PARTED = "bold $text-warning"
_MUTED = "$foreground-muted"


class BeamPanel(Panel):
    PANEL = "beams"
    TITLE = "Beams"
    HELP = (
        "A beam search keeps several candidates and returns the likeliest complete answer. `left` and `right`, or its "
        "number, choose the beam width and show its cost; `enter` uses it from the next question on. `tab` goes to the "
        "candidates. There, `enter` makes the marked candidate the answer, and the others stay as alternatives."
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "screen.close_panel", "Close", id="panel.close")]

    def __init__(self, controller: ChatController, apply: Callable[[int], None]) -> None:
        super().__init__()
        self.can_focus = False
        self._controller = controller
        self._facts = controller.status.facts
        self._widths = Widths(controller.setup.options.beams, apply)
        self._candidates = Candidates(controller.pick_beam)

    def compose(self) -> Iterable[Static | Rendered]:
        yield self._widths
        yield self._candidates

    def focus_first(self) -> None:
        self._widths.focus()

    def opened(self) -> None:
        self._candidates.show(self._controller.beams, 0, self._controller.beam_search_runs, 0.0)
        self._ask_for_costs()

    def handle_update(self, update: Update) -> None:
        if isinstance(update, StatusChanged):
            self._widths.use(self._controller.setup.options.beams)
            if self._controller.status.facts is not self._facts:
                # Another model: its costs are different.
                self._facts = self._controller.status.facts
                self._ask_for_costs()
        elif isinstance(update, BeamsChanged):
            self._candidates.show(update.beams, update.step, update.running, update.tokens_per_s)
            if not update.running:
                self._ask_for_costs()

    @work(group="costs", exclusive=True, exit_on_error=False)
    async def _ask_for_costs(self) -> None:
        tokens = self._controller.context_to_come
        self._widths.costs(await self._controller.estimate_beams(range(1, WIDEST + 1)), tokens)


class Widths(Rendered, can_focus=True):
    """The widths 1 to 16, one of them marked, with its memory and speed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Fewer", id="beams.fewer", key_display="←"),
        Binding("right", "move(1)", "More", id="beams.more", key_display="→"),
        Binding("enter", "apply", "Apply", id="beams.apply"),
    ]

    def __init__(self, width: int, apply: Callable[[int], None]) -> None:
        super().__init__(classes="widths")
        self.applied = width
        self.marked = width
        self._apply = apply
        self._costs: BeamEstimates | str = "Estimating the cost…"
        self._tokens = 0
        self._typed: str | None = ""
        """Digits that were typed one after the other; None when a question is typed."""

    def on_focus(self) -> None:
        self._typed = ""

    def use(self, width: int) -> None:
        """``width`` was set, here or elsewhere, for the next question."""
        if width != self.applied:
            self.applied = self.marked = width
            self.remake()

    def costs(self, costs: BeamEstimates | str, tokens: int) -> None:
        """``costs`` hold for a context of ``tokens``."""
        self._costs, self._tokens = costs, tokens
        self.remake()

    def on_key(self, event: events.Key) -> None:
        """Mark the width whose number is typed. Elsewhere digits begin a question, as other letters do here."""
        if self._typed is None:
            return
        if event.character is None or event.character not in "0123456789":
            self._typed = None if event.is_printable else ""
            return
        event.stop()
        self._typed = next(
            (typed for typed in (self._typed + event.character, event.character) if 1 <= int(typed) <= WIDEST), ""
        )
        if self._typed:
            self.marked = int(self._typed)
            self.remake()

    def action_move(self, offset: int) -> None:
        self.marked = min(WIDEST, max(1, self.marked + offset))
        self.remake()

    def action_apply(self) -> None:
        estimate = self._estimate(self.marked)
        if estimate is not None and not estimate.fits:
            self.app.notify(self._too_much(estimate), severity="warning", markup=False)
            return
        self._apply(self.marked)
        self.applied = self.marked
        self.remake()

    def make(self, width: int) -> Content:
        numbers = [self._number(number) for number in range(1, WIDEST + 1)]
        rows = [numbers] if width >= 52 else [numbers[:8], numbers[8:]]
        lines = [Content.assemble(("Beam width", "bold"), (f"  now {self.applied}", _MUTED))]
        lines += [Content.assemble(*row) for row in rows]
        lines += self._cost_lines()
        return Content("\n").join(lines)

    def _number(self, number: int) -> Content:
        estimate = self._estimate(number)
        text = f"[{number}]" if number == self.marked else f" {number} "
        if number == self.marked:
            style = "bold $text-accent reverse" if self.has_focus else "bold $text-accent"
        elif number == self.applied:
            style = "bold underline"
        else:
            style = "$text-error strike" if estimate is not None and not estimate.fits else _MUTED
        return Content.styled(text, style)

    def _cost_lines(self) -> list[Content]:
        if isinstance(self._costs, str):
            return [Content.styled(self._costs, _MUTED)]
        estimate = self._estimate(self.marked)
        if estimate is None:
            return []
        what = "1 beam: no beam search" if self.marked == 1 else f"{self.marked} beams: beam search"
        memory = (
            f"Needs {size(estimate.memory_bytes)} of {size(self._costs.available_bytes)} free memory "
            f"at {self._tokens:,} tokens of context"
        )
        time = f"About {100 / estimate.relative_step_time:.0f} % of the speed of one beam"
        lines = [Content(what), Content.styled(memory, _MUTED)]
        if self.marked > 1:
            lines.append(Content.styled(time, _MUTED))
        if not estimate.fits:
            lines.append(Content.styled(self._too_much(estimate), "$text-error"))
        elif self.marked != self.applied:
            lines.append(Content.styled("enter uses it in this chat from the next question on", "$text-accent"))
        return lines

    def _too_much(self, estimate: BeamEstimate) -> str:
        free = self._costs.available_bytes if isinstance(self._costs, BeamEstimates) else 0
        return (
            f"{estimate.width} beams need {size(estimate.memory_bytes - free)} more memory than is free; choose fewer."
        )

    def _estimate(self, number: int) -> BeamEstimate | None:
        if isinstance(self._costs, str):
            return None
        return next((estimate for estimate in self._costs.estimates if estimate.width == number), None)

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self.remake()


class Candidates(Rendered, can_focus=True):
    """The candidates, best first, with their scores."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False, id="candidates.up"),
        Binding("down", "move(1)", "Down", show=False, id="candidates.down"),
        Binding("enter", "pick", "Use as answer", id="candidates.pick"),
    ]
    LINES = 3
    """Lines of text shown of each candidate."""

    def __init__(self, pick: Callable[[int], None]) -> None:
        super().__init__(classes="candidates")
        self._pick = pick
        self._beams: Sequence[Beam] = ()
        self._step = 0
        self._searching = False
        self._rate = 0.0
        self._marked = 0
        self._rows: list[int] = []

    def show(self, beams: Sequence[Beam], step: int, running: bool, tokens_per_s: float) -> None:
        self._beams, self._step, self._searching, self._rate = beams, step, running, tokens_per_s
        self._marked = min(self._marked, max(0, len(beams) - 1))
        self.remake()

    def action_move(self, offset: int) -> None:
        self._marked = min(max(0, self._marked + offset), max(0, len(self._beams) - 1))
        self.remake()

    def action_pick(self) -> None:
        if self._beams:
            self._pick(self._marked)

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset_capture(self).y
        if self._beams and 0 <= row < len(self._rows) and self._rows[row] >= 0:
            self._marked = self._rows[row]
            self.remake()

    def make(self, width: int) -> Content:
        head = Content.styled("Candidates", "bold")
        self._rows = [-1]
        if not self._beams:
            hint = "Candidates appear here during and after a beam search."
            return Content.assemble(head, "\n", (hint, _MUTED))
        state = f"step {self._step}" if self._searching else "ended"
        lines = [Content.assemble(head, (f"  {' · '.join(filter(None, [state, rate(self._rate)]))}", _MUTED))]
        texts = [one_line(_text_of(beam)) for beam in self._beams]
        places = partings(texts)
        if len(texts) > 1:
            legend = Content.assemble((PARTING, _PARTED), (" from here candidates differ; … text they share", _MUTED))
            rows = legend.wrap(max(8, width))
            lines += rows
            self._rows += [-1] * len(rows)
        for index, beam in enumerate(self._beams):
            rows = self._candidate(index, beam, texts[index], places[index], width)
            lines += rows
            self._rows += [index] * len(rows)
        return Content("\n").join(lines)

    def _candidate(self, index: int, beam: Beam, text: str, places: Sequence[int], width: int) -> list[Content]:
        marked = index == self._marked
        pointer = "▸" if marked else " "
        ended = " ■" if beam.finished else ""
        style = ("bold $text-accent reverse" if self.has_focus else "bold $text-accent") if marked else "bold"
        title = Content.assemble((f"{pointer}{index + 1:>2} {beam.score:8.3f}{ended}", style))
        inner = max(8, width - 4)
        # Wrapping at words leaves a part of each line empty.
        body = _shown(text, places, self.LINES * inner * 4 // 5).wrap(inner)
        if len(body) > self.LINES:
            body = [*body[: self.LINES - 1], body[self.LINES - 1].rstrip().truncate(max(7, width - 6)) + " …"]
        return [title, *[Content.assemble("    ", line.rstrip()) for line in body]]

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self.remake()


def _shown(text: str, places: Sequence[int], room: int) -> Content:
    """The part of a candidate that shows its partings. The first different word after each parting stands out."""
    if not text:
        return Content("(empty)")
    parts: list[Content | str | tuple[str, str]] = []
    reached = 0
    for stretch in stretches(text, places, room):
        if stretch.start > reached:
            parts.append(("… " if parts else "…", _MUTED))
        reached = stretch.start
        for place in stretch.partings:
            word = next((end for end in range(place, stretch.end) if text[end] == " " and end > place), stretch.end)
            word = min(word, *[other for other in stretch.partings if other > place], stretch.end)
            parts += [text[reached:place], (PARTING, _PARTED), (text[place:word], "bold $text-accent")]
            reached = word
        parts.append(text[reached : stretch.end])
        reached = stretch.end
    return Content.assemble(*parts)


def _text_of(beam: Beam) -> str:
    """The candidate's answer; its thoughts while it has none."""
    return beam.text or (f"(thinking) {beam.reasoning}" if beam.reasoning else "")


# --- where candidates part -------------------------------------------------------------------------------------------


_WORDS_BEFORE = 3
"""Number of words shown before a parting."""
_WORDS_AFTER = 4
"""Number of words shown after a parting, if another one follows far behind."""
_LONGEST_WORD = 24
"""Characters of a word that are shown at most before a parting; scripts without spaces have no words."""


@dataclass(frozen=True)
class Stretch:
    """The characters ``start`` to ``end`` of a candidate. ``partings``: places in it where candidates part."""

    start: int
    end: int
    partings: tuple[int, ...]


def partings(texts: Sequence[str]) -> list[tuple[int, ...]]:
    """The places in each text at which others part from it, in order: the beginnings of the first different words.

    A text that is the beginning of another one parts at its end.
    """
    order = sorted(range(len(texts)), key=lambda index: texts[index])
    # In this order the common beginning of two texts is the shortest of those of the neighbours between them.
    shared = [_shared(texts[a], texts[b]) for a, b in itertools.pairwise(order)]
    places: list[tuple[int, ...]] = [()] * len(texts)
    for place, index in enumerate(order):
        lengths: set[int] = set()
        for neighbours in (shared[place:], shared[:place][::-1]):
            least: int | None = None
            for length in neighbours:
                least = length if least is None else min(least, length)
                lengths.add(least)
        places[index] = tuple(sorted({_word_start(texts[index], length) for length in lengths}))
    return places


def stretches(text: str, places: Sequence[int], room: int) -> list[Stretch]:
    """The parts of ``text`` that show its partings at ``places``, in about ``room`` characters.

    Everything from a few words before the first parting, if there is room. Otherwise the words around each parting; the
    first and the last ones are the most important. What follows the last parting may be longer than the room.
    """
    if not places:
        return [Stretch(0, len(text), ())]
    before, after = max(4, min(24, room // 8)), max(8, min(36, room // 4))
    if len(text) - _back(text, places[0], before) <= room:
        spans = [(_back(text, places[0], before), len(text))]
    else:
        spans = []
        for place in places:
            start, end = _back(text, place, before), _forth(text, place, after)
            if spans and start <= spans[-1][1] + 1:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((start, end))
        while len(spans) > 2 and sum(end - start for start, end in spans) > room:
            del spans[len(spans) // 2 - (len(spans) % 2 == 0)]
        spans[-1] = spans[-1][0], len(text)
    return [
        Stretch(start, end, tuple(place for place in places if start <= place <= end and _is_in(place, end, spans)))
        for start, end in spans
    ]


def _is_in(place: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """A place at the end of a span belongs to it only if the text ends there."""
    return place < end or end == spans[-1][1]


def _shared(first: str, other: str) -> int:
    """Number of characters at the beginning of both."""
    low, high = 0, min(len(first), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _word_start(text: str, place: int) -> int:
    """The beginning of the word in which ``place`` is; ``place`` itself if that is far."""
    if place >= len(text) or text[place : place + 1].isspace():
        return place
    start = max(text.rfind(" ", 0, place), text.rfind("\n", 0, place)) + 1
    return start if place - start <= _LONGEST_WORD else place


def _back(text: str, place: int, most: int) -> int:
    """The beginning of the few words before ``place``, at most ``most`` characters."""
    start = place
    for _ in range(_WORDS_BEFORE):
        found = text.rfind(" ", 0, max(0, start - 1)) + 1
        if place - found > most:
            break
        start = found
        if not found:
            break
    return start if start < place or not place else max(0, place - most)


def _forth(text: str, place: int, most: int) -> int:
    """The end of the few words after ``place``, at most ``most`` characters."""
    end = place
    for _ in range(_WORDS_AFTER):
        found = text.find(" ", end + 1)
        found = len(text) if found < 0 else found
        if found - place > most:
            break
        end = found
    return end if end > place else min(len(text), place + most)
