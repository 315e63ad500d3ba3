"""Colours for code, made by another process. Code is plain until they arrive.

A model may repeat hostile text, which can keep a lexer busy for ever; see :mod:`app.tui.render.highlight_process`. Only
lexers that were tested with hostile texts are used, on blocks and lines of limited size.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

import msgspec
from textual.content import Span

from app.engine_process import child_environment

BLOCK_LIMIT = 8_000
"""Maximum characters of a block that is coloured."""
SHORTER_BLOCKS = {"groovy": 3_000, "java": 3_000, "terraform": 3_000}
"""Maximum characters of a block for lexers whose time grows with the square of some blocks."""
LINE_LIMIT = 500
"""Maximum characters of a line: the time of some expressions grows with their square."""
SPACE_LIMIT = 250
"""Maximum characters of white space in a row, over any number of lines, for the same reason."""
LANGUAGES = {
    alias: lexer
    for lexer, aliases in {
        "bash": "sh shell zsh ksh",
        "c": "",
        "clojure": "clj",
        "cmake": "",
        "console": "shell-session",
        "cpp": "c++ cc cxx hpp",
        "csharp": "cs c#",
        "css": "",
        "dart": "",
        "diff": "udiff patch",
        "docker": "dockerfile",
        "elixir": "ex exs",
        "erlang": "",
        "fsharp": "f#",
        "go": "golang",
        "graphql": "",
        "groovy": "",
        "haskell": "hs",
        "html": "",
        "ini": "cfg",
        "java": "",
        "javascript": "js mjs",
        "json": "jsonc json5 jsonl",
        "jsx": "",
        "julia": "jl",
        "kotlin": "kt kts",
        "latex": "tex",
        "less": "",
        "lua": "",
        "make": "makefile",
        "matlab": "octave",
        "nasm": "asm assembly",
        "nginx": "",
        "nix": "",
        "objective-c": "objc objectivec",
        "ocaml": "",
        "perl": "pl",
        "php": "",
        "powershell": "ps1 pwsh",
        "protobuf": "proto",
        "python": "py python3",
        "r": "",
        "ruby": "rb",
        "rust": "rs",
        "sass": "",
        "scheme": "",
        "scss": "",
        "sql": "mysql postgresql sqlite",
        "swift": "",
        "terraform": "hcl tf",
        "toml": "",
        "tsx": "",
        "typescript": "ts",
        "xml": "svg",
        "yaml": "yml",
        "zig": "",
    }.items()
    for alias in (lexer, *aliases.split())
}
"""Lexer for each name after a fence. Each of them has passed the fuzz tests."""
DEADLINE_S = 2.0
"""Maximum seconds of processor time for one block. An ordinary block takes some hundredths."""
_KEPT_CHARACTERS = 400_000
"""Maximum characters of all blocks whose colours are kept."""
_RECENT = 8
"""Number of recent blocks that a growing block is compared with."""
_IDLE_S = 30.0
"""Seconds without work after which the process is ended."""
_LONGEST_REPLY = 1 << 23
"""Maximum bytes of a reply."""

_Key = tuple[str, str]
"""A lexer and a block of code."""


class Waiter(Protocol):
    """A widget that shows code."""

    def remake(self) -> None:
        """All the colours that it asked for are known."""
        ...


class Highlighter:
    """Returns the colours that are known and asks the process for the others. Belongs to one event loop.

    A block that takes longer than ``deadline_s`` seconds of processor time is not coloured, and its lexer is not used
    again.
    """

    def __init__(self, command: Sequence[str] | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        process = (sys.executable, "-P", "-m", "app.tui.render.highlight_process", str(deadline_s))
        self._command = tuple(command) if command is not None else process
        self._known: OrderedDict[_Key, list[Span]] = OrderedDict()
        self._wanted: dict[Waiter, dict[_Key, None]] = {}
        self._failed: set[str] = set()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def busy(self) -> bool:
        """Whether colours are still being computed."""
        return bool(self._wanted)

    @property
    def failed(self) -> frozenset[str]:
        """The lexers that failed or ran out of time. They are not used again."""
        return frozenset(self._failed)

    def begin(self, waiter: Waiter) -> None:
        """Forget what ``waiter`` asked for: it is about to ask for everything that it shows now."""
        self._wanted.pop(waiter, None)

    def spans(self, code: str, language: str, waiter: Waiter) -> list[Span]:
        """The colours of ``code`` as far as they are known. ``waiter.remake`` is called when the rest has arrived."""
        lexer = LANGUAGES.get(language.casefold())
        if lexer is None or lexer in self._failed or not worth_colouring(code, lexer):
            return []
        key = lexer, code
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        self._wanted.setdefault(waiter, {})[key] = None
        self._more.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="colours of code")
        # A block that is being written keeps the colours of its beginning.
        recent = islice(reversed(self._known), _RECENT)
        begun = next((known for known in recent if known[0] == lexer and code.startswith(known[1])), None)
        return self._known[begun] if begun is not None else []

    async def close(self) -> None:
        """End the process. No waiter is called any more."""
        self._wanted.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _work(self) -> None:
        try:
            while True:
                while self._wanted:
                    key = next(iter(next(iter(self._wanted.values()))))
                    self._found(key, await self._colours(key))
                self._more.clear()
                try:
                    await asyncio.wait_for(self._more.wait(), _IDLE_S)
                except TimeoutError:
                    await self._end_process()
                    if not self._wanted:
                        return
        finally:
            await self._end_process()

    async def _colours(self, key: _Key) -> list[Span]:
        """The colours of ``key``; none if the process was ended by it or cannot be started."""
        lexer, _ = key
        if lexer in self._failed:
            return []
        try:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=child_environment(),
                    cwd=os.sep,
                    limit=_LONGEST_REPLY,
                    start_new_session=True,
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(msgspec.json.encode(key) + b"\n")
            await self._process.stdin.drain()
            reply = await self._process.stdout.readline()
            return _spans(msgspec.json.decode(reply, type=list[tuple[str, int]]))
        except (OSError, ValueError, msgspec.DecodeError):
            self._failed.add(lexer)
            await self._end_process()
            return []

    def _found(self, key: _Key, spans: list[Span]) -> None:
        self._known[key] = spans
        kept = sum(len(code) for _, code in self._known)
        while kept > _KEPT_CHARACTERS:
            kept -= len(self._known.popitem(last=False)[0][1])
        for waiter in [waiter for waiter, keys in self._wanted.items() if key in keys]:
            keys = self._wanted[waiter]
            del keys[key]
            if not keys:
                del self._wanted[waiter]
                waiter.remake()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        # asyncio keeps the pipes of a process until the other side closes them, and offers no public way to let go.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
        await process.wait()


def worth_colouring(code: str, lexer: str) -> bool:
    """Whether ``code`` is within the limits for colouring."""
    if len(code) > SHORTER_BLOCKS.get(lexer, BLOCK_LIMIT) or any(len(line) > LINE_LIMIT for line in code.split("\n")):
        return False
    return all(len(space.group()) <= SPACE_LIMIT for space in re.finditer(r"\s+", code))


def _spans(runs: list[tuple[str, int]]) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for kind, length in runs:
        style = _style(kind)
        if style and spans and spans[-1].end == start and spans[-1].style == style:
            spans[-1] = Span(spans[-1].start, start + length, style)
        elif style:
            spans.append(Span(start, start + length, style))
        start += length
    return spans


@functools.cache
def _style(kind: str) -> str:
    """The style of a token type such as ``Name.Function``: its own, or that of its nearest parent type."""
    from textual.highlight import HighlightTheme

    parts = tuple(kind.split("."))
    while parts and parts not in HighlightTheme.STYLES:
        parts = parts[:-1]
    # Its see-through colours would not stand out from the background, nor its own background from text.
    style = re.sub(r" on \S+|(?<=[a-z]) \d+%", "", HighlightTheme.STYLES.get(parts, ""))
    return "italic $foreground-muted" if style == "$text" else style
