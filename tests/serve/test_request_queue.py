"""The order in which clients get the engine."""

from __future__ import annotations

import asyncio

import pytest

from app.serve.refusals import Refused
from app.serve.request_queue import RequestQueue


async def ask(queue: RequestQueue, client: str, order: list[str], go_on: asyncio.Event) -> None:
    async with queue.turn(client):
        order.append(client)
        await go_on.wait()


async def test_clients_take_turns() -> None:
    queue, order, go_on = RequestQueue(), list[str](), asyncio.Event()
    tasks = []
    for client in "aaaabbc":
        tasks.append(asyncio.create_task(ask(queue, client, order, go_on)))
        await asyncio.sleep(0)
    assert (order, queue.waiting, queue.running) == (["a"], 6, 1)
    go_on.set()
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcabaa"
    assert queue.waiting == queue.running == 0


async def test_those_who_leave_are_passed_over() -> None:
    queue, order, go_on = RequestQueue(), list[str](), asyncio.Event()
    tasks = []
    for client in "abcd":
        tasks.append(asyncio.create_task(ask(queue, client, order, go_on)))
        await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    tasks[0].cancel()  # its turn goes to c
    await asyncio.sleep(0)
    tasks[2].cancel()  # which leaves at the same moment
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "d"] and queue.waiting == queue.running == 0


async def test_a_full_queue_refuses() -> None:
    queue, order, go_on = RequestQueue(longest=1), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(ask(queue, client, order, go_on)) for client in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        async with queue.turn("c"):
            pass
    assert refused.value.status == 429
    go_on.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]
