"""The state of a model's download, as the screens that list models show it."""

from __future__ import annotations

from textual.content import Content

from app.chat.downloads import ModelFetcher
from app.chat.words import progress_text, size
from app.text_safety import one_line
from app.tui.render.formatting import bar

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
    kept = f" {size(reached.done)} of {size(reached.total)} are kept;" if reached.total else ""
    if stopped.problem:
        return [
            Content.styled(f"✗ {one_line(stopped.problem)}", "$text-error"),
            Content.styled(f"{keys} tries again.", "$text-warning"),
        ]
    return [Content.styled(f"‖ Paused.{kept} {keys} continues.", "$text-warning")]
