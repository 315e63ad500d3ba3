"""The kinds and groups of settings, how a dataclass field becomes one, and what one item of a list may be."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
    """A field that is a setting; ``more`` as in :class:`app.settings.schema.Setting`."""
    metadata = {"group": group, "kind": kind, "label": label, "help": help, **more}
    return dataclasses.field(default=default, metadata={"setting": metadata})


def choices(**labels: str) -> tuple[Choice, ...]:
    return tuple(Choice(value, label) for value, label in labels.items())


ItemKind = Literal["network", "address", "place", "machine", "share"]

DESCRIPTIONS: dict[ItemKind, str] = {
    "network": "networks like 192.168.7.0/24 or 10.0.0.2",
    "address": "addresses like studio.local:47820 or 10.0.0.2:47820",
    "place": "an address of this machine like 192.168.7.2:47820 (port 0: one that is free)",
    "machine": "names or node ids of machines",
    "share": "machines with their gigabytes, like studio=24",
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
