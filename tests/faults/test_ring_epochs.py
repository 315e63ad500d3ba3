"""What an epoch that ended must not touch: groups of other libraries that are dead, keys and values that are stale."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.ipc.messages import Notice
from engine.ipc.messages.ring import ExchangeName
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring
from tests.support.engine_forks import with_libraries
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow

LONG = 30
LOOPBACK = ["127.0.0.0/8"]


@pytest.fixture(scope="module")
def ring_with_libraries() -> Iterator[Ring]:
    with Ring(2, launch=with_libraries) as ring:
        yield ring


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", [pytest.param("socket", marks=pytest.mark.soak), "envoy", "gloo", "mlx"])
def test_killed_and_back_over_every_exchange(
    ring_with_libraries: Ring, model: Path, alone: Oracle, exchange: ExchangeName
) -> None:
    """A group of mx.distributed lives once in a process: the next epoch goes over our own sockets, and says so.

    Over TLS this happens in most tests of faults."""
    needed = {"gloo": "torch", "mlx": "mlx", "envoy": "grpc"}.get(exchange)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    ring = ring_with_libraries
    for follower in ring.followers:
        follower.returns()
    for _ in range(3):
        ring.until_ready()
        first = ring.load(model, replace(EXACT, exchange=exchange, trusted=LOOPBACK)).facts.ring
        assert first is not None
        if first.exchange == exchange:
            break
        # A busy machine did not connect in time, and a process gets no second group of mx.distributed.
        for machine in ring.machines:
            machine.kill()
        for follower in ring.followers:
            follower.returns()
        ring.head.returns(lend=False, peers=[follower.address for follower in ring.followers])
    assert first.exchange == exchange
    assert len(first.nodes) == 3
    since = ring.mark()
    asked = ring.ask(LONG)
    ring.until_tokens(asked, 8)
    gone, left = ring.followers
    gone.kill()
    assert ring.finished(asked).token_ids == alone(LONG).token_ids
    eventually(lambda: (found := left.lending()) is not None and found.nodes == 2)
    eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
    gone.returns()
    eventually(lambda: ring.state_of(gone) == "ready")
    assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
    told = " ".join(ring.notices(since))
    assert ("could not be made again" in told) == (exchange == "mlx")


def test_a_node_whose_cache_is_stale_is_refused(model: Path, alone: Oracle) -> None:
    """It says so itself, by the hash of what it holds; the ring forms again with it, and no wrong token is heard of."""
    with Ring(2, arguments={1: hooked(hooks.stale_cache, length=20)}) as ring:
        ring.load(model)
        since = ring.mark()
        follower = ring.followers[0]
        found = ring.answer(30)
        assert found.token_ids == alone(30).token_ids
        told = follower.engine.wait(lambda event: isinstance(event, Notice) and "other tokens" in event.text)
        assert isinstance(told, Notice)
        told_here = [text for text in ring.notices(since) if "Lost" in text or "going on with" in text]
        assert len(told_here) == 2 and told_here[0].startswith("Lost node 1: ")
        assert told_here[1] == "node 1 came back; going on with 3 machines."
        assert ring.answered_by_all(12, OTHER_PROMPT) == alone(12, OTHER_PROMPT).token_ids
