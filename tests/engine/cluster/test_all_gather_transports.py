"""A ring's layers over every real transport, on loopback: giving up, mending, and central mode too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.transport.exchange import PeerLost
from engine.ipc.messages.ring import ExchangeName
from engine.moe.expert_parallel import RankContext
from engine.runtimes.protocol import Interrupted
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_places import placed
from tests.engine.cluster.test_all_gather import LAYERS, CountedExperts, contexts, one_pass, routes_for, run
from tests.engine.cluster.test_central import Doubling, ask

TRANSPORTS: tuple[ExchangeName, ...] = ("tls", "socket", "envoy", "gloo")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_giving_up_and_mending(transport: ExchangeName, linked_nodes: Callable[..., LinkedNodes]) -> None:
    ends = linked_nodes(3).exchanges(transport)
    layers = [RingLayers(context, end) for context, end in zip(contexts(3, overlap=True), ends, strict=True)]

    def work(rank: int) -> tuple[int, list[Any]]:
        mine = layers[rank]
        mine.begin_pass()
        run(mine, LAYERS[0], routes_for(700, 3), CountedExperts(LAYERS[0]))
        if rank == 0:
            assert mine.give_up()
        else:
            with pytest.raises(Interrupted):
                run(mine, LAYERS[1], routes_for(700, 3), CountedExperts(LAYERS[1]))
        found = [each.outputs for each in one_pass(mine, tokens=40)]
        for layer in LAYERS:
            odd = rank == 2 and layer == LAYERS[1]
            found.append(run(mine, layer, routes_for(9, 3, 77 if odd else layer), CountedExperts(layer)).outputs)
        return mine.disagreements, found

    results = must_succeed(on_all_ranks(work, 3))
    assert [disagreements for disagreements, _ in results] == [1, 1, 1]
    for _, found in results[1:]:
        for ours, expected in zip(found, results[0][1], strict=True):
            assert (ours == expected).all()
    for end in ends:
        end.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_central_mode(transport: ExchangeName, linked_nodes: Callable[..., LinkedNodes]) -> None:
    ends = linked_nodes(2).exchanges(transport)
    both = [RankContext("epoch", rank, placed((0, 2), 4, 2), "central") for rank in range(2)]
    head, node = CentralHead(both[0], ends[0]), CentralNode(both[1], ends[1], Doubling())

    def work(rank: int) -> None:
        if rank == 1:
            with pytest.raises(PeerLost):
                node.serve()
            return
        for number in range(5):
            ask(head, 2, scale=number % 2 == 1)
        ends[0].close()

    must_succeed(on_all_ranks(work, 2))
    ends[1].close()
