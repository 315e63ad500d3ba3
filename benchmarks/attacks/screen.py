"""What a model says, on its way to the terminal."""

from __future__ import annotations

import contextlib
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attacks.campaign import Attack, Attempt, plain

_PIECES = (
    "\x1b[31m", "\x1b]0;t\x07", "\x1b]52;c;aGk=\x1b\\", "\x1bP q\x1b\\", "\x9b2J", "\x9d0;t\x9c", "\x90", "\x07",
    "\r", "\x08",
    "\u202e", "\u2066", "\u200f", "\ufeff", "\U000e0041", "\x00", "\x7f", "e\u0301" * 40, "\u4f60",
    "\U0001f468\u200d\U0001f469",
    "```", "~~~", "\n", "  ", "\t", "- ", "1. ", "> ", "| a | b |\n|--|--|\n", "# ", "**", "_", "`", "[x](y)", "<b>",
    "&amp;",
    "\\", "$x$", "![", "](", "***", "a", "word ", "\\(", "[^1]", "http://a.b", "{", "[red]", "[/]",
)  # fmt: skip


def text(draw: random.Random, most: int) -> str:
    """Up to ``most`` of the pieces, in runs."""
    found = []
    for _ in range(draw.randint(1, 12)):
        piece = draw.choice(_PIECES) if draw.random() < 0.9 else chr(draw.randrange(0x110000))
        found.append(piece * draw.choice((1, 1, 2, 7, most)))
    return "".join(found)[: 8 * most]


def sanitized(draw: random.Random) -> None:
    """Whole and cut into pieces the same text comes out, and nothing in it acts on a terminal."""
    from app.text_safety import Sanitizer, one_line, sanitize

    source = text(draw, 30)
    whole = sanitize(source)
    streamed, at = Sanitizer(), 0
    parts = []
    while at < len(source):
        step = draw.randint(1, 9)
        parts.append(streamed.feed(source[at : at + step]))
        at += step
    if "".join(parts) != whole:
        raise AssertionError(f"{source!r} depends on how it is cut")
    for found in (whole, one_line(source)):
        acting = [c for c in found if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
        if acting or any("\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in found):
            raise AssertionError(f"{source!r} leaves {acting!r}")
    if "\n" in one_line(source):
        raise AssertionError(f"{source!r} is more than one line")


def rendered(draw: random.Random) -> None:
    """Any text becomes something to show, within the time that an attempt has."""
    from app.chat.thread import code_blocks
    from app.text_safety import sanitize
    from app.tui.render.markdown import render_markdown

    source = sanitize(text(draw, draw.choice((5, 300, 3000))))
    render_markdown(source, draw.choice((1, 20, 80)))
    code_blocks(source)


@contextlib.contextmanager
def coloured(home: Path) -> Iterator[Attempt]:
    """Every lexer that may be asked, on blocks within the limits."""
    from pygments.lexers import get_lexer_by_name

    from app.tui.render.highlight_process import runs_of
    from app.tui.render.highlighting import LANGUAGES, worth_colouring

    lexers = sorted(set(LANGUAGES.values()))
    units = [*"\"'`\\/*#-<>(){}[]=:;,.!?$%&@^~|+_ \t\n0aA", '"""', "${", "{{", "/*", "<!--", "<<E\n", 'r#"', "=begin\n"]

    def attempt(draw: random.Random) -> None:
        lexer = draw.choice(lexers)
        unit = "".join(draw.choices(units, k=draw.randint(1, 4)))
        code = draw.choice(("", '"', "'", "/*")) + unit * draw.choice((16, 64, 1000))
        if worth_colouring(code, lexer):
            runs_of(get_lexer_by_name(lexer), code)

    yield attempt


ATTACKS = [
    Attack("control sequences in answers", 150_000, lambda home: plain(sanitized)),
    Attack("Markdown in answers", 20_000, lambda home: plain(rendered), cpu_s=3.0),
    Attack("code in answers, every lexer", 20_000, coloured, cpu_s=3.0),
]
