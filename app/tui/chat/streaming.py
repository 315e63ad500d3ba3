"""Cuts a growing answer into what is finished and what is still being written. Pure.

The finished part is rendered once, as Markdown; only the rest is drawn again as text arrives. A cut is made where the
Markdown of both sides means the same as that of the whole: after a blank line outside a fence at no indent, and, when
the rest grows too long for being drawn many times a second, at the end of a line of a fence or list.
"""

from __future__ import annotations

import re

LONGEST_TAIL = 2_000
"""Characters drawn again with every piece; beyond that the tail is cut at a line."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$")


class GrowingText:
    """The answer so far, as ``frozen`` blocks of Markdown and the ``tail``.

    ``update`` takes the whole text each time: it may also be another text altogether (the best beam changed).
    """

    def __init__(self) -> None:
        self.frozen: list[str] = []
        self.tail = ""
        self._text = ""
        self._frozen_length = 0
        self._reopen = ""
        """What the tail must begin with because a fence was cut: its opening line."""

    def clear(self) -> None:
        self.frozen, self.tail, self._text, self._frozen_length, self._reopen = [], "", "", 0, ""

    def update(self, text: str) -> None:
        if not text.startswith(self._text[: self._frozen_length]):
            self.clear()
        self._text = text
        rest = self._reopen + text[self._frozen_length :]
        while (cut := find_cut(rest)) is not None:
            end, fence = cut
            block = rest[:end]
            self._frozen_length += end - len(self._reopen)
            self.frozen.append(f"{block}{fence[0]}\n" if fence else block)
            self._reopen = fence[1] if fence else ""
            rest = self._reopen + rest[end:]
        self.tail = rest


def find_cut(text: str, longest: int = LONGEST_TAIL) -> tuple[int, tuple[str, str] | None] | None:
    """Where the finished part of ``text`` ends, and, if that is inside a fence, its closing and opening lines.

    None: there is nothing to cut off yet.
    """
    position = 0
    safe = 0
    line_end = 0
    fence: tuple[str, str] | None = None
    cut_fence: tuple[str, str] | None = None
    previous_blank = False
    fence_start = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            # Of a line that is still growing only this is certain: begun with a letter, it is a paragraph.
            if fence is None and previous_blank and line[0].isalpha():
                safe = position
            break
        opening = _FENCE.match(line.rstrip("\n"))
        if fence is None:
            if previous_blank and line.strip() and not line.startswith((" ", "\t")) and not _is_item(line):
                safe = position
            if opening and not ("`" in opening[2] and opening[1][0] == "`"):
                fence, fence_start = (opening[1], line), position
        elif _closes(opening, fence[0]):
            fence = None
            # An indented fence may stand in a list, which it does not end.
            if not text[fence_start].isspace():
                safe = position + len(line)
        position += len(line)
        previous_blank = fence is None and not line.strip()
        if position <= longest:
            line_end, cut_fence = position, fence
    if safe:
        return safe, None
    if len(text) <= longest or not line_end:
        return None
    if cut_fence is not None and line_end <= len(cut_fence[1]):
        return None
    return line_end, cut_fence


def _closes(match: re.Match[str] | None, fence: str) -> bool:
    return match is not None and match[1].startswith(fence) and not match[2].strip()


def _is_item(line: str) -> bool:
    return re.match(r"([-*+]|\d{1,9}[.)])[ \t]", line) is not None
