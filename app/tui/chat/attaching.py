"""Files that a question names: shown above the prompt while it is typed, read when it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

from textual.content import Content
from textual.strip import Strip
from textual.timer import Timer
from textual.widgets import Static
from textual.worker import WorkType

from app.attachments.attachment import Attachment, estimated_tokens
from app.attachments.figures import texts_of, tokens_of, unseen
from app.attachments.references import Resolved, references, resolve
from app.chat.controller import ChatController
from app.chat.state import Entry, Status
from app.tui.render.attachments import to_be_attached
from app.tui.render.thumbnails import ROWS, PictureBlock, Thumbnails

MOST_LINES = 5
"""Maximum lines of the line with attachments (``max-height`` in the style sheet)."""
LEAST_HEIGHT = 20
"""Minimum lines of a screen on which pictures are drawn before they are sent."""
LOOK_S = 0.25
"""Seconds without a key after which the draft is looked at."""
Count = Callable[[Sequence[str]], Awaitable[list[int] | None]]
_MOST_SAID = 3
"""Maximum files for which the reason is shown why they cannot be attached."""


class AttachmentLine(Static):
    """What the draft will have attached. Not displayed if that is nothing.

    Pictures are drawn above it if ``thumbnails`` can.

    ``draft_tokens`` of ``status`` becomes the tokens of the draft and its files: an estimate at once, and what
    ``count`` says of the texts when the typing pauses, unless that is None. ``on_counted`` is called when it changed.
    """

    def __init__(
        self, id: str, status: Status, count: Count, on_counted: Callable[[], None], thumbnails: Thumbnails
    ) -> None:
        super().__init__(id=id, markup=False)
        self.display = False
        self._status = status
        self._count = count
        self._on_counted = on_counted
        self._thumbnails = thumbnails
        self._block: PictureBlock | None = None
        self._text = Content()
        self._timer: Timer | None = None
        self._draft = ""
        self._paths: tuple[str, ...] = ()
        self._named: tuple[str, Sequence[Attachment]] = "", ()
        """The draft with its pastes folded, and the files that are kept."""
        self._resolved = Resolved()
        self._counted: tuple[Resolved, str, list[int]] | None = None
        """The tokens of each text, with the files and the model that counted them."""

    def draft_changed(self, draft: str, whole: str, kept: Sequence[Attachment] = ()) -> None:
        """Look at ``draft`` soon. ``whole`` is the same with its folded pastes; ``kept`` is as in ``resolve``."""
        self._draft = whole
        self._named = draft, kept
        paths = tuple(reference.path for reference in references(draft))
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        if not paths and self._paths:
            self._paths, self._resolved = (), Resolved()
            self._show(None)
        self._estimate()
        if whole.strip():
            self._timer = self.set_timer(LOOK_S, self._look_in_background)

    def look_again(self) -> None:
        """Look at the files of the draft now: another program may have changed them."""
        if self._paths:
            self._look_in_background()

    def _look_in_background(self) -> None:
        # A function: a coroutine that is replaced before it begins is a warning on the person's terminal.
        look: WorkType[None] = partial(self._look, *self._named)
        self.run_worker(look, group="attachments", exclusive=True)

    async def _look(self, draft: str, attached: Sequence[Attachment]) -> None:
        """Read the files that the draft names if they are others than before, and have the tokens counted."""
        whole = self._draft
        paths = tuple(reference.path for reference in references(draft))
        if paths != self._paths or not await asyncio.to_thread(self._resolved.is_current):
            resolved = await asyncio.to_thread(resolve, draft, Path(), attached)
            if whole != self._draft:
                return
            self._paths, self._resolved = paths, resolved
            self._show(None)
            self._estimate()
        resolved, model = self._resolved, self._status.model
        known = self._counted[2] if self._counted is not None and self._counted[:2] == (resolved, model) else None
        texts = [file.text for file in texts_of(resolved.attachments)] if known is None else []
        counts = await self._count([whole, *texts])
        if counts is not None and whole == self._draft:
            of_texts = counts[1:] if known is None else known
            self._counted = resolved, model, of_texts
            self._show(of_texts)
            self._tell(counts[0] + self._tokens(of_texts), counted=True)

    def _show(self, counts: Sequence[int] | None) -> None:
        self._text = to_be_attached(self._resolved, self._room, counts, self._status.facts)
        self.remake()

    def remake(self) -> None:
        """Show the text anew, with the pictures as they are drawn now."""
        width = self.size.width or self.app.size.width - self.gutter.width
        files = self._resolved.attachments
        room = MOST_LINES - self._text.get_height({}, width) if files and self.app.size.height >= LEAST_HEIGHT else 0
        self._block = self._thumbnails.block(files, width, self, min(ROWS, room))
        if self._text.plain:
            self.update(Content(" \n" * (self._block.rows if self._block is not None else 0)) + self._text)
        self.display = bool(self._text.plain)

    def render_line(self, y: int) -> Strip:
        line = super().render_line(y)
        return self._block.over(y, line) if self._block is not None and y < self._block.rows else line

    @property
    def _room(self) -> int | None:
        """Tokens of context that are left for the next question; None if that is not known."""
        facts = self._status.facts
        return facts.context_limit - (self._status.context_used or 0) if facts and facts.context_limit else None

    def _estimate(self) -> None:
        self._tell(estimated_tokens(len(self._draft)) + self._tokens(None), counted=False)

    def _tokens(self, counts: Sequence[int] | None) -> int:
        """The tokens of all files, as far as they are known."""
        return sum(count or 0 for count in tokens_of(self._resolved.attachments, self._status.facts, counts))

    def _tell(self, tokens: int, counted: bool) -> None:
        if (tokens, counted) != (self._status.draft_tokens, self._status.draft_counted):
            self._status.draft_tokens, self._status.draft_counted = tokens, counted
            self._on_counted()


class Asking:
    """Sends questions, with the files that they name read in threads, in the order in which they came.

    ``run`` runs a coroutine in the background. ``give_back`` is called with a question that was not sent, and why.
    """

    def __init__(
        self,
        controller: ChatController,
        run: Callable[[Coroutine[None, None, None]], object],
        give_back: Callable[[str, str], None],
    ) -> None:
        self._controller = controller
        self._run = run
        self._give_back = give_back
        self._turn = asyncio.Lock()
        self.being_read: list[str] = []
        """The questions that are not sent yet, because their files are being read."""

    def ask(self, text: str, draft: str, edited: Entry | None = None) -> None:
        """Ask ``text``. ``draft`` is the same with its large pastes folded, and ``edited`` the question that it was
        made of."""
        if not self._turn.locked() and next(references(draft), None) is None:
            self._send(text, (), edited)
        else:
            self._run(self._read_and_send(text, draft, edited))

    async def _read_and_send(self, text: str, draft: str, edited: Entry | None) -> None:
        thread = self._controller.thread
        # Nothing of a temporary chat may become the draft of another.
        kept_if_left = thread.memory is None
        if kept_if_left:
            self.being_read.append(text)
        async with self._turn:
            kept = edited.attachments if edited is not None else ()
            resolved = await asyncio.to_thread(resolve, draft, Path(), kept)
            if kept_if_left:
                self.being_read.remove(text)
            if thread is not self._controller.thread:
                if kept_if_left:
                    self._give_back(text, "The question was not sent, because another chat was opened.")
            elif problems := [*resolved.problems, *filter(None, [self._unseen(resolved)])]:
                self._give_back(text, " ".join(problems[:_MOST_SAID]))
            else:
                self._send(text, resolved.attachments, edited)

    def _unseen(self, resolved: Resolved) -> str:
        return unseen(resolved.attachments, self._controller.status.facts)

    def _send(self, text: str, attachments: tuple[Attachment, ...], edited: Entry | None) -> None:
        if edited is None:
            self._controller.submit(text, attachments)
        else:
            self._controller.edit(edited, text, attachments)
