"""Starts the engine process, sends requests, yields events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.messages import AnyEvent, AnyRequest, Notice


class EngineDied(Exception):
    """The engine process ended while it was asked something. The text says how in one sentence."""


class Engine(Protocol):
    """What the screen and ``ask`` need of an engine; tests give them another one."""

    def new_id(self) -> int:
        """A fresh request id, never 0."""
        ...

    async def start(self) -> None:
        """Start the process and wait for its Hello. Starting a running engine does nothing; a dead one starts anew."""
        ...

    @property
    def running(self) -> bool: ...

    async def send(self, request: AnyRequest) -> None:
        """Send a request that has no answer (Cancel, Watch, Shutdown). Raises EngineDied."""
        ...

    def stream(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        """Send ``request`` and yield its events, the terminal one (``messages.TERMINAL_EVENTS``) last.

        Raises EngineDied if the process ends before that.
        """
        ...

    async def close(self) -> None:
        """Ask the process to end, wait a little, then kill it."""
        ...

    on_notice: Callable[[Notice], None] | None
    """Called with events that belong to no request."""
