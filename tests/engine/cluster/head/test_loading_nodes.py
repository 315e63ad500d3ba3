"""What a follower says of itself is shown as a few safe lines, however much it is."""

from __future__ import annotations

from engine.cluster.head.loading_nodes import SHOWN_NOTICES, notices_of


def test_few_notices_are_shown_one_by_one() -> None:
    assert notices_of("studio", []) == []
    assert notices_of("studio", ["a", "b\x1b[2J"]) == ["studio: a", "studio: b [2J"]


def test_many_are_counted() -> None:
    lines = notices_of("studio", [f"notice {number}" for number in range(60)])
    assert lines == [*(f"studio: notice {number}" for number in range(SHOWN_NOTICES)), "studio: and 57 more"]
