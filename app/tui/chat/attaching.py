"""Files that a question names: shown above the prompt while it is typed, read when it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from textual.timer import Timer
from textual.widgets import Static

from app.attachments.attachment import Attachment, estimated_tokens
from app.attachments.references import Resolved, references, resolve
from app.tui.render.attachments import to_be_attached

LOOK_S = 0.25
"""Seconds without a key after which the draft is looked at."""


class AttachmentLine(Static):
    """What the draft will have attached. Not displayed if that is nothing.

    ``room`` gives the tokens of context that are left, None if that is not known. ``on_counted`` is called with the
    estimated tokens of the draft and its files, 0 for an empty draft.
    """

    def __init__(self, id: str, room: Callable[[], int | None], on_counted: Callable[[int], None]) -> None:
        super().__init__(id=id, markup=False)
        self.display = False
        self._room = room
        self._on_counted = on_counted
        self._timer: Timer | None = None
        self._draft: tuple[str, int] = "", 0
        self._kept: Sequence[Attachment] = ()
        self._paths: tuple[str, ...] = ()
        self._resolved = Resolved()

    def draft_changed(self, draft: str, characters: int, kept: Sequence[Attachment] = ()) -> None:
        """Look at ``draft`` soon. With its folded pastes it has ``characters``; ``kept`` is as in ``resolve``."""
        self._draft, self._kept = (draft, characters), kept
        paths = tuple(reference.path for reference in references(draft))
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        if not paths:
            self._paths = ()
            self._show(Resolved())
            return
        if paths != self._paths:
            self._timer = self.set_timer(LOOK_S, lambda: self._look(draft, paths))
        self._count()

    def _look(self, draft: str, paths: tuple[str, ...]) -> None:
        self._paths = paths
        self.run_worker(self._resolve(draft, paths), group="attachments", exclusive=True)

    async def _resolve(self, draft: str, paths: tuple[str, ...]) -> None:
        resolved = await asyncio.to_thread(resolve, draft, Path.cwd(), self._kept)
        if paths == self._paths:
            self._show(resolved)

    def _show(self, resolved: Resolved) -> None:
        self._resolved = resolved
        content = to_be_attached(resolved, self._room())
        if content.plain:
            self.update(content)
        self.display = bool(content.plain)
        self._count()

    def _count(self) -> None:
        files = sum(estimated_tokens(len(file.text)) for file in self._resolved.attachments)
        self._on_counted(estimated_tokens(self._draft[1]) + files)


Send = Callable[[str, tuple[Attachment, ...]], None]


class Attacher:
    """Reads the files of questions in threads, and sends the questions in the order in which they came.

    ``refuse`` is called with a question whose files cannot be read, and with what is wrong with them.
    """

    def __init__(self, refuse: Callable[[str, tuple[str, ...]], None]) -> None:
        self._refuse = refuse
        self._turn = asyncio.Lock()

    def at_once(self, draft: str) -> bool:
        """Can a question with this draft be sent without reading a file, and without overtaking another?"""
        return not self._turn.locked() and next(references(draft), None) is None

    async def send(self, text: str, draft: str, kept: Sequence[Attachment], send: Send) -> None:
        """Call ``send`` with ``text`` and the files that ``draft`` names. ``kept`` is as in ``resolve``."""
        async with self._turn:
            resolved = await asyncio.to_thread(resolve, draft, Path.cwd(), kept)
            if resolved.problems:
                self._refuse(text, resolved.problems)
            else:
                send(text, resolved.attachments)
