"""Which program is writing a message, so that one which died can be told from one which still writes."""

from __future__ import annotations

import itertools
import os
import weakref
from functools import cache

_CLOCK_SLACK_S = 10.0
_numbers = itertools.count(1)
_live: weakref.WeakValueDictionary[str, Writer]


class Writer:
    """One open store of one process. ``token`` names it in the database as ``pid:start:number``.

    A process id alone would not do: the system uses it again.
    """

    def __init__(self) -> None:
        self.token = f"{os.getpid()}:{_started(os.getpid())}:{next(_numbers)}"
        _live[self.token] = self

    def close(self) -> None:
        _live.pop(self.token, None)


_live = weakref.WeakValueDictionary()


def is_alive(token: str) -> bool:
    """Whether the writer with this token may still write."""
    pid, _, rest = token.partition(":")
    start = rest.partition(":")[0]
    if not pid.isdecimal() or not start.replace(".", "", 1).isdecimal():
        return False
    if int(pid) == os.getpid():
        return token in _live
    now = _start_time(int(pid))
    # The system's idea of when a process started moves a little when its clock is set.
    return bool(now) and abs(float(now) - float(start)) < _CLOCK_SLACK_S


@cache
def _started(pid: int) -> str:
    return _start_time(pid)


def _start_time(pid: int) -> str:
    """When process ``pid`` started, as text that stays the same; empty if there is none."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.create_time():.2f}"
    except (psutil.Error, OverflowError, ValueError):
        return ""
