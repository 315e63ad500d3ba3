"""The fields of records that leave a process: messages, requests over HTTP, what machines tell each other, files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tests.inventory.inventory_texts import PACKAGES, ROOT

_CLASS = re.compile(r"^class (\w+)\(([^)]*)", re.MULTILINE)


def records() -> list[type[msgspec.Struct]]:
    """All of them, by name. Only the modules that define some are imported."""
    known, modules = {"msgspec.Struct", "Struct"}, {path: _CLASS.findall(path.read_text("utf-8")) for path in _paths()}
    defining: set[Path] = set()
    while True:
        found = {
            (path, name)
            for path, classes in modules.items()
            for name, bases in classes
            if known & {base.strip().split("[")[0] for base in bases.split(",")}
        }
        defining = {path for path, _ in found}
        if {name for _, name in found} <= known:
            break
        known |= {name for _, name in found}
    for path in sorted(defining):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return sorted(_below(msgspec.Struct), key=lambda record: record.__name__)


def _paths() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def _below(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in base.__subclasses__():
        if each.__module__.split(".")[0] in PACKAGES:
            yield each
        yield from _below(each)


def lines_of(record: type[msgspec.Struct]) -> Iterator[str]:
    """What ``record`` says of itself, and each of its fields with its type and default."""
    config = record.__struct_config__
    said = [f"{config.tag_field}={config.tag}"] if config.tag is not None else []
    said += ["as a list"] if config.array_like else []
    said += ["no other fields"] if config.forbid_unknown_fields else []
    said += ["without defaults"] if config.omit_defaults else []
    yield f"record {record.__name__}: {', '.join(said) or 'any other fields'}"
    for field in msgspec.structs.fields(record):
        yield f"record {record.__name__}.{field.encode_name}: {type_name(field.type)}{_default(field)}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[misc]
    return f" = {type(value).__name__}()" if isinstance(value, msgspec.Struct | msgspec.Raw) else f" = {value!r}"


def type_name(kind: Any) -> str:
    """``kind`` in words that do not depend on where its parts are defined."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is NoneType or kind is None:
        return "None"
    if origin is Annotated:
        inner, *limits = parts
        return f"{type_name(inner)}{''.join(f' {_limits(each)}' for each in limits)}"
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin in (Union, UnionType):
        return " | ".join(sorted(map(type_name, parts)))
    if origin is not None:
        return f"{type_name(origin)}[{', '.join('...' if part is ... else type_name(part) for part in parts)}]"
    return kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.")


def _limits(meta: Any) -> str:
    if not isinstance(meta, msgspec.Meta):
        return repr(meta)
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    return "{" + ", ".join(f"{name}={getattr(meta, name)!r}" for name in names if getattr(meta, name) is not None) + "}"
