"""The prompt: the field where the person types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from app.chat.folding import Folds
from app.tui.chat.folding_area import FoldingArea
from app.tui.keymap import bound, either


class Prompt(FoldingArea):
    """A field for several lines. Enter sends them; enter with a modifier breaks the line.

    Not every terminal tells a modified enter from enter: ctrl+j works in all of them.
    """

    HELP = (
        "Type a question and press `enter` to send it. `ctrl+j`, `shift+enter` and `alt+enter` start a new line; "
        "`ctrl+j` works in every terminal. Pasted text keeps its lines; a long paste is folded to a label and sent "
        "whole, and `tab` beside the label shows it. `up` in an empty prompt recalls earlier questions. "
        f"{either('messages')} goes to the messages. `/help` lists the commands."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", show=False, id="prompt.send"),
        Binding("tab", "unfold", "Show the paste", show=False, id="prompt.unfold"),
        Binding(bound("newline"), "break_line", "New line", show=False, id="prompt.newline"),
        Binding(bound("messages"), "leave_up", "Messages", show=False, id="prompt.messages"),
    ]

    class Sent(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class LeftUpwards(Message):
        """The person goes to the messages above."""

    class Scrolled(Message):
        """The person scrolls the transcript by ``pages``."""

        def __init__(self, pages: int) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, id: str) -> None:
        super().__init__(id=id, soft_wrap=True, compact=True, highlight_cursor_line=False, tab_behavior="focus")
        self.folds = Folds()
        self._earlier: list[str] = []
        self._folded: dict[str, str] = {}
        self._position: int | None = None
        self.leave_upwards_first: Callable[[], bool] = lambda: False
        """Called for ``up`` in an empty field, before an earlier question is recalled. Returns True if it went
        somewhere else."""

    def remember(self, texts: list[str]) -> None:
        """Set the earlier questions that can be recalled, oldest first."""
        self._earlier = [text for text in texts if text.strip()]
        self._position = None

    def put_before(self, texts: Sequence[str]) -> None:
        """Put ``texts`` before what is in the field, as paragraphs."""
        parts = [*(self._folded.get(text, text) for text in texts), self.text]
        self.fill("\n\n".join(part for part in parts if part.strip()))

    def fill(self, text: str) -> None:
        """Put ``text`` into the field, with the cursor after it."""
        self.text = text
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        # TextArea takes enter as a character before it looks at bindings.
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.action_send()
            return
        # Other bindings would take effect only after the characters that were typed just behind them: the library
        # offers a key to all widgets around the field first.
        bound_here = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if bound_here is not None and bound_here.node is self and bound_here.enabled:
            event.stop()
            event.prevent_default()
            await self.run_action(bound_here.binding.action)
            return
        await super()._on_key(event)

    def action_send(self) -> None:
        text = self.whole_text.strip("\n")
        if not text.strip():
            return
        self._position = None
        if text != self.text:
            self._folded[text] = self.text
        self.post_message(self.Sent(text))

    def sent(self, text: str) -> None:
        """``text`` was accepted: empty the field and remember the text."""
        if not self._earlier or self._earlier[-1] != text:
            self._earlier.append(text)
        self.clear()

    def action_break_line(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    def action_unfold(self) -> None:
        """Show the folded paste at the cursor; without one, go to the next widget."""
        if not self.unfold():
            self.screen.focus_next()

    def action_leave_up(self) -> None:
        self.post_message(self.LeftUpwards())

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and not self.text and self.leave_upwards_first():
            return
        if not select and self._recalls() and self._recall(-1):
            return
        super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self._position is not None and self._recalls() and self._recall(1):
            return
        super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Scrolled(-1))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Scrolled(1))

    def _recalls(self) -> bool:
        """May the text be replaced? Only if it is empty or an earlier question, unchanged."""
        return not self.text or (self._position is not None and self.text == self._recallable(self._position))

    def _recallable(self, position: int) -> str:
        text = self._earlier[position]
        return self._folded.get(text, text)

    def _recall(self, offset: int) -> bool:
        if not self._earlier:
            return False
        start = len(self._earlier) if self._position is None else self._position
        position = start + offset
        if position < 0:
            return True
        if position >= len(self._earlier):
            self._position = None
            self.clear()
            return True
        self._position = position
        self.fill(self._recallable(position))
        return True
