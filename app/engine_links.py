"""A link to an engine process: one that this program started, or one of another program that it attached to."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from app import engine_process
from app.text_safety import made_safe, one_line
from engine.ipc.engine_sockets import connect, reachable_engines
from engine.ipc.messages import (
    PROTOCOL_VERSION,
    TERMINAL_EVENTS,
    AnyEvent,
    AnyRequest,
    Hello,
    NetworkState,
    Notice,
    ProtocolError,
    RingChanged,
    Sharing,
    Shutdown,
    WarmUp,
    event_reader,
    pack,
)
from engine.system.locations import locate


class EngineDied(Exception):
    """The engine process ended during a request. The text says how, in one sentence."""


def ends(event: AnyEvent) -> bool:
    """Whether ``event`` is the last one of its request. A NetworkState that answers a request is its only event."""
    return isinstance(event, (*TERMINAL_EVENTS, NetworkState))


Unasked = Notice | NetworkState | WarmUp | RingChanged
"""Events that belong to no request."""

_READ_BYTES = 256 * 1024
_HELLO_WAIT_S = 120.0
_ATTACH_WAIT_S = 15.0
_END_WAIT_S = 2.0
_LOOK_S = 0.5


class Inbox:
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


class EngineConnection(ABC):
    """Requests to an engine, and its events, from the beginning to the end."""

    def __init__(
        self, requests: asyncio.StreamWriter, events: asyncio.StreamReader, on_unasked: Callable[[Unasked], None]
    ) -> None:
        self.inboxes: dict[int, Inbox] = {}
        self.reason = "The engine is not running."
        self.clients = 1
        """Programs that use the engine."""
        self._requests = requests
        self._events = events
        self._on_unasked = on_unasked
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._ending = False
        self._reader = asyncio.create_task(self._read(), name="engine events")

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def kill(self) -> None:
        """End the link at once, without waiting, and the engine with it unless others use it."""

    @abstractmethod
    async def end(self) -> None:
        """End the link. Afterwards the engine has ended unless others use it."""

    @abstractmethod
    async def _gone(self, problem: str) -> str:
        """End the link because the engine sends no more, perhaps because of ``problem``. Returns the reason."""

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

    async def _greeted(self, wait_s: float) -> None:
        """Wait for the Hello. Raises EngineDied, TimeoutError."""
        hello = await asyncio.wait_for(asyncio.shield(self._hello), wait_s)
        if hello.protocol != PROTOCOL_VERSION:
            raise EngineDied(
                f"The engine speaks protocol {hello.protocol} and this program {PROTOCOL_VERSION}: "
                "install privatellm again."
            )

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
        reason = await self._gone(problem)
        self.reason = "The engine was closed." if self._ending else reason
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
        elif isinstance(event, Sharing):
            self.clients = event.clients
        elif inbox is not None:
            inbox.put(event)
        elif isinstance(event, Unasked):
            self._on_unasked(event)


class Child(EngineConnection):
    """An engine process that this program started, from its start to its end, or to the end of this program's part."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: asyncio.StreamWriter,
        events: asyncio.StreamReader,
        events_pipe: asyncio.ReadTransport,
        on_unasked: Callable[[Unasked], None],
    ) -> None:
        super().__init__(requests, events, on_unasked)
        self.process = process
        self._events_pipe = events_pipe
        self._watcher = asyncio.create_task(self._watch_end(), name="engine end")

    @classmethod
    async def start(cls, command: Sequence[str], on_unasked: Callable[[Unasked], None]) -> Child:
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
            await child._greeted(_HELLO_WAIT_S)
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

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        if self._is_shared:
            self._requests.close()
        else:
            engine_process.kill(self.process)

    async def end(self) -> None:
        self._ending = True
        try:
            if self.process.poll() is None:
                self.write_soon(Shutdown(id=0))
                self._requests.close()
                await self._exit(_END_WAIT_S, or_silent=True)
            if not self._is_shared:
                engine_process.kill(self.process)
                await self._exit(math.inf)
            await self._stop_reading()
        finally:
            # Also when these waits are cancelled: close() is not called a second time.
            if self._is_shared:
                engine_process.leave(self.process)
            else:
                engine_process.reap(self.process)
            self._watcher.cancel()
            if self._requests.transport.get_write_buffer_size():
                # Nobody will read it any more.
                self._requests.transport.abort()
            self._requests.close()
            self._events_pipe.close()

    @property
    def _is_shared(self) -> bool:
        """Whether others use the process, which is then not this program's to end."""
        return self.clients > 1 and self.process.poll() is None

    async def _exit(self, wait_s: float, every_s: float = 0.003, *, or_silent: bool = False) -> None:
        """Wait until the process has ended, at most ``wait_s`` seconds; something it started may hold its pipes.

        ``or_silent``: or until it has closed its side of a shared engine.
        """
        end = asyncio.get_running_loop().time() + wait_s
        while self.process.poll() is None and asyncio.get_running_loop().time() < end:
            if or_silent and self._is_shared and self._reader.done():
                return
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

    async def _gone(self, problem: str) -> str:
        """A process that has closed its pipe cannot be talked to any more, whatever else it still does."""
        if self._is_shared:
            return "The engine, which other programs use, talks no more to this one."
        if not problem:
            await self._exit(_END_WAIT_S)
            if self.process.poll() is None:
                problem = "it closed its output"
        engine_process.kill(self.process)
        await self._exit(math.inf)
        return how_it_ended(self.process.returncode or 0, problem)


class Attached(EngineConnection):
    """An engine process of another program of the same person."""

    def __init__(
        self, requests: asyncio.StreamWriter, events: asyncio.StreamReader, on_unasked: Callable[[Unasked], None]
    ) -> None:
        super().__init__(requests, events, on_unasked)
        self.clients = 2

    @classmethod
    async def find(cls, on_unasked: Callable[[Unasked], None], besides: Collection[int] = ()) -> Attached | None:
        """A link to the newest engine that can be shared, or None. ``besides``: ids of processes that are not meant."""
        for path in reachable_engines():
            if path.stem.endswith(tuple(f"-{pid}" for pid in besides)):
                continue
            link = await cls._attach(connect(path), on_unasked)
            if link is not None:
                return link
        return None

    @classmethod
    async def _attach(cls, connection: socket.socket | None, on_unasked: Callable[[Unasked], None]) -> Attached | None:
        if connection is None:
            return None
        try:
            events, requests = await asyncio.open_unix_connection(sock=connection, limit=_READ_BYTES)
        except OSError:
            connection.close()
            return None
        link = cls(requests, events, on_unasked)
        try:
            await link._greeted(_ATTACH_WAIT_S)
        except (EngineDied, TimeoutError):
            # It was just ending, or hangs.
            await link.end()
            return None
        except BaseException:
            link.kill()
            raise
        return link

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def pid(self) -> int:
        return self._hello.result().pid

    def kill(self) -> None:
        self._requests.transport.abort()

    async def end(self) -> None:
        self._ending = True
        self._requests.close()
        self._events.feed_eof()
        await asyncio.wait({self._reader}, timeout=_END_WAIT_S)

    async def _gone(self, problem: str) -> str:
        self._requests.close()
        if problem:
            return f"The engine sent what could not be read ({problem}){_see_log()}."
        return f"The engine, which another program had started, has ended{_see_log()}."


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
