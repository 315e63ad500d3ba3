"""When a message was written: its time, and the day where it is another one than the message before's. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.conversations.groups import local_date


@dataclass(frozen=True)
class Stamp:
    """``time``: ``14:05``. ``day``: ``Monday, 3 May 2027``; empty if it is that of the message before."""

    time: str
    day: str = ""


def stamp(created: float, before: float | None) -> Stamp | None:
    """The stamp of a message that was ``created`` then, after one of ``before`` if there is one.

    Both are in seconds since the epoch. None if the time is not known.
    """
    day = local_date(created) if created > 0 else None
    if day is None:
        return None
    other = before is None or local_date(before) != day
    return Stamp(time.strftime("%H:%M", time.localtime(created)), f"{day:%A}, {day.day} {day:%B %Y}" if other else "")
