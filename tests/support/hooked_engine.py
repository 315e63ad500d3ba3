"""An engine process that is composed of other parts: ``python hooked_engine.py MODULE:FUNCTION OPTIONS``.

The function is called with the options (a JSON object), before anything else happens in the process, and returns the
parts of the engine.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cluster.parts import Effort, EngineParts
from engine.session import turn


def hooked(function: Callable[..., EngineParts], **options: Any) -> list[str]:
    """The interpreter's arguments for an engine with the parts that ``function(**options)`` returns. The module of
    ``function`` should import little, as every such process imports it."""
    return [__file__, f"{function.__module__}:{function.__name__}", json.dumps(options)]


def measures_little() -> EngineParts:
    """Its benchmarks read as little memory as they may to measure its rate."""
    return EngineParts(effort=Effort(buffer_bytes=1))


def tells_every_token() -> EngineParts:
    """A client is told of every token, however fast they are, so that what is streamed does not depend on the time."""
    turn.PIECE_INTERVAL_S = 0.0
    return EngineParts()


def main(where: str, options: str) -> None:
    module, _, name = where.rpartition(":")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    parts = getattr(importlib.import_module(module), name)(**json.loads(options))
    importlib.import_module("engine.host").main(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
