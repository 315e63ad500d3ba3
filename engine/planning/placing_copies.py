"""Copies of a layer's experts on further nodes: see :mod:`engine.planning.placing`, step 3."""

from __future__ import annotations

from collections.abc import Sequence


def copied(
    first: Sequence[Sequence[int]],
    slots: Sequence[int],
    popularity: Sequence[float],
    seconds: Sequence[float],
    has: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """``first`` (one holder per expert) with further holders: ``slots`` more experts on each rank, none twice.

    Raises ValueError if a rank has more slots than there are experts it does not hold.
    """
    experts = len(first)
    holders = [list(ranks) for ranks in first]
    if any(slot > experts - sum(rank in ranks for ranks in holders) for rank, slot in enumerate(slots)):
        raise ValueError("a rank cannot hold more experts than a layer has")
    total = sum(popularity)
    use = (
        [(routes + 0.5) / (total + 0.5 * experts) for routes in popularity] if total > 0 else [1.0 / experts] * experts
    )
    dealing = _Dealing(holders, list(slots), use, seconds, [frozenset(each) for each in has])
    while any(dealing.left):
        dealing.next_copy()
    return [sorted(ranks) for ranks in holders]


class _Dealing:
    """The copies of one layer, one after the other. ``left``: slots per rank that are free."""

    def __init__(
        self,
        holders: list[list[int]],
        left: list[int],
        use: Sequence[float],
        seconds: Sequence[float],
        has: Sequence[frozenset[int]],
    ) -> None:
        self.left = left
        self._holders = holders
        self._use = use
        self._seconds = seconds
        self._has = has
        nodes = len(left)
        self._loads = [0.0] * nodes
        self._shared = [[0.0] * nodes for _ in range(nodes)]
        # Experts by number of copies and first holder, the most used last: the next to be copied is popped.
        self._waiting: list[list[int]] = [[] for _ in range(nodes)]
        for expert in sorted(range(len(holders)), key=lambda expert: (use[expert], -expert)):
            self._waiting[holders[expert][0]].append(expert)
            self._loads[holders[expert][0]] += use[expert]
        self._passed: list[int] = []
        self._copies = 1

    def next_copy(self) -> None:
        """Give one expert a further holder, or put it aside until all have as many copies."""
        ranks = [rank for rank, experts in enumerate(self._waiting) if experts]
        if not ranks:
            self._next_round()
            return
        busiest = max(ranks, key=lambda rank: (self._loads[rank] * self._seconds[rank], -rank))
        expert = self._waiting[busiest].pop()
        held = self._holders[expert]
        free = [rank for rank, slots in enumerate(self.left) if slots and rank not in held]
        if free:
            best = min(free, key=lambda rank: self._cost(expert, rank, busiest))
            self._give(expert, best)
        self._passed.append(expert)

    def _cost(self, expert: int, rank: int, busiest: int) -> tuple[bool, float, float, int]:
        """What speaks against a copy of ``expert`` on ``rank``: that it is not there yet; what the two share already;
        its load."""
        absent = bool(self._has) and expert not in self._has[rank]
        seconds = self._seconds[rank]
        return (
            absent,
            self._shared[busiest][rank] * seconds,
            (self._loads[rank]) * seconds / (1 + self.left[rank]),
            rank,
        )

    def _give(self, expert: int, rank: int) -> None:
        held = self._holders[expert]
        part = self._use[expert] / len(held) - self._use[expert] / (len(held) + 1)
        for other in held:
            self._loads[other] -= part
            self._shared[other][rank] += self._use[expert]
            self._shared[rank][other] += self._use[expert]
        self._loads[rank] += self._use[expert] / (len(held) + 1)
        held.append(rank)
        self.left[rank] -= 1

    def _next_round(self) -> None:
        """All experts that can have another copy, again."""
        for expert in sorted(self._passed, key=lambda expert: (self._use[expert], -expert)):
            held = self._holders[expert]
            if any(slots and rank not in held for rank, slots in enumerate(self.left)):
                self._waiting[max(held, key=lambda rank: (self._loads[rank] * self._seconds[rank], -rank))].append(
                    expert
                )
        self._passed = []
        if not any(self._waiting):
            self.left[:] = [0] * len(self.left)
