"""What settings are made of: their kinds and groups, and how a field of a dataclass is made one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Value = str | int | float | bool | None
Kind = Literal["text", "lines", "items", "integer", "number", "flag", "choice"]
"""``items``: none, one or several, separated by commas; :mod:`app.settings.items` says what one may be."""
Group = Literal["model", "answer", "ring", "screen"]
TakesEffect = Literal["now", "reload"]

GROUPS: dict[Group, str] = {"model": "Model", "answer": "Answer", "ring": "Ring of machines", "screen": "Screen"}
"""The groups in the order they are shown; each is a table of the settings file."""

GIB = 1 << 30


class SettingError(ValueError):
    """A value is not allowed; the text is one sentence with the value and what is allowed.

    ``key``: whose value it is; empty if no single setting is at fault.
    """

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Choice:
    value: str
    label: str


def setting(group: Group, kind: Kind, label: str, default: Value, help: str, **more: Any) -> Any:
    """A field that is a setting; ``more`` as in :class:`app.settings.schema.Setting`."""
    metadata = {"group": group, "kind": kind, "label": label, "help": help, **more}
    return dataclasses.field(default=default, metadata={"setting": metadata})


def choices(**labels: str) -> tuple[Choice, ...]:
    return tuple(Choice(value, label) for value, label in labels.items())
