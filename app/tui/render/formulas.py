r"""LaTeX's formulas as Unicode: ``\frac{x^2}{2} \le \sum_i a_i`` as ``x²⁄2 ≤ ∑ᵢ aᵢ``. Pure.

Commands that are not known stay as they were written, and so does a formula that cannot be read. The spaces are TeX's:
around relations and operators, not where the source has some. The work is linear in the length of a formula, and
nesting has a limit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from app.tui.render.formula_symbols import (
    ACCENTS,
    ALPHABETS,
    FUNCTIONS,
    SPACES,
    kind_of,
    letters,
    scripted,
    symbol,
)

_DEEPEST = 24
"""Maximum levels of groups within groups."""
_LARGEST = 12_000
"""Maximum cells of a formula that is drawn on several lines; a larger one is written in one."""
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\s+|[A-Za-z]+|\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|.", re.DOTALL)

_LINES = frozenset((
    "align", "aligned", "alignat", "alignedat", "eqnarray", "equation", "flalign", "gather", "gathered",
    "multline", "split",
))  # fmt: skip
"""Environments whose rows are lines."""
_GRIDS = {
    "array": ("", ""), "bmatrix": ("[", "]"), "Bmatrix": ("{", "}"), "cases": ("{", ""), "dcases": ("{", ""),
    "matrix": ("", ""), "pmatrix": ("(", ")"), "rcases": ("", "}"), "smallmatrix": ("", ""), "vmatrix": ("|", "|"),
    "Vmatrix": ("‖", "‖"),
}  # fmt: skip
"""Environments whose cells stand in columns, with what stands around them."""
_TALL = {
    "(": "⎛⎜⎜⎝", ")": "⎞⎟⎟⎠", "[": "⎡⎢⎢⎣", "]": "⎤⎥⎥⎦", "{": "⎧⎨⎪⎩", "}": "⎫⎬⎪⎭", "|": "││││", "‖": "║║║║", "": "",
}  # fmt: skip
"""Delimiters over several lines: their top, middle, what is between, and bottom."""

_WITHOUT_EFFECT = frozenset((
    "displaystyle", "textstyle", "scriptstyle", "scriptscriptstyle", "limits", "nolimits", "nonumber", "notag",
    "hline", "mathstrut", "allowbreak", "left", "right", "middle", "big", "Big", "bigg", "Bigg", "bigl", "Bigl",
    "biggl", "Biggl", "bigr", "Bigr", "biggr", "Biggr", "bigm", "Bigm", "rm", "bf", "it", "cal", "mathopen",
    "mathclose", "mathord", "mathbin", "mathrel", "mathinner", "mathpunct", "centering",
))  # fmt: skip
_LEAVE_OUT = frozenset(["label", "color", "vspace", "phantom", "hphantom", "vphantom", "require"])
"""Commands that are left out with what stands in braces after them."""
_AS_THEY_ARE = frozenset((
    "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "pmb", "mathop",
    "operatorname", "overrightarrow", "smash", "ensuremath",
))  # fmt: skip
_TEXTS = frozenset((
    "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "mbox", "hbox",
))  # fmt: skip


@dataclass(frozen=True)
class _Atom:
    """A piece of a formula. ``kind`` is a class of :func:`kind_of`, or ``inner`` (a fraction), ``text``, ``space``,
    ``row`` and ``cell``. ``apart``: there is a space before it in the source. ``lines``: it on several lines."""

    text: str
    kind: str = "ord"
    apart: bool = False
    lines: tuple[str, ...] = ()


class _Unreadable(ValueError):
    """Raised for text that is not a displayable formula."""


def inline_formula(source: str) -> str | None:
    """The formula ``source``, which has no dollars around it, in one line; None if it cannot be read."""
    try:
        rows = _rows(_FormulaReader(source).whole())
    except _Unreadable:
        return None
    return "; ".join(filter(None, map(_joined, rows))) or None


def display_formula(source: str, width: int) -> list[str] | None:
    """The formula ``source`` on lines of its own, with matrices as such where they fit in ``width`` cells.

    None if it cannot be read.
    """
    try:
        rows = _rows(_FormulaReader(source).whole())
    except _Unreadable:
        return None
    return [line for row in rows for line in _drawn(row, width)] or None


# --- reading ------------------------------------------------------------------------------------------------------


class _FormulaReader:
    """Reads LaTeX to atoms."""

    def __init__(self, source: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(source)
        self._next = 0
        self._depth = 0

    def whole(self) -> list[_Atom]:
        return self._until("")

    def _until(self, *ends: str) -> list[_Atom]:
        """The atoms up to one of ``ends``, which is taken, too; an empty one is the end of the source."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unreadable
        atoms: list[_Atom] = []
        over: list[_Atom] | None = None
        apart = False
        while (token := self._take()) not in ends:
            if not token or token in ("}", "\\end"):
                raise _Unreadable
            if token.isspace():
                apart = True
                continue
            if token in ("^", "_", "'"):
                self._script(atoms, token)
            elif token == "\\over":
                over, atoms = atoms, []
            else:
                found = self._atoms(token)
                if found and apart:
                    found[0] = _Atom(found[0].text, found[0].kind, True, found[0].lines)
                atoms += found
            apart = False
        self._depth -= 1
        return atoms if over is None else [_fraction(_joined(over), _joined(atoms))]

    def _take(self) -> str:
        if self._next >= len(self._tokens):
            self._next += 1
            return ""
        self._next += 1
        return self._tokens[self._next - 1]

    def _peek(self) -> str:
        """The next token that is not a space. Spaces before it are skipped."""
        while self._next < len(self._tokens) and self._tokens[self._next].isspace():
            self._next += 1
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _argument(self) -> list[_Atom]:
        """A group, a command with what belongs to it, or a single character."""
        token = self._peek()
        if not token or token in ("}", "^", "_", "&", "\\\\", "\\end", "\\right"):
            raise _Unreadable
        self._next += 1
        if token == "{":
            return self._until("}")
        if token[0] != "\\" and len(token) > 1:
            # Of several letters or digits only the first is meant.
            self._tokens[self._next - 1 : self._next] = [token[0], token[1:]]
            token = token[0]
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unreadable
        atoms = self._atoms(token)
        self._depth -= 1
        return atoms

    def _text(self) -> str:
        """An argument as it is written."""
        if self._peek() != "{":
            return _joined(self._argument())
        self._next += 1
        start, open_ = self._next, 1
        while open_:
            token = self._take()
            if not token:
                raise _Unreadable
            open_ += (token == "{") - (token == "}")
        return "".join(self._tokens[start : self._next - 1])

    def _option(self) -> list[_Atom]:
        """The content of square brackets, if there are any."""
        if self._peek() != "[":
            return []
        self._next += 1
        return self._until("]")

    def _script(self, atoms: list[_Atom], mark: str) -> None:
        script = "′" if mark == "'" else scripted(_compact(self._argument()), "sup" if mark == "^" else "sub")
        base = atoms.pop() if atoms and atoms[-1].kind not in ("row", "cell", "space") else _Atom("")
        text = f"({base.text})" if base.kind == "inner" else base.text
        # A relation or an operator with a script, such as an arrow with a name, is spaced as before.
        atoms.append(_Atom(text + script, "ord" if base.kind == "inner" else base.kind, base.apart))

    def _atoms(self, token: str) -> list[_Atom]:
        if token == "{":
            return self._until("}")
        if token[0] == "\\" and len(token) > 1:
            return self._command(token[1:])
        if token == "&":
            return [_Atom("", "cell")]
        if token == "~":
            return [_Atom(" ", "space")]
        text = "−" if token == "-" else token
        return [_Atom(text, kind_of(text))]

    def _command(self, name: str) -> list[_Atom]:
        read = _COMMANDS.get(name)
        if read is not None:
            return read(self, name)
        if name in SPACES:
            return [_Atom(SPACES[name], "space")]
        if name in FUNCTIONS:
            return [_Atom(name, "op")]
        if name in _WITHOUT_EFFECT:
            if name in ("left", "right") and self._peek() == ".":
                self._next += 1
            return []
        found = symbol(name)
        return [_Atom(found, kind_of(found))] if found is not None else self._unknown(name)

    def _unknown(self, name: str) -> list[_Atom]:
        """A command as it was written, with its arguments."""
        written = f"\\{name}"
        while self._next < len(self._tokens) and self._tokens[self._next] == "{":
            written += f"{{{self._text()}}}"
        return [_Atom(written)]

    def _row(self, name: str) -> list[_Atom]:
        if self._next < len(self._tokens) and self._tokens[self._next] == "[":
            self._option()
        return [_Atom("", "row")]

    def _fraction(self, name: str) -> list[_Atom]:
        top = _joined(self._argument())
        return [_fraction(top, _joined(self._argument()))]

    def _choose(self, name: str) -> list[_Atom]:
        top = _joined(self._argument())
        return [_Atom(f"({top} choose {_joined(self._argument())})", "inner")]

    def _root(self, name: str) -> list[_Atom]:
        index = _compact(self._option())
        sign = {"": "√", "2": "√", "3": "∛", "4": "∜"}.get(index) or scripted(index, "sup") + "√"
        under = _joined(self._argument())
        return [_Atom(sign + (under if len(under) == 1 or under.isdecimal() else f"({under})"), "inner")]

    def _plain_text(self, name: str) -> list[_Atom]:
        return [_Atom(" ".join(re.split(r"\s+", self._text().replace("$", ""))), "text")]

    def _left_out(self, name: str) -> list[_Atom]:
        self._text()
        return []

    def _as_it_is(self, name: str) -> list[_Atom]:
        if name == "operatorname" and self._peek() == "*":
            self._next += 1
        text = _compact(self._argument())
        return [_Atom(text, "op" if name in ("operatorname", "mathop") else "ord")]

    def _braced(self, name: str) -> list[_Atom]:
        return [_Atom(_joined(self._argument()), "inner")]

    def _alphabet(self, name: str) -> list[_Atom]:
        return [_Atom(letters(_compact(self._argument()), name))]

    def _accent(self, name: str) -> list[_Atom]:
        under = _compact(self._argument())
        if not under.isalnum() or (len(under) > 2 and name not in ("overline", "underline")):
            return [_Atom(f"{name}({under})")]
        return [_Atom(unicodedata.normalize("NFC", "".join(each + ACCENTS[name] for each in under)))]

    def _negated(self, name: str) -> list[_Atom]:
        text = unicodedata.normalize("NFC", _compact(self._argument()) + "\u0338")
        return [_Atom(text, kind_of(text))]

    def _boxed(self, name: str) -> list[_Atom]:
        return [_Atom(f"[{_joined(self._argument())}]")]

    def _modulo(self, name: str) -> list[_Atom]:
        if name == "bmod":
            return [_Atom(" mod ", "space")]
        return [_Atom(f" (mod {_joined(self._argument())})", "text")]

    def _space(self, name: str) -> list[_Atom]:
        self._text()
        return [_Atom(" ", "space")]

    def _coloured(self, name: str) -> list[_Atom]:
        self._text()
        return self._argument()

    def _tag(self, name: str) -> list[_Atom]:
        return [_Atom(f"  ({self._text()})", "text")]

    def _stacked(self, name: str) -> list[_Atom]:
        small = _compact(self._argument())
        (base, *rest) = self._argument() or [_Atom("")]
        text = base.text + scripted(small, "sub" if name == "underset" else "sup")
        return [_Atom(text, base.kind), *rest]

    def _arrow(self, name: str) -> list[_Atom]:
        below = scripted(_compact(self._option()), "sub")
        arrow = "←" if "left" in name else "→"
        return [_Atom(f"{arrow}{below}{scripted(_compact(self._argument()), 'sup')}", "rel")]

    def _several(self, name: str) -> list[_Atom]:
        return [_Atom(", ".join(map(_joined, _rows(self._argument()))))]

    def _environment(self, name: str) -> list[_Atom]:
        kind = self._text().rstrip("*")
        if kind in ("array", "alignat", "alignedat"):
            self._option()
            self._text()
        elif kind not in _LINES and kind not in _GRIDS:
            raise _Unreadable
        atoms = self._until("\\end")
        if self._text().rstrip("*") != kind:
            raise _Unreadable
        if kind in _LINES:
            return [_Atom("", "row"), *(atom for atom in atoms if atom.kind != "cell"), _Atom("", "row")]
        return [_grid([list(_parted(row, "cell")) for row in _rows(atoms)], *_GRIDS[kind])]


_COMMANDS: dict[str, Callable[[_FormulaReader, str], list[_Atom]]] = {
    "\\": _FormulaReader._row, "cr": _FormulaReader._row, "begin": _FormulaReader._environment,
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac"), _FormulaReader._fraction),
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _FormulaReader._choose),
    **dict.fromkeys(_TEXTS, _FormulaReader._plain_text), **dict.fromkeys(_LEAVE_OUT, _FormulaReader._left_out),
    **dict.fromkeys(_AS_THEY_ARE, _FormulaReader._as_it_is), **dict.fromkeys(ALPHABETS, _FormulaReader._alphabet),
    **dict.fromkeys(ACCENTS, _FormulaReader._accent), "sqrt": _FormulaReader._root, "not": _FormulaReader._negated,
    **dict.fromkeys(("boxed", "fbox"), _FormulaReader._boxed),
    **dict.fromkeys(("bmod", "pmod", "pod"), _FormulaReader._modulo),
    **dict.fromkeys(("overbrace", "underbrace"), _FormulaReader._braced),
    "hspace": _FormulaReader._space, "textcolor": _FormulaReader._coloured, "tag": _FormulaReader._tag,
    **dict.fromkeys(("overset", "underset", "stackrel"), _FormulaReader._stacked),
    **dict.fromkeys(("xrightarrow", "xleftarrow"), _FormulaReader._arrow), "substack": _FormulaReader._several,
}  # fmt: skip


# --- writing ------------------------------------------------------------------------------------------------------


def _parted(atoms: Iterable[_Atom], kind: str) -> Iterable[list[_Atom]]:
    """``atoms`` between those of ``kind``."""
    part: list[_Atom] = []
    for atom in atoms:
        if atom.kind == kind:
            yield part
            part = []
        else:
            part.append(atom)
    yield part


def _rows(atoms: Iterable[_Atom]) -> list[list[_Atom]]:
    """The rows that are not empty."""
    return [row for row in _parted(atoms, "row") if row]


def _fraction(top: str, bottom: str) -> _Atom:
    if _is_simple(top) and _is_simple(bottom):
        return _Atom(f"{top}⁄{bottom}", "inner")
    return _Atom("/".join(part if _is_simple(part) else f"({part})" for part in (top, bottom)), "inner")


def _is_simple(text: str) -> bool:
    """Whether ``text`` is a number, a letter with raised and lowered letters, or a word."""
    if text.replace(".", "").replace(",", "").isdecimal() or (len(text) > 2 and text.isalpha()):
        return True
    return (text[:1].isalpha() or text == "∞") and all(
        unicodedata.combining(each) or each in "′°" or unicodedata.decomposition(each).startswith("<su")
        for each in text[1:]
    )


def _compact(atoms: Sequence[_Atom]) -> str:
    """``atoms`` without spaces, for a script."""
    return "".join(atom.text if atom.kind in ("text", "op") else atom.text.strip() for atom in atoms).strip()


def _joined(atoms: Sequence[_Atom]) -> str:
    """``atoms`` in one line, spaced."""
    pieces: list[str] = []
    before: _Atom | None = None
    for each in atoms:
        atom = each
        if atom.kind in ("row", "cell"):
            if pieces:
                pieces.append("; " if atom.kind == "row" else " ")
            before = None
            continue
        unary = atom.kind == "bin" and (before is None or before.kind in ("bin", "op", "rel", "open", "punct"))
        atom = _Atom(atom.text, "ord", atom.apart) if unary else atom
        if before is not None and _is_spaced(before, atom):
            pieces.append(" ")
        pieces.append(atom.text)
        before = atom
    return re.sub(r" +", " ", "".join(pieces)).strip() if len(pieces) > 1 else "".join(pieces).strip()


def _is_spaced(left: _Atom, right: _Atom) -> bool:
    """Whether TeX puts space between the two."""
    kinds = {left.kind, right.kind}
    if "space" in kinds or not left.text or not right.text:
        return False
    if kinds & {"rel", "bin"}:
        return True
    if "text" in kinds:
        return False
    if left.kind == "punct":
        return True
    if kinds & {"op", "inner"}:
        return left.kind != "open" and right.kind not in ("close", "punct", "open")
    # Words are told apart as they were written.
    words = left.text.isalpha() and right.text.isalpha()
    return words and right.apart and len(left.text) + len(right.text) > 2


def _grid(rows: Sequence[Sequence[Sequence[_Atom]]], left: str, right: str) -> _Atom:
    cells = [[_joined(cell) for cell in row] for row in rows]
    flat = "; ".join(", ".join(filter(None, row)) for row in cells)
    text = f"{left}{flat}{right}"
    columns = max(map(len, cells), default=0)
    widths = [max((cell_len(row[index]) for row in cells if index < len(row)), default=0) for index in range(columns)]
    if len(cells) < 2 or len(cells) * (sum(widths) + 2 * columns) > _LARGEST:
        return _Atom(text, "inner")
    body = [
        "  ".join(_padded(row[index] if index < len(row) else "", width) for index, width in enumerate(widths))
        for row in cells
    ]
    around = _tall(left, len(body)), _tall(right, len(body))
    gap_left, gap_right = (" " if each else "" for each in (left, right))
    lines = tuple(f"{a}{gap_left}{line}{gap_right}{b}" for a, line, b in zip(around[0], body, around[1], strict=True))
    return _Atom(text, "inner", lines=lines)


def _tall(delimiter: str, height: int) -> list[str]:
    if not delimiter:
        return [""] * height
    top, middle, between, bottom = tuple(_TALL[delimiter])
    inside = [middle if index == (height - 2) // 2 else between for index in range(height - 2)]
    return [top, *inside, bottom]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _drawn(row: Sequence[_Atom], width: int) -> list[str]:
    """``row`` on as many lines as its highest atom needs, or in one if they would be too wide."""
    flat = _joined(row)
    height = max((len(atom.lines) for atom in row), default=0)
    if height < 2:
        return [flat] if flat else []
    lines = [""] * height
    rest: list[_Atom] = []

    def put(block: Sequence[str]) -> None:
        above = (height - len(block)) // 2
        wide = max(map(cell_len, block))
        gap = " " if lines[height // 2] or lines[0] else ""
        for index in range(height):
            inside = block[index - above] if above <= index < above + len(block) else ""
            lines[index] += gap + _padded(inside, wide)

    for atom in [*row, _Atom("", lines=("",))]:
        if not atom.lines:
            rest.append(atom)
            continue
        if text := _joined(rest):
            put([text])
        rest = []
        if atom.text:
            put(atom.lines)
        if len(lines[0]) * height > _LARGEST:
            return [flat]
    fits = all(cell_len(line.rstrip()) <= width for line in lines)
    return [line.rstrip() for line in lines] if fits else [flat]
