r"""The Markdown that models write, parsed: CommonMark with tables, formulas, and the HTML that models use in it.

Nothing is left out of what was written, but for the marks themselves. Lines end where the model ended them; pipes that
do not fit a table's columns belong to a cell; ``<br>``, ``<kbd>``, ``<sub>``, ``<sup>``, ``<details>`` and
``<summary>`` mean what they mean, and all other HTML is text.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.tree import SyntaxTreeNode

LONGEST_FORMULA = 2_000
"""Maximum characters of a formula; a longer one is text."""
_HIDDEN_PIPE = "\0"
"""Stands for a pipe that separates no cells while a table is parsed. The parser removes it from any text before."""
_BREAK = re.compile(r"<br[ \t]*/?>", re.IGNORECASE)
_SPAN = re.compile(r"<(kbd|sub|sup)>([^<>\n]{1,200})</\1>", re.IGNORECASE)
_DETAILS = re.compile(r"</?details(?: open)?>", re.IGNORECASE)
_END_OF_DETAILS = re.compile(r"</details>\s*\Z", re.IGNORECASE)
_SUMMARY = re.compile(r"<summary>(.{1,500}?)</summary>", re.IGNORECASE)
_FORMULA = re.compile(
    r"""
    \\\((?P<round>.+?)\\\) | \\\[(?P<square>.+?)\\\]
    | \$\$(?P<dollars>(?:[^$\\]|\\.)+)\$\$
    # As in pandoc there is no space inside the dollars, so that prices are none. A line break or code ends it, too.
    | \$(?![\s$])(?P<dollar>(?:[^$\\`\n]|\\[^\n])+)(?<!\s)\$
    """,
    re.DOTALL | re.VERBOSE,
)
_TWO_WORDS, _WORD = re.compile(r"[^\W\d_]{2}\s+[^\W\d_]{2}"), re.compile(r"[^\W\d_]{3}")
_DISPLAY = re.compile(r"\$\$|\\\[|\\begin\{(?:align|aligned|equation|gather|gathered|multline|split)\*?\}")
_MOST_LINES = 40
"""Maximum lines of a formula."""
_TICKS = re.compile("`+")
_PIPE = re.compile(r"(?<!\\)\|")


def parse(text: str) -> SyntaxTreeNode:
    """The syntax tree of ``text``. Besides the nodes of markdown-it there are ``formula``, ``display_formula``,
    ``kbd``, ``sub``, ``sup`` and ``summary``."""
    from markdown_it.tree import SyntaxTreeNode

    return SyntaxTreeNode(_parser().parse(text))


@functools.cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.inline.ruler.push("tag", _tag)
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    parser.block.ruler.at("reference", _shown_reference, {"alt": []})
    ends = ["paragraph", "reference", "blockquote", "list"]
    parser.block.ruler.before("table", "display_formula", _display_formula, {"alt": ends})
    parser.block.ruler.before("fence", "details", _details, {"alt": ends})
    return parser


# --- within a line ------------------------------------------------------------------------------------------------


def _formula(state: StateInline, silent: bool) -> bool:
    r"""``\(…\)``, ``\[…\]``, ``$…$`` and ``$$…$$``, in which no character is a mark of Markdown."""
    match = _FORMULA.match(state.src, state.pos, min(state.pos + LONGEST_FORMULA, state.posMax))
    if match is None:
        return False
    body = match[match.lastindex or 0]
    if match["dollar"] is not None:
        before, after = state.src[: state.pos][-1:], state.src[match.end() : match.end() + 1]
        if before.isalnum() or before == "$" or after.isalnum() or after in ("$", "_") or _is_prose(body):
            return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.markup = body, match[0]
    state.pos = match.end()
    return True


def _is_prose(between: str) -> bool:
    """Whether ``between`` is text between two prices, not a formula: several words, or a number and a word."""
    if "\\" in between:
        return False
    return _TWO_WORDS.search(between) is not None or (between[0].isdecimal() and _WORD.search(between) is not None)


def _tag(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] != "<":
        return False
    kinds = (_BREAK, _SPAN, _END_OF_DETAILS)
    match = next(filter(None, (kind.match(state.src, state.pos, state.posMax) for kind in kinds)), None)
    if match is None:
        return False
    if not silent:
        if match.re is _BREAK:
            state.push("hardbreak", "br", 0)
        elif match.re is _SPAN:
            state.push(match[1].lower(), "", 0).content = match[2]
    state.pos = match.end()
    return True


# --- blocks -------------------------------------------------------------------------------------------------------


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _display_formula(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula that begins and ends a line. Nothing between is a block of Markdown, such as a list."""
    if state.is_code_block(start):
        return False
    first = _line(state, start)
    opening = _DISPLAY.match(first)
    if opening is None:
        return False
    closing = {"$$": "$$", "\\[": "\\]"}.get(opening[0], opening[0].replace("begin", "end"))
    lines: list[str] = []
    for line in range(start, min(end, start + _MOST_LINES)):
        if line > start and state.sCount[line] < state.blkIndent and not state.isEmpty(line):
            return False
        lines.append(_line(state, line))
        ending = lines[-1].rstrip(" .,;:")
        if ending.endswith(closing) and (line > start or len(ending) >= len(opening[0]) + len(closing)):
            break
        if line > start and lines[-1].startswith(opening[0]):
            return False
    else:
        return False
    written = "\n".join(lines)
    outer = written.rstrip(" .,;:")
    body = outer if opening[0].startswith("\\begin") else outer[len(opening[0]) : -len(closing)]
    if len(body) > LONGEST_FORMULA or not body.strip() or (closing in body and body is not outer):
        return False
    if not silent:
        token = state.push("display_formula", "", 0)
        token.content, token.markup, token.info = body, written, written[len(outer) :]
        state.line = line + 1
    return True


def _details(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A line of ``<details>`` and ``</details>`` is left out; what stands in ``<summary>`` is a line of its own, and so
    is what stands behind it."""
    if state.is_code_block(start):
        return False
    line = _line(state, start)
    if not line.startswith("<"):
        return False
    summary = _SUMMARY.search(line)
    before, behind = (line[: summary.start()], line[summary.end() :]) if summary else (line, "")
    if summary is None and _DETAILS.match(line) and _END_OF_DETAILS.search(line):
        before, behind = "", line
    if _DETAILS.sub("", before).strip():
        return False
    if silent:
        return True
    state.line = start + 1
    if summary is not None:
        _push(state, "summary", summary[1].strip())
    if rest := _DETAILS.sub("", behind).strip():
        _push(state, "paragraph", rest)
    return True


def _push(state: StateBlock, kind: str, text: str) -> None:
    """Add a block of the ``kind`` with the Markdown ``text``."""
    state.push(f"{kind}_open", "p", 1)
    inline = state.push("inline", "", 0)
    inline.content, inline.children = text, []
    state.push(f"{kind}_close", "p", -1)


def _shown_reference(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Know ``[1]: https://…`` as the target of links, and show it too: it may not be used, or by a text that was
    parsed before it arrived. ``[^1]: a note`` is a footnote, and only text."""
    from markdown_it.rules_block import reference

    first = state.bMarks[start] + state.tShift[start]
    if state.src.startswith("[^", first) or not reference(state, start, end, silent):
        return False
    if not silent:
        _push(state, "paragraph", "\\" + state.getLines(start, state.line, state.blkIndent, False).strip())
    return True


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A table, whatever pipes its cells have: the parser would leave out what does not fit the head's columns."""
    from markdown_it.rules_block import table

    if start + 2 > end:
        return False
    marks = _line(state, start + 1).strip()
    if not marks or marks.strip("|:- \t"):
        return False
    columns = len(marks.strip("|").split("|"))
    source, first = state.src, len(state.tokens)
    lines = [start] if silent else [start, *range(start + 2, end)]
    for line in lines:
        row = _line(state, line)
        if line != start and not row.strip():
            break
        fitting = row
        if _cells(row) > columns:
            fitting = _hidden(row, _pipes_of_code(row))
        if line == start and _cells(fitting) != columns:
            return False
        if _cells(fitting) > columns:
            fitting = _hidden(fitting, _surplus(fitting, columns))
        if fitting != row:
            position = state.bMarks[line] + state.tShift[line]
            state.src = state.src[:position] + fitting + state.src[position + len(row) :]
    try:
        return table(state, start, end, silent)
    finally:
        state.src = source
        for token in state.tokens[first:]:
            token.content = token.content.replace(_HIDDEN_PIPE, "|")


def _pipes_of_code(row: str) -> set[int]:
    """Indices of the pipes in ``row`` that stand within code."""
    pipes: set[int] = set()
    runs = [match.span() for match in _TICKS.finditer(row)]
    later = {end - start: index for index, (start, end) in enumerate(runs)}
    index = 0
    while index < len(runs):
        start, end = runs[index]
        # The next run of the same length closes it. Without one, later runs of this length open nothing either.
        closing = index + 1
        if later[end - start] > index:
            while runs[closing][1] - runs[closing][0] != end - start:
                closing += 1
            pipes.update(match.start() for match in _PIPE.finditer(row, end, runs[closing][0]))
            index = closing
        index += 1
    return pipes


def _surplus(row: str, columns: int) -> set[int]:
    """Indices of the pipes in ``row`` beyond those that separate ``columns`` cells. They belong to the last cell."""
    pipes = [found.start() for found in _PIPE.finditer(row.rstrip().removesuffix("|"))]
    return set(pipes[columns - 1 + row.lstrip().startswith("|") :])


def _hidden(row: str, pipes: set[int]) -> str:
    return "".join(_HIDDEN_PIPE if index in pipes else each for index, each in enumerate(row)) if pipes else row


def _cells(row: str) -> int:
    """The number of cells that the parser finds in ``row``."""
    from markdown_it.rules_block.table import escapedSplit

    cells = escapedSplit(row.strip())
    return len(cells) - (cells[0] == "") - (len(cells) > 1 and cells[-1] == "")
