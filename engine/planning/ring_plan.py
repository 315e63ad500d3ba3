"""The plan of a ring for a model: whether and how machines form one, who holds what, in which mode, and how fast. Pure.

Every node of a ring keeps the trunk, its keys and values and a workspace, and leaves a reserve to the system. The rest
of its memory, and the memory of its GPU, hold experts. The decision gives its reason in a sentence for the person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from engine.ipc.messages.ring import LinkFacts, NodeShard, RingChoice, RingFacts
from engine.planning.cluster_load import load_outcomes
from engine.planning.memory import ModelSizes
from engine.planning.placement import Placement
from engine.planning.placement_planner import NodeRoom, Shortfall, place, place_held
from engine.planning.prediction import PREFILL_TOKENS
from engine.planning.ring_nodes import (
    NodeFacts,
    alone_times,
    disk_room,
    expert_room,
    gpu_slabs,
    node_costs,
    slabs_alone,
    with_gpu,
)
from engine.planning.ring_speed import (
    Mode,
    NodeCosts,
    PassTime,
    RingSetting,
    StepTerms,
    WireSpeed,
    expert_seconds,
    pass_time,
)
from engine.planning.ring_words import (
    THIS_MACHINE,
    alone_sentence,
    disk_sentence,
    elsewhere_sentence,
    faster_there_sentence,
    fewer_sentence,
    full_disk_sentence,
    idle_sentence,
    left_out_sentence,
    loading_sentence,
    mode_sentence,
    share_capped_sentence,
    shortfall_sentence,
    speed_sentence,
    trunk_sentence,
    waiting_alone_sentence,
    waiting_together_sentence,
)
from engine.planning.routing_load import LoadingRule

ANSWER_TOKENS = 128
"""Tokens of the answer in the turn by which modes are compared. Its prompt has PREFILL_TOKENS."""
EXACT_WORTH = 1.10
"""Factor of a turn's time that exact mode may cost. Its sums are equal to one machine's."""
FEWER_WORTH = 1.03
"""Factor by which leaving out a machine must make the ring faster."""
NOISE = 1.25
"""Maximum factor between measurements of equal machines. More is a real difference, such as slower memory."""
ELSEWHERE_WORTH = 1.10
"""Factor by which a single other machine must be faster than the ring and the head alone, to take over."""
LOGIT_BYTES = 4
ASSUMED_LATENCY_S = 1e-3
ASSUMED_BYTES_PER_S = 1.25e8
"""Assumed rate of a link that was not measured, in bytes per second: Gigabit Ethernet. Its assumed latency is the
paper's."""


@dataclass(frozen=True)
class RingDecision:
    """The decision about a ring.

    ``ring``: form it as given. ``alone``: the head is faster by itself. ``elsewhere``: another machine is faster by
    itself and holds everything; it is the second of :attr:`ranks`. ``refused``: no ring is possible; ``shortfall`` is
    the number of missing bytes, 0 for another reason.
    """

    kind: Literal["ring", "alone", "elsewhere", "refused"]
    reason: str
    ranks: tuple[str, ...] = ()
    """Node ids in rank order, the head first. Set also if the ring is not formed because one machine is faster."""
    placement: Placement | None = None
    mode: Mode = "exact"
    loading: LoadingRule = "selected"
    weights: tuple[float, ...] = ()
    """Relative seconds per expert of each rank, for :class:`engine.planning.routing_load.Assigner`."""
    facts: RingFacts | None = None
    shortfall: int = 0
    step: PassTime | None = None
    """Predicted time of a decoding step; None if too little was measured."""
    terms: StepTerms | None = None
    """Terms from which :attr:`step` was predicted."""
    prefill: PassTime | None = None
    """Predicted time of a prompt of PREFILL_TOKENS tokens."""
    alone_step: PassTime | None = None
    """Predicted time of a decoding step of the head alone; None also if the model does not fit there."""
    notices: tuple[str, ...] = ()
    instead: RingDecision | None = None
    """The decision if no answer waited. Set if another one was taken because it needs no weights sent."""

    @property
    def chosen_step(self) -> PassTime | None:
        """Predicted time of a decoding step of what was decided; None if too little was measured."""
        return self.alone_step if self.kind == "alone" else self.step


def plan_ring(
    model: ModelSizes,
    nodes: Sequence[NodeFacts],
    links: Mapping[tuple[str, str], LinkFacts],
    choice: RingChoice,
    popularity: Sequence[Sequence[float]] = (),
    at_once: float = 1.0,
    waiting: bool = False,
) -> RingDecision:
    """The ring for ``model`` on ``nodes`` (the head first), within ``choice``.

    ``links``: measured links, by the node ids of their ends in either order. ``popularity``: routes counted before,
    [MoE layer][expert]. ``at_once``: see RingSetting. ``waiting``: an answer waits, so a placement that needs no
    weights sent takes precedence. Raises ValueError without nodes, and for a popularity of another model.
    """
    if not nodes:
        raise ValueError("a ring needs at least its head")
    if not model.experts:
        return RingDecision("refused", "The model has no experts to share: run it on one machine, partitioning auto.")
    costs = _alike(model, [node_costs(model, node) for node in nodes], nodes)
    known = {node.node_id: each for node, each in zip(nodes, costs, strict=True) if each is not None}
    planner = _Planner(model, known, {frozenset(way): link for way, link in links.items()}, choice, popularity, at_once)
    chosen = [nodes[0], *(node for node in nodes[1:] if not choice.nodes or node.node_id in choice.nodes)]
    notices: list[str] = []
    if not choice.nodes:
        chosen, notices = _without_the_small(planner, chosen)
    decision = planner.ring(chosen)
    if decision.kind == "ring" and decision.step is not None and not choice.nodes and not choice.even_if_slower:
        decision = _without_the_slow(planner, chosen, decision)
    decision = replace(decision, notices=(*notices, *decision.notices))
    decision = _against_alone(planner, chosen, decision)
    return _without_sending(planner, chosen, decision) if waiting else decision


def decided_again(decision: RingDecision, terms: StepTerms | None, choice: RingChoice) -> RingDecision:
    """``decision`` after the nodes of the ring have measured together.

    The head alone if ``terms`` show the ring to be slower, unless the ring was asked for in any case.
    """
    step = decision.alone_step
    if decision.kind != "ring" or step is None or terms is None or choice.even_if_slower:
        return decision
    together = terms.step()
    if together.seconds <= step.seconds:
        return decision
    reason = alone_sentence(THIS_MACHINE, step.tokens_per_s, len(decision.ranks), together.tokens_per_s)
    return _alone(decision, reason)


def bytes_sent(decision: RingDecision) -> int:
    """Bytes of weights to send to machines other than the head for ``decision``."""
    shards = decision.facts.nodes[1:] if decision.facts is not None and decision.kind in ("ring", "elsewhere") else []
    return sum(max(0, shard.expert_bytes + shard.trunk_bytes - shard.has_bytes) for shard in shards)


class _Planner:
    """Plans for one model and choice, over several sets of nodes."""

    def __init__(
        self,
        model: ModelSizes,
        costs: Mapping[str, NodeCosts],
        links: Mapping[frozenset[str], LinkFacts],
        choice: RingChoice,
        popularity: Sequence[Sequence[float]],
        at_once: float,
    ) -> None:
        self.model = model
        self._costs = costs
        self.choice = choice
        self._links = links
        self._popularity = popularity
        self._at_once = at_once
        self._held_only = False
        """Whether every node uses only the experts that it has already."""

    def ring(self, nodes: Sequence[NodeFacts]) -> RingDecision:
        """A ring of ``nodes``, or why there is none.

        Nodes that would hold no expert are left out: they would run the trunk and wait in every exchange for nothing,
        and their loss would end the ring.
        """
        decision, lines = self._exactly(nodes), list[str]()
        while decision.placement is not None:
            idle = [node for rank, node in enumerate(nodes) if rank and not decision.placement.count_of(rank)]
            nodes = [node for node in nodes if node not in idle]
            fewer = self._exactly(nodes) if idle else decision
            if fewer is decision or fewer.kind != "ring":
                break
            decision, lines = fewer, [*lines, *(idle_sentence(node.name) for node in idle)]
        return replace(decision, notices=(*decision.notices, *lines))

    def _exactly(self, nodes: Sequence[NodeFacts]) -> RingDecision:
        """A ring of all ``nodes``, or why there is none."""
        central = self.is_central(nodes)
        if self.choice.mode in ("exact", "fast") and _unlike(nodes):
            return RingDecision(
                "refused", mode_sentence(self.choice.mode, {n.name: n.kind for n in nodes}, refused=True)
            )
        rooms: list[int] = []
        notices: list[str] = []
        for rank, node in enumerate(nodes):
            room = expert_room(self.model, node, central and rank > 0)
            hand = self.choice.shares.get(node.node_id)
            if room < 0:
                return RingDecision("refused", trunk_sentence(node.name, -room), shortfall=-room)
            if hand is not None and hand > room:
                notices.append(share_capped_sentence(node.name, hand, room))
            on_disk = disk_room(self.model, node, central and rank > 0)
            if on_disk is not None and on_disk < 0:
                return RingDecision(
                    "refused", full_disk_sentence(node.name, -on_disk, is_head=rank == 0), shortfall=-on_disk
                )
            if on_disk is not None and on_disk < min(room, self.model.expert_bytes):
                notices.append(disk_sentence(node.name, on_disk))
                room = on_disk
            rooms.append(room if hand is None else min(max(0, hand), room))
        known = [self._costs[node.node_id] for node in nodes if node.node_id in self._costs]
        costs = known if len(known) == len(nodes) else []
        placement = self._place(nodes, rooms, costs)
        if isinstance(placement, Shortfall):
            by_hand = any(node.node_id in self.choice.shares for node in nodes)
            reason = shortfall_sentence(placement, [node.name for node in nodes], rooms, by_hand)
            return RingDecision("refused", reason, shortfall=placement.missing_bytes, notices=tuple(notices))
        decisions = [self._decided(nodes, placement, costs, central, notices)]
        if costs:
            # Experts beyond a GPU's memory make its node slower: perhaps others had better hold them.
            for few in _gpu_only(self.model, nodes, rooms):
                other = self._place(nodes, few, costs)
                if not isinstance(other, Shortfall) and other != placement:
                    decisions.append(self._decided(nodes, other, costs, central, notices))
        return min(decisions, key=lambda one: one.step.seconds if one.step is not None else 0.0)

    def _place(
        self, nodes: Sequence[NodeFacts], rooms: Sequence[int], costs: Sequence[NodeCosts]
    ) -> Placement | Shortfall:
        """The placement on ``rooms``, by the experts' seconds on nodes that hold as many as they can."""
        slots = [min(max(0, room) // self.model.slab_bytes, self.model.slabs) for room in rooms]
        seconds = [each.expert_s(self.model, slot) for each, slot in zip(costs, slots, strict=True)] if costs else []
        given = [NodeRoom(room, each) for room, each in zip(rooms, seconds or [1.0] * len(nodes), strict=True)]
        has = [self._head_has(nodes[0]), *(node.has for node in nodes[1:])]
        all_hold = self.choice.even_if_slower or bool(self.choice.nodes)
        if self._held_only:
            found = place_held(self.model.grid, given, has, self.choice.overlap)
            return found or Shortfall(0, self.model.expert_bytes, sum(rooms))
        return place(self.model.grid, given, self._popularity, self.choice.overlap, has, all_hold)

    def _head_has(self, head: NodeFacts) -> Mapping[int, Sequence[int]]:
        """Experts on the head's disk, by layer. Without a limit of disk space this is the whole model, whatever was
        counted."""
        grid = self.model.grid
        return head.has if head.disk_free is not None else dict.fromkeys(grid.layers, tuple(range(grid.experts)))

    def held(self, nodes: Sequence[NodeFacts]) -> RingDecision | None:
        """A ring of ``nodes`` that needs no weights sent, or None if there is none."""
        central = self.is_central(nodes)
        able = [
            node
            for node in nodes[1:]
            if (central or node.has_trunk)
            and any(node.has.values())
            and expert_room(self.model, node, central) >= self.model.slab_bytes
        ]
        planner = copy(self)
        planner._held_only = True
        found = planner.ring([nodes[0], *able])
        return found if found.kind == "ring" and len(found.ranks) > 1 else None

    def in_mode(self, mode: Mode) -> _Planner:
        """The same planner with ``mode`` fixed."""
        choice = structs.replace(self.choice, mode=mode)
        return _Planner(self.model, self._costs, self._links, choice, self._popularity, self._at_once)

    def is_central(self, nodes: Sequence[NodeFacts]) -> bool:
        return self.choice.mode == "central" or (self.choice.mode == "auto" and _unlike(nodes))

    def alone(self, node: NodeFacts) -> PassTime | None:
        """Time of a decoding step of ``node`` alone; None if the model does not fit there or nothing was measured."""
        costs = self._costs.get(node.node_id)
        if costs is None or expert_room(self.model, node) < self.model.expert_bytes:
            return None
        return alone_times(self.model, node, costs)[0]

    def elsewhere(self, head: NodeFacts, node: NodeFacts) -> tuple[PassTime, PassTime] | None:
        """Times of a decoding step and a prompt of PREFILL_TOKENS for ``head`` if ``node`` runs the model alone.

        They include sending tokens there and logits back. None if the model does not or may not fit there, or nothing
        was measured.
        """
        step, costs, all_experts = self.alone(node), self._costs.get(node.node_id), self.model.expert_bytes
        on_disk = disk_room(self.model, node, False)
        if step is None or costs is None or (on_disk is not None and on_disk < all_experts):
            return None
        hand = self.choice.shares.get(node.node_id)
        if (hand is not None and hand < all_experts) or node.kind.partition(" ")[0] != head.kind.partition(" ")[0]:
            return None
        wire = self.wire([head, node], central=True)
        there_and_back = 2 * wire.latency_s + LOGIT_BYTES * self.model.vocabulary / wire.bytes_per_s
        prefill = alone_times(self.model, node, costs)[1]
        return replace(step, exchange_s=there_and_back), replace(prefill, exchange_s=there_and_back)

    def decided_elsewhere(
        self,
        ring: RingDecision,
        head: NodeFacts,
        node: NodeFacts,
        times: tuple[PassTime, PassTime],
        reason: str,
    ) -> RingDecision:
        """The decision that replaces ``ring`` if ``node`` holds everything, and the head nothing."""
        grid = self.model.grid
        placement = Placement(grid.layers, 2, (((1,),) * grid.experts,) * len(grid.layers))
        step, prefill = times
        facts = self._facts([head, node], placement, (1.0, 1.0), "exact", "selected", step, reason)
        here, other = facts.nodes
        nothing = structs.replace(here, trunk_bytes=0, has_bytes=0, gpu="", gpu_expert_bytes=0)
        slabs = slabs_alone(self.model, node)
        on_gpu = 0 if slabs is None else min(slabs * self.model.slab_bytes, other.expert_bytes)
        other = structs.replace(other, gpu=other.gpu if slabs is not None else "", gpu_expert_bytes=on_gpu)
        alone = ring.facts.alone_tokens_per_s if ring.facts is not None else None
        return RingDecision(
            kind="elsewhere",
            reason=reason,
            ranks=(head.node_id, node.node_id),
            placement=placement,
            weights=(1.0, 1.0),
            facts=structs.replace(facts, nodes=[nothing, other], elsewhere=True, alone_tokens_per_s=alone),
            step=step,
            prefill=prefill,
            alone_step=ring.alone_step,
            notices=ring.notices,
        )

    def slowest(self, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
        """The nodes other than the head with the slowest experts and with the slowest links."""
        step = {
            node.node_id: alone_times(self.model, node, self._costs[node.node_id])[0].seconds
            for node in nodes
            if node.node_id in self._costs
        }
        by_work = max(nodes[1:], key=lambda node: step.get(node.node_id, 0.0))
        by_link = max(
            nodes[1:], key=lambda node: sorted(self._latency(node, other) for other in nodes if other is not node)
        )
        return [by_work] if by_work is by_link else [by_work, by_link]

    def _latency(self, first: NodeFacts, second: NodeFacts) -> float:
        link = self._links.get(frozenset((first.node_id, second.node_id)))
        return link.latency_s if link else ASSUMED_LATENCY_S

    def wire(self, nodes: Sequence[NodeFacts], central: bool) -> WireSpeed:
        """Speed of the slowest link in use. Links that were not measured count as slow."""
        latency, rate = 0.0, float("inf")
        for i, first in enumerate(nodes):
            for second in nodes[i + 1 :]:
                if central and i > 0:
                    continue
                link = self._links.get(frozenset((first.node_id, second.node_id)))
                latency = max(latency, self._latency(first, second))
                rate = min(rate, link.bytes_per_s if link else ASSUMED_BYTES_PER_S)
        return WireSpeed.of_link(latency, rate)

    def _decided(
        self,
        nodes: Sequence[NodeFacts],
        placement: Placement,
        costs: Sequence[NodeCosts],
        central: bool,
        notices: list[str],
    ) -> RingDecision:
        seconds = expert_seconds(self.model, placement, costs) if costs else [1.0] * len(nodes)
        weights = tuple(item / min(seconds) for item in seconds)
        loading, why_loading = self._loading(nodes)
        mode: Mode = "central" if central else "fast" if self.choice.mode == "fast" else "exact"
        step = prefill = terms = None
        why_mode = mode_sentence(mode, {node.name: node.kind for node in nodes}) if central else ""
        if costs:
            step, prefill = self._times(nodes, placement, costs, mode, loading)
            if self.choice.mode == "auto" and not central and len(nodes) > 1:
                fast = self._times(nodes, placement, costs, "fast", loading)
                if _turn(step, prefill) > EXACT_WORTH * _turn(*fast):
                    why_mode = speed_sentence(_turn(step, prefill), _turn(*fast))
                    mode, (step, prefill) = "fast", fast
            terms = self._terms(nodes, placement, costs, mode, loading)
        reason = " ".join(item for item in (why_mode, why_loading) if item)
        return RingDecision(
            kind="ring",
            reason=reason,
            ranks=tuple(node.node_id for node in nodes),
            placement=placement,
            mode=mode,
            loading=loading,
            weights=weights,
            facts=self._facts(nodes, placement, weights, mode, loading, step, reason),
            step=step,
            terms=terms,
            prefill=prefill,
            notices=tuple(notices),
        )

    def _loading(self, nodes: Sequence[NodeFacts]) -> tuple[LoadingRule, str]:
        if self.choice.loading != "auto":
            return self.choice.loading, ""
        wired = [node.name for node in nodes if node.unified_memory]
        return ("router-aided", loading_sentence(wired)) if wired and len(nodes) > 1 else ("selected", "")

    def _terms(
        self,
        nodes: Sequence[NodeFacts],
        placement: Placement,
        costs: Sequence[NodeCosts],
        mode: Mode,
        loading: LoadingRule,
    ) -> StepTerms:
        setting = RingSetting(mode, loading, at_once=self._at_once)
        wire = self.wire(nodes, mode == "central")
        return StepTerms(self.model, placement, tuple(costs), wire, setting, self._popularity)

    def _times(
        self,
        nodes: Sequence[NodeFacts],
        placement: Placement,
        costs: Sequence[NodeCosts],
        mode: Mode,
        loading: LoadingRule,
    ) -> tuple[PassTime, PassTime]:
        """Times of a decoding step, and of a prompt of PREFILL_TOKENS."""
        terms = self._terms(nodes, placement, costs, mode, loading)
        prefill = pass_time(terms.model, placement, costs, terms.wire, terms.setting, PREFILL_TOKENS, self._popularity)
        return terms.step(), prefill

    def _facts(
        self,
        nodes: Sequence[NodeFacts],
        placement: Placement,
        weights: Sequence[float],
        mode: Mode,
        loading: LoadingRule,
        step: PassTime | None,
        reason: str,
    ) -> RingFacts:
        outcomes = load_outcomes(placement, self.model.experts_per_token, self._popularity, weights)
        shares = []
        for rank, (node, expected) in enumerate(zip(nodes, outcomes.per_rank(), strict=True)):
            trunk = 0 if mode == "central" and rank > 0 else self.model.trunk_bytes
            experts = placement.count_of(rank)
            on_gpu = min(experts, gpu_slabs(self.model, node))
            present_bytes = trunk if node.has_trunk else 0
            for layer, row in zip(placement.layers, placement.holders, strict=True):
                mine = node.has.get(layer, ())
                present_bytes += self.model.slab_bytes * sum(
                    rank in row[expert] for expert in set(mine) if expert < len(row)
                )
            shares.append(
                NodeShard(
                    rank=rank,
                    node_id=node.node_id,
                    name=node.name,
                    experts=experts,
                    expert_bytes=min(experts * self.model.slab_bytes, self.model.expert_bytes),
                    trunk_bytes=trunk,
                    memory_free=node.memory_free,
                    expected_experts=expected,
                    has_bytes=present_bytes,
                    gpu=node.gpu.name if node.gpu is not None else "",
                    gpu_expert_bytes=min(on_gpu * self.model.slab_bytes, self.model.expert_bytes),
                )
            )
        return RingFacts(
            mode=mode,
            exchange=self.choice.exchange,
            loading=loading,
            nodes=shares,
            tokens_per_s=step.tokens_per_s if step is not None else None,
            reason=reason,
        )


def _gpu_only(model: ModelSizes, nodes: Sequence[NodeFacts], rooms: Sequence[int]) -> list[list[int]]:
    """``rooms`` without the CPU's memory on nodes with a GPU: for each such node in turn, and for all of them."""
    there = [gpu_slabs(model, node) * model.slab_bytes for node in nodes]
    shared = [rank for rank, room in enumerate(rooms) if 0 < there[rank] < room]
    sets = [[rank] for rank in shared] + ([shared] if len(shared) > 1 else [])
    return [[there[rank] if rank in few else room for rank, room in enumerate(rooms)] for few in sets]


def _alike(model: ModelSizes, costs: Sequence[NodeCosts | None], nodes: Sequence[NodeFacts]) -> list[NodeCosts | None]:
    """``costs`` with the fastest measurement for nodes with the same hardware. Slower ones were disturbed by other
    work.

    This applies to processes of one kind on one machine, whatever they measured, and to machines with the same
    processor if they differ by at most NOISE. Each node keeps its own GPU.
    """
    improved = list(costs)
    for index, (node, cost) in enumerate(zip(nodes, costs, strict=True)):
        if cost is None:
            continue
        same = [
            other
            for one, other in zip(nodes, costs, strict=True)
            if other is not None and _same_hardware(node, one, cost, other)
        ]
        best = min(same, key=lambda other: other.expert.at(1))
        improved[index] = with_gpu(model, node, replace(best, machine=cost.machine))
    return improved


def _same_hardware(first: NodeFacts, second: NodeFacts, costs: NodeCosts, others: NodeCosts) -> bool:
    if first is second:
        return True
    if first.kind != second.kind:
        return False
    if first.machine and first.machine == second.machine:
        return True
    alike = first.hardware is not None and first.hardware == second.hardware
    return alike and costs.expert.at(1) <= NOISE * others.expert.at(1)


def _unlike(nodes: Sequence[NodeFacts]) -> bool:
    """Whether some nodes would compute other bits than the head."""
    return any(node.kind != nodes[0].kind for node in nodes)


def _turn(step: PassTime, prefill: PassTime) -> float:
    """Seconds of a turn."""
    return prefill.seconds + ANSWER_TOKENS * step.seconds


def _without_the_small(planner: _Planner, nodes: Sequence[NodeFacts]) -> tuple[list[NodeFacts], list[str]]:
    """The nodes with room for what every node needs and for one expert, and a line for each other node."""
    central, least = planner.is_central(nodes), planner.model.slab_bytes
    large_enough, lines = [nodes[0]], []
    for node in nodes[1:]:
        room, on_disk = expert_room(planner.model, node, central), disk_room(planner.model, node, central)
        if room < least:
            lines.append(left_out_sentence(node.name, least - room))
        elif on_disk is not None and on_disk < least:
            lines.append(left_out_sentence(node.name, least - on_disk, "disk space"))
        else:
            large_enough.append(node)
    return large_enough, lines


def _without_the_slow(planner: _Planner, nodes: Sequence[NodeFacts], best: RingDecision) -> RingDecision:
    """``best`` (the ring of all ``nodes``), or a smaller ring that is predicted to be clearly faster.

    Nodes are left out one by one, each time the slowest or the one behind the slowest link, while the rest can hold the
    model.
    """
    # In one mode: else more machines with exact sums would be weighed against fewer with fast ones.
    same = planner.in_mode(best.mode)
    whole = best.step
    chain: list[tuple[PassTime, list[NodeFacts]]] = []
    left = list(nodes)
    while len(left) > 2:
        rings: list[tuple[float, int, NodeFacts, PassTime]] = []
        for out in same.slowest(left):
            ring = same.ring([node for node in left if node is not out])
            if ring.kind == "ring" and ring.step is not None:
                rings.append((ring.step.seconds, len(rings), out, ring.step))
        if not rings:
            break
        _, _, out, step = min(rings, key=lambda option: option[:2])
        left = [node for node in left if node is not out]
        chain.append((step, left))
    if whole is None or not chain:
        return best
    step, remaining = min(chain, key=lambda option: option[0].seconds)
    if step.seconds * FEWER_WORTH > whole.seconds:
        return best
    names = [node.name for node in nodes if node not in remaining]
    line = fewer_sentence(names, step.tokens_per_s, whole.tokens_per_s)
    fewer = planner.ring(remaining)
    return replace(fewer, notices=(*fewer.notices, line))


def _against_alone(planner: _Planner, nodes: Sequence[NodeFacts], ring: RingDecision) -> RingDecision:
    """``ring``, or the head or another machine alone if that is faster."""
    head = nodes[0]
    by_itself = {node.node_id: planner.alone(node) for node in nodes}
    model = planner.model
    # A head that lacks the model would have to take all of it.
    on_disk = head.disk_free is None or head.disk_free >= model.trunk_file_bytes + model.expert_bytes
    if not on_disk:
        by_itself[head.node_id] = None
    fits_alone = on_disk and expert_room(planner.model, head) >= model.expert_bytes
    known = [(option.seconds, node.node_id) for node in nodes if (option := by_itself[node.node_id]) is not None]
    best_s, best = min(known, default=(0.0, ""))
    step = by_itself[head.node_id]
    decision = replace(ring, alone_step=step)
    if ring.facts is not None:
        decision = replace(decision, facts=_with_alone(ring.facts, 1.0 / best_s if best else None))
    if ring.kind != "ring":
        return decision
    if len(ring.ranks) == 1:
        return _alone(decision, "There is no other machine to share with.") if fits_alone else decision
    if ring.step is None or not best:
        return decision
    least = min([ring.step.seconds, *([step.seconds] if step is not None else [])])
    if not planner.choice.even_if_slower:
        reached = [(*times, node) for node in nodes[1:] if (times := planner.elsewhere(head, node)) is not None]
        at, prefill, node = min(reached, key=lambda option: option[0].seconds, default=(None, None, None))
        if at is not None and prefill is not None and node is not None and at.seconds * ELSEWHERE_WORTH <= least:
            reason = elsewhere_sentence(node.name, at.tokens_per_s, 1.0 / least, step is not None)
            return planner.decided_elsewhere(decision, head, node, (at, prefill), reason)
    if step is not None and step.seconds < ring.step.seconds and not planner.choice.even_if_slower:
        return _alone(decision, alone_sentence(head.name, step.tokens_per_s, len(ring.ranks), ring.step.tokens_per_s))
    if best != head.node_id and best_s * ELSEWHERE_WORTH <= least:
        name = next(node.name for node in nodes if node.node_id == best)
        line = faster_there_sentence(name, 1.0 / best_s, ring.step.tokens_per_s, planner.choice.even_if_slower)
        return replace(decision, notices=(*decision.notices, line))
    return decision


def _without_sending(planner: _Planner, nodes: Sequence[NodeFacts], decision: RingDecision) -> RingDecision:
    """``decision``, or one that needs no weights sent.

    That is the faster of a ring of what the nodes have, and the head alone, unless the ring was asked for even if it is
    slower.
    """
    sent = bytes_sent(decision)
    if not sent:
        return decision
    options: list[tuple[float, RingDecision]] = []
    held = planner.held(nodes)
    if held is not None and held.facts is not None:
        reason = " ".join(filter(None, (waiting_together_sentence(sent), held.reason)))
        alone = decision.facts.alone_tokens_per_s if decision.facts is not None else None
        facts = structs.replace(held.facts, reason=reason, alone_tokens_per_s=alone)
        step_s = held.step.seconds if held.step is not None else float("inf")
        options.append((step_s, replace(held, reason=reason, facts=facts, alone_step=decision.alone_step)))
    if decision.alone_step is not None and nodes[0].disk_free is None and not planner.choice.even_if_slower:
        options.append((decision.alone_step.seconds, _alone(decision, waiting_alone_sentence(sent))))
    _, best = min(options, key=lambda each: each[0], default=(0.0, decision))
    return best if best is decision else replace(best, instead=decision)


def _with_alone(facts: RingFacts, tokens_per_s: float | None) -> RingFacts:
    return structs.replace(facts, alone_tokens_per_s=tokens_per_s)


def _alone(decision: RingDecision, reason: str) -> RingDecision:
    facts = structs.replace(decision.facts, reason=reason) if decision.facts is not None else None
    return replace(decision, kind="alone", reason=reason, facts=facts)
