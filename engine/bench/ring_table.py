"""The table of ``bench ring``: measurements beside predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.calibration.samples import figure
from engine.ipc.messages import Bench, BenchResult
from engine.planning.ring_speed import PassTime, compare
from engine.system.machine import processor

MEASURED = ("tokens/s", "ms/token", "MoE", "communication", "other")
COLUMNS = ("model", "method", "nodes", *MEASURED, "planned", "predicted", "error", "within 25 %")


@dataclass(frozen=True)
class RingRow:
    """The result of one method on a number of nodes: medians over the rounds, in seconds per token on the head.

    ``low`` and ``high`` are of the fastest and slowest round. ``planned`` was predicted before the ring was formed,
    ``predicted`` with the measurements of one node alone and of the exchange; None without a basis.
    """

    model: str
    method: str
    nodes: int
    measured: PassTime
    low: float
    high: float
    planned: PassTime | None = None
    predicted: PassTime | None = None
    at_once: float = 1.0
    """Number of nodes whose experts this machine runs in the time of one node's."""
    exchange: str = ""
    exchange_s: float | None = None


def result_of(
    request: Bench, threads: int, bound: bool, cores: int, steps: int, rows: Sequence[RingRow]
) -> BenchResult:
    """``bound``: each process had cores of its own, of ``cores``."""
    where = "on cores of its own" if bound else f"sharing the {cores} cores"
    together = {row.model: f"{row.at_once:.1f} ({row.model})" for row in rows}
    notes = [
        f"{processor()}: the nodes are processes of this machine, each with {threads} "
        f"thread{'s' * (threads != 1)}, {where}, and all with one memory: at once they run "
        f"{' and '.join(together.values())} times the experts of one.",
        "Milliseconds per token, the head's, medians over the rounds (ms/token with its range); the rings were formed "
        "in turns. Waiting for the slowest node counts as communication.",
        "planned: tokens/s as predicted before the ring was formed, from experts like the model's, the rate of memory "
        "and the links. predicted: tokens/s from the step of one node that runs as in a ring but exchanges with nobody "
        "(one, in parts), its experts and all else apart, and from layers that all nodes rehearsed once they were "
        "joined; its error is of the time of a token.",
        "naive and P-L_B are central, P-L_R-D is decentralised (paper on Apple Silicon, tables 3 and 4). As there, a "
        "node of a ring holds at most half of each layer's experts, and P-L_R-D exchanges by the envoy; P-L_R-D, TLS "
        "is the same over TLS, as the central versions are.",
        *_within(rows),
    ]
    names = list(dict.fromkeys(row.model for row in rows))
    return BenchResult(
        id=request.id,
        title=f"Rings on this machine: {', '.join(names)}",
        columns=list(COLUMNS),
        rows=[_cells(row) for row in rows],
        notes=notes,
        data={
            "kind": "ring",
            "models": names,
            "processor": processor(),
            "rounds": request.rounds,
            "threads_per_node": threads,
            "cores": cores,
            "own_cores": bound,
            "steps_per_round": steps,
            "rows": [_figures(row) for row in rows],
        },
    )


def _cells(row: RingRow) -> list[str | int | float | None]:
    took = row.measured
    compared = compare(row.predicted, took) if row.predicted is not None else None
    return [
        row.model,
        row.method,
        row.nodes,
        figure(took.tokens_per_s),
        f"{figure(took.seconds * 1e3)} ({figure(row.low * 1e3)}–{figure(row.high * 1e3)})",
        figure(took.moe_s * 1e3),
        figure(took.exchange_s * 1e3),
        figure(took.other_s * 1e3),
        figure(row.planned.tokens_per_s) if row.planned is not None else None,
        figure(row.predicted.tokens_per_s) if row.predicted is not None else None,
        f"{compared.error * 100:+.0f} %" if compared is not None else None,
        ("yes" if compared.within else "no") if compared is not None else None,
    ]


def _within(rows: Sequence[RingRow]) -> list[str]:
    """A line that counts the predictions that came true; none without any."""
    counted = []
    for name in ("planned", "predicted"):
        pairs = [(time, row.measured) for row in rows if (time := getattr(row, name)) is not None]
        if pairs:
            counted.append(f"{name} {sum(compare(*pair).within for pair in pairs)} of {len(pairs)}")
    return [f"Predictions within 25 % of the measured time of a token: {', '.join(counted)}."] if counted else []


def _figures(row: RingRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "method": row.method,
        "nodes": row.nodes,
        "total_s": row.measured.seconds,
        "low_s": row.low,
        "high_s": row.high,
        "at_once": row.at_once,
        "exchange": row.exchange,
        "exchange_s": row.exchange_s,
        **_parts("", row.measured),
        **_predicted("planned", row.planned, row.measured),
        **_predicted("predicted", row.predicted, row.measured),
    }


def _parts(before: str, time: PassTime) -> dict[str, float]:
    return {
        f"{before}moe_s": time.moe_s,
        f"{before}communication_s": time.exchange_s,
        f"{before}other_s": time.other_s,
    }


def _predicted(name: str, time: PassTime | None, measured: PassTime) -> dict[str, Any]:
    if time is None:
        return {f"{name}_s": None, f"{name}_error": None, f"{name}_within_25_percent": None}
    compared = compare(time, measured)
    return {
        f"{name}_s": time.seconds,
        **_parts(f"{name}_", time),
        f"{name}_error": compared.error,
        f"{name}_within_25_percent": compared.within,
    }
