"""A model's Markdown as one Textual ``Content``, which is rendered once and then cheap to show.

The text cannot act: it is sanitised and never read as Textual markup, and HTML stays text. The address of a link is
shown, and is what opens. Colours are theme variables, so the result follows the theme. Text with an indent on every
line (lists, quotes, code, tables) is wrapped here and depends on ``width``. Plain paragraphs are wrapped by the widget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Literal

from textual.content import Content, Span
from textual.style import Style

from app.text_safety import sanitize
from app.tui.render.formula_symbols import scripted
from app.tui.render.formulas import display_formula, inline_formula
from app.tui.render.markdown_parser import parse
from app.tui.terminal.links import linked, unlinked

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode


HEADINGS = ("bold $text-primary underline", "bold $text-primary", "bold $text-secondary")
CODE_BACKGROUND = "on $code-background"
EDGE = "▏"
"""Begins each line of code. It is seen where code has no background of its own: with few colours, or none."""
INLINE_CODE = "bold $text-accent"
KEY = "bold $text-accent"
MUTED = "$foreground-muted"
LINK = "$text-accent"
"""Style of a link's text. Underlined is the address behind it, which opens."""
_BULLETS = ("•", "◦", "▪")
COPY_MARK = "⧉"
"""Stands at the end of the first line of code, where nothing else does. A click on it copies the code."""
FENCE = "fence"
"""Key in a style's meta, at a copy mark, of the number of its code in :func:`fences`."""
MARKDOWN_LIMIT = 30_000
"""Maximum characters of a text that are read as Markdown; the rest is shown as it is. Hostile Markdown of this length
blocks the screen for some tenths of a second."""
_NARROWEST = 8

Colours = Callable[[str, str], Sequence[Span]]
"""Function from code and its language to the colours that are known."""


def no_colours(code: str, language: str) -> Sequence[Span]:
    return ()


def render_markdown(source: str, width: int, colours: Colours = no_colours, *, marked: bool = False) -> Content:
    """``source`` as content for a widget ``width`` cells wide. If it is ``marked``, each code has a copy mark."""
    text, rest = _read_as_markdown(source)
    try:
        lines = _Blocks(colours, marked).of(parse(text), max(width, _NARROWEST), nested=False)
    except RecursionError:
        # Hundreds of levels of nested emphasis, which no honest text has.
        lines = [Content(text)]
    return Content("\n").join([*lines, Content(rest)] if rest else lines)


def fences(source: str) -> list[str]:
    """The code in ``source``, in the order of its copy marks."""
    nodes = parse(_read_as_markdown(source)[0]).walk()
    return [node.content.rstrip("\n") for node in nodes if node.type in ("fence", "code_block")]


def copy_marks(content: Content) -> list[int]:
    """The places of the copy marks in ``content``."""
    return [span.start for span in content.spans if isinstance(span.style, Style) and FENCE in span.style.meta]


def _read_as_markdown(source: str) -> tuple[str, str]:
    """The part of ``source`` that is read as Markdown, and the rest."""
    text = sanitize(source)
    if len(text) <= MARKDOWN_LIMIT:
        return text, ""
    cut = text.rfind("\n", 0, MARKDOWN_LIMIT) + 1 or MARKDOWN_LIMIT
    return text[:cut], text[cut:]


def render_plain(text: str) -> Content:
    """``text`` as it is, safely."""
    return Content(sanitize(text))


# --- blocks: each gives lines -------------------------------------------------------------------------------------


class _Blocks:
    """Renders blocks to lines. ``colours`` are those of their code, which has copy marks if it is ``marked``."""

    def __init__(self, colours: Colours, marked: bool) -> None:
        self._colours = colours
        self._numbers = count() if marked else None

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
            case "paragraph" | "inline" | "summary":
                text = _inline(node)
                if node.type == "summary":
                    text = Content.styled("▾ ", "$text-secondary") + text.stylize_before("bold")
                return _flow(text, width, nested)
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
            case "display_formula":
                return _flow(_display(node, width), width, nested)
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
        """The language if it is given, and the lines on a background of their own."""
        inner = max(width - 2, _NARROWEST)
        code = code.rstrip("\n").expandtabs(4)
        content = linked(Content(code, list(self._colours(code, language))))
        lines = [Content.styled(language, f"{MUTED} italic")] if language else []
        if language:
            content = content.stylize_before("$text")
        for line in content.split("\n", allow_blank=True):
            lines += line.fold(inner) or [Content()]
        marks = [] if self._numbers is None else [next(self._numbers)]
        return [_barred(line, inner, mark) for line, mark in zip_longest(lines, marks)]


def _display(node: SyntaxTreeNode, width: int) -> Content:
    """A formula on lines of its own, as it is written if it cannot be read."""
    lines = display_formula(node.content, max(width - 2, _NARROWEST))
    return Content(node.markup if lines is None else "\n".join(f"  {line}" for line in lines) + node.info)


def _flow(content: Content, width: int, nested: bool) -> list[Content]:
    if nested:
        return [line.rstrip() for line in content.wrap(width)]
    return list(content.split("\n", allow_blank=True))


def _barred(line: Content, inner: int, fence: int | None = None) -> Content:
    """``line`` of code with its edge, and with the copy mark of ``fence`` if it is one's first."""
    gap = max(0, inner - line.cell_length) + 1
    end = Content(" " * gap)
    if fence is not None:
        # Some fonts draw the mark wider than a cell: another one is left for it where there is room.
        mark = Content.styled(f"{COPY_MARK} "[:gap], MUTED).stylize(Style.from_meta({FENCE: fence}))
        end = end[len(mark) :] + mark
    return Content.assemble((EDGE, "$code-edge"), line, end).stylize_before(CODE_BACKGROUND)


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
    return linked(Content("".join(text), spans))


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
            case "softbreak" | "hardbreak":
                put("\n")
            case "formula":
                put(inline_formula(node.content) or node.markup)
            case "kbd":
                put(node.content, KEY)
            case "sub" | "sup":
                put(scripted(node.content, node.type))
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


Alignment = Literal["left", "right", "center"]

# --- tables --------------------------------------------------------------------------------------------------------

_GAP = "  "
_NARROWEST_COLUMN = 5
_WIDEST_LABEL = 60
"""Cells of a column's name before its fields in rows after the first, which has it whole."""
_RULE = "$foreground-muted"


def render_table(
    header: Sequence[Content], rows: Sequence[Sequence[Content]], alignments: Sequence[Alignment], width: int
) -> list[Content]:
    """Lines at most ``width`` cells wide: columns side by side, or, where they do not fit, one field to a line."""
    count = max([len(header), *(len(row) for row in rows)], default=0)
    if not count:
        return []
    wanted = [
        max([line.cell_length for cell in _column(header, rows, index) for line in cell.split()], default=0)
        for index in range(count)
    ]
    widths = column_widths(wanted, width - len(_GAP) * (count - 1))
    if widths is None:
        return _as_fields(header, rows, width)
    lines: list[Content] = []
    if any(cell.plain for cell in header):
        lines += _row([cell.stylize_before("bold") for cell in header], widths, alignments)
        lines.append(Content.styled(_GAP.join("─" * column for column in widths), _RULE))
    for row in rows:
        lines += _row(row, widths, alignments)
    return lines


def column_widths(wanted: Sequence[int], available: int) -> list[int] | None:
    """The width of each column, ``available`` cells in all; None if that is too narrow to read."""
    widths = [max(1, column) for column in wanted]
    floor = [min(column, _NARROWEST_COLUMN) for column in widths]
    if sum(floor) > available:
        return None
    while sum(widths) > available:
        widest = max(range(len(widths)), key=lambda index: widths[index] - floor[index])
        # One cell at a time: tables of a chat are small.
        widths[widest] -= 1
    return widths


def _column(header: Sequence[Content], rows: Sequence[Sequence[Content]], index: int) -> list[Content]:
    return [row[index] for row in (header, *rows) if index < len(row)]


def _row(cells: Sequence[Content], widths: Sequence[int], alignments: Sequence[Alignment]) -> list[Content]:
    wrapped = [
        [_aligned(line.rstrip(), width, alignment) for line in cell.wrap(width)] or [Content(" " * width)]
        for cell, width, alignment in zip_longest(cells, widths, alignments[: len(widths)], fillvalue=None)
        if cell is not None and width is not None
        for alignment in [alignment or "left"]
    ]
    height = max((len(lines) for lines in wrapped), default=0)
    blank = [Content(" " * width) for width in widths]
    return [
        Content(_GAP).join(
            lines[index] if index < len(lines) else empty for lines, empty in zip(wrapped, blank, strict=False)
        )
        for index in range(height)
    ]


def _aligned(line: Content, width: int, alignment: Alignment) -> Content:
    gap = max(0, width - line.cell_length)
    if alignment == "right":
        return line.pad_left(gap)
    if alignment == "center":
        return line.pad_left(gap // 2).pad_right(gap - gap // 2)
    return line.pad_right(gap)


def _as_fields(header: Sequence[Content], rows: Sequence[Sequence[Content]], width: int) -> list[Content]:
    lines: list[Content] = []
    names = header
    later = [
        name if name.cell_length <= _WIDEST_LABEL else unlinked(name).truncate(_WIDEST_LABEL, ellipsis=True)
        for name in header
    ]
    for row in rows:
        if lines:
            lines.append(Content.styled("─" * width, _RULE))
        for name, cell in zip_longest(names, row, fillvalue=Content()):
            label = name.stylize_before("bold") + ": " if name.plain else Content()
            lines += [line.rstrip() for line in (label + cell).wrap(width)]
        names = later
    return lines
