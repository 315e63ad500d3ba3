"""Reading and writing lines: a terminal with line editing, or pipes. Output is only ever appended."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from app.text_safety import sanitize, visible

QUOTES = '"""'
"""What begins and ends a question of several lines."""
CONTINUES = "\\"
"""What a line ends with if the question goes on in the next one."""


class ReaderGone(Exception):
    """Nobody reads what is written any more: the terminal was closed, or the pipe."""


class Console:
    """``reader`` and ``writer`` are this program's stdin and stdout. Line editing needs a terminal for both."""

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self._reader = reader
        self._writer = writer
        self.interactive = reader.isatty()
        """Whether a person types. What a script sends is written again, so that the output is the whole conversation.
        """
        self._within_line = False
        self._wraps = writer.isatty()
        self._column = 0
        self._before = ""
        for stream in (reader, writer):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="replace")
        if self.interactive:
            _edit_lines()

    def remember(self, lines: Iterable[str]) -> None:
        """Have the up key bring back ``lines``, which are given newest first, where lines are edited."""
        if not self.interactive:
            return
        with suppress(ImportError):
            import readline

            for line in reversed([line for line in lines if "\n" not in line]):
                readline.add_history(line)

    def read_line(self, prompt: str) -> str:
        """One line without its end. Raises EOFError, and KeyboardInterrupt after ctrl+c."""
        self.end_line()
        if self.interactive:
            try:
                return input(prompt)
            except OSError as error:
                raise EOFError from error
            finally:
                self._within_line, self._column = False, 0
        line = self._reader.readline()
        if not line:
            raise EOFError
        line = line.rstrip("\r\n")
        self.write_line(prompt + line)
        return line

    def read_text(self, prompt: str) -> str:
        """One line, or several: between lines of three quotation marks, or each but the last ending in a backslash.

        Raises EOFError and KeyboardInterrupt.
        """
        return gather(lambda first: self.read_line(prompt if first else "... "))

    def write(self, text: str) -> None:
        """Write ``text`` without what acts on a terminal or is not seen. Raises ReaderGone."""
        if not text:
            return
        text = visible(sanitize(text), self._before)
        self._before = (self._before + text)[-2:]
        if self._wraps:
            text, self._column = wrapped(text, self._column, shutil.get_terminal_size().columns)
        try:
            self._writer.write(text)
            self._writer.flush()
        except (OSError, ValueError) as error:
            raise ReaderGone from error
        self._within_line = not text.endswith("\n")

    def write_line(self, text: str) -> None:
        """Write ``text`` as lines of its own. Raises ReaderGone."""
        self.end_line()
        self.write(text + "\n")

    def end_line(self) -> None:
        """End the line that was begun, if one was. Raises ReaderGone."""
        if self._within_line:
            self.write("\n")


def wrapped(text: str, column: int, width: int) -> tuple[str, int]:
    """``text`` with line breaks between words where a terminal of ``width`` columns would break within them.

    ``column`` is where it begins. Returns the text, and the column in which it ends. Nothing but spaces is replaced.
    """
    parts: list[str] = []
    for piece in re.findall(r"\n|[^\S\n]+|\S+", text):
        cells = _cells(piece)
        if piece == "\n":
            column = 0
        elif column + cells <= width:
            column += cells
        elif piece.isspace():
            parts.append("\n")
            column = 0
            continue
        else:
            if parts and parts[-1].isspace() and parts[-1] != "\n":
                parts[-1] = "\n"
            elif column:
                parts.append("\n")
            column = cells % width if width else 0
        parts.append(piece)
    return "".join(parts), column


def _cells(text: str) -> int:
    """Columns of ``text``, nearly: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def gather(read: Callable[[bool], str]) -> str:
    """The text that one or several lines give. ``read`` is called with whether its line is the first."""
    line = read(True)
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read)
    lines = [line]
    while lines[-1].endswith(CONTINUES):
        lines[-1] = lines[-1].removesuffix(CONTINUES)
        try:
            lines.append(read(False))
        except EOFError:
            break
    return "\n".join(lines)


def _quoted(line: str, read: Callable[[bool], str]) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read(False)
        except EOFError:
            return "\n".join(lines).strip("\n")
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def _edit_lines() -> None:
    """Have ``input`` edit lines and remember them, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    if os.environ.get("TERM", "dumb") == "dumb" and "libedit" not in (readline.__doc__ or ""):
        # Else pastes are announced by escape sequences that such a terminal prints.
        readline.parse_and_bind("set enable-bracketed-paste off")


def standard_console() -> Console:
    """The console on stdin and stdout."""
    return Console(sys.stdin, sys.stdout)
