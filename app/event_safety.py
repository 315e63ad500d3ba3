"""The one border for what an engine says: model files, peers and libraries put their words into its events.

Every text of an event loses what acts on a terminal, whatever field it is in, also one that is added later. Left as it
is, is only text that a model streams: a sequence may be cut in two there, and whoever shows it has a ``Sanitizer``.
"""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from app.text_safety import sanitize
from engine.ipc.messages import AnyEvent, Beam, Finished, Piece

STREAMED = frozenset({(Piece, "text"), (Finished, "text"), (Beam, "text")})
"""The fields with text of a model."""


def made_safe(event: AnyEvent) -> AnyEvent:
    """``event`` itself if there is nothing to remove from it."""
    safe: AnyEvent = _safe(event)
    return safe


def _safe(value: Any) -> Any:
    match value:
        case str():
            return sanitize(value)
        case list() | tuple():
            return type(value)(_safe(item) for item in value)
        case dict():
            return {_safe(key): _safe(item) for key, item in value.items()}
        case msgspec.Struct():
            before = {name: getattr(value, name) for name in _fields_with_text(type(value))}
            after = {name: _safe(item) for name, item in before.items()}
            return value if after == before else msgspec.structs.replace(value, **after)
        case _:
            return value


@functools.cache
def _fields_with_text(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The others need not be walked through: the numbers of a timing are many, and come often."""
    return tuple(
        field.name
        for field in msgspec.structs.fields(kind)
        if (kind, field.name) not in STREAMED and _may_hold_text(field.type)
    )


def _may_hold_text(annotation: Any) -> bool:
    if annotation in (int, float, bool, NoneType) or get_origin(annotation) is Literal:
        return False
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return any(map(_may_hold_text, arguments)) if arguments else True
