"""An engine process whose sockets are watched. It imports nothing of the engine before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine.cluster.parts import THE_PRODUCT, EngineParts


def watched(seen: str) -> EngineParts:
    """Each use of a socket is a line in the file."""
    lines = Path(seen).open("w", buffering=1)  # noqa: SIM115  # as long as the process

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
            print(event, arguments, file=lines)

    sys.addaudithook(watch)
    return THE_PRODUCT
