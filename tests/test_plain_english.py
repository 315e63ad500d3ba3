"""How the code speaks: a docstring says what a thing is, and a variable of many lines has a name of its own."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "discovery")

RIDDLES = frozenset(("As", "Besides", "By", "Its", "Of", "So", "That", "There", "Those", "Whom", "Whose", "Where"))
"""First words of docstrings that leave open what the documented thing is."""

VAGUE = frozenset(("each", "found", "kept", "known", "one", "said", "theirs", "there"))
"""Names of variables that say nothing by themselves."""

LONGEST_VAGUE = 5
"""Maximum lines from the first to the last use of a variable with a vague name."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes and functions, and of constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


def riddles(tree: ast.AST) -> list[int]:
    """Lines of the docstrings that begin with a word of RIDDLES."""
    return [line for line, text in docstrings(tree) if text.split(maxsplit=1)[0].strip(",:;.") in RIDDLES]


def vague_variables(tree: ast.AST) -> list[tuple[int, str]]:
    """First line and name of variables with a vague name that live longer than LONGEST_VAGUE lines in a function."""
    vague: set[tuple[int, str]] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            lines: dict[str, list[int]] = {}
            for node in ast.walk(function):
                name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
                if name in VAGUE and isinstance(node, ast.Name | ast.arg):
                    lines.setdefault(name, []).append(node.lineno)
            vague |= {(min(used), name) for name, used in lines.items() if max(used) - min(used) >= LONGEST_VAGUE}
    return sorted(vague)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the packages' modules, by their path."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_docstrings_say_what_a_thing_is() -> None:
    trees = modules()
    assert sum(1 for tree in trees.values() for _ in docstrings(tree)) > 5000
    assert [f"{path}:{line}" for path, tree in trees.items() for line in riddles(tree)] == []


def test_variables_of_many_lines_have_names_that_tell() -> None:
    assert [f"{path}:{line} {name}" for path, tree in modules().items() for line, name in vague_variables(tree)] == []


@pytest.mark.parametrize("word", sorted(RIDDLES))
def test_riddles_are_noticed_wherever_a_docstring_stands(word: str) -> None:
    text = f'"""{word} x."""'
    source = (
        f"{text}\nLIMIT = 1\n{text}\nclass A:\n    {text}\n    x: int\n    {text}\n    def f(self):\n        {text}\n"
    )
    assert riddles(ast.parse(source)) == [1, 3, 5, 7, 9]
    assert riddles(ast.parse(source.replace(word, "Number of"))) == []


@pytest.mark.parametrize("first", ["found = []", "found: list[int] = []", "for found in ():", "def g(found): pass"])
def test_vague_names_are_noticed_when_they_live_long(first: str) -> None:
    begin = f"def f():\n    {first}\n" + ("        pass\n" if first.startswith("for") else "")
    short = begin + "    return found\n"
    long = begin + "    a = 1\n" * LONGEST_VAGUE + "    return found\n"
    assert vague_variables(ast.parse(short)) == []
    assert vague_variables(ast.parse(long)) == [(2, "found")]
