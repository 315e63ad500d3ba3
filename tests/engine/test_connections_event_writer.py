from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from engine import connections
from engine.connections import EventWriter
from engine.ipc.messages import Notice, event_reader

PATIENCE_S = 60


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    found = os.pipe()
    yield found
    for descriptor in found:
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_a_reader_far_behind_keeps_nobody_waiting_and_loses_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = EventWriter(writing, lambda: None)
    sent = [Notice(text=f"{number} " + "x" * 10_000) for number in range(100)]
    for event in sent:
        writer.send(event)
    reader, seen = event_reader(), []
    while len(seen) < len(sent):
        seen += reader.feed(os.read(reading, 777))
    assert seen == sent
    writer.drain(PATIENCE_S)
    writer.send(sent[0])
    assert reader.feed(os.read(reading, 1 << 16)) == sent[:1], "at once again"


def test_a_reader_too_far_behind_counts_as_gone(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BACKLOG_LIMIT", 300_000)
    gone = threading.Event()
    writer = EventWriter(pipe[1], gone.set)
    for _ in range(50):
        writer.send(Notice(text="x" * 10_000))
    assert gone.wait(PATIENCE_S)
    writer.send(Notice(text="nobody hears this"))


@pytest.mark.parametrize("far_behind", [False, True])
def test_a_reader_that_is_gone_is_told_once(pipe: tuple[int, int], far_behind: bool) -> None:
    reading, writing = pipe
    told = threading.Semaphore(0)
    writer = EventWriter(writing, told.release)
    if far_behind:
        for _ in range(20):
            writer.send(Notice(text="x" * 10_000))
    os.close(reading)
    writer.send(Notice(text="x"))
    assert told.acquire(timeout=PATIENCE_S)
    writer.send(Notice(text="x"))
    assert writer.closed and not told.acquire(blocking=False)
