from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from app.conversations.partial import PartialWriter
from app.conversations.records import StoreError


class Disk:
    """Keeps the last text written, unless it is full."""

    def __init__(self) -> None:
        self.now = 100.0
        self.full = False
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        if self.full:
            raise StoreError("no space", "full")
        self.texts.append(text)

    def clock(self) -> float:
        return self.now


def _writer(disk: Disk) -> PartialWriter:
    return PartialWriter(disk.write, interval_s=0.5, clock=disk.clock)


def test_pieces_are_written_together() -> None:
    disk = Disk()
    writer = _writer(disk)
    assert writer.due_in() is None and not writer.poll()
    writer.add("a")
    assert writer.poll() and disk.texts == ["a"]
    writer.add("b")
    assert not writer.poll() and writer.due_in() == 0.5
    disk.now += 0.25
    writer.add("c")
    assert not writer.poll() and writer.due_in() == 0.25
    disk.now += 0.25
    assert writer.poll() and disk.texts == ["a", "abc"]
    assert not writer.poll() and writer.due_in() is None


def test_flush_writes_the_rest_once() -> None:
    disk = Disk()
    writer = _writer(disk)
    writer.add("a")
    assert writer.flush() and writer.flush()
    writer.add("")
    assert writer.flush() and disk.texts == ["a"]


def test_replace() -> None:
    disk = Disk()
    writer = _writer(disk)
    writer.replace("best so far")
    writer.poll()
    writer.replace("best so far")
    assert writer.due_in() is None
    writer.replace("better")
    assert writer.flush() and writer.text == "better" and disk.texts == ["best so far", "better"]


def test_a_failure_keeps_the_text_and_is_tried_again() -> None:
    disk = Disk()
    writer = _writer(disk)
    disk.full = True
    writer.add("a")
    assert not writer.poll()
    assert writer.error is not None and writer.error.reason == "full" and writer.text == "a"
    assert writer.due_in() == 0.5 and not writer.poll()
    writer.add("b")
    disk.full, disk.now = False, disk.now + 0.5
    assert writer.poll() and writer.error is None and disk.texts == ["ab"]


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 0.2)), max_size=40))
def test_polled_often_enough_never_more_than_the_interval_is_unwritten(steps: list[tuple[str, float]]) -> None:
    disk = Disk()
    writer = _writer(disk)
    unwritten_since: float | None = None
    for piece, pause in steps:
        writer.add(piece)
        if piece and unwritten_since is None:
            unwritten_since = disk.now
        if writer.poll():
            unwritten_since = None
        assert unwritten_since is None or disk.now - unwritten_since <= 0.5 + 0.2
        disk.now += pause
    assert writer.flush()
    assert writer.text == "".join(piece for piece, _ in steps) == (disk.texts[-1] if disk.texts else "")


async def test_run_writes_without_anybody_polling() -> None:
    written = asyncio.Event()
    writer = PartialWriter(lambda text: written.set(), interval_s=0.02)
    task = asyncio.create_task(writer.run())
    writer.add("text")
    await written.wait()
    task.cancel()
    assert writer.due_in() is None
