"""What the source says without being run: the texts of the program, its variables, and the keys of its HTTP replies.

A text is a template: what is filled in stands as ``{}``, whatever it is called. Where a text stands is not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "engine", "discovery")

_PROSE = re.compile(r"[A-Za-z{}'’”\"),;:.`*]+ +[A-Za-z{(“'\"`*]+")
"""Two words with a space between them."""
_SELECTOR = re.compile(r"[#.$][\w-]+(?: [\w#.>:{}-]+)*$")
"""A style, or widgets as a style sheet selects them."""
_STYLE_SHEETS = ("CSS", "DEFAULT_CSS")
_QUERY = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|PRAGMA|WITH|SAVEPOINT|RELEASE|ROLLBACK|ALTER|BEGIN)\b"
)
_VARIABLE = re.compile(r"[\"'](_?(?!TCP_|SO_|AF_|MADV_|MAP_)[A-Z]{2,}(?:_[A-Z]+)+)[\"']")
"""Names of several words in capitals, but for constants of the system."""
_READ = re.compile(r"environ\w*(?:\.get\(|\.pop\(|\[)[\"'](\w+)[\"']|[\"']([A-Z]+)[\"'] (?:not )?in (?:os\.)?environ")
_FILE = re.compile(r"[\"']([\w.-]+\.(?:toml|json|jsonl|sqlite|log|pem|lock|gguf|safetensors|slabs|sock|txt))[\"']")
_GETENV = re.compile(r"getenv\(\"(\w+)\"\)")


def texts() -> set[str]:
    """All texts of two words or more that the program holds, but for docstrings, style sheets and queries."""
    found = (text for source in _sources(*PACKAGES) for text in _texts_of(ast.parse(source)))
    return {text for text in found if _PROSE.search(text) and not _SELECTOR.match(text)}


def environment_variables() -> set[str]:
    """Names of the environment variables that are read, or set for other processes."""
    found = {name for source in _sources(*PACKAGES) for name in _VARIABLE.findall(source)}
    found |= {one or other for source in _sources(*PACKAGES) for one, other in _READ.findall(source)}
    native = (path for package in PACKAGES for path in (ROOT / package).rglob("*.[ch]"))
    return found | {name for path in native for name in _GETENV.findall(path.read_text("utf-8"))}


def file_names() -> set[str]:
    """Names of files that are written or looked for by a whole name."""
    return {name for source in _sources(*PACKAGES) for name in _FILE.findall(source)}


def keys_of_dictionaries(folder: str) -> set[str]:
    """The keys of all dictionaries that are written out in the modules of ``folder``."""
    return {
        key.value
        for source in _sources(folder)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _sources(*folders: str) -> list[str]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [path.read_text("utf-8") for path in paths]


def _texts_of(tree: ast.Module) -> Iterator[str]:
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        text = _template(node)
        if text is None:
            left += _within(node)
        elif not _QUERY.match(text):
            yield " ".join(text.split())
        if isinstance(node, ast.JoinedStr):
            left += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]


def _within(node: ast.AST) -> list[ast.AST]:
    """What ``node`` consists of, without docstrings, style sheets and annotations."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None or any(isinstance(each, ast.Name) and each.id in _STYLE_SHEETS for each in targets):
            return []
        return [node.value]
    return list(ast.iter_child_nodes(node))


def _template(node: ast.AST) -> str | None:
    """The text that ``node`` is; None if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None
