"""The head's survey before it plans a ring: measurements of every node, and of the links between them."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from discovery.names import plain_text
from engine.cluster.membership.client import CallGroup, Unreachable
from engine.cluster.membership.control_messages import (
    MOST_ADDRESSES,
    MOST_TEXT,
    Linked,
    MeasuredLink,
    NodeLoad,
    WantedFacts,
    check_facts,
)
from engine.cluster.membership.heartbeat import PeerView
from engine.cluster.membership.links import LinkTrial, Tried, Way, all_ways, has_new_address, measure_best, with_gone
from engine.cluster.membership.measuring_node import measure_node
from engine.cluster.membership.node import Node, listener_addresses
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, until_done
from engine.cluster.transport.addresses import as_dialled, as_sent, parse_address
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.weights.weight_fingerprint import held_of, identity_of, known_weights
from engine.errors import ModelError
from engine.ipc.messages import Load, RuntimeName
from engine.ipc.messages.ring import LinkFacts
from engine.ipc.progress import ProgressCallback
from engine.models.folders.shard_files import is_shard
from engine.moe.kernels.pool import threads_of
from engine.moe.popularity import known_counts
from engine.planning.ring_nodes import GpuFacts, NodeFacts
from engine.planning.ring_plan import RingDecision, plan_ring
from engine.planning.ring_words import THIS_MACHINE
from engine.planning.runtime_choice import experts_runtime
from engine.runtimes.model_headers import Headers, read_headers

FACTS_S = 60.0
"""Timeout in seconds for measuring a machine, which takes a second or two, and longer on a busy machine."""
LINKS_S = 30.0
"""Timeout in seconds for measuring a link between two other machines."""
ALIVE_S = 1.5
"""Timeout in seconds for a heartbeat that asks whether a machine is alive."""
LONGEST_KIND = 160
"""Maximum characters of the description of everything on which a node's results depend."""
LONGEST_GPU = 60
"""Maximum characters of a GPU's name."""


@dataclass
class Survey:
    """The measurements of all machines.

    ``facts``: by node id, the head included. ``links``: measured links by (from, to). ``tried``: which links can be
    opened. ``whole``: whether the head has the whole model; otherwise its facts list its shard.
    """

    facts: dict[str, NodeFacts] = field(default_factory=dict)
    links: dict[Way, LinkFacts] = field(default_factory=dict)
    tried: Tried = field(default_factory=Tried)
    whole: bool = True


def candidates(node: Node, wanted: Sequence[str]) -> list[Candidate]:
    """The reachable machines that are lent and free, in the order of their node ids."""
    candidates = []
    for view in node.table.views():
        if view.client is None or view.greeting is None or not view.greeting.lends:
            continue
        if wanted and view.node_id not in wanted:
            continue
        if view.load is not None and view.load.head not in ("", node.identity.node_id):
            continue
        listeners = tuple(listener_addresses([view.client.address, *_others(view)]))
        candidates.append(Candidate(view.node_id, view.name, view.client, listeners, view.greeting.process))
    return sorted(candidates, key=lambda one: one.node_id)


def _others(view: PeerView) -> list[str]:
    known = as_dialled([*as_sent(view.greeting.listening if view.greeting else ()), *view.addresses])
    return [address for address in known if view.client is None or address != view.client.address]


class Surveyor:
    """Measures machines and links.

    Measurements are kept for later epochs: of a machine while its process runs, of a link for some minutes while both
    ends keep their addresses.
    """

    def __init__(self, me: str, folder: Path, load: Load) -> None:
        """``me`` is this machine's node id. ``folder`` contains the model, or this machine's shard of it. Raises
        ModelError if it cannot be opened."""
        self._me = me
        self._load = load
        self.folder = folder
        self._links = KnownLinks()

    def threads_for(self, runtime: str) -> int | None:
        """Number of threads that all nodes should use, as far as they can; None: each node decides.

        Torch's order of addition depends on the number of threads.
        """
        return threads_of(self._load) if runtime == "torch" else None

    @property
    def headers(self) -> Headers:
        return read_headers(self.folder, self._load)

    def survey(
        self,
        node: Node | None,
        machines: Sequence[Candidate],
        runtime: RuntimeName,
        progress: ProgressCallback,
        to_send: bool = True,
        threads: int | None = None,
        hurry: bool = False,
        links_tried: Tried | None = None,
    ) -> Survey:
        """Measure ``machines``, which ``node`` knows, and this machine.

        Each machine is asked which weights it has. With ``to_send`` it will be sent the others, for which the model
        here is read once; without it, it is asked only if the model's fingerprint is known. ``threads`` is the others'
        number of threads; None: their own choice. ``hurry``: old measurements of links are used, too. ``links_tried``:
        the result of opening the links just now, if that was tried.

        Raises NodeRefused for the first node that cannot be measured, Cancelled.
        """
        threads = threads or self.threads_for(runtime)
        survey = Survey()
        weights = self._weights(progress, to_send) if machines else ""
        progress("measuring the machines", 0, 0, "")
        wanted = WantedFacts(
            shape=self.headers.shape,
            weights=weights,
            threads=threads,
            family=self.headers.sizes.family,
            dtype=self._load.dtype,
            runtime=runtime,
        )
        # Processes of one machine measure one after the other, or each would measure a part of the machine.
        hosts: dict[str, list[Candidate]] = {}
        for machine in machines:
            hosts.setdefault(machine.client.address.rpartition(":")[0], []).append(machine)
        trial = self._trial(node, machines) if node is not None and links_tried is None else None
        with _helpers(len(hosts) + len(machines) + 1) as (pool, calls):

            def of_host(group: list[Candidate]) -> dict[str, NodeFacts]:
                return {machine.node_id: ask(machine, partial(_facts_of, machine, wanted, calls)) for machine in group}

            trying = trial.begin(pool, calls) if trial is not None else []
            asked = [pool.submit(of_host, group) for group in hosts.values()]
            until_done([*trying, *asked], lambda: progress("measuring the machines", 0, 0, ""))
            for future in asked:
                survey.facts.update(future.result())
            survey.tried = trial.result(trying) if trial is not None else links_tried or survey.tried
        mine = measure_node(wanted, self._load.cpu_threads)
        survey.facts[self._me] = mine if node is None else node.reported(mine)
        if is_shard(self.folder):
            survey.whole = False
            has, trunk = held_of(known_weights(self.folder), self._me)
            survey.facts[self._me] = msgspec.structs.replace(survey.facts[self._me], has=has, has_trunk=trunk)
        if node is not None:
            self._measure_links(node, machines, survey, progress, hurry)
        return survey

    def _trial(self, node: Node, machines: Sequence[Candidate]) -> LinkTrial:
        ways = all_ways(self._me, machines)
        best = {way: link.address for way in ways if (link := self._links.last(way)) is not None}
        return LinkTrial(node, machines, ways, secrets.token_hex(8), best)

    def try_links(self, node: Node, machines: Sequence[Candidate], progress: ProgressCallback) -> Tried:
        """Find out which links among ``node`` and ``machines`` can be opened now. Raises NodeRefused, Cancelled."""
        trial = self._trial(node, machines)
        with _helpers(len(machines) + 1) as (pool, calls):
            trying = trial.begin(pool, calls)
            until_done(trying, lambda: progress("trying the links", 0, 0, ""))
            return trial.result(trying)

    def _weights(self, progress: ProgressCallback, to_send: bool) -> str:
        """The fingerprint of the weights here; empty if it is unknown and nothing will be sent."""
        return known_weights(self.folder) or (identity_of(self.folder, progress).weights if to_send else "")

    def _measure_links(
        self, node: Node, machines: Sequence[Candidate], survey: Survey, progress: ProgressCallback, hurry: bool
    ) -> None:
        """Measure the links one after the other, so that no measurement disturbs another one."""
        me, reached = self._me, survey.tried.reached
        pairs = len(machines) * (len(machines) + 1) // 2
        done = 0
        epoch = secrets.token_hex(8)
        with _helpers(1) as (pool, calls):

            def measure(way: Way, ends: Sequence[str], measuring: Callable[[], LinkFacts]) -> None:
                nonlocal done
                if frozenset(way) in survey.tried.broken:
                    return
                link = self._links.get(way, ends, hurry)
                if link is None or reached.get(way, link.address) != link.address:
                    future = pool.submit(measuring)
                    try:
                        until_done([future], lambda: progress("measuring the links", done, pairs, ""))
                        link = future.result()
                    except LinkFailedError as failed:
                        survey.tried.broken[frozenset(way)] = str(failed)
                        return
                    self._links.put(way, ends, link)
                survey.links[way] = with_gone(link, self._links.fastest(way))
                done += 1

            here = listener_addresses(node.addresses)
            for one in machines:
                ends = (*here, one.process, *one.listeners)
                measure((me, one.node_id), ends, partial(_to, node, one, epoch))
                if (me, one.node_id) in survey.links:
                    node.table.set_link(one.node_id, survey.links[me, one.node_id])
            for index, first in enumerate(machines):
                for second in machines[index + 1 :]:
                    way = first.node_id, second.node_id
                    ends = (first.process, *first.listeners, second.process, *second.listeners)
                    sent = replace(second, listeners=tuple(as_sent(second.listeners)))
                    measure(way, ends, partial(_between, node, first, sent, epoch, calls))

    def fastest_link(self, way: Way) -> LinkFacts | None:
        """The fastest link of ``way`` that was ever measured."""
        return self._links.fastest(way)

    def measure_addresses(
        self,
        node: Node,
        machines: Sequence[Candidate],
        wanted: Mapping[Way, Sequence[str]],
        progress: ProgressCallback,
    ) -> dict[Way, list[LinkFacts]]:
        """Measure the link of each way at each of its addresses, one by one, in their order.

        A way is left out if one of its addresses cannot be measured. Raises NodeRefused, Cancelled.
        """
        by_id, epoch = {one.node_id: one for one in machines}, secrets.token_hex(8)
        measured_by_way: dict[Way, list[LinkFacts]] = {}
        with _helpers(1) as (pool, calls):

            def measure(way: Way, address: str) -> LinkFacts:
                second = replace(by_id[way[1]], listeners=(address,))
                if way[0] == self._me:
                    return _to(node, second, epoch)
                return _between(node, by_id[way[0]], second, epoch, calls)

            for way, addresses in wanted.items():
                measured = []
                for address in addresses:
                    future = pool.submit(measure, way, address)
                    with contextlib.suppress(LinkFailedError):
                        until_done([future], lambda: progress("measuring the links", 0, 0, ""))
                        measured.append(future.result())
                if len(measured) == len(addresses):
                    measured_by_way[way] = measured
        return measured_by_way

    def took_links(self, links: Mapping[Way, LinkFacts]) -> None:
        """Record that the ring uses ``links`` now. Other measurements of these ways are repeated the next time."""
        for way, link in links.items():
            self._links.replace(way, link)


@contextlib.contextmanager
def _helpers(threads: int) -> Iterator[tuple[ThreadPoolExecutor, CallGroup]]:
    """A thread pool, and the group of its calls.

    An exception inside ends the calls. The threads are not waited for, as a link to a dead machine takes seconds to
    fail.
    """
    pool, calls = ThreadPoolExecutor(max(1, threads), thread_name_prefix="asking nodes"), CallGroup()
    try:
        yield pool, calls
    except BaseException:
        calls.end()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class LinkFailedError(Exception):
    """Raised if a link cannot be measured although both of its ends are alive."""


def _to(node: Node, machine: Candidate, epoch: str) -> LinkFacts:
    certificate = node.table.peer(machine.node_id).certificate_pem.encode()
    try:
        return measure_best(node.links, epoch, machine.node_id, certificate, machine.listeners, machine.name)
    except ModelError as error:
        raise _failed(node, (machine,), error) from error


def _failed(node: Node, ends: Sequence[Candidate], error: ModelError) -> Exception:
    """The cause of a failed measurement that ended with ``error``. Raises NodeRefused if one of the ``ends`` is
    gone."""
    for one in ends:
        ask(one, partial(one.client.call, "Beat", node.load(), NodeLoad, ALIVE_S))
    return LinkFailedError(str(error).rstrip("."))


def _facts_of(one: Candidate, wanted: WantedFacts, calls: CallGroup) -> NodeFacts:
    facts = one.client.call("Facts", wanted, NodeFacts, FACTS_S, calls)
    check_facts(facts)
    return facts


def check_link(link: LinkFacts) -> None:
    """Raises RingProtocolError for impossible measurements, ModelError for an invalid address."""
    parse_address(link.address)
    if not 0 < link.latency_s < math.inf or not 0 < link.bytes_per_s < math.inf:
        raise RingProtocolError(f"A link of {link.latency_s} s and {link.bytes_per_s} bytes/s was measured.")
    if max(map(len, (link.interface, link.address, *link.others))) > MOST_TEXT or len(link.others) > MOST_ADDRESSES:
        raise RingProtocolError("A link is described in too many words.")


def _between(node: Node, first: Candidate, second: Candidate, epoch: str, calls: CallGroup) -> LinkFacts:
    """Measure the link between two followers, at the addresses of ``second`` as ``first`` knows them. They need not be
    paired: the head vouches for both during this call."""
    certificates = {one.node_id: node.table.peer(one.node_id).certificate_pem.encode() for one in (first, second)}
    vouched = Linked(epoch=epoch, node_id=first.node_id, certificate=certificates[first.node_id])
    ask(second, lambda: second.client.call("MeasureLinks", vouched, MeasuredLink, LINKS_S, calls))
    wanted = Linked(
        epoch=epoch, node_id=second.node_id, certificate=certificates[second.node_id], addresses=list(second.listeners)
    )
    try:
        answer = first.client.call("MeasureLinks", wanted, MeasuredLink, LINKS_S, calls)
        if answer.link is None:
            raise ModelError("nothing was measured", kind="network")
    except RingProtocolError as error:
        raise NodeRefused(first.node_id, str(error)) from error
    except (ModelError, PeerLost, Unreachable) as error:
        raise _failed(node, (first, second), ModelError(str(error))) from error
    link = answer.link
    ask(first, lambda: check_link(link))
    return link


def decide(
    headers: Headers,
    name: str,
    load: Load,
    order: Sequence[tuple[str, str]],
    survey: Survey,
    at_once: float = 1.0,
    waiting: bool = False,
) -> RingDecision:
    """The plan for the model ``name`` on the nodes ``order`` (ids and names, the head first), loaded as ``load``.
    ``waiting``: see :func:`plan_ring`.

    The plan's sentences call the head "this machine"; its facts contain the head's name.
    """
    (me, my_name), *others = order
    nodes = planned_nodes(
        survey, [(me, THIS_MACHINE), *others], load.runtime, headers.sizes.for_runtime(load.runtime).dtype, load
    )
    popularity: list[list[float]] = []
    if headers.profile is not None:
        counts = known_counts(headers.folder, headers.profile, headers.sizes.experts_per_token, lambda text: None)
        popularity = [] if counts is None else [list(map(float, row)) for row in counts.values()]
    model = replace(headers.sizes.as_loaded(load, load.runtime), name=name)
    decision = plan_ring(model, nodes, survey.links, load.ring, popularity, at_once, waiting)
    if decision.facts is None:
        return decision
    named = [
        msgspec.structs.replace(shard, name=my_name) if shard.node_id == me else shard for shard in decision.facts.nodes
    ]
    at_best = not all(_overheads(survey, me, node_id) for node_id, _ in order)
    return replace(decision, facts=msgspec.structs.replace(decision.facts, nodes=named, at_best=at_best))


def planned_nodes(
    survey: Survey, order: Sequence[tuple[str, str]], runtime: str, dtype: str, own: Load | None = None
) -> list[NodeFacts]:
    """The nodes ``order`` as the planner takes them (node ids and names, the head first).

    Processes of one machine divide its free memory; those that receive weights divide its disk. ``own``: how the head
    loads its shard; None: with all defaults.
    """
    machines: dict[str, int] = {}
    for node_id, _ in order:
        machine = survey.facts[node_id].machine
        machines[machine] = machines.get(machine, 0) + 1
    nodes: list[NodeFacts] = []
    for node_id, name in order:
        facts = survey.facts[node_id]
        shared = machines[facts.machine]
        taking = order[1:] if survey.whole else order
        disk = sum(survey.facts[other].disk == facts.disk for other, _ in taking) if facts.disk else 1
        runs = experts_runtime(runtime, facts.runtimes)
        gpu = None if runs != "torch" or facts.gpu is None else _gpu_of(facts.gpu, shared, None if nodes else own)
        nodes.append(
            msgspec.structs.replace(
                facts,
                node_id=node_id,
                name=name,
                runs=runs,
                kind=_kind(runs, facts, dtype),
                memory_total=facts.memory_total // shared,
                memory_free=_least(facts.memory_free // shared, facts.memory_lent),
                disk_free=(facts.disk_free or 0) // disk if nodes or not survey.whole else None,
                layer_overhead_s=_overheads(survey, order[0][0], node_id),
                machine=facts.machine if shared > 1 else "",
                gpu=gpu,
            )
        )
    return nodes


def _gpu_of(facts: GpuFacts, shared: int, own: Load | None) -> GpuFacts | None:
    """The GPU of a machine that ``shared`` nodes share, as one of them uses it. ``own``: how the head loads; others use
    what is lent by the default policy."""
    if own is not None and own.partitioning == "cpu":
        return None
    return msgspec.structs.replace(
        facts,
        name=plain_text(facts.name, LONGEST_GPU),
        memory_total=facts.memory_total // shared,
        memory_free=_least(facts.memory_free // shared, facts.memory_lent),
        policy=own.policy if own is not None else "balanced",
        expert_bytes=own.gpu_expert_bytes if own is not None else None,
    )


def _least(free: int, lent: int | None) -> int:
    return free if lent is None else min(free, lent)


def _kind(runs: str, facts: NodeFacts, dtype: str) -> str:
    """A description of everything that a node's exact results depend on.

    Native kernels depend only on the instruction set; torch and mlx depend on more.
    """
    words = f"{runs} {facts.libraries.get(runs, '')} {facts.instruction_set} {dtype}, {facts.system}"
    if runs != "native":
        words += f", {facts.processor}"
    if runs == "torch":
        words += f", {facts.threads} thread{'s' * (facts.threads != 1)}"
    return plain_text(" ".join(words.split()), LONGEST_KIND)


def _overheads(survey: Survey, head: str, node_id: str) -> dict[str, float]:
    """Seconds of a layer beside its weights on a node, by runtime; empty if they were not measured.

    Other processes on the head's machine have the head's values, whatever their home is.
    """
    facts = survey.facts[node_id]
    same = facts.machine == survey.facts[head].machine
    return survey.facts[head].layer_overhead_s if same else facts.layer_overhead_s


# --- links that were measured before ---------------------------------------------------------------------------------

LINK_AGE_S = 600.0
"""Seconds after which a link is measured again, because other traffic may have disturbed the measurement."""


@dataclass(frozen=True)
class _Known:
    ends: frozenset[str]
    measured: float
    link: LinkFacts


class KnownLinks:
    """The last measured link of each pair of node ids. ``clock`` returns seconds, as time.monotonic does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}
        self._fastest: dict[tuple[str, str], LinkFacts] = {}

    def get(self, pair: tuple[str, str], ends: Iterable[str], hurry: bool = False) -> LinkFacts | None:
        """The link of ``pair`` if its measurement is recent and both ends have the same processes and addresses
        (``ends``) as then. ``hurry``: the measurement may be old."""
        known = self._known.get(pair)
        if known is None or known.ends != frozenset(ends):
            return None
        return known.link if hurry or self._clock() - known.measured < LINK_AGE_S else None

    def last(self, pair: tuple[str, str]) -> LinkFacts | None:
        """The last measurement of ``pair``, whatever changed since."""
        known = self._known.get(pair)
        return known.link if known is not None else None

    def put(self, pair: tuple[str, str], ends: Iterable[str], link: LinkFacts) -> None:
        """Store a measurement that was made now."""
        self._known[pair] = _Known(frozenset(ends), self._clock(), link)
        fastest = self._fastest.get(pair)
        if (
            fastest is None
            or fastest.address == link.address
            or link.latency_s < fastest.latency_s
            or has_new_address(link.interface, link.address, fastest)
        ):
            self._fastest[pair] = link

    def fastest(self, pair: tuple[str, str]) -> LinkFacts | None:
        """The fastest measurement of ``pair``, whatever changed since."""
        return self._fastest.get(pair)

    def replace(self, pair: tuple[str, str], link: LinkFacts) -> None:
        """Store a measurement that counts as old, because its ends are not known."""
        self.put(pair, (), link)
