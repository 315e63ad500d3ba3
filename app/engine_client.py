"""Starts the engine process, sends requests, yields events."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from app import engine_process
from app.text_safety import made_safe, one_line
from engine.ipc.messages import (
    PROTOCOL_VERSION,
    TERMINAL_EVENTS,
    AnyEvent,
    AnyRequest,
    Cancel,
    Failed,
    Hello,
    NetworkState,
    Notice,
    ProtocolError,
    RingChanged,
    Shutdown,
    WarmUp,
    event_reader,
    pack,
)
from engine.models.locations import locate


class EngineDied(Exception):
    """The engine process ended during a request. The text says how, in one sentence."""


class Engine(Protocol):
    """What the screen and the commands need of an engine. The tests have a second implementation."""

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


def ends(event: AnyEvent) -> bool:
    """Is ``event`` the last one of its request? A NetworkState that answers a request is its only event."""
    return isinstance(event, (*TERMINAL_EVENTS, NetworkState))


Unasked = Notice | NetworkState | WarmUp | RingChanged
"""Events that belong to no request."""

_READ_BYTES = 256 * 1024
_HELLO_WAIT_S = 120.0
_END_WAIT_S = 2.0
_LOOK_S = 0.5


class EngineClient:
    """The :class:`Engine` of the product: ``python -m engine.host`` as a child in a session of its own.

    In its own session, ctrl-c in the terminal does not reach it. It lives exactly as long as its standard input stays
    open, so it ends with this process however that ends; what it prints goes to the log. Use it from one event loop.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self.on_notice: Callable[[Notice], None] | None = None
        self.on_network: Callable[[NetworkState], None] | None = None
        self.on_warm_up: Callable[[WarmUp], None] | None = None
        self.on_ring: Callable[[RingChanged], None] | None = None
        self._command = tuple(command) if command is not None else engine_process.host_command()
        self._ids = itertools.count(1)
        self._starting = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._child: _Child | None = None

    def new_id(self) -> int:
        return next(self._ids)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.alive

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._child.process.pid if self._child is not None and self._child.alive else None

    async def start(self) -> None:
        async with self._starting:
            if self.running:
                return
            if self._child is not None:
                await self._child.end()
            self._child = await _Child.start(self._command, self._unasked)

    async def send(self, request: AnyRequest) -> None:
        child = self._running_child()
        async with self._writing:
            await child.write(pack(request))

    async def stream(self, request: AnyRequest) -> AsyncGenerator[AnyEvent, None]:
        """As :meth:`Engine.stream`. Closing it early cancels the request."""
        child = self._running_child()
        try:
            frame = pack(request)
        except ProtocolError as error:
            yield Failed(id=request.id, error=f"This cannot be sent to the engine: {error}.", kind="bad-input")
            return
        inbox = child.inboxes[request.id] = _Inbox()
        ended = False
        try:
            async with self._writing:
                await child.write(frame)
            while not ended:
                event = await inbox.get()
                ended = ends(event)
                yield event
        finally:
            child.inboxes.pop(request.id, None)
            if not ended and child.alive:
                child.write_soon(Cancel(id=self.new_id(), target=request.id))

    async def close(self) -> None:
        async with self._starting:
            child, self._child = self._child, None
            if child is not None:
                await child.end()

    def kill(self) -> None:
        """Kill the process at once, without waiting; for a program that must end now."""
        if self._child is not None:
            self._child.kill()

    def _running_child(self) -> _Child:
        if self._child is None:
            raise EngineDied("The engine is not running.")
        if not self._child.alive:
            raise EngineDied(self._child.reason)
        return self._child

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


class _Inbox:
    """Events of one request, waiting to be taken. The engine limits how many there are a second."""

    def __init__(self) -> None:
        self._events: deque[AnyEvent] = deque()
        self._arrived = asyncio.Event()
        self._death: str | None = None

    def put(self, event: AnyEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    def die(self, reason: str) -> None:
        self._death = reason
        self._arrived.set()

    async def get(self) -> AnyEvent:
        """The next event. Raises EngineDied after the last event of an engine that died."""
        while not self._events:
            if self._death is not None:
                raise EngineDied(self._death)
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class _Child:
    """One engine process from its start to its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: asyncio.StreamWriter,
        events: asyncio.StreamReader,
        events_pipe: asyncio.ReadTransport,
        on_unasked: Callable[[Unasked], None],
    ) -> None:
        self.process = process
        self._requests = requests
        self._events = events
        self._events_pipe = events_pipe
        self.inboxes: dict[int, _Inbox] = {}
        self.reason = "The engine is not running."
        self._on_unasked = on_unasked
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._ending = False
        self._reader = asyncio.create_task(self._read(), name="engine events")
        self._watcher = asyncio.create_task(self._watch_end(), name="engine end")

    @classmethod
    async def start(cls, command: Sequence[str], on_unasked: Callable[[Unasked], None]) -> _Child:
        """Raises EngineDied if the process does not come up."""
        try:
            process = engine_process.take(command)
        except OSError as error:
            raise EngineDied(f"The engine could not be started: {error.strerror or error}.") from error
        try:
            child = cls(process, *await _streams(process), on_unasked)
        except BaseException:
            engine_process.end(process)
            raise
        try:
            hello = await asyncio.wait_for(asyncio.shield(child._hello), _HELLO_WAIT_S)
            if hello.protocol != PROTOCOL_VERSION:
                raise EngineDied(
                    f"The engine speaks protocol {hello.protocol} and this program {PROTOCOL_VERSION}: "
                    "install privatellm again."
                )
        except TimeoutError:
            child.kill()
            await child.end()
            raise EngineDied(
                f"The engine did not answer within {_HELLO_WAIT_S:.0f} seconds of its start{_see_log()}."
            ) from None
        except BaseException:
            child.kill()
            await child.end()
            raise
        return child

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.poll() is None

    async def write(self, frame: bytes) -> None:
        """Raises EngineDied."""
        try:
            self._requests.write(frame)
            await self._requests.drain()
        except (ConnectionError, RuntimeError) as error:
            await asyncio.wait({self._reader}, timeout=_END_WAIT_S)
            raise EngineDied(self.reason) from error

    def write_soon(self, request: AnyRequest) -> None:
        """Hand a small request to the pipe without waiting. It may never arrive."""
        with suppress(ConnectionError, RuntimeError):
            self._requests.write(pack(request))

    def kill(self) -> None:
        """Kill the process and whatever it started (it leads a process group)."""
        engine_process.kill(self.process)

    async def end(self) -> None:
        """Ask the process to end; kill it if it does not soon. Afterwards no process is left."""
        self._ending = True
        try:
            if self.process.poll() is None:
                self.write_soon(Shutdown(id=0))
                self._requests.close()
                await self._exit(_END_WAIT_S)
            self.kill()
            await self._exit(math.inf)
            await self._stop_reading()
        finally:
            # Also when these waits are cancelled: close() is not called a second time.
            engine_process.reap(self.process)
            self._watcher.cancel()
            if self._requests.transport.get_write_buffer_size():
                # Nobody will read it any more.
                self._requests.transport.abort()
            self._requests.close()
            self._events_pipe.close()

    async def _exit(self, wait_s: float, every_s: float = 0.003) -> None:
        """Wait until the process has ended, at most ``wait_s`` seconds; something it started may hold its pipes."""
        end = asyncio.get_running_loop().time() + wait_s
        while self.process.poll() is None and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(min(every_s, wait_s))

    async def _watch_end(self) -> None:
        await self._exit(math.inf, every_s=_LOOK_S)
        await self._stop_reading()

    async def _stop_reading(self) -> None:
        """End the reading of events. A process that the engine started may hold the pipe open after its end."""
        await asyncio.wait({self._reader}, timeout=_END_WAIT_S)
        if not self._reader.done():
            self._events.feed_eof()
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        frames = event_reader()
        problem = ""
        try:
            while data := await self._events.read(_READ_BYTES):
                for event in frames.feed(data):
                    self._dispatch(event)
        except ProtocolError as error:
            for event in error.before:
                self._dispatch(event)
            problem = one_line(str(error))
        except ConnectionError as error:
            problem = one_line(str(error))
        except Exception as error:
            # Whatever went wrong, the requests that wait must end.
            problem = f"{type(error).__name__}: {error}"
        # A process that has closed its pipe cannot be talked to any more, whatever else it still does.
        if not problem:
            await self._exit(_END_WAIT_S)
            if self.process.poll() is None:
                problem = "it closed its output"
        self.kill()
        await self._exit(math.inf)
        code = self.process.returncode or 0
        self.reason = "The engine was closed." if self._ending else how_it_ended(code, problem)
        self._ended = True
        if not self._hello.done():
            self._hello.set_exception(EngineDied(self.reason))
            self._hello.exception()  # seen, also if nobody waits any more
        for inbox in self.inboxes.values():
            inbox.die(self.reason)

    def _dispatch(self, event: AnyEvent) -> None:
        event = made_safe(event)
        inbox = self.inboxes.get(event.id)
        if isinstance(event, Hello):
            if not self._hello.done():
                self._hello.set_result(event)
        elif inbox is not None:
            inbox.put(event)
        elif isinstance(event, Unasked):
            self._on_unasked(event)


async def _streams(
    process: subprocess.Popen[bytes],
) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.ReadTransport]:
    """The pipes of ``process``: its stdin, its stdout, and what closes that."""
    loop = asyncio.get_running_loop()
    events = asyncio.StreamReader(limit=_READ_BYTES)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(events), process.stdout)
    unread = asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unread), process.stdin)
    return asyncio.StreamWriter(transport, protocol, unread, loop), events, pipe


def how_it_ended(code: int, problem: str = "") -> str:
    """One sentence about the end of the engine.

    ``code``: the exit status as Python gives it, negative for a signal. ``problem``: why this program stopped the
    engine, if it did; the exit status means nothing then.
    """
    if problem:
        return f"The engine sent what could not be read ({problem}) and was stopped{_see_log()}."
    if code >= 0:
        return f"The engine ended unexpectedly (exit status {code}){_see_log()}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return (
            f"The engine was killed ({name}), most likely because memory ran out: try a smaller model, fewer beams or "
            "a shorter context."
        )
    if -code == signal.SIGBUS:
        return (
            f"The engine crashed ({name}): most likely a file of the model was shortened while it was in use, or its "
            f"disk is failing; check the disk and fetch the model again{_see_log()}."
        )
    if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return f"The engine crashed ({name}){_see_log()}."
    return f"The engine was ended by {name}."


def _see_log() -> str:
    return f"; see {locate('logs') / 'engine.log'}"
