"""A process that gathers over mx.distributed, says ``equal``, and then whether the other one is lost."""

from __future__ import annotations

import sys
from typing import NoReturn

import mlx.core as mx

from engine.cluster.transport.collective import CollectiveExchange
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.transport.mlx_group import MlxGathering


def run(rank: int, size: int) -> NoReturn:
    """The last one waits for the end of its input."""
    exchange = CollectiveExchange(MlxGathering(mx.distributed.init(strict=True, backend="ring")))
    assert (exchange.rank, exchange.size, exchange.name) == (rank, size, "mlx")
    for nbytes in (0, 5, 12304, 50000):
        own = bytes([rank + 1]) * (nbytes * rank)
        exchange.send([own], nbytes * size)
        assert [bytes(v) for v in exchange.receive()] == [bytes([r + 1]) * (nbytes * r) for r in range(size)], nbytes
    print("equal", flush=True)
    if rank == 1:
        sys.stdin.read()
    exchange.send([b"x"], 1)
    try:
        exchange.receive()
        print("received", flush=True)
    except PeerLost:
        print("lost", flush=True)
    raise SystemExit(0)
