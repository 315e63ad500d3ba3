"""How GPU and CPU share the experts of a layer: ours, the papers', and the papers' baselines, behind one protocol.

A policy is a pure value. For every MoE layer of a step it is told which experts are active, with how many tokens, and
which of them are in GPU memory, and answers where each runs. What the GPU keeps between steps is the executor's
business, by the policy's :class:`CacheRule`. Every policy gives the same logits; they differ in time and bytes.

==============  ========================================================================================================
``balanced``    default: the later of GPU and CPU is done as soon as possible (engine.planning.balancing)
``twiddler``    Algorithm 1 of the Twiddler paper: each expert by itself, wherever it is done sooner
``monde``       MoNDE's load balancing: the hottest H to the GPU, H from the bandwidths, its factor tuned while running
``layers``      llama.cpp's -ngl: the experts of some layers on the GPU, those of the others on the CPU
``lru-offload`` Mixtral-offloading: always the GPU, a least-recently-used cache per layer
``stream``      ZeRO-Infinity: always the GPU, a layer's experts copied every time, all of them
``on-demand``   the MoNDE paper's GPU+PM: always the GPU, a layer's active experts copied every time
==============  ========================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from engine.ipc.messages import ExpertPolicy
from engine.planning.balancing import ActiveExpert, Place, layer_sides, share
from engine.planning.calibration import Calibration

__all__ = [
    "ActiveExpert",
    "Balanced",
    "CacheRule",
    "Decision",
    "Layers",
    "LeastRecentlyUsed",
    "Monde",
    "Observed",
    "OnDemand",
    "Place",
    "Policy",
    "Stream",
    "Twiddler",
    "hot_experts",
    "policy_named",
]

FEW_TOKENS = 64
"""Maximum tokens of a pass in which a moved expert may replace another in the cache. A long prefill uses nearly all
experts of a layer and would evict those that decoding needs."""

CLEARLY = 1.0
"""Difference in worth (see CacheRule) from which an expert counts as used clearly more often: twice as often."""

CacheKind = Literal["none", "static", "layers", "lru", "lfru"]
_TUNING_STEPS = 32
"""Maximum steps of one tuning. Each step goes to a better neighbour, so this only bounds its time."""


@dataclass(frozen=True)
class CacheRule:
    """The rule by which the GPU keeps experts between steps.

    ``none``: nothing. ``static``: the most popular experts, chosen at load. ``layers``: all experts of as many layers
    as fit. ``lru``: the most recently used. ``lfru``: those used often and recently. It is seeded with the most
    popular, which count as long used: one long prompt, which uses every expert of every layer once, does not evict
    them.
    """

    kind: CacheKind
    admits_moved: bool
    """Whether a copied expert takes the place of another one. Otherwise its copy is dropped after use."""
    scope: Literal["layer", "global"]
    """``global``: one pool of slots for all layers. ``layer``: each layer has the same number of slots."""
    learns: bool = False
    """Whether, while no expert is copied to be run, one expert a step is copied in place of one that is used clearly
    less. So the cache follows the person's use even where copying never pays within a layer."""
    copies_whole_layer: bool = False
    """Whether all experts of a layer are copied, active or not, as in systems that stream layers."""


@dataclass(frozen=True)
class Decision:
    """The places of the active experts, in their order, and the predicted seconds of the CPU's and the GPU's work."""

    places: tuple[Place, ...]
    cpu_s: float
    gpu_s: float
    active: tuple[ActiveExpert, ...] = field(default=(), repr=False, compare=False)
    calibration: Calibration | None = field(default=None, repr=False, compare=False)


class Policy(Protocol):
    """A frozen value. Deciding changes nothing, and observing gives the next policy."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> ExpertPolicy: ...

    @property
    def cache(self) -> CacheRule: ...

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        """Decide where the ``active`` experts of ``layer`` run. Raises ValueError if the calibration knows no GPU."""
        ...

    def observe(self, layer: int, decision: Decision, cpu_s: float, gpu_s: float) -> Policy:
        """The policy for the next layer, after ``decision`` took ``cpu_s`` and ``gpu_s`` seconds on the two sides."""
        ...


def _decided(active: Sequence[ActiveExpert], places: Sequence[Place], calibration: Calibration) -> Decision:
    cpu, gpu = layer_sides(active, places, calibration)
    return Decision(tuple(places), cpu, gpu, tuple(active), calibration)


@dataclass(frozen=True)
class _Unchanging:
    """A policy that learns nothing."""

    def observe(self, layer: int, decision: Decision, cpu_s: float, gpu_s: float) -> Policy:
        return self  # type: ignore[return-value]


@dataclass(frozen=True)
class Balanced(_Unchanging):
    """Policy by which the later of both sides is done as soon as possible.

    A resident expert also goes to the CPU if that lowers the maximum. Its weights are in the host's memory anyway, so
    it costs the CPU no more than any other, and the GPU may be the busier side (many residents, long prefill).
    """

    name: ExpertPolicy = "balanced"
    cache: CacheRule = CacheRule("lfru", admits_moved=True, scope="global", learns=True)

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        pairs = [(each.tokens, each.resident) for each in active]
        kinds = tuple(sorted([(*pair, count) for pair, count in Counter(pairs).items()]))
        left = {kind[:2]: there for kind, there in zip(kinds, share(kinds, calibration), strict=True) if there}
        places: list[Place] = []
        for pair in pairs:
            if left.get(pair):
                left[pair] -= 1
                places.append("amove")
            else:
                places.append("gpu" if pair[1] else "pmove")
        return _decided(active, places, calibration)


FITTED_TOKENS = 32
"""Number of tokens up to which Twiddler's line is fitted to the CPU's times: figure 7 of its paper has few tokens, and
more go to the GPU in any case."""


@dataclass(frozen=True)
class Twiddler(_Unchanging):
    """Algorithm 1 of the Twiddler paper: a resident expert runs where it is; another is copied if the GPU, copy
    included, beats the CPU.

    In the paper's model the GPU takes a constant time, and the CPU a constant times the tokens. The GPU's constant is
    its time for one token. The CPU's is fitted to all measured numbers of tokens up to FITTED_TOKENS. Experts are
    judged one by one, as if nothing else ran at the same time.
    """

    name: ExpertPolicy = "twiddler"
    cache: CacheRule = CacheRule("static", admits_moved=False, scope="global")

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        if calibration.gpu is None:
            raise ValueError(
                f"the calibration of {calibration.machine!r} has no GPU: measure one before sharing experts"
            )
        copied = calibration.gpu.at(1) + calibration.weight_copy
        slope = calibration.cpu.slope(FITTED_TOKENS)
        places: list[Place] = [
            "gpu" if each.resident else "pmove" if slope * each.tokens > copied else "amove" for each in active
        ]
        return _decided(active, places, calibration)


def hot_experts(active: int, pcie_rate: float, near_rate: float, alpha: float = 1.0) -> float:
    """Number of ``active`` experts that the GPU should get, by MoNDE's equation 6. The rates share one unit."""
    return alpha * pcie_rate / (near_rate + pcie_rate) * active


@dataclass(frozen=True)
class Observed:
    """A decision and the seconds that either side took for it."""

    decision: Decision
    cpu_s: float
    gpu_s: float

    @property
    def missing(self) -> int:
        """Number of active experts that were not in GPU memory."""
        return sum(1 for each in self.decision.active if not each.resident)


@dataclass(frozen=True)
class Monde:
    """MoNDE's load balancing: the ``H`` experts with the most tokens go to the GPU, the others stay near their memory.

    The near-data unit is this machine's CPU, its bandwidth the measured rate of streaming weights. The paper keeps no
    expert on the GPU. An expert that is resident nevertheless runs there and does not count towards H.

    ``alpha`` is tuned as in section 3.3. Every ``period`` layers, the last ``window`` of them are costed again with H
    one expert larger or smaller, both sides' costs scaled by the measurements, until no neighbour is better.
    """

    alpha: float = 1.0
    period: int = 16
    window: int = 8
    seen: int = 0
    recent: tuple[Observed, ...] = field(default=(), repr=False)
    name: ExpertPolicy = "monde"
    cache: CacheRule = CacheRule("none", admits_moved=False, scope="layer")

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        missing = [place for place, each in enumerate(active) if not each.resident]
        hot = round(self.alpha * _hot_share(calibration) * len(missing))
        to_gpu = set(sorted(missing, key=lambda place: (-active[place].tokens, place))[:hot])
        places: list[Place] = [
            "gpu" if each.resident else "pmove" if place in to_gpu else "amove" for place, each in enumerate(active)
        ]
        return _decided(active, places, calibration)

    def observe(self, layer: int, decision: Decision, cpu_s: float, gpu_s: float) -> Monde:
        recent = (*self.recent, Observed(decision, cpu_s, gpu_s))[-self.window :]
        next_policy = replace(self, seen=self.seen + 1, recent=recent)
        return next_policy if next_policy.seen % self.period else next_policy.tuned()

    def tuned(self) -> Monde:
        """The same policy with the best ``alpha`` among its neighbours for what was observed."""
        seen = [each for each in self.recent if each.missing and each.decision.calibration is not None]
        shares = [_hot_share(each.decision.calibration) * each.missing for each in seen if each.decision.calibration]
        step = 1.0 / max(shares, default=0.0) if shares and max(shares) > 0 else 0.0
        if not step:
            return self
        costs: dict[float, float] = {}
        alpha = self.alpha
        for _ in range(_TUNING_STEPS):
            for near in (max(0.0, alpha - step), alpha, alpha + step, alpha + 2 * step):
                if near not in costs:
                    costs[near] = replace(self, alpha=near)._cost(seen)
            best = min(costs, key=lambda near: (costs[near], abs(near - self.alpha)))
            if best == alpha:
                break
            alpha = best
        return replace(self, alpha=alpha)

    def _cost(self, seen: Sequence[Observed]) -> float:
        """Seconds that the observed layers would take with this alpha."""
        cpu_scale = _scale([(observed.cpu_s, observed.decision.cpu_s) for observed in seen])
        gpu_scale = _scale([(observed.gpu_s, observed.decision.gpu_s) for observed in seen])
        total = 0.0
        for observed in seen:
            if observed.decision.calibration is not None:
                decision = self.decide(0, observed.decision.active, observed.decision.calibration)
                total += max(cpu_scale * decision.cpu_s, gpu_scale * decision.gpu_s)
        return total


def _hot_share(calibration: Calibration) -> float:
    """Equation 6 for one expert with alpha 1, from the measured rates; 1.0 if copies cost nothing."""
    if calibration.weight_copy <= 0.0:
        return 1.0
    return hot_experts(1, calibration.shape.expert_bytes / calibration.weight_copy, calibration.memory_read)


def _scale(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured over predicted seconds; 1.0 if nothing was predicted or measured."""
    measured, predicted = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return measured / predicted if measured > 0.0 and predicted > 0.0 else 1.0


@dataclass(frozen=True)
class Layers(_Unchanging):
    """Policy with whole layers on the GPU and the others on the CPU, whatever the number of tokens."""

    name: ExpertPolicy = "layers"
    cache: CacheRule = CacheRule("layers", admits_moved=False, scope="layer")

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        return _decided(active, ["gpu" if each.resident else "amove" for each in active], calibration)


@dataclass(frozen=True)
class LeastRecentlyUsed(_Unchanging):
    """Policy with everything on the GPU. Copied experts stay until others were used more recently."""

    name: ExpertPolicy = "lru-offload"
    cache: CacheRule = CacheRule("lru", admits_moved=True, scope="layer")

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        return _decided(active, ["gpu" if each.resident else "pmove" for each in active], calibration)


@dataclass(frozen=True)
class Stream(_Unchanging):
    """Policy with everything on the GPU, nothing kept, and inactive experts copied, too.

    ``experts``: number of the layer's experts, which allows predictions to count the copies of inactive ones; None:
    unknown.
    """

    experts: int = 0
    name: ExpertPolicy = "stream"
    cache: CacheRule = CacheRule("none", admits_moved=False, scope="layer", copies_whole_layer=True)

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        decision = _decided(active, ["gpu" if each.resident else "pmove" for each in active], calibration)
        unused = max(0, self.experts - len(active))
        if not unused:
            return decision
        gpu = decision.gpu_s + unused * calibration.weight_copy
        return Decision(decision.places, decision.cpu_s, gpu, decision.active, calibration)


@dataclass(frozen=True)
class OnDemand(_Unchanging):
    """Policy with everything on the GPU, nothing kept, and only active experts copied: GPU+PM, the MoNDE paper's
    baseline."""

    name: ExpertPolicy = "on-demand"
    cache: CacheRule = CacheRule("none", admits_moved=False, scope="layer")

    def decide(self, layer: int, active: Sequence[ActiveExpert], calibration: Calibration) -> Decision:
        return _decided(active, ["gpu" if each.resident else "pmove" for each in active], calibration)


def policy_named(name: ExpertPolicy, experts_per_layer: int = 0) -> Policy:
    """The policy called ``name``. ``experts_per_layer`` serves predictions of ``stream``. Raises KeyError for other
    names."""
    policies: dict[ExpertPolicy, Policy] = {
        "balanced": Balanced(),
        "twiddler": Twiddler(),
        "monde": Monde(),
        "layers": Layers(),
        "lru-offload": LeastRecentlyUsed(),
        "stream": Stream(experts=experts_per_layer),
        "on-demand": OnDemand(),
    }
    return policies[name]
