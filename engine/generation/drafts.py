"""Drafts: guesses of the next tokens, which one pass checks together, and how many of them are worth a longer pass.

A guess is what followed the same tokens earlier in the conversation, as in prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_MATCH = 3
"""Number of tokens that must be the same before a guess."""
MOST_MATCH = 64
"""Number of tokens that are compared at most."""
MOST_PLACES = 4
"""Maximum number of earlier places that are compared, the latest first."""
FORGOTTEN = 0.05
"""Share by which older guesses count less with each further one."""
ROW_COST = 0.25
"""Time of a further token in a pass, in passes of one token, where it was not measured."""
MEASURED = 7
"""Latest passes of which the median is taken."""
VALID_PASSES = 256
"""Number of passes after which a measurement is dropped, so that what was slow once is tried again."""


@dataclass(frozen=True)
class TokenDraft:
    """Guessed tokens, and the probability of each that it is right if those before it are."""

    tokens: Sequence[int]
    chance: float


class Repetitions:
    """Guesses of what follows ``tokens``, to which the caller appends."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._latest: dict[tuple[int, ...], int] = {}
        """End of the latest occurrence of so many tokens."""
        self._earlier = [0] * LEAST_MATCH
        """For each end of so many tokens, that of the occurrence before it; 0: there is none. It is as long as the part
        of :attr:`tokens` that is indexed, and one more."""
        self._right: dict[int, tuple[float, float]] = {}
        """Guesses that were right, and all, by the logarithm of the length that was the same. Old ones count less."""
        self._guessed: tuple[int, int, int] | None = None
        """Position, token and kind of the last guess."""

    def guess(self, token: int, most: int) -> TokenDraft | None:
        """At most ``most`` tokens after ``token``, which follows :attr:`tokens`. None without an earlier occurrence."""
        self._learn(token)
        self._index()
        end = (*self.tokens[1 - LEAST_MATCH :], token)
        place, places = self._latest.get(end, 0), list[int]()
        while place and len(places) < MOST_PLACES:
            places.append(place)
            place = self._earlier[place]
        if not places:
            return None
        length, place = max((self._same_before(place), place) for place in places)
        kind = length.bit_length()
        guessed = self._following(place, token, most)
        if not guessed:
            return None
        self._guessed = len(self.tokens) + 1, guessed[0], kind
        right, all_of_them = self._right.get(kind, (0.0, 0.0))
        # Before anything was learnt: the longer what is the same, the likelier what follows is the same, too.
        expected = 1 - 2 ** (LEAST_MATCH.bit_length() - 1 - kind)
        return TokenDraft(guessed, (right + 2 * expected) / (all_of_them + 2))

    def _learn(self, token: int) -> None:
        """Count whether the last guess was right, whoever checked it."""
        if self._guessed is None:
            return
        position, guessed, kind = self._guessed
        self._guessed = None
        if position > len(self.tokens):
            return
        now = self.tokens[position] if position < len(self.tokens) else token
        right, all_of_them = (count * (1 - FORGOTTEN) for count in self._right.get(kind, (0.0, 0.0)))
        self._right[kind] = right + (now == guessed), all_of_them + 1

    def _index(self) -> None:
        latest, earlier, first = self._latest, self._earlier, len(self._earlier) - LEAST_MATCH
        following = (self.tokens[first + offset :] for offset in range(LEAST_MATCH))
        for end, last in enumerate(zip(*following, strict=False), len(earlier)):
            earlier.append(latest.get(last, 0))
            latest[last] = end

    def _same_before(self, place: int) -> int:
        """Number of tokens before ``place`` that are those at the end, with the last one."""
        length = LEAST_MATCH
        end = len(self.tokens) + 1
        while length < min(MOST_MATCH, place) and self.tokens[place - 1 - length] == self.tokens[end - 1 - length]:
            length += 1
        return length

    def _following(self, place: int, token: int, most: int) -> list[int]:
        """What followed ``place``, over and over if that reaches the end. Pictures are not guessed."""
        period = len(self.tokens) + 1 - place
        following = [*self.tokens[place : place + most], token][: min(most, period)]
        found = [following[index % period] for index in range(most)]
        picture = next((index for index, each in enumerate(found) if each < 0), most)
        return found[:picture]


class PassCosts:
    """Measured seconds of passes over one to several tokens of a text."""

    def __init__(self) -> None:
        self._passes = 0
        self._measured: dict[int, deque[float]] = {}
        """Seconds of the latest passes, by their tokens."""
        self._medians: dict[int, float] = {}
        self._last: dict[int, int] = {}
        """Number of the last pass of each kind."""

    def took(self, tokens: int, seconds: float) -> None:
        """Count a pass over ``tokens`` tokens."""
        self._passes += 1
        latest = self._measured.setdefault(tokens, deque(maxlen=MEASURED))
        latest.append(seconds)
        self._medians[tokens], self._last[tokens] = statistics.median(latest), self._passes
        for count in [count for count, last in self._last.items() if last <= self._passes - VALID_PASSES]:
            del self._measured[count], self._medians[count], self._last[count]

    def of(self, tokens: int) -> float:
        """Seconds of a pass over ``tokens`` tokens; without any measurement, passes of one token."""
        medians = self._medians
        if tokens in medians:
            return medians[tokens]
        if not medians:
            return 1 + ROW_COST * (tokens - 1)
        near = min(medians, key=lambda count: (abs(count - tokens), count))
        beyond = [count for count in medians if (count > tokens) != (near > tokens)]
        if not beyond and len(medians) > 1:  # as between the two longest, or shortest
            beyond = [count for count in medians if count != near]
        if beyond:
            far = min(beyond, key=lambda count: abs(count - tokens))
            return max(medians[near] + (medians[far] - medians[near]) * (tokens - near) / (far - near), 0.0)
        single = medians.get(1, medians[near] / (1 + ROW_COST * (near - 1)))
        return max(medians[near] + ROW_COST * single * (tokens - near), 0.0)

    def worth(self, chance: float, most: int) -> int:
        """Number of guesses, at most ``most``, with which a pass gives the most tokens per second. Each is right with
        ``chance`` after right ones. Before the cost of a single token is known there are none."""
        if 1 not in self._medians:
            return 0
        expected, best, best_rate = 1.0, 0, 1 / max(self.of(1), 1e-9)
        for count in range(1, most + 1):
            expected += chance**count
            rate = expected / max(self.of(count + 1), 1e-9)
            if rate > best_rate:
                best, best_rate = count, rate
        return best
