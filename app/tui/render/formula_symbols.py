"""The characters that LaTeX's commands stand for. Most names are also those of HTML's entities. Pure."""

from __future__ import annotations

import functools
import unicodedata
from html.entities import html5

FUNCTIONS = frozenset((
    "arccos", "arcsin", "arctan", "arg", "argmax", "argmin", "cos", "cosh", "cot", "coth", "csc", "deg", "det",
    "dim", "exp", "gcd", "hom", "inf", "ker", "lcm", "lg", "lim", "liminf", "limsup", "ln", "log", "max", "min",
    "mod", "Pr", "rank", "sec", "sgn", "sign", "sin", "sinh", "softmax", "sup", "tan", "tanh", "tr",
))  # fmt: skip
"""Functions that are written by their names."""
ACCENTS = {
    "acute": "\u0301", "bar": "\u0304", "breve": "\u0306", "check": "\u030c", "ddot": "\u0308", "dot": "\u0307",
    "grave": "\u0300", "hat": "\u0302", "mathring": "\u030a", "overline": "\u0305", "tilde": "\u0303",
    "underline": "\u0332", "vec": "\u20d7", "widehat": "\u0302", "widetilde": "\u0303",
}  # fmt: skip
"""Accents as the characters that are combined with the one before."""
SPACES = {
    "!": "", ",": " ", ":": " ", ";": " ", " ": " ", ">": " ", "enspace": " ", "qquad": "    ", "quad": "  ",
    "thinspace": " ", "medspace": " ", "thickspace": " ", "negthinspace": "", "newline": " ", "\n": " ",
}  # fmt: skip
_ALPHABETS = {
    "mathbb": ("DOUBLE-STRUCK", "DOUBLE-STRUCK"), "mathcal": ("SCRIPT", "SCRIPT"), "mathscr": ("SCRIPT", "SCRIPT"),
    "mathfrak": ("BLACK-LETTER", "FRAKTUR"),
}  # fmt: skip
ALPHABETS = frozenset(_ALPHABETS)
"""Commands that write letters of another alphabet."""
_OWN = {
    "#": "#", "$": "$", "%": "%", "&": "&", "_": "_", "{": "{", "}": "}", "|": "‖", "Box": "□", "Diamond": "◇",
    "Longleftrightarrow": "⟺", "P": "¶", "S": "§", "Vert": "‖", "asymp": "≍", "backslash": "\\", "bigstar": "★",
    "cdot": "·", "cdots": "⋯", "circ": "∘", "colon": ":", "dag": "†", "ddag": "‡", "ddots": "⋱", "degree": "°",
    "dots": "…", "dotsb": "⋯", "dotsc": "…", "dotsi": "⋯", "dotsm": "⋯", "dotso": "…", "exists": "∃", "gets": "←",
    "iff": "⟺", "iint": "∬", "impliedby": "⟸", "implies": "⟹", "infty": "∞", "lVert": "‖", "land": "∧", "ldots": "…",
    "leadsto": "↝", "lnot": "¬", "lor": "∨", "lvert": "|", "mid": "|", "models": "⊨", "neg": "¬", "neq": "≠",
    "nexists": "∄", "owns": "∋", "partial": "∂", "phi": "ϕ", "pounds": "£", "qed": "∎", "rVert": "‖", "rvert": "|",
    "star": "⋆", "surd": "√", "to": "→", "varepsilon": "ε", "varphi": "φ", "vdots": "⋮", "vert": "|",
}  # fmt: skip
"""Commands that have no entity of their name, or one with another meaning."""
_SUPERSCRIPTS = {"*": "*", "∗": "*", "∘": "°", "°": "°", "′": "′", "†": "†", "⊤": "ᵀ", "-": "⁻"}
_SUBSCRIPTS = {"-": "₋"}
_SMALL = (0xAA, *range(0xB2, 0xBB), *range(0x2B0, 0x2B9), *range(0x1D2C, 0x1D6B), 0x1DBF, *range(0x2070, 0x209D),
          0x2C7C, 0x2C7D)  # fmt: skip
"""Code points among which the raised and lowered characters are."""

_BINARY = frozenset("+−±∓×÷·∗⋆∘∩∪⊎⊓⊔∨∧⊕⊖⊗⊘⊙∖†‡⋄*")
_ORDINARY = frozenset("∂∇∞∅∀∃∄¬⊤∠□◇∎⋯⋮⋱△∁∴∵√")
_LARGE = frozenset("∑∏∐∫∬∭∮⋃⋂⨁⨂⋁⋀⨆⨄")


@functools.cache
def symbol(command: str) -> str | None:
    """The character of a command without its backslash; None if there is none that can be seen."""
    found = _OWN.get(command) or html5.get(f"{command};", "")
    return found if found and all(unicodedata.category(each)[0] in "LNPS" for each in found) else None


@functools.cache
def kind_of(text: str) -> str:
    """Spacing class of ``text`` in TeX: ``ord``, ``op``, ``bin``, ``rel``, ``open``, ``close``, ``punct``."""
    if text in _BINARY:
        return "bin"
    if text in _LARGE:
        return "op"
    if text in (",", ";", ":"):
        return "punct"
    if len(text) != 1 or text in _ORDINARY:
        return "ord"
    category = unicodedata.category(text)
    if category in ("Ps", "Pe"):
        return "open" if category == "Ps" else "close"
    code = ord(text)
    is_relation = text in "=<>" or 0x2190 <= code < 0x2300 or 0x27C0 <= code < 0x2A00 or 0x2A7D <= code < 0x2B00
    return "rel" if is_relation else "ord"


def letters(text: str, command: str) -> str:
    """``text`` in one of the :data:`ALPHABETS`."""
    return "".join(_letter(each, command) for each in text)


@functools.cache
def _letter(letter: str, command: str) -> str:
    if not (letter.isascii() and letter.isalpha()):
        return letter
    first, usual = _ALPHABETS[command]
    case = "CAPITAL" if letter.isupper() else "SMALL"
    for name in (f"{first} {case} {letter}", f"MATHEMATICAL {usual} {case} {letter}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return letter


def scripted(text: str, script: str) -> str:
    """``text`` raised (``script`` is ``sup``) or lowered (``sub``): by its own characters if there are such for all of
    it, and otherwise as ``^(…)`` and ``_(…)``."""
    known = _scripts(script)
    if not text:
        return ""
    if all(each in known for each in text):
        return "".join(known[each] for each in text)
    return f"{'^' if script == 'sup' else '_'}{text if len(text) == 1 else f'({text})'}"


@functools.cache
def _scripts(script: str) -> dict[str, str]:
    letters: dict[str, str] = {}
    for code in _SMALL:
        kind, _, plain = unicodedata.decomposition(chr(code)).partition(" ")
        if kind == f"<{'super' if script == 'sup' else 'sub'}>" and " " not in plain:
            letters.setdefault(chr(int(plain, 16)), chr(code))
    return letters | (_SUPERSCRIPTS if script == "sup" else _SUBSCRIPTS)
