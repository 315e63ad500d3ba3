"""A lent machine, told in lines; its engine is started again when it dies."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from app.engine_client import EngineDied
from app.lending import LendingService, event_lines
from engine.ipc.messages import LendingFacts, LinkFacts, NetworkState, OpenNetwork
from tests.app.fake_engine import ME, STRANGER, STUDIO, FakeEngine
from tests.app.tui.screen_helpers import until

LINK = LinkFacts(
    interface="en5", address="10.0.0.2:47821", latency_s=85e-6, bytes_per_s=2.3e9, others=["en0 192.168.1.7: 450 µs"]
)


SHARE = LendingFacts(
    head="desk", model="mixtral-8x7b", rank=1, nodes=2, experts=132, expert_bytes=43_100_000_000,
    stage="receiving weights", done=12_400_000_000, total=43_100_000_000, link=LINK,
)  # fmt: skip


ANSWERING = msgspec.structs.replace(SHARE, stage="answering", done=0, total=0, tokens=1834, busy=0.62, probe_s=0.041)


CLOSED = NetworkState(me=msgspec.structs.replace(ME, listening=[]), open=False)


OPEN = NetworkState(me=ME, open=True, code="1234 5678", code_seconds=120, code_tries=3)


JOIN = OpenNetwork(id=0, lend=True)


def test_opening_tells_who_this_is_and_the_code() -> None:
    lines = event_lines(CLOSED, OPEN)
    assert lines[0] == "laptop, a1a1a1a1 (amber canyon lemon orbit), listens on 10.0.0.1:47820."
    assert any(line.startswith("Code: 1234 5678 (valid for 120 s, 3 tries)") for line in lines)
    assert event_lines(OPEN, msgspec.structs.replace(OPEN, code_seconds=119)) == []
    assert event_lines(OPEN, CLOSED) == ["The network is closed."]
    nowhere = msgspec.structs.replace(OPEN, me=msgspec.structs.replace(ME, listening=[]))
    assert event_lines(CLOSED, nowhere)[0].endswith("is found automatically only: it has no address to type elsewhere.")


def test_a_code_that_nobody_used_is_over_with_the_way_to_another() -> None:
    over = msgspec.structs.replace(OPEN, code="", code_seconds=0, code_tries=0)
    expired = msgspec.structs.replace(over, code_expired=True)
    assert event_lines(OPEN, expired) == ["The code has expired; `privatellm peers code` shows a new one."]
    assert event_lines(expired, expired) == event_lines(expired, over) == []
    # It was typed wrongly too often, which has a line of its own, a moment later.
    void = msgspec.structs.replace(over, problems=["A wrong code was typed too often: the code is void."])
    assert event_lines(OPEN, over) == []
    assert event_lines(over, void) == event_lines(OPEN, void) == void.problems
    paired = msgspec.structs.replace(over, peers=[msgspec.structs.replace(STUDIO, state="ready")])
    assert event_lines(OPEN, paired) == ["Paired with studio."]


def test_machines_come_and_go() -> None:
    before = msgspec.structs.replace(OPEN, peers=[STRANGER])
    assert event_lines(OPEN, before) == []  # what is only announced is a hint
    paired = msgspec.structs.replace(OPEN, peers=[msgspec.structs.replace(STRANGER, name="mini", state="ready")])
    assert event_lines(before, paired) == event_lines(OPEN, paired) == ["Paired with mini."]
    refused = msgspec.structs.replace(
        OPEN,
        peers=[msgspec.structs.replace(STRANGER, name="mini", state="refused", problem="version 0.1 there\x1b[2J")],
    )
    assert event_lines(paired, refused) == ["mini: cannot be used: version 0.1 there."]
    sentence = "It has privatellm 2 and this machine has 1; install the same version on both."
    other = msgspec.structs.replace(refused, peers=[msgspec.structs.replace(refused.peers[0], problem=sentence)])
    assert event_lines(paired, other) == [f"mini: cannot be used: i{sentence[1:]}"]
    assert event_lines(paired, OPEN) == ["mini is gone."]


def test_a_share_is_told_by_quarters_and_an_answer_not_at_all() -> None:
    first = msgspec.structs.replace(SHARE, model="", rank=0, nodes=0, experts=0, stage="")
    states = [
        msgspec.structs.replace(OPEN, lending=lending)
        for lending in (
            None, first, SHARE, msgspec.structs.replace(SHARE, done=13_000_000_000),
            msgspec.structs.replace(SHARE, done=22_000_000_000),
            msgspec.structs.replace(SHARE, stage="ready", done=0, total=0), ANSWERING,
            msgspec.structs.replace(ANSWERING, stage="ready"), None,
        )
    ]  # fmt: skip
    lines = [line for before, after in itertools.pairwise(states) for line in event_lines(before, after)]
    assert lines == [
        "desk forms a ring with this machine.",
        "In the ring of desk: mixtral-8x7b, node 2 of 2, 132 experts, 43.1 GB.",
        "Receiving weights: 28 %.",
        "Receiving weights: 51 %.",
        "Ready.",
    ]
    assert event_lines(states[1], states[0]) == ["desk formed no ring with this machine."]


async def test_an_engine_that_dies_is_started_again_with_its_network(engine: FakeEngine) -> None:
    lines: list[str] = []
    lender = LendingService(engine, JOIN, lines.append, first_wait_s=0.01)
    running = asyncio.create_task(lender.run())
    await until(lambda: engine.network.opened)
    engine.die()
    engine.network.refusal = "Port 47820 is in use: choose another."
    await until(lambda: any("in use" in line for line in lines))
    assert lender.restarting and lender.state is not None and not lender.state.open
    engine.network.refusal = ""
    await until(lambda: any("can be used again" in line for line in lines))
    assert engine.starts == 2 and engine.network.opened is not None and not lender.restarting
    await lender.leave()
    assert engine.network.opened is None
    running.cancel()


async def test_an_engine_that_dies_between_the_state_and_the_answer_is_started_again(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    lender = LendingService(engine, JOIN, lines.append, first_wait_s=0.01)
    open_it, calls = lender.network.ensure_open, []

    async def dies_at_first(wanted: OpenNetwork, *, wait: bool = True) -> None:
        calls.append(wanted)
        await open_it(wanted, wait=wait)
        if len(calls) == 1:
            engine.die()
            raise EngineDied("The engine ended.")

    monkeypatch.setattr(lender.network, "ensure_open", dies_at_first)
    running = asyncio.create_task(lender.run())
    await until(lambda: any("can be used again" in line for line in lines))
    assert engine.starts == 2 and len(calls) == 2 and not running.done()
    running.cancel()
