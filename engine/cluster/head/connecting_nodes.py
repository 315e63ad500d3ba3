"""Connecting the nodes of an epoch, and measuring the exchanges that they opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from engine.cluster.epoch_links import EpochLinks, connect_epoch, rehearsal_of
from engine.cluster.head.epoch_specs import Ring
from engine.cluster.head.formed import end_epoch
from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import Connected, EpochSpec
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import (
    Candidate,
    NodeRefused,
    ask,
    connected_or_refused,
    most_likely,
    stopped_by,
)
from engine.cluster.rehearsal import ranks_together
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.ipc.progress import ProgressCallback
from engine.moe.rank_context import HEAD

CONNECT_S = 60.0
"""Timeout in seconds for connecting and for measuring every allowed exchange."""


class NothingConnected(ModelError):
    """No node in particular failed: no exchange could be made between this machine and any other."""


def connect_nodes(
    node: Node,
    ring: Ring,
    specs: Mapping[int, EpochSpec],
    links: EpochLinks,
    cpu_threads: int | None,
    try_links: Callable[[Ring, ProgressCallback], None],
    progress: ProgressCallback,
) -> dict[ExchangeName, float]:
    """The median seconds of each exchange that every node opened, as measured on the slowest node.

    ``try_links`` finds out why links could not be opened. Raises what it raises, NodeRefused, NothingConnected,
    ModelError, PeerLost, and what ``progress`` raises.
    """
    names = ", ".join(one.name for one in ring.followers.values())
    calls = CallGroup()

    def tick() -> None:
        progress(f"connecting to {names}, measuring the exchange", 0, 0, "")

    def stop() -> None:
        calls.end()
        links.close()

    tick()

    def connect(rank: int, one: Candidate) -> Connected:
        return ask(one, lambda: one.client.call("Connect", specs[rank], Connected, CONNECT_S, calls))

    with (
        stopped_by(tick, stop),
        ThreadPoolExecutor(len(ring.followers), thread_name_prefix="connecting nodes") as pool,
    ):
        asked = {rank: pool.submit(connect, rank, one) for rank, one in ring.followers.items()}
        for future in asked.values():
            # A node that failed never connects, so waiting for its links ends here.
            future.add_done_callback(lambda done: links.close() if done.exception() is not None else None)
        failure: Exception | None = None
        try:
            machines = [ring.survey.facts[node_id].machine for node_id in ring.decision.ranks]
            rehearsal = rehearsal_of(specs[HEAD], cpu_threads, ranks_together(machines))
            connect_epoch(node.links, links, specs[HEAD].exchanges, specs[HEAD].mode != "central", rehearsal)
        except (ModelError, PeerLost) as error:
            failure = error
            links.close()
            end_epoch(node.table, [one.node_id for one in ring.followers.values()], ring.epoch)
        answers = [connected_or_refused(future) for future in asked.values()]
    refused = [answer for answer in answers if isinstance(answer, NodeRefused)]
    unreachable = any(isinstance(one.__cause__, Unreachable) for one in refused)
    if (failure is not None or refused) and not unreachable:
        try_links(ring, progress)
    if isinstance(failure, ModelError) and len(refused) == len(answers) and not unreachable:
        raise NothingConnected(str(failure), failure.kind) from failure
    if refused:
        raise most_likely(refused)
    if failure is not None:
        raise failure
    return {
        name: max([seconds, *(answer.medians[name] for answer in answers if isinstance(answer, Connected))])
        for name, seconds in links.medians.items()
        if all(isinstance(answer, Connected) and name in answer.medians for answer in answers)
    }
