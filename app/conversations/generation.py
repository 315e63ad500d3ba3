"""How an answer was generated: sampling, seed, beams and times, kept with the message as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """How one answer was generated. None: not known, or there was none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    beams: int | None = None
    """Width of the beam search; None if there was none."""
    length_penalty: float | None = None
    prompt_tokens: int | None = None
    ttft_s: float | None = None
    """Seconds to the first token."""
    edited: bool | None = None
    """True if a person changed the text."""

    @property
    def known(self) -> dict[str, float | int]:
        """The values that are known, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        """The values that are known as a JSON object; empty if none is."""
        return json.dumps(self.known) if self.known else ""


UNKNOWN = Generation()
"""The generation of a message that was typed, or of which nothing is known."""
EDITED = Generation(edited=True)
"""The generation of an answer that a person changed."""

_WHOLE = frozenset({"top_k", "seed", "beams", "prompt_tokens"})
_LARGEST = 2**64


def generation_from(text: str) -> Generation:
    """The inverse of :meth:`Generation.to_json`. Text that is no such JSON gives :data:`UNKNOWN`."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return UNKNOWN
    return generation_of(found)


def generation_of(found: object) -> Generation:
    """The generation in a decoded JSON object. Values of a wrong type or size are left out."""
    if not isinstance(found, Mapping):
        return UNKNOWN
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Generation):
        value: Any = found.get(field.name)
        whole = field.name in _WHOLE
        if field.name == "edited":
            values[field.name] = True if value is True else None
        elif _is_number(value, whole=whole):
            values[field.name] = value if whole else float(value)
    return Generation(**values)


def _is_number(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return -_LARGEST < value < _LARGEST and math.isfinite(value)
