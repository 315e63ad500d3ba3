"""Which layer or node takes longest, found and in words. Pure; no Textual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from app.text_safety import one_line
from engine.ipc.messages import LayerTimes, NodeTimes, PhaseTimes, Timing

PARTS = ("attention", "router", "experts", "exchange", "wait", "other")
"""The parts of a layer's time, in the order in which they are shown."""
WAITING = ("exchange", "wait")
"""The parts in which a node of a ring waits for others."""


def total(times: LayerTimes) -> float:
    """Milliseconds of a layer."""
    return sum(float(getattr(times, name)) for name in PARTS)


def slowest_layers(layers: Sequence[LayerTimes], count: int = 3) -> list[tuple[int, float, str]]:
    """The ``count`` slowest layers: index, milliseconds per token, and the part that took longest."""
    order = sorted(range(len(layers)), key=lambda index: total(layers[index]), reverse=True)
    return [
        (index, total(layers[index]), max(PARTS, key=lambda part: float(getattr(layers[index], part))))
        for index in order[:count]
        if total(layers[index]) > 0
    ]


def work_of(times: LayerTimes) -> float:
    """Milliseconds in which the node itself worked. The other nodes wait for the longest."""
    return sum(float(getattr(times, name)) for name in PARTS if name not in WAITING)


@dataclass(frozen=True)
class Slowest:
    """The slowest node of one layer, its times, and how much longer than the fastest it worked."""

    node: int
    times: LayerTimes
    gap: float
    """Milliseconds a token."""


def slowest_by_layer(nodes: Sequence[Sequence[LayerTimes]]) -> list[Slowest]:
    """The slowest node of each layer that all nodes measured; of equals the first. ``nodes``: each node's layers."""
    if not nodes:
        return []
    found = []
    for layer in range(min(map(len, nodes))):
        work = [work_of(node[layer]) for node in nodes]
        slowest = max(range(len(work)), key=work.__getitem__)
        found.append(Slowest(slowest, nodes[slowest][layer], work[slowest] - min(work)))
    return found


def node_name(node: NodeTimes) -> str:
    """The machine's name, or its number: ranks count from 0, numbers for people from 1."""
    return one_line(node.name) or f"node {node.rank + 1}"


def slowest_layer_words(layers: Sequence[LayerTimes]) -> str:
    """``Layer 12 takes longest: experts 1.9 of 2.4 ms``; empty if nothing was measured."""
    found = slowest_layers(layers, 1)
    if not found:
        return ""
    index, time, part = found[0]
    return f"Layer {index} takes longest: {part} {_ms(float(getattr(layers[index], part)))} of {_ms(time)} ms"


def slowest_node_words(nodes: Sequence[NodeTimes], phase: str) -> str:
    """``studio is slowest in 9 of 12 layers``; empty if nothing was measured. ``phase``: ``decode`` or ``prefill``."""
    found = slowest_by_layer([getattr(node, phase).layers for node in nodes])
    if not any(work_of(layer.times) for layer in found):
        return ""
    (node, count), *_ = Counter(layer.node for layer in found).most_common(1)
    return f"{node_name(nodes[node])} is slowest in {count} of {len(found)} layers"


def slowest_words(timing: Timing) -> str:
    """What a decoding step waits for longest: the slowest node of a ring, otherwise the slowest layer."""
    if len(timing.nodes) > 1:
        return slowest_node_words(timing.nodes, "decode")
    return slowest_layer_words(timing.nodes[0].decode.layers if timing.nodes else timing.decode.layers)


def timing_words(timing: Timing) -> list[str]:
    """The times of both phases in sentences."""
    if len(timing.nodes) > 1:
        lines = [slowest_node_words(timing.nodes, "decode")]
        lines += [f"{node_name(node)}: {line}" for node in timing.nodes for line in _phases(node.decode, node.prefill)]
    else:
        whole = timing.nodes[0] if timing.nodes else timing
        lines = [slowest_layer_words(whole.decode.layers), *_phases(whole.decode, whole.prefill)]
    return [f"{line}." for line in lines if line]


def _phases(decode: PhaseTimes, prefill: PhaseTimes) -> list[str]:
    lines = []
    for name, phase in (("Decoding", decode), ("Prefill", prefill)):
        if not phase.tokens:
            continue
        sums = {part: sum(float(getattr(layer, part)) for layer in phase.layers) for part in PARTS}
        sums["other"] += phase.outside_layers
        whole = sum(sums.values()) or 1.0
        shares = [f"{part} {value / whole:.0%}" for part, value in sums.items() if value > 0]
        lines.append(f"{name} {_ms(phase.per_token)} ms per token: {', '.join(shares)}")
    return lines


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"
