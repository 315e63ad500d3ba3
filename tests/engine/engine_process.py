"""A real engine process for tests: requests in, events out."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from engine.ipc.messages import TERMINAL_EVENTS, AnyEvent, AnyRequest, Hello, event_reader, pack
from tests.support.engine_forks import forked

PATIENCE_S = 120
"""After this long without an event a test fails rather than hangs; nothing is asserted about time."""


class EngineProcess:
    """``python -m engine.host`` with ``home`` as PRIVATELLM_HOME, or with other ``arguments`` (see hooked_engine.py).

    Forked from a process that has imported the engine; ``cold``: a new Python, for tests of the start itself.
    """

    def __init__(self, home: Path, arguments: Sequence[str] = ("-m", "engine.host"), cold: bool = False) -> None:
        environment = {**os.environ, "PRIVATELLM_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.home = home
        self.process = (
            subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                bufsize=0,
                start_new_session=True,
            )
            if cold
            else forked(arguments, environment, session=True)
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._reader = event_reader()
        self._waiting: list[AnyEvent] = []

    def __enter__(self) -> EngineProcess:
        hello = self.next()
        assert isinstance(hello, Hello)
        assert hello.pid == self.process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.stdout.close()

    def send(self, *requests: AnyRequest) -> None:
        self.send_bytes(b"".join(pack(request) for request in requests))

    def send_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.stdin.fileno(), view) :]

    def next(self) -> AnyEvent | None:
        """The next event, or None at the end of the stream."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while not self._waiting:
                assert selector.select(PATIENCE_S), "the engine is silent"
                data = os.read(self.stdout.fileno(), 1 << 16)
                if not data:
                    return None
                self._waiting += self._reader.feed(data)
        return self._waiting.pop(0)

    def events(self, request_id: int) -> Iterator[AnyEvent]:
        """Events of ``request_id``, the terminal one last; those of others are dropped."""
        while (event := self.next()) is not None:
            if event.id == request_id:
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
        raise AssertionError("the engine ended before it answered")

    def ask(self, request: AnyRequest) -> list[AnyEvent]:
        self.send(request)
        return list(self.events(request.id))

    def wait_for_end(self) -> int:
        """Read to the end of the stream; the exit status."""
        while self.next() is not None:
            pass
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        return (self.home / "logs" / "engine.log").read_text(errors="replace")
