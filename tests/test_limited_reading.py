"""What is parsed may be somebody else's: it is read up to a limit, and nesting it deeply is no unexpected error.

Every parser of JSON, TOML and msgpack goes through Python's recursion limit, and raises RecursionError rather than its
own error for ten thousand brackets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "discovery", "assets")
PARSERS = (
    *("json.load", "json.loads", "json.JSONDecoder().raw_decode", "msgspec.json.decode", "msgspec.msgpack.decode"),
    *("tomllib.load", "tomllib.loads", "tomlkit.parse", "tomlkit.load"),
)
NAMED_WITH = re.compile("json|toml|msgspec|ecoder")
"""A part of the name of every parser, and of every decoder."""
UNLIMITED = ("read_bytes", "read_text", "read")

OWN_WORDS = {
    # What comes with the program.
    "engine/models/store/catalogue.py", "engine/models/text/reasoning_formats.py", "engine/models/text/tool_formats.py",
    # What another process of the program has written.
    "app/commands/doctor.py", "engine/doctor_facts.py", "engine/bench/exchange_node.py", "engine/bench/exchange.py",
    "engine/cluster/transport/envoy.py", "engine/cluster/transport/envoy_process.py",
    "app/tui/render/highlighting.py", "app/tui/render/highlight_process.py", "engine/models/text/template_sandbox.py",
    "engine/models/text/template_process.py", "engine/models/text/token_bytes.py",
    # What was parsed before: a tool's parameters, as they came with a request.
    "engine/generation/call_grammars.py",
    # A table of bytes, whose reader refuses a nested value.
    "engine/cluster/transport/gloo.py",
    # The caller takes a RuntimeError for a group that could not be made.
    "engine/cluster/transport/mlx_group.py",
    # An entry whose depth was counted.
    "app/conversations/importing/entries.py",
}  # fmt: skip
"""The files whose texts are nested no deeper than the program nests them."""
OWN_FILES = {
    # It has the size already.
    "discovery/peers.py",
}  # fmt: skip
"""The files that are read whole."""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Module]:
    """All functions, also those in classes and functions, and the module for what is outside of them."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def own_nodes(function: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes in ``function`` but not in functions in it, each with whether a RecursionError there is caught."""
    for field, value in ast.iter_fields(function):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            here = guarded or (field == "body" and catches(function))
            yield child, here
            yield from own_nodes(child, here)


def catches(node: ast.AST) -> bool:
    """Whether ``node`` catches a RecursionError of its body."""
    if isinstance(node, ast.Try):
        kinds = [ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers]
    elif isinstance(node, ast.With):
        kinds = [ast.unparse(item.context_expr) for item in node.items if "suppress(" in ast.unparse(item.context_expr)]
    else:
        return False
    return any(word in kind for kind in kinds for word in ("RecursionError", "RuntimeError", "Exception"))


def decoders(tree: ast.Module) -> set[str]:
    """The names to which decoders are assigned."""
    assigned = (
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and "Decoder(" in ast.unparse(node.value)
    )
    return {ast.unparse(target) for node in assigned for target in node.targets}


def last_name(function: ast.expr) -> str:
    """What a call calls: ``c`` of ``a.b.c(…)``."""
    return getattr(function, "attr", getattr(function, "id", ""))


def faults(source: str) -> Iterator[tuple[str, str]]:
    """The name of each function that parses, with a word for each thing that is wrong with it, and one without."""
    if not NAMED_WITH.search(source):
        return
    tree = ast.parse(source)
    known = {*PARSERS, *(f"{name}.decode" for name in decoders(tree) | {"self._decoder", "decoder"})}
    called_last = {name.rpartition(".")[2] for name in (*known, *UNLIMITED, "check_size")}
    for function in functions(tree):
        nodes = list(own_nodes(function))
        calls = [
            (ast.unparse(node.func), node, guarded)
            for node, guarded in nodes
            if isinstance(node, ast.Call) and last_name(node.func) in called_last
        ]
        parsing = [guarded for name, _, guarded in calls if name in known]
        if not parsing:
            continue
        name = getattr(function, "name", "")
        if not all(parsing):
            yield name, "nesting"
        whole = [called for called, node, _ in calls if called.rpartition(".")[2] in UNLIMITED and not node.args]
        limited = any(isinstance(node, ast.Attribute) and node.attr == "st_size" for node, _ in nodes)
        if whole and not limited and not any(called == "check_size" for called, _, _ in calls):
            yield name, "size"
        yield name, ""


def test_all_parsers_are_named_with_one_of_these_words() -> None:
    assert [name for name in PARSERS if not NAMED_WITH.search(name)] == []


def test_what_is_parsed_is_limited_and_may_be_nested() -> None:
    found = [
        (str(file.relative_to(ROOT)), name, fault)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for name, fault in faults(file.read_text("utf-8"))
    ]
    assert len([file for file, _, fault in found if not fault]) > 50
    own = OWN_WORDS | {"app/settings/personas.py"}
    assert [(file, name) for file, name, fault in found if fault == "nesting" and file not in own] == []
    own = OWN_WORDS | OWN_FILES
    assert [(file, name) for file, name, fault in found if fault == "size" and file not in own] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("def f(): json.loads(path.read_bytes())", ["nesting", "size", ""]),
        ("def f():\n try: x(json.loads(b))\n except ValueError: pass", ["nesting", ""]),
        ("def f():\n try: x(json.loads(b))\n except (ValueError, RecursionError): pass", [""]),
        ("def f():\n try: pass\n except RecursionError: json.loads(b)", ["nesting", ""]),
        ("def f():\n with suppress(RecursionError): msgspec.json.decode(file.read(9))", [""]),
        ("d = msgspec.msgpack.Decoder(X)\ndef f(): d.decode(b)", ["nesting", ""]),
        ("def f(): data.decode()", []),
    ],
)
def test_such_reading_is_found(line: str, expected: list[str]) -> None:
    assert [fault for _, fault in faults(line)] == expected
