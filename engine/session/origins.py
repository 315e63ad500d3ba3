"""Which tokens of a cache were read, and which were written.

The last bits of a token's keys and values depend on the tokens before it and on this, and on nothing else where the
runtime is the native one. To reproduce a cache to the bit, its tokens are read and written as before.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED = 4096
"""Maximum prompts whose origins are remembered, up to a few hundred bytes each."""


class Origins:
    """What the tokens of a row were, from its start. Immutable.

    A positive run is that many tokens of a prompt, which were read. A negative run is that many tokens of an answer,
    which were written. Runs of one sign never follow one another.
    """

    def __init__(self, runs: Sequence[int] = ()) -> None:
        self.runs = tuple(runs)
        self.length = sum(map(abs, self.runs))
        """Tokens of all runs."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"Origins({list(self.runs)})"

    def read(self, tokens: int) -> Origins:
        """These, followed by ``tokens`` that were read."""
        return self._with(tokens)

    def written(self, tokens: int = 1) -> Origins:
        """These, followed by ``tokens`` that were written."""
        return self._with(-tokens)

    def _with(self, run: int) -> Origins:
        if self.runs and (self.runs[-1] > 0) == (run > 0):
            return Origins((*self.runs[:-1], self.runs[-1] + run))
        return Origins((*self.runs, run)) if run else self

    def cut(self, length: int) -> Origins:
        """Origins of the first ``length`` tokens."""
        runs: list[int] = []
        for run in self.runs:
            count = min(abs(run), length)
            if not count:
                break
            runs.append(count if run > 0 else -count)
            length -= count
        return Origins(runs)

    def shared(self, other: Origins) -> Origins:
        """The longest common prefix of both."""
        same = 0
        for mine, theirs in zip(self.runs, other.runs, strict=False):
            if mine != theirs:
                same += min(abs(mine), abs(theirs)) if (mine > 0) == (theirs > 0) else 0
                break
            same += abs(mine)
        return self.cut(same)

    def after(self, length: int) -> Iterator[int]:
        """The runs after the first ``length`` tokens."""
        for run in self.runs:
            skipped = min(abs(run), length)
            length -= skipped
            if skipped < abs(run):
                yield run - skipped if run > 0 else run + skipped


class RememberedOrigins:
    """The origins of the :data:`REMEMBERED` latest prompts."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, array[int]] = OrderedDict()

    def put(self, prompt: Sequence[int], origins: Origins) -> None:
        self._found[_digest(prompt)] = array("i", origins.runs)
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)

    def get(self, prompt: Sequence[int]) -> Origins | None:
        key = _digest(prompt)
        runs = self._found.get(key)
        if runs is None:
            return None
        self._found.move_to_end(key)
        return Origins(runs)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()
