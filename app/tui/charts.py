"""Timing bars and the heat map of expert use, as ``Content``. Readable without colour: every part has its own fill."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from app.tui.formatting import rate
from engine.messages import LayerTimes, PhaseTimes, Timing

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


def parts_of(times: LayerTimes) -> list[float]:
    """The parts of one layer in the order of :data:`PARTS`, in milliseconds."""
    return [float(getattr(times, name)) for name, _, _ in PARTS]


def total(times: LayerTimes) -> float:
    return sum(parts_of(times))


def cells(values: Sequence[float], width: int) -> list[int]:
    """``width`` cells shared out in proportion to ``values``; they add up to ``width`` exactly (0 if all are 0)."""
    whole = sum(values)
    if whole <= 0 or width <= 0:
        return [0] * len(values)
    exact = [value * width / whole for value in values]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(values)), key=lambda index: exact[index] - shares[index], reverse=True)
    for index in by_rest[: width - sum(shares)]:
        shares[index] += 1
    return shares


def slowest(layers: Sequence[LayerTimes], count: int = 3) -> list[tuple[int, float, str]]:
    """The ``count`` slowest layers: index, milliseconds per token, and the part that took most of it."""
    order = sorted(range(len(layers)), key=lambda index: total(layers[index]), reverse=True)
    return [
        (index, total(layers[index]), max(PARTS, key=lambda part: float(getattr(layers[index], part[0])))[0])
        for index in order[:count]
        if total(layers[index]) > 0
    ]


def phase_summary(name: str, phase: PhaseTimes, width: int) -> Content:
    """A phase in a few lines: its time per token, and what that went to over all layers."""
    if not phase.tokens:
        return Content.assemble((name, "bold"), ("  not measured yet", _MUTED))
    speed = rate(1000 / phase.per_token) if phase.per_token > 0 else ""
    figures = [f"{phase.per_token:.2f} ms a token", speed, f"{phase.tokens:,} tokens"]
    head = [Content.styled(name, "bold"), *[Content(figure) for figure in figures if figure]]
    sums = [sum(values) for values in zip(*(parts_of(layer) for layer in phase.layers), strict=True)] or [0.0] * 6
    sums[-1] += phase.outside_layers
    return Content("\n").join([flowing(head, width), stacked(sums, width), flowing(shares(sums), width)])


def flowing(items: Sequence[Content], width: int) -> Content:
    """``items`` side by side, on as many lines as they need; none is broken in two."""
    lines: list[Content] = []
    for item in items:
        if lines and lines[-1].cell_length + 2 + item.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], "  ", item)
        else:
            lines.append(item)
    return Content("\n").join(lines)


def stacked(values: Sequence[float], width: int) -> Content:
    """One stacked bar of ``width`` cells."""
    pieces = [
        (fill * count, colour) for (_, fill, colour), count in zip(PARTS, cells(values, width), strict=True) if count
    ]
    return Content.assemble(*pieces)


def shares(values: Sequence[float]) -> list[Content]:
    """The legend with the share of each part; parts that took no time are left out."""
    whole = sum(values) or 1.0
    return [
        Content.assemble((fill, colour), f" {name} {100 * value / whole:.0f}%")
        for (name, fill, colour), value in zip(PARTS, values, strict=True)
        if value > 0
    ]


def layer_bars(layers: Sequence[LayerTimes], width: int) -> Content:
    """One bar for each layer, all on one scale, with its milliseconds per token."""
    longest = max((total(layer) for layer in layers), default=0.0)
    if longest <= 0:
        return Content.styled("Nothing was measured yet.", _MUTED)
    digits = len(str(len(layers) - 1))
    room = max(4, width - digits - 9)
    named = {index for index, _, _ in slowest(layers)}
    lines = []
    for index, layer in enumerate(layers):
        length = round(room * total(layer) / longest)
        bar = stacked(parts_of(layer), length)
        style = "bold $text-warning" if index in named and len(layers) > 3 else ""
        figure = (f" {total(layer):7.2f}", style)
        lines.append(Content.assemble((f"{index:>{digits}} ", style or _MUTED), bar, " " * (room - length), figure))
    return Content("\n").join(lines)


def slowest_line(layers: Sequence[LayerTimes]) -> Content:
    found = slowest(layers)
    if not found:
        return Content()
    words = ", ".join(f"layer {index} ({time:.2f} ms, mostly {part})" for index, time, part in found)
    return Content.assemble(("Slowest: ", "bold"), words)


# --- the heat map -------------------------------------------------------------------------------------------------


def group_columns(use: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], int]:
    """At most ``most`` columns: neighbours are joined, each column showing the busiest of its group.

    Returns the table and how many experts stand in a column.
    """
    count = max((len(row) for row in use), default=0)
    size = max(1, -(-count // max(1, most)))
    return [[max(row[start : start + size]) for start in range(0, len(row), size)] for row in use], size


def heat_map(timing: Timing, width: int) -> Content:
    """Rows are layers, columns experts; the busiest expert of the model is 1, as in the papers."""
    use = timing.expert_use
    busiest = max((count for row in use for count in row), default=0)
    if not busiest:
        return Content.styled("No expert was counted yet.", _MUTED)
    digits = max(len(str(layer)) for layer in timing.moe_layers) if timing.moe_layers else 1
    room = max(1, width - digits - 1)
    table, size = group_columns(use, room)
    columns = max(len(row) for row in table)
    cell = max(1, min(6, room // columns))
    lines = [_map_header(columns, size, cell, digits)] if cell >= 3 else []
    for layer, row in zip(timing.moe_layers, table, strict=False):
        line = [Content.styled(f"{layer:>{digits}} ", _MUTED), *[heat_cell(count / busiest, cell) for count in row]]
        lines.append(Content.assemble(*line))
    if size > 1:
        lines.append(Content.styled(f"Each column is {size} experts; the busiest of them is shown.", _MUTED))
    return Content("\n").join(lines)


def heat_cell(share: float, width: int) -> Content:
    """One cell: a figure where it fits, else a shade; the colour says the same."""
    style = f"on $accent {round(5 + 85 * share)}%"
    if width >= 4:
        figure = "1.00" if share >= 0.995 else f"{share:.2f}"[1:]
        return Content.styled(f"{figure:^{width}}", f"auto {style}")
    shade = _SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))]
    return Content.styled(shade * width, f"$accent {round(35 + 65 * share)}%")


def heat_legend(width: int) -> Content:
    steps = [0.0, 0.25, 0.5, 0.75, 1.0]
    cell = 6 if width >= 46 else 4
    return Content.assemble(("rarely ", _MUTED), *[heat_cell(step, cell) for step in steps], (" busiest", _MUTED))


def _map_header(columns: int, size: int, cell: int, digits: int) -> Content:
    names = "".join(f"{index * size:^{cell}}" for index in range(columns))
    return Content.styled(" " * (digits + 1) + names, _MUTED)
