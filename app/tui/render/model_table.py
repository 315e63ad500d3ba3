"""The models to choose from as lines of columns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from textual.content import Content

from app.chat.downloads import ModelFetcher
from app.chat.model_choices import ModelOption
from app.chat.words import progress_text, size
from app.text_safety import one_line
from app.tui.render.formatting import bar

_MUTED = "$foreground-muted"
_GAP = "  "
_MARK = 2
"""Width of the column of marks, in cells."""
_LONGEST_NAME = 32
"""Longest name, in cells, that the columns make room for."""
_COLUMNS: Mapping[str, Callable[[ModelOption], str]] = {
    "size": lambda row: row.size,
    "memory": lambda row: row.memory,
    "predicted": lambda row: row.speed.removeprefix("about "),
    "licence": lambda row: row.licence,
}
_DROPPED = ("licence", "memory", "size")
"""The columns that a narrow screen leaves out, the first of them first."""


def model_table(
    rows: Sequence[ModelOption], current: str, states: Mapping[str, str], width: int
) -> tuple[Content, list[Content]]:
    """The line of titles and a line for each of ``rows``, of at most ``width`` cells.

    ``current`` is the name of the open model. ``states`` has a few words for each model whose download began; they take
    the place of its speed.
    """
    cells = {title: [Content(one_line(text(row))) for row in rows] for title, text in _COLUMNS.items()}
    for index, row in enumerate(rows):
        if row.name in states:
            cells["predicted"][index] = Content.styled(states[row.name], "$text-warning")
        elif row.runs_not:
            cells["predicted"][index] = cells["predicted"][index].stylize("$text-warning")
    names = [Content.styled(one_line(row.name), "bold") for row in rows]
    widths = {
        title: max(len(title), *(cell.cell_length for cell in column)) if rows else len(title)
        for title, column in cells.items()
        if any(cell.plain for cell in column)
    }
    name_width = min(_LONGEST_NAME, max((name.cell_length for name in names), default=0))
    for title in _DROPPED:
        if _MARK + name_width + sum(len(_GAP) + cells for cells in widths.values()) > width:
            widths.pop(title, None)
    name_width = min(name_width, max(1, width - _MARK - sum(len(_GAP) + cells for cells in widths.values())))

    def line(mark: Content, name: Content, texts: Mapping[str, Content]) -> Content:
        parts = [Content.assemble(mark, name.truncate(name_width, ellipsis=True, pad=True))]
        parts += [
            text.truncate(widths[title], ellipsis=True, pad=True)
            if title == "predicted"
            else text.truncate(widths[title], ellipsis=True, pad=True).stylize(_MUTED)
            for title, text in texts.items()
            if title in widths
        ]
        return Content(_GAP).join(parts)

    titles = line(Content(" " * _MARK), Content("model"), {title: Content(title) for title in _COLUMNS})
    lines = [
        line(_mark(row, current), name, {title: column[index] for title, column in cells.items()})
        for index, (row, name) in enumerate(zip(rows, names, strict=True))
    ]
    return titles, lines


def _mark(row: ModelOption, current: str) -> Content:
    if not row.here:
        return Content.styled("↓ ", "$text-warning")
    return Content.styled("● ", "$text-success") if row.name == current else Content("  ")


# --- downloads -------------------------------------------------------------------------------------------------------


BAR_CELLS = 20
"""Width of a progress bar, in cells."""


def download_lines(fetcher: ModelFetcher, name: str, keys: str) -> list[Content]:
    """What is known of the download of ``name``: a bar and figures, and why it does not go on. Empty without one.

    ``keys`` names what continues a download: ``enter``.
    """
    progress = fetcher.active.get(name)
    if progress is not None:
        text = progress_text(progress)
        if " " in progress.stage:  # words, not the name of a file
            text = text[:1].upper() + text[1:]
        if not progress.total:
            return [Content(text)]
        share = f" {100 * progress.done // progress.total} %"
        return [
            Content.assemble(bar(progress.done, progress.total, BAR_CELLS), share),
            Content(text),
        ]
    stopped = fetcher.stopped.get(name)
    if stopped is None:
        return []
    reached = stopped.progress
    downloaded = f" {size(reached.done)} of {size(reached.total)} are kept;" if reached.total else ""
    if stopped.problem:
        return [
            Content.styled(f"✗ {one_line(stopped.problem)}", "$text-error"),
            Content.styled(f"{keys} tries again.", "$text-warning"),
        ]
    return [Content.styled(f"‖ Paused.{downloaded} {keys} continues.", "$text-warning")]
