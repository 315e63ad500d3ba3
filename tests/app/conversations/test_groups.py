"""The groups of the list of conversations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conversations.groups import PINNED, TODAY, UNDATED, WEEK, YESTERDAY, date_group, grouped
from app.conversations.records import Conversation

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def conversation(number: int, updated: float, *, pinned: bool = False) -> Conversation:
    return Conversation(number, f"chat {number}", "", "m", updated, updated, None, pinned=pinned)


@pytest.mark.parametrize(
    ("then", "now", "group"),
    [
        ("2026-11-22T00:00:00", "2026-11-22T23:59:59", TODAY),
        ("2026-11-21T23:59:59", "2026-11-22T00:00:00", YESTERDAY),
        ("2026-11-21T00:00:00", "2026-11-22T23:59:59", YESTERDAY),
        ("2026-11-20T23:59:59", "2026-11-22T00:00:00", WEEK),
        ("2026-11-15T00:00:00", "2026-11-22T12:00:00", WEEK),
        ("2026-11-14T23:59:59", "2026-11-22T12:00:00", "November"),
        ("2026-01-01T00:00:00", "2026-11-22T12:00:00", "January"),
        ("2025-12-31T23:59:59", "2026-01-01T00:00:00", YESTERDAY),
        ("2025-12-28T12:00:00", "2026-01-02T12:00:00", WEEK),
        ("2025-12-20T12:00:00", "2026-01-02T12:00:00", "December 2025"),
        ("2025-11-22T12:00:00", "2026-11-22T12:00:00", "November 2025"),
        # The clock was set back: by an hour, by days, by a year.
        ("2026-11-22T13:00:00", "2026-11-22T12:00:00", TODAY),
        ("2026-11-25T13:00:00", "2026-11-22T12:00:00", TODAY),
        ("2027-11-22T12:00:00", "2026-11-22T12:00:00", TODAY),
        # The day has 23 hours, and the one before 25.
        ("2026-03-28T00:30:00", "2026-03-29T23:30:00", YESTERDAY),
        ("2026-10-25T00:10:00", "2026-10-25T23:50:00", TODAY),
        ("2026-10-24T23:50:00", "2026-10-25T23:50:00", YESTERDAY),
    ],
)
def test_the_group_of_a_date(then: str, now: str, group: str) -> None:
    assert date_group(at(then), at(now), BERLIN) == group


def test_the_hour_that_comes_twice_is_one_day() -> None:
    first, second = at("2026-10-25T02:30:00"), at("2026-10-25T02:30:00", fold=1)
    assert second - first == 3600
    assert date_group(first, second, BERLIN) == date_group(second, first, BERLIN) == TODAY


def test_the_zone_decides() -> None:
    then, now = at("2026-11-22T23:30:00"), at("2026-11-23T00:30:00")
    assert date_group(then, now, BERLIN) == YESTERDAY
    assert date_group(then, now, UTC) == TODAY


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_time_that_is_none_has_a_group(seconds: float) -> None:
    assert date_group(seconds, at("2026-11-22T12:00:00")) == UNDATED


def test_pinned_conversations_stand_first_and_each_group_once() -> None:
    now = at("2026-11-22T12:00:00")
    days = [conversation(number, now - number * 86_400, pinned=number in (3, 40)) for number in range(60)]
    found = grouped(days[::-1], now, BERLIN)
    assert [title for title, _ in found] == [PINNED, TODAY, YESTERDAY, WEEK, "November", "October", "September"]
    assert [chat.id for chat in found[0][1]] == [3, 40]
    assert [chat.id for chat in found[3][1]] == [2, 4, 5, 6, 7]


@given(st.lists(st.tuples(st.floats(-1e9, 4e9), st.booleans())), st.floats(0, 4e9))
def test_every_conversation_is_in_one_group_and_no_group_comes_twice(
    facts: list[tuple[float, bool]], now: float
) -> None:
    chats = [conversation(number, updated, pinned=pinned) for number, (updated, pinned) in enumerate(facts)]
    found = grouped(chats, now, timezone(timedelta(hours=5)))
    assert sorted(chat.id for _, group in found for chat in group) == list(range(len(chats)))
    titles = [title for title, _ in found]
    assert len(titles) == len(set(titles))
    assert all(group for _, group in found)
