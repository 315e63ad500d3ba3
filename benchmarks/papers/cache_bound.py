"""How close a GPU's cache of experts comes to the best that knows the future, on routes of a real model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.papers.replay import Key, ReplayedCache, Step
from engine.planning.policy import CacheRule
from engine.runtimes.protocol import LoadedModel

RULES = {
    "static, most popular": CacheRule("static", admits_moved=False, scope="global"),
    "LRU per layer": CacheRule("lru", admits_moved=True, scope="layer"),
    "LRU": CacheRule("lru", admits_moved=True, scope="global"),
    "ours (LFRU)": CacheRule("lfru", admits_moved=True, scope="global"),
}


def hit_rate(
    rule: CacheRule, trace: Sequence[Step], slots: int, layers: int, experts: int, order: Sequence[Key]
) -> float:
    """Share of the active experts that ``rule`` has on the GPU; every missed one is offered to the cache."""
    per_token = max((len(layer) for step in trace for layer in step.layers), default=1)
    cache = ReplayedCache(rule, slots, layers, experts, order, per_token)
    hits = total = 0
    for step in trace:
        for layer, routes in enumerate(step.layers):
            needed = [expert for expert, _ in routes]
            missed = [expert for expert in needed if (layer, expert) not in cache]
            hits += len(needed) - len(missed)
            total += len(needed)
            cache.used(layer, needed)
            for expert in missed:
                cache.admit(layer, expert, needed)
    return hits / total if total else 0.0


def best_hit_rate(trace: Sequence[Step], slots: int) -> float:
    """Belady's bound: the expert that is needed last goes first, or is not kept at all. It begins with the experts that
    are needed first, so that no cache beats it, whatever it was seeded with."""
    uses: dict[Key, deque[int]] = {}
    wanted = [(layer, expert) for step in trace for layer, routes in enumerate(step.layers) for expert, _ in routes]
    for place, key in enumerate(wanted):
        uses.setdefault(key, deque()).append(place)
    kept = set(sorted(uses, key=lambda each: uses[each][0])[:slots])
    hits = 0
    for key in wanted:
        uses[key].popleft()
        if key in kept:
            hits += 1
        kept.add(key)
        if len(kept) > slots:
            kept.remove(max(kept, key=lambda each: uses[each][0] if uses[each] else len(wanted)))
    return hits / len(wanted) if wanted else 0.0


@contextmanager
def recorded(model: LoadedModel) -> Iterator[list[Step]]:
    """Collects the routes of every pass of ``model`` within it, one step per pass of all layers."""
    recorder = model.recorder
    found: list[Step] = []
    layers: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    before = recorder.enabled

    def note(layer: int, counts: Sequence[int]) -> None:
        if layers and layer <= layers[-1][0]:
            found.append(_step([routes for _, routes in layers]))
            layers.clear()
        layers.append((layer, tuple((expert, int(count)) for expert, count in enumerate(counts) if count)))

    recorder.enabled = True
    recorder.on_routes = note
    try:
        yield found
    finally:
        if layers:
            found.append(_step([routes for _, routes in layers]))
        recorder.enabled = before
        recorder.on_routes = None


def _step(layers: Sequence[tuple[tuple[int, int], ...]]) -> Step:
    return Step(max((tokens for routes in layers for _, tokens in routes), default=0), tuple(layers))


def decoding(trace: Sequence[Step], per_token: int) -> list[Step]:
    """The steps of ``trace`` that are of one token."""
    return [replace(step, rows=1) for step in trace if all(len(layer) == per_token for layer in step.layers)]


def popular(trace: Sequence[Step]) -> list[Key]:
    """(layer, expert) by use in ``trace``, the most used first."""
    counts: dict[Key, int] = {}
    for step in trace:
        for layer, routes in enumerate(step.layers):
            for expert, tokens in routes:
                counts[layer, expert] = counts.get((layer, expert), 0) + tokens
    return sorted(counts, key=lambda key: (-counts[key], key))
