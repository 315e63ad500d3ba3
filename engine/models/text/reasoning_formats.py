"""How a model marks its thoughts: ``assets/reasoning.toml``, and which of its formats a template declares."""

from __future__ import annotations

import functools
import importlib.resources
import re
import tomllib
from collections.abc import Collection
from typing import Any

import msgspec

EFFORTS = ("low", "medium", "high")
"""Values of ``reasoning_effort`` that templates take."""

_SWITCH = re.compile(r"\benable_thinking\b|(?<![.\w'\"])thinking\b(?!['\"])")
_EFFORT = re.compile(r"(?<![.\w'\"])reasoning_effort\b")


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marks of one format. They are not part of any text that is shown."""

    name: str
    begin: str = ""
    """Mark before the thoughts; empty if parts have names."""
    end: str
    """Mark after the thoughts, or after a part."""
    hidden: tuple[str, ...] = ()
    """Marks that begin and end nothing."""
    stray: tuple[str, ...] = ()
    """Marks that models also write where they mean nothing. With them, thoughts may begin anywhere in the answer."""
    headers: tuple[str, ...] = ()
    """Marks before the name of a part."""
    body: str = ""
    """Mark after the name of a part."""
    within: tuple[str, ...] = ()
    """Special tokens within the name of a part, between two words of it."""
    thoughts: tuple[str, ...] = ()
    """Names of the parts that are thoughts."""

    known: tuple[str, ...] = ()
    """Texts by which the format is known; empty: its marks."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks but those within names."""
        return tuple(
            mark for mark in (self.begin, self.end, *self.hidden, *self.stray, *self.headers, self.body) if mark
        )


def format_of(template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    """The first format all of whose texts or marks are in the chat ``template``'s source or among the added
    ``tokens``."""
    return next(
        (each for each in formats() if all(mark in template or mark in tokens for mark in each.known or each.marks)),
        None,
    )


def has_switch(template: str) -> bool:
    """Whether the template can be told to think or not (``enable_thinking`` or ``thinking``)."""
    return _SWITCH.search(template) is not None


def has_effort(template: str) -> bool:
    """Whether the template can be told how long to think (``reasoning_effort``)."""
    return _EFFORT.search(template) is not None


def template_variables(thinking: bool | None, effort: str) -> dict[str, Any]:
    """The variables that tell a template to think or not, and how long; those that are None or empty are left out."""
    switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    return {**switch, "reasoning_effort": effort} if effort else switch


@functools.cache
def formats() -> tuple[ReasoningFormat, ...]:
    """The formats of ``assets/reasoning.toml``, in its order."""
    text = importlib.resources.files("assets").joinpath("reasoning.toml").read_text(encoding="utf-8")
    found = msgspec.convert(tomllib.loads(text), dict[str, list[ReasoningFormat]])
    return tuple(found["format"])
