"""A program that attaches to an engine of another one, by the engine's socket."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from engine.ipc.engine_sockets import connect, reachable_engines
from engine.ipc.messages import TERMINAL_EVENTS, AnyEvent, AnyRequest, Hello, event_reader, pack
from tests.engine.engine_process import PATIENCE_S
from tests.support.eventually import eventually


def the_socket() -> Path:
    """The path of the one engine that can be shared; waits until there is one."""
    eventually(reachable_engines, why="no engine can be shared")
    (path,) = reachable_engines()
    return path


class AttachedProgram:
    def __init__(self, path: Path | None = None) -> None:
        found = connect(path or the_socket())
        assert found is not None
        self.socket: socket.socket = found
        self.reader = event_reader()
        self.seen: list[AnyEvent] = []
        """All events, in their order."""
        self._taken = 0

    def __enter__(self) -> AttachedProgram:
        self.hello = self.next()
        assert isinstance(self.hello, Hello)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, *requests: AnyRequest) -> None:
        self.socket.sendall(b"".join(pack(request) for request in requests))

    def next(self) -> AnyEvent | None:
        """The next event; None at the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            while self._taken == len(self.seen):
                assert selector.select(PATIENCE_S), "the engine is silent"
                data = os.read(self.socket.fileno(), 1 << 16)
                if not data:
                    return None
                self.seen += self.reader.feed(data)
        self._taken += 1
        return self.seen[self._taken - 1]

    def until(self, wanted: Callable[[AnyEvent], bool]) -> AnyEvent:
        for event in iter(self.next, None):
            if wanted(event):
                return event
        raise AssertionError("the engine talks no more")

    def events(self, request_id: int) -> Iterator[AnyEvent]:
        for event in iter(self.next, None):
            if event.id == request_id:
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
        raise AssertionError("the engine talks no more")

    def ask(self, request: AnyRequest) -> Sequence[AnyEvent]:
        self.send(request)
        return list(self.events(request.id))
