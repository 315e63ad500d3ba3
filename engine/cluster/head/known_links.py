"""Links between machines that were measured before, and whether they are still what they were."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.ipc.messages.ring import LinkFacts

LINK_AGE_S = 600.0
"""A measurement is believed for so long: it may have met other traffic."""


@dataclass(frozen=True)
class _Known:
    ends: frozenset[str]
    measured: float
    link: LinkFacts


class KnownLinks:
    """One link for each pair of node ids. ``clock``: seconds from any time on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}

    def get(self, pair: tuple[str, str], ends: Iterable[str], hurry: bool = False) -> LinkFacts | None:
        """The link of ``pair`` if it need not be measured: both have the ``ends`` (their processes and addresses) that
        they had, and it is not long ago. ``hurry``: however long ago it is."""
        known = self._known.get(pair)
        if known is None or known.ends != frozenset(ends):
            return None
        return known.link if hurry or self._clock() - known.measured < LINK_AGE_S else None

    def last(self, pair: tuple[str, str]) -> LinkFacts | None:
        """The link of ``pair`` as it was when it was measured last, whatever changed since."""
        known = self._known.get(pair)
        return known.link if known is not None else None

    def put(self, pair: tuple[str, str], ends: Iterable[str], link: LinkFacts) -> None:
        """It was measured now."""
        self._known[pair] = _Known(frozenset(ends), self._clock(), link)
