"""Markdown of a model to one Textual ``Content``: rendered once, then cheap to show.

Nothing of the text acts: it is sanitised, never read as Textual markup, HTML stays text and links cannot be clicked.
Colours are theme variables, so the result follows the theme. Text that needs an indent on every line (lists, quotes,
code, tables) is wrapped here and depends on ``width``; plain paragraphs are left for the widget to wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from textual.content import Content, Span

from app.text_safety import sanitize
from app.tui.render.tables import Alignment, render_table

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

HEADINGS = ("bold $text-primary underline", "bold $text-primary", "bold $text-secondary")
CODE_BACKGROUND = "on $surface-lighten-1"
INLINE_CODE = "$text-accent"
MUTED = "$foreground-muted"
LINK = "underline $text-accent"
_BULLETS = ("•", "◦", "▪")
MARKDOWN_LIMIT = 30_000
"""Characters of one text that are read as Markdown. What comes behind them is shown as it is: hostile Markdown of this
length takes some tenths of a second, in which the screen stands still."""
_LONGEST_FORMULA = 2_000
_NARROWEST = 8

Colours = Callable[[str, str], Sequence[Span]]
"""The colours of some code in a language, as far as they are known."""


def no_colours(code: str, language: str) -> Sequence[Span]:
    return ()


def render_markdown(source: str, width: int, colours: Colours = no_colours) -> Content:
    """``source`` as content for a widget ``width`` cells wide."""
    text = sanitize(source)
    rest = ""
    if len(text) > MARKDOWN_LIMIT:
        cut = text.rfind("\n", 0, MARKDOWN_LIMIT) + 1 or MARKDOWN_LIMIT
        text, rest = text[:cut], text[cut:]
    try:
        lines = _Blocks(colours).of(_parse(text), max(width, _NARROWEST), nested=False)
    except RecursionError:
        # Emphasis within emphasis, some hundred times, as nobody writes it who means it.
        lines = [Content(text)]
    return Content("\n").join([*lines, Content(rest)] if rest else lines)


def render_plain(text: str) -> Content:
    """``text`` as it is, safely."""
    return Content(sanitize(text))


def code_blocks(source: str) -> list[str]:
    """The code of each fence of ``source``, in order."""
    try:
        return [node.content.rstrip("\n") for node in _parse(source).walk() if node.type in ("fence", "code_block")]
    except RecursionError:
        return []


@functools.cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock, reference
    from markdown_it.rules_inline import StateInline

    def formula(state: StateInline, silent: bool) -> bool:
        r"""``\(…\)`` and ``\[…\]`` stay as they are: their backslashes are no escapes of Markdown."""
        closing = {"\\(": "\\)", "\\[": "\\]"}.get(state.src[state.pos : state.pos + 2])
        if closing is None:
            return False
        end = state.src.find(closing, state.pos + 2, min(state.pos + _LONGEST_FORMULA, state.posMax))
        if end < 0:
            return False
        if not silent:
            state.push("text", "", 0).content = state.src[state.pos : end + 2]
        state.pos = end + 2
        return True

    def reference_but_no_footnote(state: StateBlock, start: int, end: int, silent: bool) -> bool:
        """``[^1]: a note`` is text, and not where a link of that name leads."""
        first = state.bMarks[start] + state.tShift[start]
        return not state.src.startswith("[^", first) and reference(state, start, end, silent)

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.inline.ruler.before("escape", "formula", formula)
    parser.block.ruler.at("reference", reference_but_no_footnote, {"alt": []})
    return parser


def _parse(text: str) -> SyntaxTreeNode:
    from markdown_it.tree import SyntaxTreeNode

    return SyntaxTreeNode(_parser().parse(text))


# --- blocks: each gives lines -------------------------------------------------------------------------------------


class _Blocks:
    """Blocks as lines, with these colours for their code."""

    def __init__(self, colours: Colours) -> None:
        self._colours = colours

    def of(
        self, parent: SyntaxTreeNode, width: int, *, nested: bool, tight: bool = False, depth: int = 0
    ) -> list[Content]:
        """The lines of what ``parent`` holds."""
        lines: list[Content] = []
        for node in parent.children:
            if lines and not tight:
                lines.append(Content())
            lines += self._block(node, width, nested, depth)
        return lines

    def _block(self, node: SyntaxTreeNode, width: int, nested: bool, depth: int) -> list[Content]:
        match node.type:
            case "paragraph" | "inline":
                return _flow(_inline(node), width, nested)
            case "heading":
                level = int(node.tag[1:]) if node.tag[1:].isdigit() else 1
                style = HEADINGS[min(level, len(HEADINGS)) - 1]
                return _flow(_inline(node).stylize_before(style), width, nested)
            case "fence" | "code_block":
                return self._code(node.content, node.info.split()[0] if node.info.split() else "", width)
            case "bullet_list" | "ordered_list":
                return self._list(node, width, depth)
            case "blockquote":
                inside = self.of(node, max(width - 2, _NARROWEST), nested=True, depth=depth)
                return [Content.assemble(("▎ ", "$text-secondary"), line.stylize_before(MUTED)) for line in inside]
            case "hr":
                return [Content.styled("─" * width, MUTED)]
            case "table":
                header, rows, alignments = _table_cells(node)
                return render_table(header, rows, alignments, width)
            case _:
                return _flow(Content(node.content or ""), width, nested)

    def _list(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Content]:
        ordered = node.type == "ordered_list"
        first = int(node.attrs.get("start", 1)) if ordered else 1
        digits = len(str(first + len(node.children) - 1))
        tight = all(child.hidden for item in node.children for child in item.children if child.type == "paragraph")
        lines: list[Content] = []
        for number, item in enumerate(node.children, start=first):
            mark = f"{number:>{digits}}." if ordered else _BULLETS[depth % len(_BULLETS)]
            indent = len(mark) + 1
            inside = self.of(item, max(width - indent, _NARROWEST), nested=True, tight=tight, depth=depth + 1)
            if lines and not tight:
                lines.append(Content())
            for index, line in enumerate(inside or [Content()]):
                lead = Content.styled(f"{mark} ", "$text-secondary") if index == 0 else Content(" " * indent)
                lines.append(lead + line)
        return lines

    def _code(self, code: str, language: str, width: int) -> list[Content]:
        """A label if the language is known, and the lines on a background of their own."""
        inner = max(width - 2, _NARROWEST)
        code = code.rstrip("\n").expandtabs(4)
        lines: list[Content] = []
        content = Content(code, list(self._colours(code, language)))
        if language:
            content = content.stylize_before("$text")
            lines.append(_barred(Content.styled(language, f"{MUTED} italic"), inner))
        for line in content.split("\n", allow_blank=True):
            lines += [_barred(piece, inner) for piece in (line.fold(inner) or [Content()])]
        return lines


def _flow(content: Content, width: int, nested: bool) -> list[Content]:
    if nested:
        return [line.rstrip() for line in content.wrap(width)]
    return list(content.split("\n", allow_blank=True))


def _barred(line: Content, inner: int) -> Content:
    gap = max(0, inner - line.cell_length)
    return Content.assemble(" ", line, " " * (gap + 1)).stylize_before(CODE_BACKGROUND)


def _table_cells(table: SyntaxTreeNode) -> tuple[list[Content], list[list[Content]], list[Alignment]]:
    header: list[Content] = []
    rows: list[list[Content]] = []
    alignments: list[Alignment] = []
    for section in table.children:
        for row in section.children:
            cells = [_inline(cell) for cell in row.children]
            if section.type == "thead":
                header, alignments = cells, [_alignment(cell) for cell in row.children]
            else:
                rows.append(cells)
    return header, rows, alignments


def _alignment(cell: SyntaxTreeNode) -> Alignment:
    style = str(cell.attrs.get("style", ""))
    return "right" if "right" in style else "center" if "center" in style else "left"


# --- inline: pieces of text with styles ---------------------------------------------------------------------------

_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}


def _inline(node: SyntaxTreeNode) -> Content:
    text: list[str] = []
    spans: list[Span] = []
    position = 0

    def put(piece: str, style: str = "") -> None:
        nonlocal position
        if style and piece:
            spans.append(Span(position, position + len(piece), style))
        text.append(piece)
        position += len(piece)

    _put_inline(node.children, put, lambda start, style: spans.append(Span(start, position, style)), lambda: position)
    spans.sort(key=lambda span: (span.start, -span.end))
    return Content("".join(text), spans)


def _put_inline(
    nodes: Iterable[SyntaxTreeNode],
    put: Callable[..., None],
    mark: Callable[[int, str], None],
    here: Callable[[], int],
) -> None:
    for node in nodes:
        start = here()
        match node.type:
            case "text":
                put(node.content)
            case "softbreak":
                put(" ")
            case "hardbreak":
                put("\n")
            case "code_inline":
                put(node.content, INLINE_CODE)
            case "link" | "image":
                _put_inline(node.children, put, mark, here)
                mark(start, LINK)
                target = str(node.attrs.get("href") or node.attrs.get("src") or "")
                if target and target != _text_of(node.children):
                    put(f" ({target})", MUTED)
            case _:
                if node.children:
                    _put_inline(node.children, put, mark, here)
                    if node.type in _STYLES:
                        mark(start, _STYLES[node.type])
                else:
                    put(node.content)


def _text_of(nodes: Sequence[SyntaxTreeNode]) -> str:
    return "".join(node.content or _text_of(node.children) for node in nodes)
