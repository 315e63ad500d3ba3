"""The model picker: the models on this machine and in other programs, those of the catalogue, any other by its name."""

from __future__ import annotations

from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import WorkType

from app.chat.controller import ChatController
from app.chat.first_run import machine_figures
from app.chat.model_choices import ModelOption, model_options
from app.chat.offers import MachineFigures
from app.chat.state import DownloadsChanged, Update
from app.text_safety import one_line
from app.tui.keymap import bound
from app.tui.render.formatting import flowing
from app.tui.render.key_footer import KeyFooter
from app.tui.render.model_table import download_lines, model_table
from app.tui.screens.updates import is_open
from engine.errors import ModelError

_MUTED = "$foreground-muted"
_AROUND = 7
"""Cells at both sides of the list's text: margins, padding and scrollbar."""


class ModelsScreen(Screen[str | None]):
    """Screen whose result is the name of the chosen model."""

    HELP = (
        "`enter` loads a model that is on this machine. It downloads any other model while you go on chatting. `p` "
        "pauses a download and continues it, also after a new start. Speeds are predicted from a model's size and this "
        "machine's memory. To use a model that is not listed, type its Hugging Face "
        "repository id (with `:Q4_K_M` for one GGUF file of it), its folder or its GGUF file into the field. Models "
        "that ollama, LM Studio, llama.cpp or the Hugging Face cache hold are used where they lie."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape," + bound("model"), "dismiss(None)", "Close", key_display="esc", id="models.close"),
        Binding("p", "pause", "Pause/continue", id="models.pause"),
        Binding(bound("help"), "app.help", "Help", id="models.help"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._rows: list[ModelOption] = []
        self._machine: MachineFigures | None = None

    def compose(self) -> ComposeResult:
        yield Static("Model", classes="screen-title", markup=False)
        yield Static("", id="models-titles")
        yield OptionList(id="models")
        with VerticalScroll(id="model-details", can_focus=False):
            yield Static("")
        yield Static(
            Content.assemble(("↓", "$text-warning"), " marks what is not here; enter downloads it."), id="models-hint"
        )
        yield Static("", id="model-problem", classes="problem", markup=False)
        yield Input(placeholder="another model: owner/name, owner/name:Q4_K_M, a folder, or a .gguf file", id="other")
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._controller.pulling.quiet = True
        self._look()
        if self._machine is None:
            measure: WorkType[None] = self._measure  # a coroutine that never begins is a warning
            self.run_worker(measure, group="measure", exclusive=True)

    def on_unmount(self) -> None:
        self._controller.pulling.quiet = False

    def on_resize(self) -> None:
        self._draw()

    async def _measure(self) -> None:
        """Find how fast this machine is, which waits for an answer that is being written."""
        self._machine = await machine_figures(self._controller.link)
        self._look()

    @work(thread=True, group="look", exclusive=True)
    def _look(self) -> None:
        try:
            found, problem = model_options(self._machine), ""
        except (ModelError, OSError) as error:
            found, problem = [], str(error)
        self.app.call_from_thread(self._found, found, problem)

    def _found(self, found: list[ModelOption], problem: str) -> None:
        if not is_open(self):
            return
        self._rows = found
        self.query_one("#model-problem", Static).update(Content(one_line(problem)))
        self._draw()

    def handle_update(self, update: Update) -> None:
        """The controller changed something. When a download ended, there may be a new model."""
        if not isinstance(update, DownloadsChanged):
            return
        if not self._controller.pulling.active:
            self._look()
        self._draw()

    def _draw(self) -> None:
        models = self.query_one(OptionList)
        marked = models.highlighted
        current = self._controller.options.model
        if marked is None:
            marked = next((i for i, row in enumerate(self._rows) if row.name == current), 0)
        titles, lines = model_table(self._rows, current, self._states(), self.size.width - _AROUND)
        self.query_one("#models-titles", Static).update(titles if self._rows else "")
        models.set_options([Option(line) for line in lines])
        if self._rows:
            models.highlighted = min(marked, len(self._rows) - 1)
        self._describe()

    def _states(self) -> dict[str, str]:
        """In a few words how far each download is that began."""
        pulling = self._controller.pulling
        states = {name: "failed" if stopped.problem else "paused" for name, stopped in pulling.stopped.items()}
        for name, progress in pulling.active.items():
            states[name] = f"{100 * progress.done // progress.total} %" if progress.total else "downloading"
        return states

    def _describe(self) -> None:
        """Show what is known of the marked model below the list, its download first."""
        self.refresh_bindings()
        row = self._marked_row()
        lines: list[Content] = []
        if row is not None:
            figures = Content.styled(one_line(row.figures), _MUTED)
            lines = [
                flowing([Content.styled(one_line(row.name), "bold"), figures], self.size.width - _AROUND),
                *download_lines(self._controller.pulling, row.name, "p"),
                Content.styled(row.description, _MUTED),
            ]
        text = Content("\n").join(line for line in lines if line.plain)
        self.query_one("#model-details Static", Static).update(text)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        row = self._rows[event.option_index]
        if row.here:
            self.dismiss(row.name)
        else:
            self._controller.pulling.start(row.name)

    @on(Input.Submitted)
    def _other(self, event: Input.Submitted) -> None:
        event.stop()
        name = event.value.strip()
        if not name:
            return
        from engine.models.store.local_models import resolve

        try:
            model = resolve(name)
        except ModelError as error:
            self.query_one("#model-problem", Static).update(Content(one_line(str(error))))
            return
        if model.kind == "hub" and model.folder is None:
            self._rows = [*self._rows, ModelOption(name, here=False)]
            self._controller.pulling.start(name)
            self._draw()
            self.query_one(OptionList).focus()
        else:
            self.dismiss(name)

    async def action_pause(self) -> None:
        """Pause the marked download, or continue it."""
        name, pulling = self._marked(), self._controller.pulling
        if name in pulling.active:
            await pulling.cancel(name)
        elif name in pulling.stopped:
            pulling.start(name)

    def _marked_row(self) -> ModelOption | None:
        marked = self.query_one(OptionList).highlighted
        return self._rows[marked] if marked is not None and marked < len(self._rows) else None

    def _marked(self) -> str:
        """The name of the marked model; "" before there is one."""
        row = self._marked_row()
        return row.name if row is not None else ""

    @on(OptionList.OptionHighlighted)
    def _marks_another(self) -> None:
        self._describe()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        pulling = self._controller.pulling
        return action != "pause" or (self.is_mounted and self._marked() in {*pulling.active, *pulling.stopped})

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """Why a key does nothing with the marked model."""
        return "This model is not being downloaded." if action == "pause" else ""
