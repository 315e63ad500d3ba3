"""The person's files: replaced as a whole, and kept aside when they are damaged."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path


def name_aside(path: Path) -> Path:
    """The name a damaged file is kept under: ``<stem>.damaged-<time><suffix>``, with a number if that exists.

    Nothing is renamed here.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    aside, number = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    return aside


LARGEST_FILE = 4 << 20
"""Maximum bytes of a file that the person writes. More is a mistake."""


def read_whole(path: Path) -> str:
    """The text of a file that the person writes. Raises OSError, and ValueError if it is too large or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it is larger than {LARGEST_FILE >> 20} MiB")
    return data.decode()


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text``: whatever happens, it is the old one or the new one.

    A symbolic link keeps pointing where it pointed. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
