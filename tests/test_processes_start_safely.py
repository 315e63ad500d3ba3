"""Every Python that the program starts leaves the current folder out of where it looks for modules.

The folder may be somebody else's, and a file in it be named like a module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "discovery", "assets")


def commands_of_modules(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """The line, and the words before the module's name, of each list or tuple that has the word ``-m``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [ast.unparse(item) for item in node.elts]
            if "'-m'" in words:
                yield node.lineno, words[: words.index("'-m'")]


def test_no_module_is_started_from_the_current_folder() -> None:
    found = [
        (f"{file.relative_to(ROOT)}:{line}", words)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if '"-m"' in (text := file.read_text("utf-8"))
        for line, words in commands_of_modules(ast.parse(text))
    ]
    assert len(found) >= 5
    assert [place for place, words in found if "'-P'" not in words] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [("run([python, '-m', 'pip'])", [["python"]]), ("x = ('-P', '-m', 'y')", [["'-P'"]]), ("run(['git', '-c'])", [])],
)
def test_such_a_command_is_found(line: str, words: list[list[str]]) -> None:
    assert [before for _, before in commands_of_modules(ast.parse(line))] == words
