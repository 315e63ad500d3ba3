"""The chat's event loop in a thread of its own, so that the main thread can block while a person types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class BackgroundLoop:
    """An event loop that runs until :meth:`close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result], timeout_s: float | None = None) -> _Result:
        """Run ``work`` in the loop and wait for its result. Raises what it raises, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Call ``function`` in the loop and wait for its result. Raises what it raises."""

        async def work() -> _Result:
            return function(*arguments)

        return self.run(work())

    def begin(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Start ``work`` in the loop. Returns what cancels it and waits for its end."""

        async def start() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(work)

        task = self.run(start())

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        return end

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
