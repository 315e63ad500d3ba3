"""How fast a ring will be, predicted from what was measured of its nodes and links before it is formed. Pure.

The paper's equation (1) with measured terms, for unlike nodes:

    pass = sum over the MoE layers of [ nodes(attention and router + experts run) + exchange ] + what is outside of them

where ``nodes`` is the time until the last node is done: the mean over what the routes may be, not the slowest node's
mean. Shared experts are computed while the wire is busy, so the longer of the two counts. In central mode the head
alone runs the trunk, and each layer sends twice: routes with hidden states out, the results back. Nodes that are
processes of one machine share what it can do at once for as long as they are busy. Once a ring is joined, all of its
nodes rehearse layers: what one takes beside trunk and experts is then known as a whole. All times are seconds. (Paper
of private LLMs on Apple Silicon, sections 4.3 and 4.4.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.planning.calibration import Calibration, Curve
from engine.planning.cluster_load import LoadOutcomes, fractions, load_outcomes
from engine.planning.memory import ModelSizes
from engine.planning.placement import Placement
from engine.planning.policy import Policy
from engine.planning.prediction import (
    DECODE_CONTEXT,
    Shares,
    decode_layer_s,
    expected_tokens,
    prefill_layer_s,
)
from engine.planning.routing_load import Assigner, LoadingRule, spare_quota, whole_weights

Mode = Literal["exact", "fast", "central"]

MEASURED_BYTES = 12 * 1024
"""Size in bytes of the messages by which a link's latency is measured."""
PER_PEER = 0.14
"""Fraction of a link's latency that each peer beyond the first adds to an exchange. The paper's table 4 has 38, 44 and
48 ms per token for two, three and four nodes."""
_HEADER_BYTES = 64


@dataclass(frozen=True)
class GpuCosts:
    """A node's GPU, which keeps ``slabs`` of its experts.

    A layer's time with it is predicted as on one machine (:mod:`engine.planning.balancing`), with the trunk on the CPU.
    """

    calibration: Calibration
    policy: Policy
    slabs: int

    def resident(self, held: float) -> float:
        """Fraction of the ``held`` experts of the node that are on the GPU."""
        return min(1.0, self.slabs / held) if held > 0 else 0.0


@dataclass(frozen=True)
class NodeCosts:
    """Costs of one node, measured on it alone, in seconds by the number of tokens of a pass."""

    expert: Curve
    """Seconds of one routed expert, by the tokens sent to it."""
    attention: Curve
    """Seconds of attention, norms and router of one MoE layer."""
    outside: Curve
    """Seconds outside the MoE layers per pass: dense layers, embedding, head, and fixed costs."""
    shared: Curve | None = None
    """Seconds of the shared experts of one MoE layer."""
    fence_s: float = 0.0
    """Seconds per layer for handing over between the processor that computes and the one that sends, and back."""
    central_s: float = 0.0
    """Seconds per layer that the head and another node together add in central mode, for sending and reading question
    and answer."""
    machine: str = ""
    """Name of the machine. Nodes with the same name are processes of one machine; empty: a machine of its own."""
    gpu: GpuCosts | None = None

    def decode_s(self, run: float, resident: float) -> float:
        """Seconds of a layer for one token, of which the node runs ``run`` experts on average.

        ``resident``: the fraction of the node's experts, weighted by use, that its GPU keeps.
        """
        if self.gpu is None:
            return run * self.expert.at(1)
        few = int(run)
        seconds = decode_layer_s(few, resident, self.gpu.calibration, self.gpu.policy)
        if run == few:
            return seconds
        more = decode_layer_s(few + 1, resident, self.gpu.calibration, self.gpu.policy)
        return seconds + (run - few) * (more - seconds)

    def prefill_s(self, tokens: Sequence[int], layers: int) -> float:
        """Seconds of a layer whose experts have ``tokens`` tokens each. ``layers``: MoE layers that share the GPU's
        memory."""
        if self.gpu is None or not tokens:
            return sum(self.expert.at(count) for count in tokens)
        ranked = sorted(tokens, reverse=True)
        return prefill_layer_s(ranked, self.gpu.slabs / layers, self.gpu.calibration, self.gpu.policy)

    def expert_s(self, model: ModelSizes, held: int) -> float:
        """Seconds per expert if the node holds ``held`` experts and runs all of a token's. Nodes share the work by
        it."""
        if self.gpu is None:
            return self.expert.at(1)
        together = max(1, min(model.experts_per_token, model.experts))
        return self.decode_s(together, self.gpu.resident(held)) / together


@dataclass(frozen=True)
class WireSpeed:
    """Speed of the exchange over the slowest link in use.

    ``latency_s``: seconds of MEASURED_BYTES, one way. ``per_peer_s``: seconds that each peer beyond the first adds; 0.0
    if the exchange was measured with all nodes. ``layer_s``: seconds of a layer of a decoding step beside trunk and
    experts, as all nodes rehearsed it; None: they did not.
    """

    latency_s: float
    bytes_per_s: float
    per_peer_s: float = 0.0
    layer_s: float | None = None

    @classmethod
    def of_link(cls, latency_s: float, bytes_per_s: float) -> WireSpeed:
        """The speed estimated from the slowest link between two nodes, before all are joined."""
        return cls(latency_s, bytes_per_s, PER_PEER * latency_s)

    def seconds(self, nbytes: float, peers: int) -> float:
        """Seconds until ``nbytes``, all that the busiest node sends to (or gets from) its ``peers``, have arrived; 0.0
        without peers."""
        if peers <= 0:
            return 0.0
        beyond = max(0.0, nbytes + _HEADER_BYTES * peers - MEASURED_BYTES) / self.bytes_per_s
        return self.latency_s + (peers - 1) * self.per_peer_s + beyond


@dataclass(frozen=True)
class RingSetting:
    """Conditions of a prediction.

    ``word_bytes``: bytes of a number in transfer. ``at_once``: number of nodes' work that a machine does in the time of
    one (1.0: a single node uses all of it).
    """

    mode: Mode = "exact"
    loading: LoadingRule = "selected"
    word_bytes: int = 4
    at_once: float = 1.0


@dataclass(frozen=True)
class PassTime:
    """Seconds of one forward pass, split as in the paper's table 3: the experts, the exchange, all else."""

    moe_s: float
    exchange_s: float
    other_s: float
    tokens: int = 1

    @property
    def seconds(self) -> float:
        return self.moe_s + self.exchange_s + self.other_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


ALLOWED_ERROR = 0.25
"""Relative error of a token's time within which a prediction counts as true."""


def relative_error(predicted: PassTime, measured: PassTime) -> float:
    """(predicted - measured) / measured time. Raises ValueError if the measured time is not above 0."""
    if not measured.seconds > 0:
        raise ValueError(f"a measured pass takes more than {measured.seconds:g} s")
    return (predicted.seconds - measured.seconds) / measured.seconds


@dataclass(frozen=True)
class StepTerms:
    """All terms from which a ring's decoding step is predicted, so that single terms can be replaced by better
    measurements."""

    model: ModelSizes
    placement: Placement
    nodes: tuple[NodeCosts, ...]
    wire: WireSpeed
    setting: RingSetting
    popularity: Sequence[Sequence[float]] = ()

    def step(self) -> PassTime:
        return step_time(self.model, self.placement, self.nodes, self.wire, self.setting, self.popularity)

    def rows_s(self, rows: int) -> float:
        """Seconds of a decoding step of ``rows`` rows; see :func:`rows_time`."""
        if rows == 1:
            return self.step().seconds
        return rows_time(self.model, self.placement, self.nodes, self.wire, self.setting, rows, self.popularity).seconds

    def with_exchange(self, seconds: float, layer_s: float | None = None) -> StepTerms:
        """These terms with an exchange that took ``seconds`` once all nodes were joined.

        It is measured with nodes that send at the same time, so that none sleeps. In a step they wait for each other,
        which takes at least a link's latency. ``layer_s``: see :class:`WireSpeed`.
        """
        if len(self.nodes) < 2:
            return self
        before = self.wire.latency_s + (len(self.nodes) - 2) * self.wire.per_peer_s
        return replace(self, wire=WireSpeed(max(seconds, before), self.wire.bytes_per_s, layer_s=layer_s))

    def with_nodes(self, each: NodeCosts) -> StepTerms:
        """These terms with all nodes like ``each``."""
        return replace(self, nodes=(each,) * len(self.nodes))


def step_time(
    model: ModelSizes,
    placement: Placement,
    nodes: Sequence[NodeCosts],
    wire: WireSpeed,
    setting: RingSetting,
    popularity: Sequence[Sequence[float]] = (),
) -> PassTime:
    """Time of a decoding step of one token. ``nodes`` are in rank order.

    Raises ValueError for another number of nodes than the placement's.
    """
    weights = expert_seconds(model, placement, nodes)
    outcomes = load_outcomes(placement, model.experts_per_token, popularity, weights)
    resident = [_resident(node, placement, rank, popularity) for rank, node in enumerate(nodes)]
    return _of_outcomes(model, placement, nodes, wire, setting, outcomes, weights, resident)


def pass_time(
    model: ModelSizes,
    placement: Placement,
    nodes: Sequence[NodeCosts],
    wire: WireSpeed,
    setting: RingSetting,
    tokens: int,
    popularity: Sequence[Sequence[float]] = (),
) -> PassTime:
    """Time of a forward pass of ``tokens`` tokens, such as a chunk of a prompt; :func:`step_time` for one token."""
    if tokens <= 1:
        return step_time(model, placement, nodes, wire, setting, popularity)
    weights = expert_seconds(model, placement, nodes)
    assigner = Assigner(placement, weights)
    moe = exchange = attention = 0.0
    layer_times: dict[tuple[object, ...], tuple[float, float, float]] = {}
    for at, layer in enumerate(placement.layers):
        use = tuple(popularity[at]) if popularity else ()
        key = (placement.holders[at], use)
        if key not in layer_times:
            counts = _tokens_of(use, placement.experts, model.experts_per_token, tokens)
            active = [expert for expert, count in enumerate(counts) if count]
            owners = assigner.owners(layer, active, [counts[expert] for expert in active])
            runs: list[list[int]] = [[] for _ in nodes]
            for expert, owner in zip(active, owners, strict=True):
                runs[owner].append(counts[expert])
            experts = [node.prefill_s(run, len(placement.layers)) for node, run in zip(nodes, runs, strict=True)]
            rows = [sum(run) for run in runs]
            layer_times[key] = _layer(nodes, setting, wire, model, tokens, experts, rows)
        trunk, computing, travelling = layer_times[key]
        attention, moe, exchange = attention + trunk, moe + computing, exchange + travelling
    other = attention + _together(nodes, [node.outside.at(tokens) for node in nodes], setting)
    return PassTime(moe, exchange, other, tokens)


DRAWN_LAYERS = 256
"""Number of layers that are drawn to predict a step of several rows."""


def rows_time(
    model: ModelSizes,
    placement: Placement,
    nodes: Sequence[NodeCosts],
    wire: WireSpeed,
    setting: RingSetting,
    rows: int,
    popularity: Sequence[Sequence[float]] = (),
) -> PassTime:
    """Time of a decoding step of ``rows`` rows of independent texts: the mean over drawn layers, always the same ones.

    Each row chooses experts by their ``popularity``. A node reads each expert that it runs once. Raises ValueError for
    another number of nodes than the placement's.
    """
    assigner = Assigner(placement, expert_seconds(model, placement, nodes))
    draws, layers = fractions(), len(placement.layers)
    moe = exchange = attention = 0.0
    for number in range(DRAWN_LAYERS):
        at = number % layers
        drawn = Counter(
            expert
            for _ in range(rows)
            for expert in _chosen(
                draws, placement.experts, model.experts_per_token, popularity[at] if popularity else ()
            )
        )
        active = sorted(drawn)
        runs: list[list[int]] = [[] for _ in nodes]
        owners = assigner.owners(placement.layers[at], active, [drawn[expert] for expert in active])
        for expert, owner in zip(active, owners, strict=True):
            runs[owner].append(drawn[expert])
        experts = [node.prefill_s(run, layers) for node, run in zip(nodes, runs, strict=True)]
        trunk, computing, travelling = _layer(nodes, setting, wire, model, rows, experts, [sum(run) for run in runs])
        attention, moe, exchange = attention + trunk, moe + computing, exchange + travelling
    each = layers / DRAWN_LAYERS
    other = each * attention + _together(nodes, [node.outside.at(rows) for node in nodes], setting)
    return PassTime(each * moe, each * exchange, other, rows)


def _chosen(draws: Iterator[float], experts: int, per_token: int, use: Sequence[float]) -> list[int]:
    """Different experts of one row, drawn one after the other by their ``use``; empty: all are used alike."""
    left = list(range(experts))
    if sum(use) <= 0:
        return [left.pop(int(next(draws) * len(left))) for _ in range(min(per_token, experts))]
    # The largest of these keys are a draw without replacement. An expert that nobody used comes last.
    keys = [math.log(1.0 - next(draws)) / each if each > 0 else -math.inf for each in use]
    return sorted(left, key=lambda expert: -keys[expert])[:per_token]


def alone_time(model: ModelSizes, node: NodeCosts, tokens: int = 1) -> PassTime:
    """Time of a pass on the CPU of a single machine that holds everything."""
    layers = model.moe_layers
    if tokens <= 1:
        experts = min(model.experts_per_token, model.experts) * node.expert.at(1)
    else:
        counts = _tokens_of((), model.experts, model.experts_per_token, tokens)
        experts = sum(node.expert.at(count) for count in counts)
    shared = node.shared.at(tokens) if node.shared is not None else 0.0
    other = layers * (node.attention.at(tokens) + shared) + node.outside.at(tokens)
    return PassTime(layers * experts, 0.0, other, max(1, tokens))


def costs_of(
    model: ModelSizes,
    expert: Curve,
    memory_read: float,
    layer_overhead_s: float = 0.0,
    fence_s: float = 0.0,
    machine: str = "",
    step_s: float = 0.0,
    central_s: float = 0.0,
) -> NodeCosts:
    """The costs of a node whose experts take ``expert`` and whose memory is read at ``memory_read`` bytes per second.

    A few tokens take the time of reading the trunk. Many take that of its operations, at the rate of the largest
    measured expert. The trunk without the shared experts counts as equal in all layers. ``layer_overhead_s``: seconds
    of a layer beyond its weights. ``step_s``: seconds of a pass beyond its layers.
    """
    points = tuple(sorted({1, *(tokens for tokens in expert.tokens if tokens >= 1)}))
    most = expert.tokens[-1]
    operations = 2.0 * most * model.slab_weights / expert.at(most)
    layers = max(1, model.layers)

    def seconds(tokens: int, weights: int, beside: int = 0) -> float:
        """Seconds of a pass of ``tokens`` through ``weights`` bytes that also reads ``beside`` bytes of other data."""
        reading = (weights + beside) / memory_read
        return max(reading, 2.0 * tokens * weights * model.weights_per_trunk_byte / operations if operations else 0.0)

    shared = model.shared_bytes if model.moe_layers else 0
    cached = model.cache_bytes(DECODE_CONTEXT)
    trunk = [seconds(tokens, model.trunk_bytes - shared, cached) for tokens in points]
    per_layer = tuple(trunk_s / layers + layer_overhead_s for trunk_s in trunk)
    dense = layers - model.moe_layers
    per_moe = tuple(seconds(tokens, shared) / model.moe_layers for tokens in points) if shared else ()
    return NodeCosts(
        expert=expert,
        attention=Curve(points, per_layer),
        outside=Curve(points, tuple(step_s + dense * trunk_s for trunk_s in per_layer)),
        shared=Curve(points, per_moe) if per_moe else None,
        fence_s=fence_s,
        central_s=central_s,
        machine=machine,
    )


def measured_costs(
    model: ModelSizes, alone: PassTime, fence_s: float = 0.0, central_s: float = 0.0, machine: str = ""
) -> NodeCosts:
    """The costs of a node on which a decoding step alone took ``alone``, for predicting a ring of such nodes.

    ``fence_s`` and ``central_s`` as in :class:`NodeCosts`. Raises ValueError without routed experts.
    """
    routes = model.moe_layers * min(model.experts_per_token, model.experts)
    if not routes:
        raise ValueError("a model without experts has none to be measured")
    layer = alone.other_s / max(1, model.layers)
    return NodeCosts(
        expert=Curve((1,), (alone.moe_s / routes,)),
        attention=Curve((1,), (layer,)),
        outside=Curve((1,), (alone.other_s - model.moe_layers * layer,)),
        fence_s=fence_s,
        central_s=central_s,
        machine=machine,
    )


def expert_seconds(model: ModelSizes, placement: Placement, nodes: Sequence[NodeCosts]) -> list[float]:
    """Seconds per expert of each node. Nodes divide by it the routes that several could run.

    Raises ValueError for another number of nodes than the placement's.
    """
    if len(nodes) != placement.nodes:
        raise ValueError(f"a placement on {placement.nodes} nodes needs as many costs, not {len(nodes)}")
    return [node.expert_s(model, placement.count_of(rank)) for rank, node in enumerate(nodes)]


def _resident(node: NodeCosts, placement: Placement, rank: int, popularity: Sequence[Sequence[float]]) -> float:
    """Fraction of the routes of ``node`` whose experts its GPU keeps: the most used of its experts."""
    if node.gpu is None or not placement.count_of(rank):
        return 0.0
    if not popularity or node.gpu.policy.cache.kind == "layers":
        return node.gpu.resident(placement.count_of(rank))
    slots = node.gpu.slabs / len(placement.layers)
    caught = total = 0.0
    for row, holders in zip(popularity, placement.holders, strict=True):
        mine = sorted((use for use, ranks in zip(row, holders, strict=True) if rank in ranks), reverse=True)
        if sum(mine) > 0:
            caught += sum(mine) * Shares(tuple(use / sum(mine) for use in mine)).caught(slots)
            total += sum(mine)
    return caught / total if total else node.gpu.resident(placement.count_of(rank))


def _of_outcomes(
    model: ModelSizes,
    placement: Placement,
    nodes: Sequence[NodeCosts],
    wire: WireSpeed,
    setting: RingSetting,
    outcomes: LoadOutcomes,
    weights: Sequence[float],
    resident: Sequence[float],
) -> PassTime:
    layers = len(placement.layers)
    held = [placement.count_of(rank) / layers if layers else 0.0 for rank in range(placement.nodes)]
    whole = whole_weights(weights, placement.nodes)
    moe = exchange = attention = 0.0
    for chance, counts in outcomes.outcomes:
        run = _with_spare(counts, held, whole, setting.loading)
        experts = [node.decode_s(n, there) for n, node, there in zip(run, nodes, resident, strict=True)]
        trunk, computing, travelling = _layer(nodes, setting, wire, model, 1, experts, counts)
        attention, moe, exchange = attention + chance * trunk, moe + chance * computing, exchange + chance * travelling
    outside = _together(nodes, [node.outside.at(1) for node in nodes], setting)
    return PassTime(layers * moe, layers * exchange, layers * attention + outside)


def _with_spare(counts: Sequence[int], held: Sequence[float], weights: Sequence[int], rule: LoadingRule) -> list[float]:
    """Expected experts that each node runs, including those whose results are thrown away."""
    if rule == "selected":
        return [float(n) for n in counts]
    if rule == "busy-full":
        return list(held)
    owners = [rank for rank, n in enumerate(counts) for _ in range(n)]
    return [min(max(held[rank], n), n + spare_quota(owners, rank, weights)) for rank, n in enumerate(counts)]


def _layer(
    nodes: Sequence[NodeCosts],
    setting: RingSetting,
    wire: WireSpeed,
    model: ModelSizes,
    tokens: int,
    experts: Sequence[float],
    rows: Sequence[int],
) -> tuple[float, float, float]:
    """Seconds of a MoE layer until the last node is done, as (attention and router, experts, exchange).

    ``experts``: seconds per node. ``rows``: number of routes that each node runs.
    """
    peers = len(nodes) - 1
    trunks = [node.attention.at(tokens) for node in nodes]
    shared = [node.shared.at(tokens) if node.shared is not None else 0.0 for node in nodes]
    row = model.hidden * setting.word_bytes
    if setting.mode == "central":
        out = wire.seconds(peers * tokens * (model.hidden * 4 + model.experts_per_token * 8), peers)
        back = wire.seconds(sum(rows[1:]) * model.hidden * 4, peers)
        experts = [experts[0] + shared[0], *experts[1:]]
        central = max(node.central_s for node in nodes) if peers else 0.0
        travelling = _rehearsed(wire, tokens, out + back + central)
        return trunks[0], _together(nodes, experts, setting), travelling
    sent = max(rows) * row if setting.mode == "exact" else tokens * row
    fence = max(node.fence_s for node in nodes) if peers else 0.0
    travelling = _rehearsed(wire, tokens, wire.seconds(peers * sent, peers) + fence)
    # What the wire does not hide is computing, like the rest of the trunk.
    left = max(0.0, _together(nodes, shared, setting) - travelling)
    trunk = _together(nodes, trunks, setting)
    both = _together(nodes, [a + b for a, b in zip(trunks, experts, strict=True)], setting)
    return trunk + left, max(0.0, both - trunk), travelling


def _rehearsed(wire: WireSpeed, tokens: int, added_up: float) -> float:
    """Seconds of a layer beside trunk and experts: the rehearsed value if it was for so many tokens, otherwise
    ``added_up``."""
    return added_up if wire.layer_s is None or tokens != 1 else wire.layer_s


def _together(nodes: Sequence[NodeCosts], seconds: Sequence[float], setting: RingSetting) -> float:
    """Seconds until all nodes are done with ``seconds`` of work each. Nodes on one machine share it."""
    work: dict[str, list[float]] = {}
    for node, each in zip(nodes, seconds, strict=True):
        if node.machine:
            work.setdefault(node.machine, []).append(each)
    return max(max(seconds, default=0.0), *(sharing_s(each, setting.at_once) for each in work.values()), 0.0)


def sharing_s(work: Sequence[float], at_once: float) -> float:
    """Seconds until processes of one machine are done with ``work`` (seconds of each alone), if all begin now.

    A single process does one second's work per second. Several share the machine equally, which does at most
    ``at_once``.
    """
    total = done = 0.0
    for place, each in enumerate(sorted(work)):
        busy = len(work) - place
        total += (each - done) * busy / min(float(busy), at_once)
        done = each
    return total


def _tokens_of(use: Sequence[float], experts: int, per_token: int, tokens: int) -> list[int]:
    """Expected tokens per expert for ``tokens`` tokens."""
    total = sum(use)
    if total <= 0:
        return expected_tokens(Shares.even(experts), per_token, tokens)
    order = sorted(range(experts), key=lambda expert: (-use[expert], expert))
    ranked = expected_tokens(Shares(tuple(use[expert] / total for expert in order)), per_token, tokens)
    counts = [0] * experts
    for expert, count in zip(order, ranked, strict=True):
        counts[expert] = count
    return counts
