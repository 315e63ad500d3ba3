"""The model picker: the models on this machine and in other programs, those of the catalogue, any other by its name."""

from __future__ import annotations

from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from app.chat.controller import ChatController
from app.chat.model_choices import ModelOption, model_options
from app.chat.state import DownloadsChanged, Update
from app.chat.words import progress_text
from app.text_safety import one_line
from app.tui.keymap import bound
from app.tui.render.formatting import bar
from engine.errors import ModelError

_MUTED = "$foreground-muted"


class ModelsScreen(Screen[str | None]):
    """Its result is the name of the chosen model."""

    HELP = (
        "`enter` loads a model that is on this machine. It downloads any other model while you go on chatting. `x` "
        "stops a download; the next one continues it. To use a model that is not listed, type its Hugging Face "
        "repository id (with `:Q4_K_M` for one GGUF file of it), its folder or its GGUF file into the field. Models "
        "that ollama, LM Studio, llama.cpp or the Hugging Face cache hold are used where they lie."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape," + bound("model"), "leave", "Close", key_display="esc", id="models.close"),
        Binding("x", "stop", "Stop download", id="models.stop"),
        Binding(bound("help"), "app.help", "Help", id="models.help"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._rows: list[ModelOption] = []

    def compose(self) -> ComposeResult:
        yield Static("Model", classes="screen-title", markup=False)
        yield OptionList(id="models")
        yield Static(Content.assemble(("↓", "$text-warning"), " Not downloaded. Enter downloads it."), id="models-hint")
        yield Static("", id="model-problem", classes="problem", markup=False)
        yield Input(placeholder="another model: owner/name, owner/name:Q4_K_M, a folder, or a .gguf file", id="other")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._look()

    @work(thread=True, group="look", exclusive=True)
    def _look(self) -> None:
        try:
            found, problem = model_options(), ""
        except (ModelError, OSError) as error:
            found, problem = [], str(error)
        self.app.call_from_thread(self._found, found, problem)

    def _found(self, found: list[ModelOption], problem: str) -> None:
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
        models.set_options([Option(self._prompt(row, current)) for row in self._rows])
        if self._rows:
            models.highlighted = min(marked, len(self._rows) - 1)

    def _prompt(self, row: ModelOption, current: str) -> Content:
        dot = ("● ", "$text-success") if row.name == current else ("  ", "") if row.here else ("↓ ", "$text-warning")
        title = Content.assemble(dot, (row.name, "bold"), (f"  {row.figures}", _MUTED))
        lines = [title]
        progress = self._controller.pulling.active.get(row.name)
        if progress is not None:
            lines.append(Content.assemble("  ", bar(progress.done, progress.total, 20), f" {progress_text(progress)}"))
        if row.about:
            lines.append(Content.styled(f"  {row.about}", _MUTED))
        return Content("\n").join(lines)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        row = self._rows[event.option_index]
        if row.here or row.name == "starter":
            self.dismiss(row.name)
        else:
            self._controller.pulling.start(row.name)

    @on(Input.Submitted)
    def _other(self, event: Input.Submitted) -> None:
        event.stop()
        name = event.value.strip()
        if not name:
            return
        from engine.models.store import resolve

        try:
            model = resolve(name)
        except ModelError as error:
            self.query_one("#model-problem", Static).update(Content(one_line(str(error))))
            return
        if model.kind == "hub" and model.folder is None:
            self._rows = [*self._rows, ModelOption(name, "", "", False)]
            self._controller.pulling.start(name)
            self._draw()
            self.query_one(OptionList).focus()
        else:
            self.dismiss(name)

    async def action_stop(self) -> None:
        marked = self.query_one(OptionList).highlighted
        if marked is not None and marked < len(self._rows):
            await self._controller.pulling.cancel(self._rows[marked].name)

    def action_leave(self) -> None:
        self.dismiss(None)
