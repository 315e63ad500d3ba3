"""Models that are downloaded while the chat goes on. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from app.chat.engine_link import EngineLink
from app.chat.state import DownloadsChanged, Severity, Update, UserNotice
from app.engine_client import EngineDied
from app.text_safety import one_line
from engine.ipc.messages import Cancel, Done, Failed, Progress


@dataclass(frozen=True)
class StoppedDownload:
    """A download that ended early. What arrived is kept, and the next attempt continues it."""

    progress: Progress
    """The last progress; ``total`` 0 if none was reported."""
    problem: str = ""
    """Why it failed, in a sentence; empty if the person paused it."""


class ModelFetcher:
    """Downloads models while the chat goes on. ``emit`` is called with each change and with how a download ended."""

    def __init__(self, link: EngineLink, emit: Callable[[Update], None]) -> None:
        self.active: dict[str, Progress] = {}
        """The latest progress of each download."""
        self.stopped: dict[str, StoppedDownload] = {}
        """The downloads that were paused or failed, and were not continued since."""
        self.finished: set[str] = set()
        """The models that were downloaded since the program was started."""
        self.quiet = False
        """Whether a screen shows how downloads end, so that no notice has to."""
        self._link = link
        self._emit = emit
        self._requests: dict[str, int] = {}
        self._pausing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, model: str) -> None:
        """Download ``model``, or continue it. Does nothing if it is being downloaded already."""
        if model in self.active:
            return
        # The engine fetches one model after the other.
        others = bool(self.active)
        self.active[model] = Progress(stage="Waiting for the other download" if others else "Connecting…")
        self.stopped.pop(model, None)
        task = asyncio.get_running_loop().create_task(self._pull(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._emit(DownloadsChanged())

    async def cancel(self, model: str) -> None:
        """Pause the download of ``model``. The downloaded part is kept, and the next attempt continues it."""
        request = self._requests.get(model)
        if request is not None:
            self._pausing.add(model)
            engine = self._link.engine
            with suppress(EngineDied):
                await engine.send(Cancel(id=engine.new_id(), target=request))

    async def _pull(self, model: str) -> None:
        problem = "The engine did not say how it ended."
        reached = Progress(stage="")
        done = False
        try:
            async for event in self._link.pull(model, lambda request: self._requests.update({model: request})):
                match event:
                    case Progress():
                        self.active[model] = event
                        reached = event if event.unit == "bytes" else reached
                        self._emit(DownloadsChanged())
                    case Done():
                        done = True
                    case Failed():
                        problem = event.error
        except EngineDied as died:
            problem = f"The download of {one_line(model)} ended: {died}"
        finally:
            self.active.pop(model, None)
            self._requests.pop(model, None)
            paused = model in self._pausing
            self._pausing.discard(model)
        self._ended(model, reached, done, "" if paused else problem)

    def _ended(self, model: str, reached: Progress, done: bool, problem: str) -> None:
        if done:
            self.finished.add(model)
            self._notify(f"{one_line(model)} is downloaded. Use /model to load it.", "information")
        else:
            self.stopped[model] = StoppedDownload(reached, problem)
            if problem:
                self._notify(problem, "error")
        self._emit(DownloadsChanged())

    def _notify(self, text: str, severity: Severity) -> None:
        if not self.quiet:
            self._emit(UserNotice(text, severity))
