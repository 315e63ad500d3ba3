"""``privatellm bench``: one table of what a model costs on this machine."""

from __future__ import annotations

from typing import Any

import msgspec

from app.commands.engine_work import Interruption, do, run_with_engine, with_ring
from app.commands.options import LoadFlags, load_from
from app.commands.output import ProgressLine, answer, as_json, figure
from app.engine_client import EngineClient
from app.text_safety import one_line
from engine.ipc.messages import Bench, BenchKind, BenchResult

_NOTHING = "–"


_WITHOUT_MODEL: tuple[BenchKind, ...] = ("exchange", "residency")


def bench(
    kind: BenchKind, flags: LoadFlags, *, rounds: int, nodes: tuple[int, ...], even_if_busy: bool, in_json: bool
) -> int:
    """Measure and print the table on stdout; the exit status.

    ``nodes``: numbers of processes that ``ring`` runs with. ``even_if_busy``: save the figures for plans although other
    programs were running. Raises WorkFailed.
    """
    by_default = kind == "ring" and "model" not in flags.settings
    wanted = load_from(flags, needs_model=kind not in _WITHOUT_MODEL and not by_default)

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        load = await with_ring(engine, wanted.load, wanted.settings, wanted.peers)
        if by_default:
            # The starter and a made-up model, not the one of the settings.
            load = msgspec.structs.replace(load, model="")
        request = Bench(
            id=engine.new_id(), kind=kind, load=load, rounds=rounds, even_if_busy=even_if_busy, nodes=list(nodes)
        )
        result = await do(engine, request, ProgressLine())
        assert isinstance(result, BenchResult)
        answer(as_json(as_object(result)) if in_json else as_text(result))
        return 0

    return run_with_engine(work)


def as_object(result: BenchResult) -> dict[str, Any]:
    """The object that ``--json`` prints: the table as shown, and every figure behind it."""
    table = {"title": result.title, "columns": result.columns, "rows": result.rows, "notes": result.notes}
    return {**table, **result.data}


def as_text(result: BenchResult) -> str:
    """The title, the table with its columns under one another, and the notes; without a table, these alone."""
    if not result.columns:
        return "\n".join([one_line(result.title), "", *map(one_line, result.notes)]) + "\n"
    rows = [[one_line(column) for column in result.columns], *([_cell(cell) for cell in row] for row in result.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(result.columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    parts = [one_line(result.title), "", *lines, "", *map(one_line, result.notes)]
    return "\n".join(parts).rstrip() + "\n"


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return _NOTHING
    return figure(value) if isinstance(value, float) else one_line(str(value))
