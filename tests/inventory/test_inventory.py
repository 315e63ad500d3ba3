"""What privatellm offers and says is what ``inventory.txt`` lists: a change of either is a change of that file too."""

from __future__ import annotations

import difflib

import pytest

from tests.inventory.inventory_tables import inventory
from tests.inventory.write_inventory import FILE

_MOST_SHOWN = 100


def differences(listed: list[str], found: list[str]) -> list[str]:
    """Lines that only one of the two has: ``-`` is gone, ``+`` is new."""
    compared = difflib.unified_diff(listed, found, lineterm="", n=0)
    return [line for line in compared if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_nothing_came_or_went_that_the_inventory_does_not_say() -> None:
    pytest.importorskip("mlx", reason="records of machines that exchange by mlx cannot be looked at without it")
    changed = differences(FILE.read_text("utf-8").splitlines(), inventory())
    assert not changed, "`make inventory` writes what is now there:\n" + "\n".join(changed[:_MOST_SHOWN])


def test_the_inventory_has_each_kind_of_line() -> None:
    kinds = {line.partition(" ")[0] for line in FILE.read_text("utf-8").splitlines()}
    assert kinds == {
        *("command", "slash", "setting", "key", "action", "request", "event", "record", "error", "http", "environment"),
        *("catalogue", "number", "reasoning", "tool_calls", "import", "gguf", "exchange", "policy", "family", "every"),
        *("json", "file", "text"),
    }


def test_a_line_that_went_is_named() -> None:
    assert differences(["command a", "command b"], ["command b", "command c"]) == ["-command a", "+command c"]
