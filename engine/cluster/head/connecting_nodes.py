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
from engine.cluster.transport.addresses import parse_address, plain_ip
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.transport.registry import TRANSPORTS, allowed_exchanges, available_exchanges, choose_exchange
from engine.errors import ModelError
from engine.ipc.messages import RuntimeName
from engine.ipc.messages.ring import ExchangeName, RingChoice
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import HEAD

CONNECT_S = 60.0
"""Timeout in seconds for connecting and for measuring every allowed exchange."""


class NothingConnected(ModelError):
    """Raised if no exchange could be made between this machine and any other, although no node in particular failed."""


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
    names = ", ".join(machine.name for machine in ring.followers.values())
    calls = CallGroup()

    def tick() -> None:
        progress(f"connecting to {names}, measuring the exchange", 0, 0, "")

    def stop() -> None:
        calls.end()
        links.close()

    tick()

    def connect(rank: int, machine: Candidate) -> Connected:
        return ask(machine, lambda: machine.client.call("Connect", specs[rank], Connected, CONNECT_S, calls))

    with (
        stopped_by(tick, stop),
        ThreadPoolExecutor(len(ring.followers), thread_name_prefix="connecting nodes") as pool,
    ):
        asked = {rank: pool.submit(connect, rank, machine) for rank, machine in ring.followers.items()}
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
            end_epoch(node.table, [machine.node_id for machine in ring.followers.values()], ring.epoch)
        answers = [connected_or_refused(future) for future in asked.values()]
    refused = [answer for answer in answers if isinstance(answer, NodeRefused)]
    unreachable = any(isinstance(machine.__cause__, Unreachable) for machine in refused)
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


# --- the choice of the exchange --------------------------------------------------------------------------------------


CERTAIN: tuple[ExchangeName, ...] = ("tls", "socket", "envoy")
"""Exchanges that can be opened wherever links can. The others belong to other libraries and may fail there."""


class ExchangeChoice:
    """Chooses an exchange by measurements when the ring is first formed. Later a ring keeps its exchange or uses TLS.

    ``choice`` is the person's.
    """

    def __init__(self, choice: RingChoice) -> None:
        self._choice = choice
        self._chosen: ExchangeName | None = None
        self._fallen_back = ""

    @property
    def made(self) -> bool:
        """Whether a ring was formed before."""
        return self._chosen is not None

    def candidates(self, ring: Ring, runtime: RuntimeName, in_use: bool) -> list[ExchangeName]:
        """The exchanges that all nodes open. ``in_use``: a formed ring still uses the former exchange.

        Raises ModelError if the wanted exchange is not allowed or not available.
        """
        used = {link.address for link in ring.survey.links.values()}
        hosts = sorted({plain_ip(parse_address(address)[0]) for address in used})
        available = [
            name
            for name in available_exchanges()
            if all(name in ring.survey.facts[one.node_id].exchanges for one in ring.followers.values())
        ]
        if ring.decision.mode == "central":
            available = [name for name in available if not TRANSPORTS[name].in_step_only]
        machines = [ring.survey.facts[node_id].machine for node_id in ring.decision.ranks]
        allowed = allowed_exchanges(
            self._choice.exchange,
            hosts,
            self._choice.trusted,
            available,
            runtime,
            together=len(set(machines)) < len(machines),
        )
        if allowed == ["mlx"]:
            # mlx may not be available a second time (see below). The ring must not fail because of that.
            allowed = ["tls", "mlx"]
        if self._chosen is not None:
            # Forming again must be quick: the former exchange is used without a comparison, or tls where it fails.
            # A process can open one mlx group in its life, so none after a loss or with other machines.
            again = self._chosen in allowed and (self._chosen != "mlx" or not in_use)
            return list(dict.fromkeys([self._chosen if again else allowed[0], "tls"]))
        # Exchanges that may fail come last: nodes that wait for them in vain have the others by then.
        return sorted(allowed, key=lambda name: CERTAIN.index(name) if name in CERTAIN else len(CERTAIN))

    def choose(
        self, medians: Mapping[ExchangeName, float], problems: Mapping[ExchangeName, str]
    ) -> tuple[ExchangeName, float]:
        """The exchange to use, and its median seconds, from the ``medians`` of those that every node opened.

        ``problems`` say why others could not be opened. Raises ModelError if there are no medians.
        """
        wanted = self._choice.exchange
        before = self._chosen or (wanted if wanted != "auto" else None)
        if before is not None and before not in medians:
            self._fallen_back = (
                f"The exchange “{before}” could not be made{' again' if self._chosen else ''} "
                f"({problems.get(before, 'not by every node, or not a second time').rstrip('.')})"
            )
        chosen = before if before is not None and before in medians else choose_exchange(medians)
        self._chosen = chosen
        return chosen, medians[chosen]

    def take_notices(self) -> list[str]:
        """A line, once, if the exchange is not the wanted or the former one."""
        line, self._fallen_back = self._fallen_back, ""
        return [f"{line}; {self._chosen} is used."] if line else []
