"""Child processes that the running test has started, without those that other tests of the same worker have left."""

from __future__ import annotations

import psutil

from tests.support.eventually import has_ended

_before: set[int] = set()


def remember_children() -> None:
    """Leave the children of now out of account from here on."""
    _before.clear()
    _before.update(own_children())


def own_children() -> list[int]:
    """Ids of the running children that were started since."""
    children = [child.pid for child in psutil.Process().children() if not has_ended(child)]
    return [pid for pid in children if pid not in _before]
