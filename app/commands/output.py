"""The only place that writes to the terminal for the commands: answers to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TextIO

from app.text_safety import HIDDEN, UNSAFE, one_line, sanitize, visible
from engine.planning.units import byte_size

if TYPE_CHECKING:
    from engine.ipc.messages import Progress

_STEPS = 4


class ReaderGoneError(Exception):
    """Raised if the reader of our output has closed it (``| head``). That is no failure, but the work can stop."""


class _LastLine:
    """Contents of the terminal's last line, to which stdout and stderr both write."""

    def __init__(self) -> None:
        self.holds: Literal["", "progress", "answer"] = ""

    def leave(self) -> None:
        """Erase a line of progress, and end an unfinished line of an answer, before something else is written."""
        if self.holds == "progress":
            _to_stderr("\r\x1b[K")
        elif self.holds == "answer" and _is_terminal(sys.stdout) and _is_terminal(sys.stderr):
            _to_stderr("\n")
        self.holds = ""


_last_line = _LastLine()


def answer(text: str, before: str = "") -> None:
    """Write a piece of the answer to stdout at once, without what acts on a terminal or is not seen.

    ``before``: the end of what was written before it.

    Raises ReaderGoneError if the reader closed it, WorkFailed if it cannot be written.
    """
    if not text:
        return
    if sys.stdout is None or sys.stdout.closed:
        raise WorkFailed("the answer cannot be written: stdout is closed")
    try:
        sys.stdout.write(visible(sanitize(text), before))
        sys.stdout.flush()
        _last_line.holds = "" if text.endswith("\n") else "answer"
    except BrokenPipeError as error:
        forget_stdout()
        raise ReaderGoneError from error
    except UnicodeEncodeError:
        # A terminal that is not UTF-8 gets what it can show.
        encoding = sys.stdout.encoding
        answer(text.encode(encoding, "replace").decode(encoding))
    except OSError as error:
        forget_stdout()
        raise WorkFailed(f"the answer cannot be written: {error.strerror or error}") from error


def forget_stdout() -> None:
    """Send what is still buffered to nowhere: at its end Python would try to write it again and print an error."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


class WorkFailed(Exception):
    """A command cannot do its work. The text is one sentence; ``status`` is the exit status.

    ``answered``: the JSON object on stdout reports the failure already.
    """

    def __init__(self, text: str, status: int = 1, *, answered: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.answered = answered


def notify(text: str) -> None:
    """One line for the person, on stderr."""
    _last_line.leave()
    _to_stderr(one_line(text) + "\n")


def print_error(text: str) -> None:
    """An error, on stderr."""
    notify(f"privatellm: {text}")


def fail(text: str, status: int, *, in_json: bool) -> int:
    """Print why a command fails and return ``status``. ``in_json``: as an object on stdout as well."""
    print_error(text)
    if in_json:
        with suppress(ReaderGoneError, WorkFailed):
            answer(as_json({"error": text}))
    return status


def as_json(value: object) -> str:
    """``value`` as one line of JSON. Characters that would act on a terminal, or cannot be seen, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for pattern in (UNSAFE, HIDDEN):
        text = pattern.sub(lambda match: json.dumps(match.group())[1:-1], text)
    return text + "\n"


def figure(value: float) -> str:
    """Three significant digits of ``value``, or all of its whole part: ``0.0123``, ``1.23``, ``1,234``."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


class ProgressLine:
    """Progress on stderr: one changing line on a terminal, elsewhere a line per stage and quarter.

    ``quiet_elsewhere``: nothing is printed where stderr is not a terminal.
    """

    def __init__(self, *, quiet_elsewhere: bool = False) -> None:
        self._live = _is_terminal(sys.stderr)
        self._quiet = quiet_elsewhere and not self._live
        self._shown = ""
        self._last: tuple[str, int] | None = None

    def show(self, progress: Progress) -> None:
        if self._quiet:
            return
        line = describe(progress)
        if self._live:
            if line != self._shown or _last_line.holds != "progress":
                if _last_line.holds == "answer":
                    _last_line.leave()
                _to_stderr(f"\r\x1b[K{line[: _columns() - 1]}")
                self._shown, _last_line.holds = line, "progress"
            return
        quarter = progress.done * _STEPS // progress.total if progress.total > 0 else 0
        if self._last != (progress.stage, quarter):
            self._last = (progress.stage, quarter)
            notify(line)

    def clear(self) -> None:
        """Erase the changing line before something else is written."""
        if self._shown and _last_line.holds == "progress":
            _last_line.leave()
        self._shown = ""


def describe(progress: Progress) -> str:
    """``downloading: 12 % (35 MB of 290 MB)``"""
    stage = one_line(progress.stage)
    if progress.total <= 0:
        if progress.done <= 0:
            return stage
        done = byte_size(progress.done) if progress.unit == "bytes" else f"{progress.done} {progress.unit}"
        return f"{stage}: {done}"
    percent = min(100, 100 * progress.done // progress.total)
    if progress.unit == "bytes":
        return f"{stage}: {percent} % ({byte_size(progress.done)} of {byte_size(progress.total)})"
    counts = f"{progress.done} of {progress.total} {progress.unit}".rstrip()
    return f"{stage}: {percent} % ({counts})"


def _to_stderr(text: str) -> None:
    if sys.stderr is None or sys.stderr.closed:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        return  # nobody reads it: no reason to stop the work


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _columns() -> int:
    import shutil

    return max(20, shutil.get_terminal_size().columns)
