"""The order in which requests get the engine: clients take turns, and each client's own requests keep their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.serve.refusals import Refused

LONGEST = 256
"""Number of requests that may wait."""


class RequestQueue:
    """One request runs at a time. A client that asks ten times does not delay another's first by more than one."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy = False
        self._latest = ""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        return int(self._busy)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the engine, which is ``client``'s inside. Raises Refused if too many wait."""
        if self._busy:
            await self._wait(client)
        self._busy = True
        self._latest = client
        try:
            yield
        finally:
            self._busy = self._wake_next()

    async def _wait(self, client: str) -> None:
        if self.waiting >= self._longest:
            raise Refused(f"{self._longest} requests are waiting already: try again later.", 429, code="queue_full")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                # The turn was given to a request whose client left at the same moment.
                self._busy = self._wake_next()
            else:
                self._forget(client, mine)
            raise

    def _forget(self, client: str, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(client)
        if line is not None and mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[client]

    def _wake_next(self) -> bool:
        """Give the turn to the client whose last one is longest ago; False if nobody waits."""
        if self._latest in self._waiting:
            self._waiting[self._latest] = self._waiting.pop(self._latest)  # to the end
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            next_one = line.popleft()
            if line:
                self._waiting[client] = line  # at the end: the others come first
            if not next_one.done():
                next_one.set_result(None)
                return True
        return False
