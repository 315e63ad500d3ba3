"""The output to the terminal: stray output of this process goes to a log, and every drawn line is made safe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from app.text_safety import HIDDEN, UNSAFE, visible
from app.tui.terminal.links import checked

_LOG_LIMIT = 1_000_000
"""Size in bytes from which on the log is begun again."""


def open_log(path: Path) -> IO[bytes] | None:
    """The log, opened for appending; None if it cannot be opened."""
    try:
        too_long = path.exists() and path.stat().st_size > _LOG_LIMIT
        return path.open("wb" if too_long else "ab")
    except OSError:
        return None


@contextlib.contextmanager
def guarded_output(log_path: Path | None = None) -> Iterator[None]:
    """Redirects descriptors 1 and 2 to the log inside, so that native code that prints does not corrupt the screen.

    The screen draws on ``sys.__stderr__`` and ``sys.__stdout__``, which stay the terminal. Afterwards everything is as
    before. Does nothing without a terminal.
    """
    terminal = next((fd for fd in (1, 2) if _is_terminal(fd)), None)
    if terminal is None:
        yield
        return
    log = open_log(log_path if log_path is not None else screen_log())
    target = log.fileno() if log is not None else os.open(os.devnull, os.O_WRONLY)
    duplicates = {fd: os.dup(fd) for fd in (1, 2)}
    screen = os.fdopen(os.dup(terminal), "w", encoding="utf-8", errors="replace", newline="")
    streams = sys.stderr, sys.__stderr__, sys.__stdout__
    _flush(sys.stdout, sys.stderr)
    for fd in (1, 2):
        os.dup2(target, fd)
    # Textual draws on sys.__stderr__, asks sys.__stdout__ for the size of the terminal, and reports a crash on
    # sys.stderr after it has restored the terminal.
    sys.stderr = sys.__stderr__ = sys.__stdout__ = screen  # type: ignore[misc]
    try:
        yield
    finally:
        _flush(sys.stdout, screen)
        sys.stderr, sys.__stderr__, sys.__stdout__ = streams  # type: ignore[misc]
        for fd, original in duplicates.items():
            os.dup2(original, fd)
            os.close(original)
        with contextlib.suppress(OSError):  # a terminal that is gone
            screen.close()
        if log is not None:
            log.close()
        else:
            os.close(target)


def log_error(error: BaseException) -> None:
    """Write ``error`` with its traceback to the log, without the values of variables: they may be the person's text."""
    log = open_log(screen_log())
    if log is None:
        return
    with log, contextlib.suppress(OSError):
        lines = traceback.format_exception(error)
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {''.join(lines)}".encode("utf-8", "replace"))


def screen_log() -> Path:
    """The log of the process with the screen."""
    from engine.system.locations import ensure, locate

    try:
        return ensure("logs") / "screen.log"
    except OSError:
        return locate("logs") / "screen.log"


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _flush(*streams: IO[str] | None) -> None:
    for stream in streams:
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


class SafeLines(LineFilter):
    """Replaces in each drawn line the characters that act on a terminal or that nobody can see, which Textual passes
    through, and removes each link that opens something else than what is shown.

    It is the last check of all text. Replacements have the same width, so the layout stays.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        readable = self._readable(segments)
        linked = any(segment.style is not None and segment.style.link for segment in readable)
        return checked(readable) if linked else readable

    def _readable(self, segments: list[Segment]) -> list[Segment]:
        if all(segment.text.isascii() and not UNSAFE.search(segment.text) for segment in segments):
            return segments
        safe, before = [], ""
        for segment in segments:
            text = visible(HIDDEN.sub(_blank, UNSAFE.sub(_blank, segment.text)), before)
            before = (before + text)[-2:]
            safe.append(segment if text == segment.text else Segment(text, segment.style))
        return safe


_FORMS = "\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
_PICTURES = "\U0001f000-\U0001f1e5\U0001f200-\U0001faff"
_EMOJI = re.compile(f"[{_PICTURES}\U0001f1e6-\U0001f1ff{_FORMS}\u200d]")
_MAY_DIFFER = re.compile(
    # Command strings, in which no text is drawn; flags; pictures, and other characters with a form, alone or joined.
    r"\x1b\][^\x07\x1b]*|([\U0001f1e6-\U0001f1ff]{1,2}"
    rf"|(?:[{_PICTURES}]|[#*0-9\xa9\xae\u2010-\u33ff](?=[{_FORMS}\u200d]))[{_FORMS}]*"
    rf"(?:\u200d[{_PICTURES}\u2010-\u33ff][{_FORMS}]*)*)"
)


def kept_in_place(drawn: str) -> str:
    """``drawn``, what is sent to the terminal, with what follows an emoji where it belongs.

    Terminals and Rich disagree on how many cells the newer ones have, and those of several characters. After each of
    them the cursor is therefore moved from where it was by the cells that the layout counted, which are blank before.
    """
    return _MAY_DIFFER.sub(_placed, drawn) if _EMOJI.search(drawn) else drawn


def _placed(found: re.Match[str]) -> str:
    cells = cell_len(found[1] or "")
    return f"\x1b7{' ' * cells}\x1b8{found[1]}\x1b8\x1b[{cells}C" if cells else found[0]


def _blank(unseen: re.Match[str]) -> str:
    # Terminals draw a soft hyphen as a hyphen, or not at all.
    return "-" if unseen.group() == "\xad" else " " * cell_len(unseen.group())


_SAFE_LINES = SafeLines()


def with_safe_lines(filters: Sequence[LineFilter]) -> list[LineFilter]:
    """``filters`` and :class:`SafeLines`, for ``App.get_line_filters``."""
    # The last one: a filter that changes a colour gives a link another id.
    return [*filters, _SAFE_LINES]
