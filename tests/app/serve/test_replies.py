"""Answers as an HTTP server sends them: silence, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from app.serve.openai_fields import failure
from app.serve.replies import EventStream, Refused


class Client:
    """One that receives what is sent, until it leaves."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.changed = asyncio.Condition()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self.changed:
            self.sent.append(message)
            self.changed.notify_all()

    async def has(self, wanted: Callable[[bytes], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: wanted(self.body))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def ask(self, frames: AsyncGenerator[bytes, None]) -> None:
        await EventStream(frames, "openai", failure, ping=lambda: b": ping\n\n", ping_s=0.01)(
            {"type": "http"}, self.receive, self.send
        )


async def test_silence_is_filled_before_and_between_frames() -> None:
    client = Client()
    steps = [asyncio.Event(), asyncio.Event()]

    async def frames() -> AsyncGenerator[bytes, None]:
        for number, step in enumerate(steps):
            await step.wait()
            yield b"frame %d\n\n" % number

    asking = asyncio.create_task(client.ask(frames()))
    await client.has(lambda body: body.startswith(b": ping"))
    steps[0].set()
    await client.has(lambda body: b": ping" in body.partition(b"frame 0")[2])
    steps[1].set()
    await asking
    assert client.status == 200 and client.body.endswith(b"frame 1\n\n")
    assert client.sent[-1]["more_body"] is False


async def test_a_refusal_has_its_status_before_the_first_frame_and_is_a_frame_after_it() -> None:
    async def frames(first: bytes) -> AsyncGenerator[bytes, None]:
        if first:
            yield first
        raise Refused("Too many wait.", 429)

    early, late = Client(), Client()
    await early.ask(frames(b""))
    assert early.status == 429 and b"Too many wait." in early.body
    await late.ask(frames(b"data: 1\n\n"))
    assert late.status == 200 and late.body.startswith(b"data: 1\n\ndata: {") and b"Too many wait." in late.body


async def test_a_client_that_leaves_ends_the_frames() -> None:
    client, closed = Client(), asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            yield b"frame"
            await asyncio.Event().wait()
        finally:
            closed.set()

    asking = asyncio.create_task(client.ask(frames()))
    await client.has(lambda body: b"frame" in body)
    client.left.set()
    await asking
    assert closed.is_set()
