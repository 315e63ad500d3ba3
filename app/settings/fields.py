"""The kinds and groups of settings, how a dataclass field becomes one, and what one item of a list may be."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from app.machine import Machine, unavailable_reason
from app.text_safety import sanitize

Value = str | int | float | bool | None
Kind = Literal["text", "lines", "items", "integer", "number", "flag", "choice"]
"""Kind of a setting's value. ``items``: none, one or several, separated by commas, each of an :data:`ItemKind`."""
Group = Literal["model", "answer", "ring", "screen"]
TakesEffect = Literal["now", "reload"]

GROUPS: dict[Group, str] = {"model": "Model", "answer": "Answer", "ring": "Ring of machines", "screen": "Screen"}
"""Titles of the groups in the order shown. Each group is a table of the settings file."""

GIB = 1 << 30


class SettingError(ValueError):
    """A value is not allowed. The text is one sentence with the value and what is allowed.

    ``key``: the setting of the value; empty if no single setting is at fault.
    """

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Choice:
    value: str
    label: str


def setting(group: Group, kind: Kind, label: str, default: Value, help: str, **more: Any) -> Any:
    """A dataclass field that is a setting. ``more``: other fields of :class:`Setting`."""
    metadata = {"group": group, "kind": kind, "label": label, "help": help, **more}
    return dataclasses.field(default=default, metadata={"setting": metadata})


def choices(**labels: str) -> tuple[Choice, ...]:
    return tuple(Choice(value, label) for value, label in labels.items())


ItemKind = Literal["network", "address", "place", "machine", "share"]

DESCRIPTIONS: dict[ItemKind, str] = {
    "network": "networks such as 192.168.7.0/24 or 10.0.0.2",
    "address": "addresses such as studio.local:47820 or 10.0.0.2:47820",
    "place": "an address of this machine such as 192.168.7.2:47820 (port 0: any free port)",
    "machine": "names or node ids of machines",
    "share": "machines with an amount in GiB, such as studio=24",
}
"""Description of what is allowed, in the plural, for each kind of item."""

_LONGEST = 300


class ItemError(ValueError):
    """An item is not allowed. The text is the item."""


def split_items(text: str) -> list[str]:
    """The items of ``text``, separated by commas. Empty ones are left out."""
    return [item.strip() for item in text.split(",") if item.strip()]


def check_items(kind: ItemKind, text: str) -> str:
    """``text`` with each item in its usual form. Raises ItemError."""
    return ", ".join(check_item(kind, item) for item in split_items(text))


def check_item(kind: ItemKind, item: str) -> str:
    """``item`` in its usual form. Raises ItemError."""
    if len(item) > _LONGEST or not item.isprintable():
        raise ItemError(item[:_LONGEST])
    try:
        return _CHECKS[kind](item)
    except ValueError:
        raise ItemError(item) from None


def host_and_port(item: str, *, least: int = 1) -> tuple[str, int]:
    """``HOST:PORT``, an IPv6 address in brackets; the port is at least ``least``. Raises ValueError."""
    host, colon, port = item.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        ipaddress.IPv6Address(host[1:-1].partition("%")[0])
    elif ":" in host or any(character.isspace() or character in "[]/@" for character in host):
        raise ValueError(item)
    # The link listener uses the port after the one that is named.
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not least <= int(port) <= 65_534:
        raise ValueError(item)
    return host, int(port)


def share(item: str) -> tuple[str, float]:
    """``NAME=GIB``: the machine and its gibibytes. Raises ValueError."""
    name, equals, amount = item.rpartition("=")
    gibibytes = float(amount)
    if not equals or not name.strip() or not math.isfinite(gibibytes) or not 0 <= gibibytes <= 65_536:
        raise ValueError(item)
    return name.strip(), gibibytes


def _network(item: str) -> str:
    network = ipaddress.ip_network(item, strict=False)
    return str(network.network_address) if network.num_addresses == 1 else str(network)


def _address(item: str) -> str:
    host, port = host_and_port(item)
    return f"{host}:{port}"


def _place(item: str) -> str:
    host, port = host_and_port(item, least=0)
    return f"{host}:{port}"


def _machine(item: str) -> str:
    if "=" in item:
        raise ValueError(item)
    return item


def _share(item: str) -> str:
    name, gibibytes = share(item)
    return f"{name}={gibibytes:g}"


_CHECKS: dict[ItemKind, Callable[[str], str]] = {
    "network": _network,
    "address": _address,
    "place": _place,
    "machine": _machine,
    "share": _share,
}


@dataclass(frozen=True)
class Setting:
    """The allowed values of one setting, and how it is shown. ``minimum`` and ``maximum`` are inclusive."""

    key: str
    group: Group
    kind: Kind
    label: str
    help: str
    default: Value
    choices: tuple[Choice, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False
    """True if None is allowed, which means the model's own default or no limit."""
    takes_effect: TakesEffect = "now"
    """``now``: from the next answer on; ``reload``: the model is loaded again."""
    item: ItemKind | None = None
    """Kind of one item, for the kind ``items``."""
    most: int | None = None
    """Maximum number of items."""

    def check(self, value: object) -> Value:
        """``value`` in its usual form. Raises SettingError if it is not allowed."""
        if value is None:
            if self.optional:
                return None
            raise self._refuse(value)
        match self.kind:
            case "flag":
                if isinstance(value, bool):
                    return value
            case "integer":
                if isinstance(value, int) and not isinstance(value, bool) and self._in_range(value):
                    return int(value)
            case "number":
                if isinstance(value, int | float) and not isinstance(value, bool) and self._in_range(value):
                    return float(value)
            case "choice":
                if isinstance(value, str) and any(choice.value == value for choice in self.choices):
                    return str(value)
            case _ if isinstance(value, str):
                return self._check_text(value)
        raise self._refuse(value)

    def parse(self, text: str) -> Value:
        """The value of a typed ``text``. An empty one is None for an optional setting. Raises SettingError."""
        if self.kind == "lines":
            return self.check(text)
        word = text.strip()
        if not word and self.optional:
            return None
        try:
            match self.kind:
                case "integer":
                    return self.check(int(word))
                case "number":
                    return self.check(float(word))
                case "flag":
                    return self.check({"true": True, "on": True, "false": False, "off": False}[word.lower()])
                case _:
                    return self.check(word)
        except (ValueError, KeyError) as error:
            raise error if isinstance(error, SettingError) else self._refuse(text) from None

    def unavailable(self, choice: str, machine: Machine | None = None) -> str | None:
        """Why ``choice`` is unavailable on this machine; None if it is available."""
        return unavailable_reason(self.key, choice, machine)

    def without_effect(self, machine: Machine | None = None) -> str | None:
        """Why the setting has no effect on this machine, whatever its value; None if it has one."""
        return unavailable_reason(self.key, None, machine)

    @property
    def allowed(self) -> str:
        """The allowed values in words: ``1 to 16``, ``one of auto, torch, mlx``."""
        match self.kind:
            case "choice":
                words = "one of " + ", ".join(choice.value for choice in self.choices)
            case "flag":
                words = "true or false"
            case "integer" | "number":
                kind = "a whole number" if self.kind == "integer" else "a number"
                words = f"{kind} from {_figure(self.minimum)} to {_figure(self.maximum)}"
            case "items" if self.item is not None:
                words = f"{DESCRIPTIONS[self.item]}, or none"
            case _:
                words = "text"
        return f"{words}, or empty" if self.optional else words

    def _refuse(self, value: object) -> SettingError:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return SettingError(f"{self.key} cannot be {shown}; it must be {self.allowed}", self.key)

    def _check_text(self, value: str) -> str:
        match self.kind:
            case "text":
                # A model's name goes into messages and file names: one line, no control characters.
                if value.strip() and value.isprintable():
                    return value.strip()
            case "items" if self.item is not None:
                try:
                    if self.most is None or len(split_items(value)) <= self.most:
                        return check_items(self.item, value)
                except ItemError:
                    raise self._refuse(value) from None
            case "lines":
                if not any("\ud800" <= character <= "\udfff" for character in value):
                    return sanitize(value)
        raise self._refuse(value)

    def _in_range(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


def _figure(value: float | None) -> str:
    if value is None:
        return "any"
    return f"{value:,.15g}" if isinstance(value, float) else f"{value:,}"
