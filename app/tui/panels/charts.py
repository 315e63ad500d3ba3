"""Timing bars and the heat map of expert use, as ``Content``. Readable without colour: every part has its own fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from app.chat.words import WAITING, Slowest, node_name, rate, size, slowest_by_layer, slowest_layers, total, work_of
from app.tui.render.formatting import flowing
from app.tui.terminal.colours import HEATS
from engine.ipc.messages import ExpertMovement, LayerTimes, NodeTimes, PhaseTimes, Timing

PARTS: tuple[tuple[str, str, str], ...] = (
    ("attention", "█", "$primary"),
    ("router", "▚", "$success"),
    ("experts", "▓", "$accent"),
    ("exchange", "▒", "$secondary"),
    ("wait", "░", "$error"),
    ("other", "·", "$foreground-muted"),
)
"""Name, fill and colour of each part of a layer's time, in the order in which they are stacked."""

_MUTED = "$foreground-muted"
_SHADES = " ·░▒▓█"
_RESIDENT = "▪"
"""Mark after the figure of an expert that is in GPU memory. Where there is no room for figures, such an expert shows a
digit instead of a shade."""

_LONGEST_NAME = 12
_NARROW = 48
"""Width in cells below which a layer shows its slowest node's number without the name."""


def parts_of(times: LayerTimes) -> list[float]:
    """The parts of one layer in the order of :data:`PARTS`, in milliseconds."""
    return [float(getattr(times, name)) for name, _, _ in PARTS]


def cells(values: Sequence[float], width: int) -> list[int]:
    """``width`` cells divided in proportion to ``values``. They add up to ``width``, or to 0 if all values are 0."""
    whole = sum(values)
    if whole <= 0 or width <= 0:
        return [0] * len(values)
    exact = [value * width / whole for value in values]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(values)), key=lambda index: exact[index] - shares[index], reverse=True)
    for index in by_rest[: width - sum(shares)]:
        shares[index] += 1
    return shares


def phase_summary(name: str, phase: PhaseTimes, width: int) -> Content:
    """A phase in a few lines: its time per token, and the share of each part over all layers."""
    if not phase.tokens:
        return Content.assemble((name, "bold"), ("  not measured yet", _MUTED))
    speed = rate(1000 / phase.per_token) if phase.per_token > 0 else ""
    figures = [f"{phase.per_token:.2f} ms per token", speed, f"{phase.tokens:,} tokens"]
    head = [Content.styled(name, "bold"), *[Content(figure) for figure in figures if figure]]
    sums = [sum(values) for values in zip(*(parts_of(layer) for layer in phase.layers), strict=True)] or [0.0] * 6
    sums[-1] += phase.outside_layers
    return Content("\n").join([flowing(head, width), stacked(sums, width), flowing(shares(sums), width)])


def stacked(values: Sequence[float], width: int) -> Content:
    """One stacked bar of ``width`` cells."""
    pieces = [
        (fill * count, colour) for (_, fill, colour), count in zip(PARTS, cells(values, width), strict=True) if count
    ]
    return Content.assemble(*pieces)


def shares(values: Sequence[float]) -> list[Content]:
    """The legend with the share of each part. Parts that took no time are left out."""
    whole = sum(values) or 1.0
    return [
        Content.assemble((fill, colour), f" {name} {100 * value / whole:.0f}%")
        for (name, fill, colour), value in zip(PARTS, values, strict=True)
        if value > 0
    ]


def layer_bars(layers: Sequence[LayerTimes], width: int) -> Content:
    """One bar for each layer with its milliseconds per token. All bars have the same scale."""
    longest = max((total(layer) for layer in layers), default=0.0)
    if longest <= 0:
        return Content.styled("Nothing has been measured yet.", _MUTED)
    digits = len(str(len(layers) - 1))
    room = max(4, width - digits - 9)
    named = {index for index, _, _ in slowest_layers(layers)}
    lines = []
    for index, layer in enumerate(layers):
        length = round(room * total(layer) / longest)
        bar = stacked(parts_of(layer), length)
        style = "bold $text-warning" if index in named and len(layers) > 3 else ""
        figure = (f" {total(layer):7.2f}", style)
        lines.append(Content.assemble((f"{index:>{digits}} ", style or _MUTED), bar, " " * (room - length), figure))
    return Content("\n").join(lines)


# --- sharing experts between GPU and CPU --------------------------------------------------------------------------


def movement(moved: ExpertMovement, width: int) -> Content:
    """Bytes moved per token, the hit rate of the GPU's experts, and the times in which GPU and CPU worked."""
    tokens = max(1, moved.tokens)
    active = moved.hits + moved.misses
    first = [
        Content.styled("Experts on GPU and CPU", "bold"),
        Content(f"moved per token: weights {size(moved.weight_bytes / tokens)}"),
        Content(f"activations {size(moved.activation_bytes / tokens)}"),
    ]
    if active:
        first.append(Content(f"hit rate {moved.hits / active:.0%}"))
        if moved.misses:
            first.append(Content.styled(f"{moved.moved / moved.misses:.0%} of misses copied", _MUTED))
    lines = [flowing(first, width)]
    if moved.total_s > 0:
        busy = {"GPU busy": moved.gpu_s, "CPU busy": moved.cpu_s, "both busy": moved.both_s}
        times = [Content(f"{name} {seconds / moved.total_s:.0%}") for name, seconds in busy.items()]
        lines.append(flowing([*times, Content.styled("of the experts' time", _MUTED)], width))
    return Content("\n").join(lines)


# --- the heat map -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell of the heat map: how often its expert was used, and whether it is in GPU memory."""

    count: int
    resident: bool = False


def group_columns(rows: Sequence[Sequence[Cell]], most: int) -> tuple[list[list[Cell]], int]:
    """At most ``most`` columns: neighbours are joined, each column showing the busiest of its group.

    Returns the table and the number of experts in a column.
    """
    count = max((len(row) for row in rows), default=0)
    group = max(1, -(-count // max(1, most)))

    def joined(row: Sequence[Cell], start: int) -> Cell:
        return max(row[start : start + group], key=lambda cell: (cell.count, cell.resident))

    return [[joined(row, start) for start in range(0, len(row), group)] for row in rows], group


def heat_map(timing: Timing, width: int) -> Content:
    """The use of experts: rows are layers, columns experts. The busiest expert of the model is 1, as in the papers."""
    rows = _cells_of(timing)
    busiest = max((cell.count for row in rows for cell in row), default=0)
    if not busiest and not timing.resident:
        return Content.styled("No expert use has been counted yet.", _MUTED)
    digits = max(len(str(layer)) for layer in timing.moe_layers) if timing.moe_layers else 1
    room = max(1, width - digits - 1)
    table, group = group_columns(rows, room)
    columns = max(len(row) for row in table)
    cell = _cell_width(columns, room)
    lines = [_map_header(columns, group, cell, digits)] if cell >= 3 else []
    for layer, row in zip(timing.moe_layers, table, strict=False):
        pieces = [heat_cell(place.count / max(1, busiest), cell, place.resident) for place in row]
        lines.append(Content.assemble((f"{layer:>{digits}} ", _MUTED), *_joined(pieces)))
    if group > 1:
        lines.append(Content.styled(f"Each column shows the busiest of {group} experts.", _MUTED))
    return Content("\n").join(lines)


def _joined(pieces: Sequence[Content]) -> list[Content]:
    """The same text in fewer pieces: neighbours with the same style are joined."""
    joined: list[tuple[str, str]] = []
    for piece in pieces:
        style = str(piece.spans[0].style) if piece.spans else ""
        if joined and joined[-1][1] == style:
            joined[-1] = joined[-1][0] + piece.plain, style
        else:
            joined.append((piece.plain, style))
    return [Content.styled(text, style) for text, style in joined]


def _cell_width(columns: int, room: int) -> int:
    return max(1, min(6, room // max(1, columns)))


def _cells_of(timing: Timing) -> list[list[Cell]]:
    resident = [set(layer) for layer in timing.resident] or [set()] * len(timing.expert_use)
    return [
        [Cell(count, expert in there) for expert, count in enumerate(row)]
        for row, there in zip(timing.expert_use, resident, strict=False)
    ]


def heat_cell(share: float, width: int, resident: bool = False) -> Content:
    """One cell: a figure if it fits, otherwise a shade, with the colour to match. See :data:`_RESIDENT`."""
    if width >= 4:
        figure = ("1.0" if resident else "1.00") if share >= 0.995 else f"{share:.2f}"[1:]
        text = f"{figure}{_RESIDENT}" if resident else figure
        step = min(HEATS - 1, int(HEATS * share))
        weight = "bold " if resident else ""
        return Content.styled(f"{text:^{width}}", f"{weight}$heat-text-{step} on $heat-{step}")
    if resident:
        return Content.styled(f"{min(9, int(10 * share)):^{width}}", "bold $text-accent")
    step = round(min(1.0, share) * (len(_SHADES) - 1))
    return Content.styled(_SHADES[step] * width, f"$accent {35 + 13 * step}%")


def heat_legend(timing: Timing, width: int) -> Content:
    steps = [0.0, 0.25, 0.5, 0.75, 1.0]
    cell = 6 if width >= 46 else 4
    scale = Content.assemble(("rarely ", _MUTED), *[heat_cell(step, cell) for step in steps], (" busiest", _MUTED))
    if not timing.resident:
        return scale
    there, every = sum(map(len, timing.resident)), sum(map(len, timing.expert_use))
    digits = max(len(str(layer)) for layer in timing.moe_layers) if timing.moe_layers else 1
    figures = _cell_width(max(map(len, timing.expert_use), default=1), width - digits - 1) >= 4
    mark = _RESIDENT if figures else "a digit (tenths)"
    words = Content.assemble((mark, "bold"), f" in GPU memory: {there:,} of {every:,} experts")
    return flowing([scale, words], width)


def _map_header(columns: int, group: int, cell: int, digits: int) -> Content:
    names = "".join(f"{index * group:^{cell}}" for index in range(columns))
    return Content.styled(" " * (digits + 1) + names, _MUTED)


# --- the nodes of a ring ------------------------------------------------------------------------------------------


def node_line(nodes: Sequence[NodeTimes], shown: int | None, width: int) -> Content:
    """All nodes, the shown one marked. ``shown`` None: the overview."""
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
        return Content("\n").join([*lines, Content.styled("Nothing has been measured yet.", _MUTED)])
    counts = Counter(layer.node for layer in slowest)
    words = [f"{_name(nodes[node])} in {count} of {len(slowest)} layers" for node, count in counts.most_common()]
    lines.append(flowing([Content.styled("Slowest:", "bold"), *map(Content, words)], width))
    return Content("\n").join([*lines, _bars(nodes, slowest, width)])


def _summaries(nodes: Sequence[NodeTimes], times: Sequence[Sequence[LayerTimes]], width: int) -> list[Content]:
    """A bar for each node with its milliseconds per token in the layers. All bars have the same scale."""
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
    """One bar for each layer: the work of its slowest node, with the node's name."""
    longest = max(work_of(layer.times) for layer in slowest)
    digits = len(str(len(slowest) - 1))
    labels = [_label(nodes[layer.node]) if width >= _NARROW else _number(nodes[layer.node]) for layer in slowest]
    names = max(map(len, labels))
    room = max(4, width - digits - names - 18)
    lines = [Content.styled(f"{'':{digits + names + room + 3}} {'ms':>7} {'gap':>6}", _MUTED)]
    for index, (layer, label) in enumerate(zip(slowest, labels, strict=True)):
        work = work_of(layer.times)
        values = [0.0 if name in WAITING else float(getattr(layer.times, name)) for name, _, _ in PARTS]
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
    """The node's number for people: ranks count from 0, this from 1."""
    return str(node.rank + 1)


def _name(node: NodeTimes) -> str:
    name = node_name(node)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
