"""What is behind a loss that came out of a pass: a machine that is gone, or a link between two that are there."""

from __future__ import annotations

import time
from collections.abc import Mapping

from engine.cluster.membership.peer_table import PeerTable
from engine.errors import LinkLost, PeerLost
from engine.moe.rank_context import HEAD

ASK_S = 1.0
"""A machine that is there says by then how it is."""


def what_broke(table: PeerTable, nodes: Mapping[int, str], names: Mapping[int, str], lost: PeerLost) -> PeerLost:
    """``lost``, or more exactly who is gone or which link broke; ``nodes``: node ids by rank. Asks the followers how
    they are. A node whose link broke leaves the ring, and takes with it those that only hear of its leaving."""
    moment = time.monotonic()
    table.send_heartbeats(ASK_S)
    ranks = {node_id: rank for rank, node_id in nodes.items()}
    gone = []
    broken = {frozenset((HEAD, rank)) for rank in lost.ranks if rank != HEAD}
    for rank, node_id in nodes.items():
        view, watch = table.view(node_id), table.watch(node_id)
        if rank == HEAD:
            continue
        if view is None or watch is None or view.client is None or not watch.notified_since(moment):
            gone.append(rank)
        elif view.load is not None:
            broken |= {frozenset((rank, ranks[other])) for other in view.load.broken if other in ranks}
    if gone:
        if set(lost.ranks) & set(gone):
            return lost
        who = " and ".join(names[rank] for rank in gone)
        return PeerLost(f"{who} {'does' if len(gone) == 1 else 'do'} not answer any more", gone)
    links = [sorted(pair) for pair in sorted(map(sorted, broken)) if len(pair) == 2]
    if not links:
        return lost
    called = [
        f"the link to {names[second]}" if first == HEAD else f"the link between {names[first]} and {names[second]}"
        for first, second in links
    ]
    text = " and ".join(called)
    return LinkLost(f"{text[0].upper()}{text[1:]} broke")
