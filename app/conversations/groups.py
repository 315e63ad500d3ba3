"""Conversations in groups by date: pinned, today, yesterday, the previous seven days, then months. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, tzinfo
from itertools import groupby

from app.conversations.records import Conversation

PINNED = "Pinned"
TODAY = "Today"
YESTERDAY = "Yesterday"
WEEK = "Previous 7 days"
UNDATED = "Undated"

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def local_date(seconds: float, zone: tzinfo | None = None) -> date | None:
    """The date in ``zone`` (default: this machine's) of ``seconds`` since the epoch; None if there is no such date."""
    try:
        return datetime.fromtimestamp(seconds, zone).date()
    except (OverflowError, ValueError, OSError):
        return None


def date_group(seconds: float, now: float, zone: tzinfo | None = None) -> str:
    """The group of what happened at ``seconds``, as seen at ``now``; both in seconds since the epoch.

    Days are those of the calendar, whatever their length. A moment that is still to come, as after the clock was set
    back, belongs to today.
    """
    day, today = local_date(seconds, zone), local_date(now, zone)
    if day is None or today is None:
        return UNDATED
    past = (today - day).days
    if past <= 0:
        return TODAY
    if past == 1:
        return YESTERDAY
    if past <= 7:
        return WEEK
    month = _MONTHS[day.month - 1]
    return month if day.year == today.year else f"{month} {day.year}"


def grouped(
    conversations: Iterable[Conversation], now: float, zone: tzinfo | None = None
) -> list[tuple[str, list[Conversation]]]:
    """Titles of groups with their conversations: first the pinned ones, then by date, each newest first."""
    ordered = sorted(conversations, key=lambda found: (found.pinned, found.updated, found.id), reverse=True)
    return [
        (title, list(found))
        for title, found in groupby(
            ordered, lambda found: PINNED if found.pinned else date_group(found.updated, now, zone)
        )
    ]
