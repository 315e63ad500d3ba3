"""The passes that computed the keys and values in a cache, and the places where the cache may be cut.

The last bits of a token's keys and values depend on the number of tokens in the same pass. To reproduce a cache to the
bit, it is filled by the same passes and cut only at the end of one of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED = 4096
"""Maximum prompts whose passes are remembered, up to a few hundred bytes each."""


class PassSequence:
    """The passes over one row of tokens from its start. Immutable.

    A positive run is one prefill pass of that many tokens. A negative run is that many tokens decoded one by one, or
    run again to the same bits by passes of several; two negative runs never follow one another.
    """

    def __init__(self, runs: Sequence[int] = ()) -> None:
        self.runs = tuple(runs)
        self.length = sum(map(abs, self.runs))
        """Tokens over all passes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassSequence) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"PassSequence({list(self.runs)})"

    def prefilled(self, tokens: int) -> PassSequence:
        """This sequence, followed by one pass over ``tokens`` of a prompt."""
        return PassSequence((*self.runs, tokens))

    def decoded(self, tokens: int = 1) -> PassSequence:
        """This sequence, followed by ``tokens`` decoded one by one."""
        if not self.runs or self.runs[-1] > 0:
            return PassSequence((*self.runs, -tokens))
        return PassSequence((*self.runs[:-1], self.runs[-1] - tokens))

    def up_to(self, length: int, chunk: int, whole: Sequence[tuple[int, int]] = ()) -> PassSequence:
        """This sequence, followed by passes of at most ``chunk`` tokens up to a total of ``length``.

        ``whole``: beginnings and ends of tokens that have to be in one pass, which may be longer. ``length`` is not
        between them.
        """
        runs, at = list(self.runs), self.length
        while at < length:
            end = min(at + chunk, length)
            cut = next(((first, last) for first, last in whole if first < end < last), None)
            if cut is not None:
                end = cut[0] if cut[0] > at else cut[1]
            runs.append(end - at)
            at = end
        return PassSequence(runs)

    def cut(self, length: int) -> PassSequence:
        """The passes that ended within the first ``length`` tokens."""
        runs: list[int] = []
        for run in self.runs:
            if abs(run) > length:
                if run < 0 < length:
                    runs.append(-length)
                break
            runs.append(run)
            length -= abs(run)
        return PassSequence(runs)

    def shared(self, other: PassSequence) -> PassSequence:
        """The longest common prefix of both."""
        same = 0
        for mine, theirs in zip(self.runs, other.runs, strict=False):
            if mine != theirs:
                same += min(-mine, -theirs) if mine < 0 and theirs < 0 else 0
                break
            same += abs(mine)
        return self.cut(same)

    def after(self, length: int) -> Iterator[int]:
        """The runs after the first ``length`` tokens; a pass must end there."""
        for run in self.runs:
            if length >= abs(run):
                length -= abs(run)
            else:
                yield run + length if run < 0 else run
                length = 0


class RememberedPasses:
    """The passes of the :data:`REMEMBERED` latest prompts."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, array[int]] = OrderedDict()

    def put(self, prompt: Sequence[int], passes: PassSequence) -> None:
        self._found[_digest(prompt)] = array("i", passes.runs)
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)

    def get(self, prompt: Sequence[int]) -> PassSequence | None:
        key = _digest(prompt)
        runs = self._found.get(key)
        if runs is None:
            return None
        self._found.move_to_end(key)
        return PassSequence(runs)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()
