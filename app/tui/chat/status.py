"""Texts about the model and the engine: the status line, and the content of an empty conversation."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from app.chat.setup import setup_line
from app.chat.state import Phase, Severity, Status
from app.chat.thread import Thread
from app.chat.words import engine_name, parameters, progress_text
from app.settings.schema import Settings
from app.text_safety import one_line
from app.tui.keymap import key
from app.tui.render.status_line import status_line
from app.tui.render.streaming import PacedDrawing

FIGURES_S, SLOWEST_FIGURES_S = 1.0, 2.0
"""Seconds between two drawings of the figures that grow with an answer, at least and at most."""
_NAME = ("private", "bold"), ("llm", "bold $text-primary")


class Welcome(Static):
    """The program's name, facts about the model, and the most important keys."""

    def __init__(self, id: str) -> None:
        super().__init__(_welcome(Status()), id=id)
        self._shown = ""

    def show(self, status: Status) -> None:
        if not self.display:
            return
        content = _welcome(status)
        if content.markup != self._shown:
            self._shown = content.markup
            self.update(content)


def _welcome(status: Status) -> Content:
    lines = [
        Content.assemble(*_NAME),
        Content.styled("What you type stays on your machines.", "$foreground-muted"),
        Content(),
        *_about_model(status),
        Content(),
        *[
            Content.assemble((f"{keys:>9}", "bold"), (f"  {text}", "$foreground-muted"))
            for keys, text in (
                (key("send"), "send         "),
                (key("newline"), "new line     "),
                ("@", "attach a file"),
                ("/", "all commands "),
                (key("help"), "help         "),
                (key("quit"), "quit         "),
            )
        ],
    ]
    return Content("\n").join(lines)


def _about_model(status: Status) -> list[Content]:
    facts = status.facts
    if status.phase is Phase.UNAVAILABLE:
        return [
            Content.styled(f"No model is loaded: {status.problem}", "$text-error"),
            Content.styled(f"Press {key('model')} to choose another model.", "$foreground-muted"),
        ]
    if facts is not None:
        experts = f"{facts.experts} experts, {facts.experts_per_token} active per token" if facts.experts else "dense"
        lines = [
            Content.assemble((facts.name, "bold"), (f" · {parameters(facts.parameters)} · {experts}", "")),
            Content.styled(engine_name(facts), "$foreground-muted"),
        ]
        if facts.name == "starter":
            lines.append(Content.styled("A small model for first tests. Expect mistakes.", "$text-warning"))
        return [*lines, *[Content.styled(notice, "$text-warning") for notice in facts.notices]]
    what = progress_text(status.progress) if status.progress is not None else status.phase.value
    return [
        Content.assemble((status.model, "bold"), (f" · {what}", "$foreground-muted")),
        Content.styled("You can type now. Your question waits for the model.", "$foreground-muted"),
    ]


class StatusLine(Widget):
    """One line about model, engine, context and speed. Its size is fixed, so drawing it lays out nothing."""

    def __init__(self, status: Status, id: str) -> None:
        super().__init__(id=id)
        self._status = status
        self._shown = ""
        self._drawing = PacedDrawing(self, self.update, FIGURES_S, SLOWEST_FIGURES_S)

    def grow(self) -> None:
        """The figures of an answer in progress changed: draw them when the pace allows it."""
        self._drawing.want()

    def update(self) -> None:
        """Draw the line now if it would read differently."""
        self._drawing.drawn()
        line = status_line(self._status, self.size.width).markup
        if line != self._shown:
            self._shown = line
            self.refresh()

    def render(self) -> Content:
        return status_line(self._status, self.size.width)


# --- the line above a conversation -----------------------------------------------------------------------------------


TEMPORARY = "◌ Temporary chat: nothing is saved"
"""Title of a conversation that is kept in memory only, before the title made from its first question."""

_LONGEST_TITLE = 60
"""Maximum characters of a chat's title in the title of the window."""


def terminal_title(thread: Thread, *, ended: bool = False) -> str:
    """The title of the window while ``thread`` is shown. That of a temporary chat stays within it.

    ``ended``: an answer has ended that the person has not seen.
    """
    title = one_line(thread.title) if thread.path and thread.memory is None else ""
    name = f"{title[:_LONGEST_TITLE]} – privatellm" if title else "privatellm"
    return f"✓ {name}" if ended else name


class Heading(Horizontal):
    """Hidden while there is nothing to say."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.shown = "", ""
        """The title and the setup that are shown."""
        self.display = False

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Static(id="setup", markup=False)

    def show(self, thread: Thread, options: Settings) -> bool:
        """Show those of ``thread``. Returns whether they are others than before."""
        title = one_line(thread.title) if thread.path else ""
        if thread.memory is not None:
            title = f"{TEMPORARY} · {title}" if title else TEMPORARY
        shown = title, one_line(setup_line(thread, options))
        # Updating a line lays out the whole screen.
        if shown == self.shown:
            return False
        self.shown = shown
        for name, text in zip(("#title", "#setup"), shown, strict=True):
            line = self.query_one(name, Static)
            line.update(Content(text))
            line.display = bool(text)
        self.display = any(shown)
        self.set_class(not shown[0], "-untitled")
        return True


# --- notices ---------------------------------------------------------------------------------------------------------


WHISPER_S = 4
"""Seconds that a line is shown about a key that does nothing."""
_MOST_LINES = 3
"""Maximum number of lines shown. The oldest leave first."""

_MARKS: dict[Severity, str] = {"information": "·", "warning": "!", "error": "✗"}
"""Marks at the start of a line, so that colour is not the only sign of its severity."""


class NoticeLine(Static):
    """Warnings and errors, one a line. Not displayed while there is none."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, markup=False)
        self.display = False
        self._lines: list[tuple[str, str]] = []
        self._whispered = ""
        self._timer: Timer | None = None
        self._until_saved = False

    def tell(self, text: str, severity: Severity, *, beside: bool = False, until_saved: bool = False) -> None:
        """Show ``text``.

        ``beside``: it is added to the lines there instead of replacing them. ``until_saved``: :meth:`saved` hides it.
        """
        text = one_line(text)
        before = [line for line in self._lines if line[1] != text] if beside and self.display else []
        self._lines = [*before, (_MARKS[severity], text)][-_MOST_LINES:]
        self.set_class(severity == "error", "error")
        self._until_saved = until_saved
        self._draw()

    def whisper(self, text: str) -> None:
        """Show one muted line below the others for some seconds."""
        self._whispered = one_line(text)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(WHISPER_S, self._end_whisper)
        if not self.display:
            self._lines = []
            self.remove_class("error")
        self._draw()

    def _end_whisper(self) -> None:
        self._whispered = ""
        if self._lines:
            self._draw()
        else:
            self.display = False

    def _draw(self) -> None:
        lines = [Content.assemble((f"{mark} ", "bold"), line) for mark, line in self._lines]
        if self._whispered:
            lines.append(Content.styled(self._whispered, "$foreground-muted"))
        self.update(Content("\n").join(lines))
        self.display = True

    def saved(self) -> None:
        """Everything is on disk: hide what was shown while it was not."""
        if self._until_saved:
            self.hide()

    def hide(self) -> None:
        self._until_saved = False
        self._lines = []
        self.display = False
