"""A queue in which everybody gets a turn: owners in a ring, and the items of each in the order of their arrival."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class TurnQueue(Generic[Owner, Item]):
    """While an owner's item waits, no other owner is served twice, what was just served included. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()
        self._served: Owner | None = None
        """The latest owner that was served."""
        self._changed = threading.Condition()

    def put(self, owner: Owner, item: Item) -> None:
        """Add ``item`` behind the other items of ``owner``, who joins the ring at its end."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def take(self) -> Item:
        """The next item. Waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            if self._served is not None and self._served in self._waiting:
                # It asked again while it was served, perhaps before others came.
                self._waiting.move_to_end(self._served)
            owner, items = next(iter(self._waiting.items()))
            item = items.popleft()
            if not items:
                del self._waiting[owner]
            self._served = owner
            return item

    def remove(self, owner: Owner, item: Item) -> bool:
        """Take ``item`` of ``owner`` out of the queue. Returns False if it does not wait any more."""
        with self._changed:
            items = self._waiting.get(owner)
            if items is None or item not in items:
                return False
            items.remove(item)
            if not items:
                del self._waiting[owner]
            return True

    def waiting(self) -> int:
        """Number of items that wait."""
        with self._changed:
            return sum(map(len, self._waiting.values()))
