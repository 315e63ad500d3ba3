"""The first screen of a first start: the models to choose from, one key each, and how their downloads go."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import WorkType

from app.chat.first_run import FirstRun, begun
from app.chat.offers import ModelOffer
from app.chat.state import Update
from app.chat.words import size
from app.machine import Machine, this_machine
from app.tui.keymap import bound
from app.tui.render.key_footer import KeyFooter
from app.tui.render.model_table import download_lines
from app.tui.screens.updates import is_open

_MUTED = "$foreground-muted"
OTHER = "Choose another…"
_INDENT = 3
"""Cells before every line but the first of a model."""
_AROUND = 10
"""Cells at both sides of the list: margins, padding and scrollbar."""


class FirstRunScreen(Screen[bool]):
    """Screen whose result is True if the person wants the list of all models."""

    HELP = (
        "No model is on this machine yet, and nothing is downloaded before you choose. `1`, `2`, `3` (or `enter`) "
        "downloads a model and loads it; `p` pauses a download and continues it. `m` lists all models. `esc` goes to "
        "the chat; downloads continue. Speeds are predicted from the size of a model and this machine's memory."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number + 1), f"choose({number})", show=False, id=f"first.choose{number + 1}")
          for number in range(3)),
        Binding("p", "pause", "Pause/continue", id="first.pause"),
        Binding("m," + bound("model"), "models", "All models", key_display="m", id="first.models"),
        Binding("escape", "leave", "To the chat", key_display="esc", id="first.leave"),
        Binding(bound("help"), "app.help", "Help", id="first.help"),
    ]  # fmt: skip

    def __init__(self, first_run: FirstRun, machine: Machine | None = None) -> None:
        super().__init__()
        self._first_run = first_run
        self._machine = machine or this_machine()
        self._begun: dict[str, int] = {}

    def compose(self) -> ComposeResult:
        yield Static(
            Content.assemble(("private", "bold"), ("llm", "bold $text-primary"), "  Choose a model to begin."),
            id="first-title",
        )
        yield Static(
            Content.styled("Nothing is downloaded before you choose. What you type stays on this machine.", _MUTED),
            id="first-about",
        )
        yield OptionList(id="first-models")
        yield Static("", id="first-machine", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._first_run.on_change = self._draw
        self._first_run.controller.pulling.quiet = True
        self.query_one(OptionList).focus()
        self._draw()
        look: WorkType[None] = self._look  # a coroutine that never begins is a warning
        self.run_worker(look, group="look", exclusive=True)

    async def _look(self) -> None:
        if not self._first_run.offers:
            await self._first_run.look()
        self._begun = {offer.name: begun(offer.name) for offer in self._first_run.offers}
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_unmount(self) -> None:
        self._first_run.on_change = lambda: None
        self._first_run.controller.pulling.quiet = False

    def handle_update(self, update: Update) -> None:
        """The controller changed something; :class:`FirstRun` was told, too."""
        if self._first_run.arrived and self.is_current:
            self.dismiss(False)

    def _draw(self) -> None:
        if not self.is_mounted or not is_open(self):
            return
        first_run, models = self._first_run, self.query_one(OptionList)
        marked = models.highlighted or 0
        rows = [self._prompt(number, offer) for number, offer in enumerate(first_run.offers, start=1)]
        if first_run.machine is None:
            rows = [Content.styled("Looking at this machine…", _MUTED)]
        else:
            rows.append(Content.assemble(("m  ", "bold $text-primary"), OTHER))
        models.set_options([Option(row) for row in rows])
        models.highlighted = min(marked, len(rows) - 1)
        self.query_one("#first-machine", Static).update(Content.styled(self._about_machine(), _MUTED))
        self.refresh_bindings()

    def _prompt(self, number: int, offer: ModelOffer) -> Content:
        width = max(20, self.size.width - _AROUND - _INDENT)
        name = Content.assemble((f"{number}  ", "bold $text-primary"), (offer.name, "bold"))
        figures = Content(f"  {offer.figures}")
        if name.cell_length + figures.cell_length <= width:
            lines = [Content.assemble(name, figures)]
        else:
            lines = [name, *_indented(Content(offer.figures), width)]
        lines += _indented(Content.styled(offer.about, _MUTED), width)
        downloads = download_lines(self._first_run.controller.pulling, offer.name, str(number))
        kept = self._begun.get(offer.name, 0)
        if not downloads and kept:
            downloads = [Content.styled(f"‖ {size(kept)} are here already. {number} continues.", "$text-warning")]
        return Content("\n").join([*lines, *(part for line in downloads for part in _indented(line, width))])

    def _about_machine(self) -> str:
        machine = self._first_run.machine
        if machine is None:
            return ""
        if not machine.memory_read:
            return "Speeds are rough: the memory of this machine could not be measured."
        fewer = "" if len(self._first_run.offers) == 3 else " Larger models do not fit it."
        graphics = " With its GPU, speeds are higher." if self._machine.gpu else ""
        return f"This machine: {size(machine.memory_bytes)} of memory.{fewer}{graphics}"

    @on(OptionList.OptionSelected)
    async def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        await self.action_choose(event.option_index)

    async def action_choose(self, index: int) -> None:
        """Download the offer at ``index``, or pause or continue that; after the last one: all models."""
        offers = self._first_run.offers
        if index < len(offers):
            self.query_one(OptionList).highlighted = index
            await self._first_run.pause_or_resume(offers[index].name)
        elif offers and index == self.query_one(OptionList).option_count - 1:
            self.action_models()

    async def action_pause(self) -> None:
        """Pause or continue: the marked download, else the one that is going on or was stopped."""
        names = [offer.name for offer in self._first_run.offers]
        marked = self.query_one(OptionList).highlighted
        known = self._downloads()
        if marked is not None and marked < len(names) and names[marked] in known:
            known = [names[marked]]
        if known:
            await self._first_run.pause_or_resume(known[0])

    def _downloads(self) -> list[str]:
        """The offers that are being downloaded, or whose download was stopped."""
        pulling = self._first_run.controller.pulling
        names = (offer.name for offer in self._first_run.offers)
        return [name for name in names if name in pulling.active or name in pulling.stopped]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "pause" or bool(self._downloads())

    def action_models(self) -> None:
        self.dismiss(True)

    def action_leave(self) -> None:
        self.dismiss(False)


def _indented(line: Content, width: int) -> list[Content]:
    """``line`` wrapped to ``width`` cells, each part behind the indentation."""
    return [Content.assemble(" " * _INDENT, part) for part in line.wrap(width)]
