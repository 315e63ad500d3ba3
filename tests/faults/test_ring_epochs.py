"""What an epoch that ended must not touch: groups of other libraries that are dead, keys and values that are stale."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_forks import forked, with_libraries
from msgspec.structs import replace
from ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring, eventually

from engine.ipc.messages import Notice
from engine.ipc.messages.ring import ExchangeName

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOPBACK = ["127.0.0.0/8"]


@pytest.mark.parametrize("exchange", ["socket", "envoy", "gloo", "mlx"])
def test_killed_and_back_over_every_exchange(model: Path, alone: Oracle, exchange: ExchangeName) -> None:
    """A group of mx.distributed lives once in a process: the next epoch goes over our own sockets, and says so."""
    needed = {"gloo": "torch", "mlx": "mlx", "envoy": "grpc"}.get(exchange)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    with Ring(2, launch=with_libraries if exchange in ("gloo", "mlx") else forked) as ring:
        first = ring.load(model, replace(EXACT, exchange=exchange, trusted=LOOPBACK)).facts.ring
        assert first is not None
        assert first.exchange == exchange
        assert len(first.nodes) == 3
        since = ring.mark()
        asked = ring.ask(200)
        ring.until_tokens(asked, 10)
        gone = ring.followers[0]
        gone.kill()
        assert ring.finished(asked).token_ids == alone(200).token_ids
        eventually(lambda: (found := ring.followers[1].lending()) is not None and found.nodes == 2)
        eventually(lambda: ring.state_of(gone) in ("lost", "paired"))
        gone.start(lend=True)
        eventually(lambda: ring.state_of(gone) == "ready")
        assert ring.answer(24, OTHER_PROMPT).token_ids == alone(24, OTHER_PROMPT).token_ids
        eventually(lambda: set(ring.states().values()) == {"ring"})
        told = " ".join(ring.notices(since))
        assert ("could not be made again" in told) == (exchange == "mlx")


OTHER_TOKENS = """
# Once, in the middle of an answer, this node's keys and values are those of other tokens than the head's.
import os
from engine.cluster import commands
from engine.cluster.worker import follower
_do = follower.Follower.do
_once = []
def do(self, command):
    if isinstance(command, commands.Step) and not _once:
        rows, prefixes = self._rows[command.rows]
        if rows.length == 40:
            _once.append(True)
            self._rows[command.rows] = (rows, prefixes.truncated(38).extended([5, 6]))
    return _do(self, command)
follower.Follower.do = do
"""


def test_a_node_whose_cache_is_stale_is_refused(model: Path, alone: Oracle) -> None:
    """It says so itself, by the hash of what it holds; the ring forms again with it, and no wrong token is heard of."""
    with Ring(2, codes={1: OTHER_TOKENS}) as ring:
        ring.load(model)
        since = ring.mark()
        follower = ring.followers[0]
        found = ring.answer(200)
        assert found.token_ids == alone(200).token_ids
        told = follower.engine.wait(lambda event: isinstance(event, Notice) and "other tokens" in event.text, 10)
        assert isinstance(told, Notice)
        told_here = [text for text in ring.notices(since) if "Lost" in text or "going on with" in text]
        assert len(told_here) == 2 and told_here[0].startswith("Lost node 1: ")
        assert told_here[1] == "node 1 came back; going on with 3 machines."
        assert ring.answer(24, OTHER_PROMPT).token_ids == alone(24, OTHER_PROMPT).token_ids
        eventually(lambda: set(ring.states().values()) == {"ring"})
