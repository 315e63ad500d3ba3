"""Events in which every text acts on a terminal. Run as a program: an engine that says them, whatever it is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from engine.ipc.messages import (
    PROTOCOL_VERSION,
    AnyEvent,
    Done,
    EstimateBeams,
    Failed,
    Finished,
    Generate,
    Hello,
    Loaded,
    NetworkState,
    Notice,
    Planned,
    Progress,
    RingChanged,
    Shutdown,
    pack,
    request_reader,
)

EVIL = "\x1b]0;PWNED\x07\x1b[777mX\x9b31m\u202eY\x1bPq"
"""Sets the title, a style nobody has, the same in C1, and turns text around."""
EVENTS: tuple[type[msgspec.Struct], ...] = get_args(AnyEvent)


def filled(kind: Any) -> Any:
    """A value of the annotation ``kind``, with one item in each container and :data:`EVIL` as each text."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: filled(field.type) for field in msgspec.structs.fields(kind)})
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return filled(next(argument for argument in arguments if argument is not NoneType))
    if origin in (list, Sequence):
        return [filled(arguments[0])]
    if origin is tuple:
        return tuple(filled(argument) for argument in arguments if argument is not Ellipsis)
    if origin is dict:
        return {filled(arguments[0]): filled(arguments[1])}
    if kind in (int, float, bool):
        return kind(1)
    return EVIL


def texts(value: Any) -> list[str]:
    """Every text in ``value``."""
    match value:
        case str():
            return [value]
        case list() | tuple():
            return [text for item in value for text in texts(item)]
        case dict():
            return texts([*value, *value.values()])
        case msgspec.Struct():
            return texts([getattr(value, field.name) for field in msgspec.structs.fields(type(value))])
        case _:
            return []


def emit(kind: type[msgspec.Struct], id: int = 0) -> None:
    os.write(1, pack(msgspec.structs.replace(filled(kind), id=id)))


def main() -> None:
    """Loading works, so that all of the chat is shown; with the answers, everything that comes unasked."""
    os.write(1, pack(Hello(protocol=PROTOCOL_VERSION, pid=os.getpid())))
    reader = request_reader()
    while data := os.read(0, 65536):
        for request in reader.feed(data):
            if not isinstance(request, EstimateBeams):  # asked anew after each change of a ring, so without end
                for kind in (Notice, NetworkState, RingChanged):
                    emit(kind)
            if isinstance(request, Shutdown):
                return
            emit(Progress, request.id)
            if isinstance(request, Generate):
                refused = "refuse" in request.messages[-1].content
                emit(Failed if refused else Finished, request.id)
            else:
                endings = {"Load": Loaded, "Plan": Planned, "ListPeers": NetworkState}
                emit(endings.get(type(request).__name__, Done), request.id)


if __name__ == "__main__":
    sys.exit(main())
