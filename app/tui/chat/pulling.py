"""Models being fetched while the chat goes on. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from app.engine_client import EngineDied
from app.text_safety import one_line
from app.tui.chat.engine_link import EngineLink
from app.tui.chat.state import Severity
from app.tui.shortcuts import key
from engine.ipc.messages import Cancel, Done, Failed, Progress


class Pulling:
    """``active`` holds the latest progress of each model that is being fetched; ``on_change`` is called with each."""

    def __init__(self, link: EngineLink, say: Callable[[str, Severity], None]) -> None:
        self.active: dict[str, Progress] = {}
        self.on_change: Callable[[], None] | None = None
        self._link = link
        self._say = say
        self._requests: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, model: str) -> None:
        """Fetch ``model``; does nothing if that is going on already."""
        if model in self.active:
            return
        self.active[model] = Progress(stage="Connecting…")
        task = asyncio.get_running_loop().create_task(self._pull(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._changed()

    async def cancel(self, model: str) -> None:
        """Stop fetching ``model``; what is there is kept, and fetching goes on from it the next time."""
        request = self._requests.get(model)
        if request is not None:
            engine = self._link.engine
            with suppress(EngineDied):
                await engine.send(Cancel(id=engine.new_id(), target=request))

    async def _pull(self, model: str) -> None:
        try:
            async for event in self._link.pull(model, lambda request: self._requests.update({model: request})):
                match event:
                    case Progress():
                        self.active[model] = event
                        self._changed()
                    case Done():
                        self._say(f"{one_line(model)} is on this machine; {key('model')} loads it.", "information")
                    case Failed():
                        self._say(event.error, "error")
        except EngineDied as died:
            self._say(f"Fetching {one_line(model)} ended: {died}", "error")
        finally:
            self.active.pop(model, None)
            self._requests.pop(model, None)
            self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
