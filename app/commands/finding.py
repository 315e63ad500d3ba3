"""What ``privatellm doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``way_out`` is what to do about it."""

    about: str
    text: str
    mark: Mark = "ok"
    way_out: str = ""
