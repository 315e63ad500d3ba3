"""What a policy would take for recorded routes: policy, cache and calibration over a trace. Pure.

This replays decisions, not models: every MoE layer takes the later of both sides by :mod:`engine.planning.balancing`,
and between the layers the GPU's cache changes as the policy's rule says. What the trunk takes is added by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.planning.balancing import load_of
from engine.planning.calibration import Calibration
from engine.planning.policy import CLEARLY, FEW_TOKENS, ActiveExpert, CacheRule, Policy

HALF_LIFE_STEPS = 64
"""Steps after which a use counts half, where the rule weighs frequency."""

Key = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True)
class Step:
    """The routes of one forward pass of ``rows`` tokens: per MoE layer, (expert, its tokens) of the active experts."""

    rows: int
    layers: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Replayed:
    """Sums over the replayed steps; seconds and bytes."""

    seconds: tuple[float, ...]
    """Of each step, MoE layers only."""
    weight_bytes: int = 0
    activation_bytes: int = 0
    hits: int = 0
    misses: int = 0
    moved: int = 0
    learned: int = 0
    """Experts copied while the link was idle: in ``weight_bytes``, not in the seconds."""
    cpu_s: float = 0.0
    gpu_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def hit_rate(self) -> float:
        """Of the active experts, the share that was in GPU memory."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


class ReplayedCache:
    """Which experts are on the GPU. ``slots`` in all; ``order`` is the most popular (layer, expert) first.

    Rules of scope ``layer`` have equal parts of the slots. Where frequency counts, the first experts there are worth
    what an expert of average use is worth after long use (one token to ``per_token`` experts each step): else one pass
    over all layers, a prompt, would put them out before their layer's turn, and with them what popularity told.
    Raises ValueError for a negative number of slots.
    """

    def __init__(
        self, rule: CacheRule, slots: int, layers: int, experts: int, order: Iterable[Key] = (), per_token: int = 1
    ) -> None:
        if slots < 0:
            raise ValueError(f"a cache has no {slots} slots: give 0 or more")
        self._rule = rule
        self._now = 0.0
        self._half_life = float(HALF_LIFE_STEPS * max(1, layers))
        self._worth: dict[Key, float] = {}
        self._pooled = rule.scope == "global" or rule.kind == "layers"
        kept = 0 if rule.kind == "none" else min(slots, layers * experts)
        self._room = [kept] if self._pooled else [kept // layers] * layers if layers else []
        self._there: list[set[Key]] = [set() for _ in self._room]
        if rule.kind == "layers":
            whole = kept // experts if experts else 0
            order = [(layer, expert) for layer in range(layers - whole, layers) for expert in range(experts)]
        for key in order:
            pool = self._pool(key[0])
            if pool < len(self._room) and len(self._there[pool]) < self._room[pool]:
                self._there[pool].add(key)
                if rule.kind == "lfru" and experts:
                    self._worth[key] = math.log2(max(1, per_token) / experts * HALF_LIFE_STEPS / math.log(2.0))

    def __contains__(self, key: Key) -> bool:
        return key in self._there[self._pool(key[0])]

    def __len__(self) -> int:
        return sum(map(len, self._there))

    def used(self, layer: int, experts: Iterable[int]) -> None:
        """``experts`` of ``layer`` are used now."""
        self._now += 1.0
        for expert in experts:
            key = (layer, expert)
            if self._rule.kind == "lfru":
                now = self._now / self._half_life
                before = self._worth.get(key, -math.inf)
                self._worth[key] = now + math.log2(1.0 + 2.0 ** (before - now))
            else:
                self._worth[key] = self._now

    def hottest(self, layer: int, experts: Iterable[int]) -> int | None:
        """Which of ``experts`` of ``layer`` is worth most."""
        return max(experts, key=lambda expert: self._worth.get((layer, expert), -math.inf), default=None)

    def admit(self, layer: int, expert: int, needed: Iterable[int], evict: bool = True, clearly: bool = False) -> bool:
        """Keep an expert that was copied, in place of the one worth least, if ``evict``; whether it is kept."""
        pool = self._pool(layer)
        there = self._there[pool]
        if not self._rule.admits_moved or not self._room[pool]:
            return False
        if len(there) >= self._room[pool]:
            if not evict:
                return False
            busy = {(layer, other) for other in needed}
            worth, victim = min(((self._worth.get(key, -math.inf), key) for key in there - busy), default=(0.0, None))
            mine = self._worth.get((layer, expert), -math.inf)
            margin = CLEARLY if clearly else 0.0
            if victim is None or (self._rule.kind == "lfru" and worth + margin > mine):
                return False
            there.remove(victim)
        there.add((layer, expert))
        return True

    def _pool(self, layer: int) -> int:
        return 0 if self._pooled else layer


def replay(
    trace: Sequence[Step],
    policy: Policy,
    calibration: Calibration,
    slots: int,
    experts: int,
    order: Iterable[Key] = (),
    warm_up: int = 0,
    overlap: bool = True,
) -> Replayed:
    """What ``policy`` takes for ``trace`` with ``slots`` experts on the GPU, seeded with the first of ``order``.

    The first ``warm_up`` steps change the cache and the policy, and are not counted. ``experts`` is per layer. Without
    ``overlap`` a layer takes the sum of its experts and copies, as programs do that run one after the other.
    """
    layers = max((len(step.layers) for step in trace), default=0)
    per_token = round(
        max((_routes(step) / (step.rows * layers) for step in trace if step.rows and layers), default=1.0)
    )
    cache = ReplayedCache(policy.cache, slots, layers, experts, order, per_token)
    counted, idle = _Sums(), 0
    for place, step in enumerate(trace):
        if place == warm_up:
            counted = _Sums()
        counted.seconds.append(0.0)
        may_learn, few = policy.cache.learns and step.rows <= FEW_TOKENS, step.rows <= FEW_TOKENS
        for layer, routes in enumerate(step.layers):
            before = counted.moved
            policy, missed = _layer(layer, routes, policy, calibration, cache, experts, counted, few, overlap)
            idle = 0 if counted.moved > before else idle + 1
            hottest = cache.hottest(layer, missed) if may_learn and idle >= layers else None
            if hottest is not None and cache.admit(layer, hottest, [expert for expert, _ in routes], clearly=True):
                counted.learned += 1
                may_learn = False
    return counted.result()


def _routes(step: Step) -> int:
    return sum(tokens for layer in step.layers for _, tokens in layer)


class _Sums:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.copied = self.sent = self.hits = self.misses = self.moved = self.learned = 0
        self.cpu_s = self.gpu_s = 0.0
        self.slab_bytes = self.token_bytes = 0

    def result(self) -> Replayed:
        return Replayed(
            seconds=tuple(self.seconds),
            weight_bytes=(self.copied + self.learned) * self.slab_bytes,
            activation_bytes=self.sent * self.token_bytes,
            hits=self.hits,
            misses=self.misses,
            moved=self.moved,
            learned=self.learned,
            cpu_s=self.cpu_s,
            gpu_s=self.gpu_s,
        )


def _layer(
    layer: int,
    routes: Sequence[tuple[int, int]],
    policy: Policy,
    calibration: Calibration,
    cache: ReplayedCache,
    experts: int,
    counted: _Sums,
    few: bool,
    overlap: bool,
) -> tuple[Policy, list[int]]:
    """The policy for the next layer, and the missing experts that the CPU ran."""
    active = [ActiveExpert(expert, tokens, (layer, expert) in cache) for expert, tokens in routes]
    decision = policy.decide(layer, active, calibration)
    needed = [each.expert for each in active]
    cache.used(layer, needed)
    moved = [each for each, place in zip(active, decision.places, strict=True) if place == "pmove"]
    for each in moved:
        cache.admit(layer, each.expert, needed, evict=few)
    hits = sum(each.resident for each in active)
    if overlap:
        counted.seconds[-1] += max(decision.cpu_s, decision.gpu_s)
    else:
        load = load_of(active, decision.places, calibration)
        unused = experts - len(active) if policy.cache.copies_whole_layer else 0
        copying = (load.copies + unused) * calibration.weight_copy
        counted.seconds[-1] += load.cpu + load.resident + load.moved + copying
    counted.hits += hits
    counted.misses += len(active) - hits
    counted.moved += len(moved)
    counted.copied += experts if policy.cache.copies_whole_layer else len(moved)
    counted.sent += sum(e.tokens for e, place in zip(active, decision.places, strict=True) if place == "amove")
    counted.cpu_s += decision.cpu_s
    counted.gpu_s += decision.gpu_s
    counted.slab_bytes = calibration.shape.expert_bytes
    # Float32 there, float32 back: what the CPU's kernels take and give.
    counted.token_bytes = 2 * 4 * calibration.shape.hidden
    missed = [e.expert for e, place in zip(active, decision.places, strict=True) if place == "amove" and not e.resident]
    return policy.observe(layer, decision, decision.cpu_s, decision.gpu_s), missed
