"""Programs that attach to an engine that is not there for them: it stops being shared, or has stopped altogether."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from engine.connections import Connections, EventWriter
from engine.ipc.engine_sockets import connect, engine_key, listen, reachable_engines
from engine.ipc.messages import AnyEvent, AnyRequest, CountTokens, Load, pack


class Taking:
    """Takes requests, and says when there is one more."""

    def __init__(self) -> None:
        self.taken: list[AnyRequest] = []
        self.more = threading.Semaphore(0)

    def attach(self, send: Callable[[AnyEvent], None]) -> int:
        return 0

    def detach(self, client: int) -> None:
        """Nothing is kept of a client."""

    def take(self, request: AnyRequest, client: int) -> None:
        self.taken.append(request)
        self.more.release()


def test_who_comes_while_sharing_ends_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))

    def end() -> None:
        raise SystemExit

    def on_bad_frame(writer: EventWriter, problem: str) -> None:
        raise AssertionError(problem)

    clients = Taking()
    connections = Connections[int](clients, engine_key(), end, on_bad_frame)
    (requests, asking), (reading, events) = os.pipe(), os.pipe()
    connections.add_pipes(requests, events)
    assert connections.share() == ""
    # Both are seen at once: the request that ends the sharing, and a program that wants to attach.
    unshared = Load(id=1, model="m", share=False)
    os.write(asking, pack(unshared))
    attaching = connect(reachable_engines()[0])
    assert attaching is not None

    def run() -> None:
        with suppress(SystemExit):
            connections.run()

    running = threading.Thread(target=run)
    running.start()
    assert clients.more.acquire(timeout=60)
    count = CountTokens(id=2, texts=["x"])
    os.write(asking, pack(count))
    assert clients.more.acquire(timeout=60), "the engine still reads"
    assert clients.taken == [unshared, count] and reachable_engines() == []
    os.close(asking)
    running.join(60)
    attaching.close()
    os.close(reading)


def test_an_engine_that_accepts_nobody_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    stopped, path = listen(engine_key())
    stopped.listen(0)
    attached = [connect(path) for _ in range(3)]
    assert attached[0] is not None and attached[-1] is None and path.exists()
    for each in (stopped, *attached):
        if each is not None:
            each.close()
