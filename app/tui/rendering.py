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
from app.tui.tables import Alignment, render_table

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

HEADINGS = ("bold $text-primary underline", "bold $text-primary", "bold $text-secondary")
CODE_BACKGROUND = "on $surface-lighten-1"
INLINE_CODE = "$text-accent"
MUTED = "$foreground-muted"
LINK = "underline $text-accent"
_BULLETS = ("•", "◦", "▪")
_HIGHLIGHT_LIMIT = 40_000
"""Characters of one fence that are still worth colouring; more would hold up the screen."""
_NARROWEST = 8


def render_markdown(source: str, width: int) -> Content:
    """``source`` as content for a widget ``width`` cells wide."""
    text = sanitize(source)
    return Content("\n").join(_blocks(_parse(text), max(width, _NARROWEST), nested=False))


def render_plain(text: str) -> Content:
    """``text`` as it is, safely."""
    return Content(sanitize(text))


def code_blocks(source: str) -> list[str]:
    """The code of each fence of ``source``, in order."""
    return [node.content.rstrip("\n") for node in _parse(source).walk() if node.type in ("fence", "code_block")]


@functools.cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def _parse(text: str) -> SyntaxTreeNode:
    from markdown_it.tree import SyntaxTreeNode

    return SyntaxTreeNode(_parser().parse(text))


# --- blocks: each gives lines -------------------------------------------------------------------------------------


def _blocks(parent: SyntaxTreeNode, width: int, *, nested: bool, tight: bool = False, depth: int = 0) -> list[Content]:
    lines: list[Content] = []
    for node in parent.children:
        if lines and not tight:
            lines.append(Content())
        lines += _block(node, width, nested, depth)
    return lines


def _block(node: SyntaxTreeNode, width: int, nested: bool, depth: int) -> list[Content]:
    match node.type:
        case "paragraph" | "inline":
            return _flow(_inline(node), width, nested)
        case "heading":
            level = int(node.tag[1:]) if node.tag[1:].isdigit() else 1
            style = HEADINGS[min(level, len(HEADINGS)) - 1]
            return _flow(_inline(node).stylize_before(style), width, nested)
        case "fence" | "code_block":
            return code_lines(node.content, node.info.split()[0] if node.info.split() else "", width)
        case "bullet_list" | "ordered_list":
            return _list(node, width, depth)
        case "blockquote":
            inside = _blocks(node, max(width - 2, _NARROWEST), nested=True, depth=depth)
            return [Content.assemble(("▎ ", "$text-secondary"), line.stylize_before(MUTED)) for line in inside]
        case "hr":
            return [Content.styled("─" * width, MUTED)]
        case "table":
            header, rows, alignments = _table_cells(node)
            return render_table(header, rows, alignments, width)
        case _:
            return _flow(Content(node.content or ""), width, nested)


def _flow(content: Content, width: int, nested: bool) -> list[Content]:
    if nested:
        return [line.rstrip() for line in content.wrap(width)]
    return list(content.split("\n", allow_blank=True))


def _list(node: SyntaxTreeNode, width: int, depth: int) -> list[Content]:
    ordered = node.type == "ordered_list"
    first = int(node.attrs.get("start", 1)) if ordered else 1
    digits = len(str(first + len(node.children) - 1))
    tight = all(child.hidden for item in node.children for child in item.children if child.type == "paragraph")
    lines: list[Content] = []
    for number, item in enumerate(node.children, start=first):
        mark = f"{number:>{digits}}." if ordered else _BULLETS[depth % len(_BULLETS)]
        indent = len(mark) + 1
        inside = _blocks(item, max(width - indent, _NARROWEST), nested=True, tight=tight, depth=depth + 1)
        if lines and not tight:
            lines.append(Content())
        for index, line in enumerate(inside or [Content()]):
            lead = Content.styled(f"{mark} ", "$text-secondary") if index == 0 else Content(" " * indent)
            lines.append(lead + line)
    return lines


def code_lines(code: str, language: str, width: int) -> list[Content]:
    """A block of code: a label if the language is known, and lines on a background of their own."""
    inner = max(width - 2, _NARROWEST)
    content = _highlighted(code.rstrip("\n").expandtabs(4), language)
    lines: list[Content] = []
    if language:
        lines.append(_barred(Content.styled(language, f"{MUTED} italic"), inner))
    for line in content.split("\n", allow_blank=True):
        lines += [_barred(piece, inner) for piece in (line.fold(inner) or [Content()])]
    return lines


def _barred(line: Content, inner: int) -> Content:
    gap = max(0, inner - line.cell_length)
    return Content.assemble(" ", line, " " * (gap + 1)).stylize_before(CODE_BACKGROUND)


def _highlighted(code: str, language: str) -> Content:
    if not language or len(code) > _HIGHLIGHT_LIMIT:
        return Content(code)
    from textual.highlight import highlight

    return highlight(code, language=language, tab_size=4)


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
