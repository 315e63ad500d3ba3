"""The programs that use this engine: the one that started it, by pipes, and others that attach, by a Unix socket."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NoReturn, Protocol, TypeVar

from engine.ipc.engine_sockets import CAN_SHARE, is_same_user, listen
from engine.ipc.messages import (
    FRAME_LIMIT,
    PROTOCOL_VERSION,
    AnyEvent,
    AnyRequest,
    Event,
    Hello,
    Load,
    Notice,
    ProtocolError,
    Shutdown,
    pack,
    request_reader,
)

READ_BYTES = 1 << 16
MOST_ATTACHED = 64
"""Maximum number of programs that are attached at once."""

ClientT = TypeVar("ClientT")


class Clients(Protocol[ClientT]):
    """The interface to the code that answers requests. All methods are thread-safe."""

    def attach(self, send: Callable[[AnyEvent], None]) -> ClientT: ...

    def detach(self, client: ClientT) -> None: ...

    def take(self, request: AnyRequest, client: ClientT) -> object: ...


class Connection(Generic[ClientT]):
    """One program: where its requests are read, and what writes its events. ``peer``: its socket; None for pipes."""

    def __init__(
        self, requests: int, events: int, writer: EventWriter, client: ClientT, peer: socket.socket | None
    ) -> None:
        self.requests = requests
        self.writer = writer
        self.client = client
        self.reader = request_reader()
        self.peer = peer
        self._events = events

    def close(self) -> None:
        """Close the descriptors, which the program sees. From the reading thread."""
        self.writer.close()
        if self.peer is not None:
            self.peer.close()
        else:
            os.close(self.requests)
            os.close(self._events)


class Connections(Generic[ClientT]):
    """Reads the requests of all programs.

    ``on_empty`` is called when the last program is gone, and never returns. ``on_bad_frame`` is called with the writer
    of the program that started this process, and the problem, if that sent something that is not a request. ``key``:
    see :func:`engine.ipc.engine_sockets.listen`.
    """

    def __init__(
        self,
        clients: Clients[ClientT],
        key: str,
        on_empty: Callable[[], None],
        on_bad_frame: Callable[[EventWriter, str], None],
    ) -> None:
        self._clients = clients
        self._key = key
        self._on_empty = on_empty
        self._on_bad_frame = on_bad_frame
        self._selector = selectors.DefaultSelector()
        self._open: set[Connection[ClientT]] = set()
        self._lock = threading.Lock()
        self._listening: tuple[socket.socket, Path] | None = None

    def add_pipes(self, requests: int, events: int) -> EventWriter:
        """Add the program that started this process."""
        return self._add(requests, events, None).writer

    def run(self) -> NoReturn:
        """Read requests; only ``on_empty`` and ``on_bad_frame`` end it."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

    def share(self) -> str:
        """Let other programs attach. Returns a sentence if that is impossible."""
        if self._listening is not None or not CAN_SHARE:
            return ""
        try:
            self._listening = listen(self._key)
        except OSError as error:
            return f"Other programs load the model again, as this engine cannot be shared: {error}."
        self._selector.register(self._listening[0], selectors.EVENT_READ, None)
        return ""

    def stop_sharing(self) -> None:
        """Let nobody else attach; those who are attached stay."""
        found, self._listening = self._listening, None
        if found is not None:
            self._selector.unregister(found[0])
            self._forget_socket(found)

    def forget_socket(self) -> None:
        """Remove the socket's file at the end of the process. Thread-safe."""
        found = self._listening
        if found is not None:
            self._forget_socket(found)

    @staticmethod
    def _forget_socket(found: tuple[socket.socket, Path]) -> None:
        with contextlib.suppress(OSError):
            found[1].unlink()
        found[0].close()

    def _add(self, requests: int, events: int, peer: socket.socket | None) -> Connection[ClientT]:
        made: list[Connection[ClientT]] = []
        writer = EventWriter(events, lambda: self._lost(*made))
        writer.send(Hello(protocol=PROTOCOL_VERSION, pid=os.getpid()))
        connection = Connection(requests, events, writer, self._clients.attach(writer.send), peer)
        with self._lock:
            self._open.add(connection)
        made.append(connection)
        self._selector.register(requests, selectors.EVENT_READ, connection)
        if writer.closed:
            # It was gone before anybody could be told whose writer that was.
            self._lost(connection)
        return connection

    def _accept(self) -> None:
        if self._listening is None:
            return  # a Load that was read just before ended the sharing
        try:
            peer, _ = self._listening[0].accept()
        except OSError:
            return
        if len(self._open) > MOST_ATTACHED or not is_same_user(peer):
            peer.close()
            return
        self._add(peer.fileno(), peer.fileno(), peer)

    def _read(self, connection: Connection[ClientT]) -> None:
        if connection not in self._open:
            self._close(connection)
            return
        try:
            data = os.read(connection.requests, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        try:
            requests = connection.reader.feed(data)
        except ProtocolError as error:
            # What follows a bad frame cannot be trusted to begin where a frame begins.
            if connection.peer is None:
                self._on_bad_frame(connection.writer, str(error))
            connection.writer.send(Notice(text=f"The engine got something that is no request: {error}."))
            self._close(connection)
            return
        for request in requests:
            if isinstance(request, Shutdown):
                self._close(connection)
                return
            if isinstance(request, Load):
                self._share_for(request, connection)
            self._clients.take(request, connection.client)

    def _lost(self, *connections: Connection[ClientT]) -> None:
        """Forget programs to whose ``connections`` nothing can be written any more. Thread-safe."""
        for connection in connections:
            if connection.peer is not None:
                with contextlib.suppress(OSError):
                    # It is read as the end of its requests.
                    connection.peer.shutdown(socket.SHUT_RDWR)
            self._detach(connection)

    def _share_for(self, request: Load, connection: Connection[ClientT]) -> None:
        if not request.share:
            self.stop_sharing()
        elif problem := self.share():
            connection.writer.send(Notice(text=problem))

    def _close(self, connection: Connection[ClientT]) -> None:
        """End ``connection``; from the reading thread."""
        self._selector.unregister(connection.requests)
        self._detach(connection)
        connection.close()

    def _detach(self, connection: Connection[ClientT]) -> None:
        with self._lock:
            if connection not in self._open:
                return
            self._open.discard(connection)
            last = not self._open
        self._clients.detach(connection.client)
        if last:
            self._on_empty()


# --- writing events to one program -----------------------------------------------------------------------------------


BACKLOG_LIMIT = FRAME_LIMIT
"""Bytes that may wait for a program that does not read; with more it counts as gone."""


class EventWriter:
    """Writes events as frames. Thread-safe.

    What the reader does not take at once waits in a backlog, which a thread writes. ``on_closed`` is called once if the
    reader is gone, from any thread.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._waiting = 0
        self._closed = False
        self._flushing = False

    def send(self, event: Event) -> None:
        """Write ``event``, or put it into the backlog. Does nothing if the reader is gone. Raises ProtocolError."""
        frame = memoryview(pack(event))
        with self._changed:
            if self._closed:
                return
            if self._waiting > BACKLOG_LIMIT:
                self._closed = True
            else:
                self._backlog.append(frame)
                self._waiting += len(frame)
                if not self._flushing:
                    self._write()
            closed, flush = self._closed, bool(self._backlog) and not self._flushing
            self._flushing = self._flushing or flush
        if closed:
            self._end()
        elif flush:
            self._flush_beside()

    @property
    def closed(self) -> bool:
        """Whether the reader is gone."""
        return self._closed

    def drain(self, seconds: float) -> None:
        """Wait until everything was written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._backlog, seconds)

    def close(self) -> None:
        """Write nothing more; the descriptor is the caller's to close. ``on_closed`` is not called."""
        with self._changed:
            self._closed = True
            self._on_closed = lambda: None
            self._changed.notify_all()

    def _write(self) -> None:
        """Write what the reader takes without waiting."""
        try:
            while self._backlog:
                frame = self._backlog[0]
                written = os.write(self._descriptor, frame)
                self._waiting -= written
                if written < len(frame):
                    self._backlog[0] = frame[written:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._closed = True

    def _flush_beside(self) -> None:
        try:
            threading.Thread(target=self._flush, name="writing", daemon=True).start()
        except RuntimeError:
            self._flush()

    def _flush(self) -> None:
        """Write the backlog as the reader takes it."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        while True:
            ready.poll(1000)
            with self._changed:
                if not self._closed:
                    self._write()
                if self._closed or not self._backlog:
                    self._flushing = False
                    self._changed.notify_all()
                    break
        if self._closed:
            self._end()

    def _end(self) -> None:
        with self._changed:
            told, self._on_closed = self._on_closed, lambda: None
            self._backlog.clear()
            self._changed.notify_all()
        told()
