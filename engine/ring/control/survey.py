"""What the head finds out before it plans a ring: the figures of every node, and the links between all of them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from discovery.errors import DiscoveryError
from engine.errors import Cancelled, ModelError
from engine.exchange.addresses import parse_address
from engine.exchange.exchange import PeerLost, RingProtocolError
from engine.experts.popularity_file import known_counts
from engine.messages import Load, RuntimeName
from engine.messages.ring import LinkFacts
from engine.model_headers import Headers, read_headers
from engine.planning.hybrid import Wanted
from engine.planning.prediction import ModelSizes
from engine.planning.ring_plan import LinkMeasured as PlannedLink
from engine.planning.ring_plan import NodeMeasured, RingDecision, RingModel, plan_ring
from engine.progress import ProgressCallback
from engine.ring.control.beats import PeerView
from engine.ring.control.client import PeerClient, Unreachable
from engine.ring.control.control_messages import (
    MOST_ADDRESSES,
    MOST_TEXT,
    Linked,
    LinkMeasured,
    NodeFacts,
    WantedFacts,
    check_facts,
)
from engine.ring.control.measuring_links import measure_best
from engine.ring.control.measuring_node import measure_node
from engine.ring.control.node import Node, door_addresses
from engine.ring.weights.identity_of_model import identity_of

FACTS_S = 60.0
"""Measuring takes a second or two, on a machine that is busy longer."""
LINKS_S = 30.0

Answer = TypeVar("Answer")


class NodeRefused(Exception):
    """One node cannot be in the ring; the others perhaps can do without it. ``gone``: it does not answer."""

    def __init__(self, node_id: str, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.node_id = node_id
        self.gone = gone


@dataclass(frozen=True)
class Candidate:
    """A machine that could be in the ring."""

    node_id: str
    name: str
    client: PeerClient
    doors: tuple[str, ...]
    process: str


@dataclass
class Survey:
    """``facts`` by node id, the head's too; ``links`` by (from, to), measured from there."""

    facts: dict[str, NodeFacts] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkFacts] = field(default_factory=dict)


def candidates(node: Node, wanted: Sequence[str]) -> list[Candidate]:
    """Machines that are there, lend themselves and are free, in the order of their ids."""
    found = []
    for view in node.table.views():
        if view.client is None or view.greeting is None or not view.greeting.lends:
            continue
        if wanted and view.node_id not in wanted:
            continue
        if view.load is not None and view.load.head not in ("", node.identity.node_id):
            continue
        doors = tuple(door_addresses([view.client.address, *_others(view)]))
        found.append(Candidate(view.node_id, view.name, view.client, doors, view.greeting.process))
    return sorted(found, key=lambda one: one.node_id)


def _others(view: PeerView) -> list[str]:
    known = [*(view.greeting.listening if view.greeting else ()), *view.addresses]
    return [address for address in dict.fromkeys(known) if view.client is None or address != view.client.address]


def ask(one: Candidate, call: Callable[[], Answer]) -> Answer:
    """``call``, with whatever goes wrong as this node's. Raises NodeRefused, Cancelled."""
    try:
        return call()
    except Cancelled:
        raise
    except (PeerLost, Unreachable) as error:
        raise NodeRefused(one.node_id, f"{error}.".replace("..", "."), gone=True) from error
    except (ModelError, DiscoveryError) as error:
        raise NodeRefused(one.node_id, str(error)) from error


def most_likely(refused: Sequence[NodeRefused]) -> NodeRefused:
    """Of several that failed at the same time: one that cannot be reached, because others fail for its sake; last of
    all those whose work was ended."""

    def order(one: NodeRefused) -> int:
        return 0 if isinstance(one.__cause__, Unreachable) else 2 if isinstance(one.__cause__, PeerLost) else 1

    return min(refused, key=order)


def check_all(asked: Iterable[Future[Any]]) -> None:
    """Raises what one of ``asked`` that are done has raised, :func:`most_likely` the cause; waits for nothing."""
    failed = [error for future in asked if future.done() and (error := future.exception()) is not None]
    refused = [error for error in failed if isinstance(error, NodeRefused)]
    if refused:
        raise most_likely(refused)
    if failed:
        raise failed[0]


class Surveyor:
    """Measures what is not known yet; what was measured of the same processes is kept for the next epoch."""

    def __init__(self, me: str, folder: Path, load: Load) -> None:
        """``me``: this machine's node id. Raises ModelError if the model in ``folder`` cannot be opened."""
        self._me = me
        self._load = load
        self._folder = folder
        self._links: dict[tuple[str, str, str], LinkFacts] = {}

    @property
    def headers(self) -> Headers:
        return read_headers(self._folder, self._load)

    def survey(
        self,
        node: Node | None,
        there: Sequence[Candidate],
        runtime: RuntimeName,
        progress: ProgressCallback,
        to_send: bool = True,
        threads: int | None = None,
    ) -> Survey:
        """``there`` are machines that ``node`` knows. ``to_send``: weights will be sent, so each is asked what it has,
        for which the model here is read once. ``threads``: that the others will use; None: theirs to decide.

        Raises NodeRefused for the first node that cannot be measured, Cancelled.
        """
        found = Survey()
        weights = identity_of(self._folder, progress).weights if there and to_send else ""
        progress("measuring the machines", 0, 0, "")
        wanted = WantedFacts(
            shape=self.headers.shape,
            weights=weights,
            threads=threads,
            family=self.headers.sizes.family,
            dtype=self._load.dtype,
            runtime=runtime,
        )
        # Processes of one machine must not measure at the same time, or each would find a part of it.
        hosts: dict[str, list[Candidate]] = {}
        for one in there:
            hosts.setdefault(one.client.address.rpartition(":")[0], []).append(one)

        def of_host(group: list[Candidate]) -> dict[str, NodeFacts]:
            return {one.node_id: ask(one, partial(_facts_of, one, wanted)) for one in group}

        with ThreadPoolExecutor(max(1, len(hosts)), thread_name_prefix="asking nodes") as pool:
            for answers in pool.map(of_host, hosts.values()):
                found.facts.update(answers)
        found.facts[self._me] = measure_node(wanted, self._load.cpu_threads)
        if node is not None:
            self._measure_links(node, there, found, progress)
        return found

    def _measure_links(self, node: Node, there: Sequence[Candidate], found: Survey, progress: ProgressCallback) -> None:
        """One after the other, so that no measurement meets another one."""
        me = self._me
        pairs = len(there) * (len(there) + 1) // 2
        done = 0
        epoch = secrets.token_hex(8)
        for one in there:
            progress("measuring the links", done, pairs, "")
            key = (me, one.node_id, one.process)
            if key not in self._links:
                self._links[key] = ask(one, partial(_to, node, one, epoch))
            found.links[me, one.node_id] = self._links[key]
            node.table.set_link(one.node_id, self._links[key])
            done += 1
        for index, first in enumerate(there):
            for second in there[index + 1 :]:
                progress("measuring the links", done, pairs, "")
                key = (first.node_id, second.node_id, f"{first.process} {second.process}")
                if key not in self._links:
                    self._links[key] = _between(node, first, second, epoch)
                found.links[first.node_id, second.node_id] = self._links[key]
                done += 1


def _to(node: Node, one: Candidate, epoch: str) -> LinkFacts:
    certificate = node.table.peer(one.node_id).certificate_pem.encode()
    return measure_best(node.links, epoch, one.node_id, certificate, one.doors, one.name)


def _facts_of(one: Candidate, wanted: WantedFacts) -> NodeFacts:
    facts = one.client.call("Facts", wanted, NodeFacts, FACTS_S)
    check_facts(facts)
    return facts


def check_link(link: LinkFacts) -> None:
    """Raises RingProtocolError for a link that another machine cannot have measured; ModelError for no address."""
    parse_address(link.address)
    if not 0 < link.latency_s < math.inf or not 0 < link.bytes_per_s < math.inf:
        raise RingProtocolError(f"A link of {link.latency_s} s and {link.bytes_per_s} bytes/s was measured.")
    if max(map(len, (link.interface, link.address, *link.others))) > MOST_TEXT or len(link.others) > MOST_ADDRESSES:
        raise RingProtocolError("A link is described in too many words.")


def _between(node: Node, first: Candidate, second: Candidate, epoch: str) -> LinkFacts:
    """The two need not know each other: the head vouches for both, for these measurements."""
    certificates = {one.node_id: node.table.peer(one.node_id).certificate_pem.encode() for one in (first, second)}
    vouched = Linked(epoch=epoch, node_id=first.node_id, certificate=certificates[first.node_id])
    ask(second, lambda: second.client.call("MeasureLinks", vouched, LinkMeasured, LINKS_S))
    wanted = Linked(
        epoch=epoch, node_id=second.node_id, certificate=certificates[second.node_id], addresses=list(second.doors)
    )
    answer = ask(second, lambda: first.client.call("MeasureLinks", wanted, LinkMeasured, LINKS_S))
    if answer.link is None:
        raise NodeRefused(second.node_id, f"{first.name} measured no link to it.")
    link = answer.link
    ask(first, lambda: check_link(link))
    return link


def decide(
    headers: Headers, name: str, load: Load, order: Sequence[tuple[str, str]], survey: Survey, at_once: float = 1.0
) -> RingDecision:
    """The plan for the model ``name`` on the nodes ``order`` (ids and names, the head first), loaded as ``load``."""
    nodes = planned_nodes(survey, order, load.runtime, headers.sizes.dtype)
    popularity: list[list[float]] = []
    if headers.profile is not None:
        counts = known_counts(headers.folder, headers.profile, headers.sizes.experts_per_token, lambda text: None)
        popularity = [] if counts is None else [list(map(float, row)) for row in counts.values()]
    return plan_ring(planned_model(headers, name, load), nodes, planned_links(survey), load.ring, popularity, at_once)


def planned_model(headers: Headers, name: str, load: Load) -> RingModel:
    """The model as the planner takes it."""
    sizes = headers.sizes
    profile = headers.profile
    return RingModel(
        sizes=ModelSizes(
            name=name,
            layers=sizes.layers,
            moe_layers=sizes.moe_layers,
            experts=sizes.experts,
            experts_per_token=sizes.experts_per_token,
            hidden=sizes.hidden,
            trunk_bytes=sizes.trunk_bytes,
            expert_bytes=sizes.expert_bytes,
            key_value_bytes_per_token=sizes.key_value_bytes_per_token,
            bytes_per_weight=sizes.width,
        ),
        moe_layers=profile.layers if profile is not None else (),
        context_tokens=min(sizes.context_limit, load.context_limit or Wanted().context_tokens),
        prefill_chunk=load.prefill_chunk,
    )


def planned_nodes(survey: Survey, order: Sequence[tuple[str, str]], runtime: str, dtype: str) -> list[NodeMeasured]:
    """``order``: node ids and names, the head first. Processes of one machine share its free memory."""
    machines: dict[str, int] = {}
    for node_id, _ in order:
        machine = survey.facts[node_id].machine
        machines[machine] = machines.get(machine, 0) + 1
    nodes = []
    for node_id, name in order:
        facts = survey.facts[node_id]
        shared = machines[facts.machine]
        runs = runtime if runtime in facts.runtimes else next(iter(facts.runtimes), "none")
        # What was measured of a layer on this machine holds for its other processes, whatever home they have.
        head = survey.facts[order[0][0]]
        overhead = head.layer_overhead_s if facts.machine == head.machine else facts.layer_overhead_s
        nodes.append(
            NodeMeasured(
                node_id=node_id,
                name=name,
                memory_total=facts.memory_total // shared,
                memory_free=facts.memory_free // shared,
                kind=f"{runs} {facts.instruction_set} {dtype}",
                unified=facts.unified_memory,
                expert=facts.expert,
                memory_read=facts.memory_read,
                layer_overhead_s=overhead.get(runs, overhead.get("native", 0.0)),
                fence_s=facts.fence_s,
                machine=facts.machine if shared > 1 else "",
                processor=f"{facts.processor}, {facts.threads} threads" if facts.processor else "",
                has={layer: tuple(experts) for layer, experts in facts.has.items()},
                has_trunk=facts.has_trunk,
            )
        )
    return nodes


def planned_links(survey: Survey) -> list[PlannedLink]:
    return [
        PlannedLink(first, second, link.latency_s, link.bytes_per_s) for (first, second), link in survey.links.items()
    ]
