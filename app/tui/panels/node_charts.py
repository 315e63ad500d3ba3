"""Where the time of a token goes on each node of a ring, as ``Content``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from app.text_safety import one_line
from app.tui.panels.charts import PARTS, flowing, parts_of, stacked
from engine.ipc.messages import LayerTimes, NodeTimes

_MUTED = "$foreground-muted"
_WAITING = ("exchange", "wait")
_LONGEST_NAME = 12
_NARROW = 48
"""Cells below which a layer names its slowest node by its number only."""


def work_of(times: LayerTimes) -> float:
    """Milliseconds in which the node itself worked: what the others have to wait for."""
    return sum(float(getattr(times, name)) for name, _, _ in PARTS if name not in _WAITING)


@dataclass(frozen=True)
class Slowest:
    """Of one layer: which node worked longest, on what, and how much longer than the quickest."""

    node: int
    times: LayerTimes
    gap: float
    """Milliseconds a token."""


def slowest_by_layer(nodes: Sequence[Sequence[LayerTimes]]) -> list[Slowest]:
    """For every layer that all nodes measured; the first of equals. ``nodes``: the layers of each node."""
    if not nodes:
        return []
    found = []
    for layer in range(min(map(len, nodes))):
        work = [work_of(node[layer]) for node in nodes]
        slowest = max(range(len(work)), key=work.__getitem__)
        found.append(Slowest(slowest, nodes[slowest][layer], work[slowest] - min(work)))
    return found


def node_line(nodes: Sequence[NodeTimes], shown: int | None, width: int) -> Content:
    """All nodes with the one that is shown marked; ``shown`` None: the overview."""
    items = [Content.assemble(("n ", "bold"), ("node", _MUTED))]
    names = ["all", *map(_label, nodes)]
    chosen = 0 if shown is None else shown + 1
    items += [
        Content.styled(f"[{name}]" if index == chosen else f" {name} ", "bold $text-accent" if index == chosen else "")
        for index, name in enumerate(names)
    ]
    return flowing(items, width)


def overview(nodes: Sequence[NodeTimes], phase: str, width: int) -> Content:
    """Each node's time in a line, then for each layer the node that the others waited for. ``phase``: ``decode`` or
    ``prefill``."""
    times = [node.decode if phase == "decode" else node.prefill for node in nodes]
    lines = [*_summaries(nodes, [time.layers for time in times], width), _legend(width), Content()]
    slowest = slowest_by_layer([time.layers for time in times])
    if not any(work_of(layer.times) for layer in slowest):
        return Content("\n").join([*lines, Content.styled("Nothing was measured yet.", _MUTED)])
    counts = Counter(layer.node for layer in slowest)
    words = [f"{_name(nodes[node])} in {count} of {len(slowest)} layers" for node, count in counts.most_common()]
    lines.append(flowing([Content.styled("Slowest:", "bold"), *map(Content, words)], width))
    return Content("\n").join([*lines, _bars(nodes, slowest, width)])


def _summaries(nodes: Sequence[NodeTimes], times: Sequence[Sequence[LayerTimes]], width: int) -> list[Content]:
    """A bar for each node, all on one scale, with its milliseconds a token in the layers."""
    sums = [[sum(values) for values in zip(*map(parts_of, layers), strict=True)] or [0.0] * len(PARTS)
            for layers in times]  # fmt: skip
    longest = max(map(sum, sums), default=0.0)
    names = max(len(_label(node)) for node in nodes)
    room = max(4, width - names - 10)
    lines = []
    for node, values in zip(nodes, sums, strict=True):
        length = round(room * sum(values) / longest) if longest else 0
        label = Content.styled(f"{_label(node):{names}}  ", "bold")
        lines.append(Content.assemble(label, stacked(values, length), " " * (room - length), f" {sum(values):7.2f}"))
    return lines


def _legend(width: int) -> Content:
    return flowing([Content.assemble((fill, colour), f" {name}") for name, fill, colour in PARTS], width)


def _bars(nodes: Sequence[NodeTimes], slowest: Sequence[Slowest], width: int) -> Content:
    """One bar for each layer: the work of its slowest node, which is named."""
    longest = max(work_of(layer.times) for layer in slowest)
    digits = len(str(len(slowest) - 1))
    labels = [_label(nodes[layer.node]) if width >= _NARROW else _number(nodes[layer.node]) for layer in slowest]
    names = max(map(len, labels))
    room = max(4, width - digits - names - 18)
    lines = [Content.styled(f"{'':{digits + names + room + 3}} {'ms':>7} {'gap':>6}", _MUTED)]
    for index, (layer, label) in enumerate(zip(slowest, labels, strict=True)):
        work = work_of(layer.times)
        values = [0.0 if name in _WAITING else float(getattr(layer.times, name)) for name, _, _ in PARTS]
        length = round(room * work / longest) if longest else 0
        lines.append(
            Content.assemble(
                (f"{index:>{digits}} ", _MUTED), (f"{label:{names}}  ", "bold"), stacked(values, length),
                " " * (room - length), f" {work:7.2f}", (f" {layer.gap:+6.2f}", _MUTED),
            )
        )  # fmt: skip
    return Content("\n").join(lines)


def _label(node: NodeTimes) -> str:
    return f"{_number(node)} {_name(node)}"


def _number(node: NodeTimes) -> str:
    """People count from one, and the head is the first."""
    return str(node.rank + 1)


def _name(node: NodeTimes) -> str:
    name = one_line(node.name) or f"node {_number(node)}"
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
