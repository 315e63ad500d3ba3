"""Starts the engine process, sends requests, yields events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec

from app import engine_process
from app.engine_links import Attached, Child, EngineConnection, EngineDied, Inbox, Unasked, ends, how_it_ended
from engine.ipc.messages import (
    AnyEvent,
    AnyRequest,
    Cancel,
    CloseNetwork,
    Failed,
    ForgetPeer,
    Load,
    NetworkState,
    Notice,
    OpenNetwork,
    Pair,
    ProtocolError,
    RingChanged,
    ShowCode,
    WarmUp,
    pack,
)
from engine.models.store import catalogue

__all__ = ["Engine", "EngineClient", "EngineDied", "ends", "how_it_ended"]


class Engine(Protocol):
    """The interface to an engine for the screen and the commands. The tests have a second implementation."""

    def new_id(self) -> int:
        """A fresh request id, never 0."""
        ...

    async def start(self) -> None:
        """Start the process and wait for its Hello. Does nothing if it is running; starts a new one if it died."""
        ...

    @property
    def running(self) -> bool: ...

    async def send(self, request: AnyRequest) -> None:
        """Send a request that has no events (Cancel, Watch, Shutdown). Raises EngineDied."""
        ...

    def stream(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        """Send ``request`` and yield its events, the terminal one (see :func:`ends`) last.

        Raises EngineDied if the process ends before that.
        """
        ...

    async def close(self) -> None:
        """Ask the process to end, wait a little, then kill it."""
        ...

    on_notice: Callable[[Notice], None] | None
    """Called with each notice that belongs to no request."""
    on_network: Callable[[NetworkState], None] | None
    """Called whenever something about the network changed."""
    on_warm_up: Callable[[WarmUp], None] | None
    """Called while the weights are brought into memory."""
    on_ring: Callable[[RingChanged], None] | None
    """Called when the loaded model runs on another ring than before."""


_OF_THE_NETWORK = (OpenNetwork, CloseNetwork, ShowCode, Pair, ForgetPeer)
"""Requests that change an engine's network, which is its first program's affair."""


class EngineClient:
    """The product's :class:`Engine`: ``python -m engine.host`` as a child process in its own session.

    Its own session keeps ctrl-c in the terminal away from it. It lives as long as a program uses it, so it ends with
    this one in any case. Its output goes to the log. Use it from one event loop. ``share``: programs of the same person
    share an engine. This one attaches to a running engine that has loaded, or is loading, the wanted model, and others
    may attach to an engine that it starts.
    """

    def __init__(self, command: Sequence[str] | None = None, *, share: bool = False) -> None:
        self.on_notice: Callable[[Notice], None] | None = None
        self.on_network: Callable[[NetworkState], None] | None = None
        self.on_warm_up: Callable[[WarmUp], None] | None = None
        self.on_ring: Callable[[RingChanged], None] | None = None
        self._command = tuple(command) if command is not None else None
        self._share = share
        self._ids = itertools.count(1)
        self._starting = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._link: EngineConnection | None = None

    def new_id(self) -> int:
        return next(self._ids)

    @property
    def running(self) -> bool:
        return self._link is not None and self._link.alive

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._link.pid if self._link is not None and self._link.alive else None

    @property
    def clients(self) -> int:
        """Number of programs that use the engine, this one included; 0 while there is none."""
        return self._link.clients if self._link is not None and self._link.alive else 0

    async def start(self) -> None:
        async with self._starting:
            if self.running:
                return
            if self._link is not None:
                await self._link.end()
            self._link = (await Attached.find(self._unasked)) if self._share else None
            if self._link is None:
                self._link = await self._started()

    async def send(self, request: AnyRequest) -> None:
        link = self._running_link()
        async with self._writing:
            await link.write(pack(request))

    async def stream(self, request: AnyRequest) -> AsyncGenerator[AnyEvent, None]:
        """The events of ``request``, as in :meth:`Engine.stream`. Closing the iterator early cancels the request."""
        self._running_link()
        if self._share and isinstance(request, Load):
            events = self._load(request)
        else:
            if isinstance(request, _OF_THE_NETWORK) and isinstance(self._link, Attached):
                await self._go_to(await self._started())
            events = self._ask(request)
        async with aclosing(events):
            async for event in events:
                yield event

    async def close(self) -> None:
        async with self._starting:
            link, self._link = self._link, None
            if link is not None:
                await link.end()

    def kill(self) -> None:
        """Kill the process at once, without waiting, unless others use it; for a program that must end now."""
        if self._link is not None:
            self._link.kill()

    async def _ask(self, request: AnyRequest) -> AsyncGenerator[AnyEvent, None]:
        """The events of ``request`` from the engine that is linked now."""
        link = self._running_link()
        try:
            frame = pack(request)
        except ProtocolError as error:
            yield Failed(id=request.id, error=f"This cannot be sent to the engine: {error}.", kind="bad-input")
            return
        inbox = link.inboxes[request.id] = Inbox()
        ended = False
        try:
            async with self._writing:
                await link.write(frame)
            while not ended:
                event = await inbox.get()
                ended = ends(event)
                yield event
        finally:
            link.inboxes.pop(request.id, None)
            if not ended and link.alive:
                link.write_soon(Cancel(id=self.new_id(), target=request.id))

    async def _load(self, request: Load) -> AsyncGenerator[AnyEvent, None]:
        """Load a model in an engine where that disturbs nobody: this one, another's that has it, or a new one.

        A ring's engine is not shared.
        """
        model = _from_anywhere(request.model)
        request = msgspec.structs.replace(request, model=model, share=request.partitioning != "ring")
        tried: set[int] = set()
        while True:
            if not request.share and isinstance(self._link, Attached):
                await self._go_to(await self._started())
            link = self._running_link()
            tried.add(link.pid)
            refused = False
            try:
                async with aclosing(self._ask(request)) as events:
                    async for event in events:
                        refused = isinstance(event, Failed) and event.kind == "in-use"
                        if not refused:
                            yield event
            except EngineDied:
                # The engine of another program is no loss.
                if not isinstance(link, Attached):
                    raise
                refused = True
            if not refused:
                return
            other = await Attached.find(self._unasked, tried) if request.share else None
            await self._go_to(other or await self._started())

    async def _started(self) -> Child:
        return await Child.start(self._command or engine_process.host_command(), self._unasked)

    async def _go_to(self, link: EngineConnection) -> None:
        """Use another engine from now on."""
        async with self._starting:
            former, self._link = self._link, link
            if former is not None:
                await former.end()

    def _running_link(self) -> EngineConnection:
        if self._link is None:
            raise EngineDied("The engine is not running.")
        if not self._link.alive:
            raise EngineDied(self._link.reason)
        return self._link

    def _unasked(self, event: Unasked) -> None:
        match event:
            case NetworkState() if self.on_network is not None:
                self.on_network(event)
            case WarmUp() if self.on_warm_up is not None:
                self.on_warm_up(event)
            case RingChanged() if self.on_ring is not None:
                self.on_ring(event)
            case Notice() if self.on_notice is not None:
                self.on_notice(event)


def _from_anywhere(model: str) -> str:
    """``model``, with a path made absolute: the engine may have been started in another folder."""
    path = Path(model)
    if path.is_absolute() or catalogue.find(model) is not None:
        return model
    try:
        return str(Path.cwd() / path) if path.exists() else model
    except (OSError, ValueError):
        return model
