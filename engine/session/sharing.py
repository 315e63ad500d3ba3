"""The answers under way, and their parts of the passes of the last seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from engine.ipc.messages import AskingProgram, PassShare, UnderWay

WINDOW_S = 2.0
"""Seconds over which rows and tokens are counted; longer if one pass takes longer."""


class _Recent:
    """The passes of the last :data:`WINDOW_S` seconds in which one answer took part, or those of all answers."""

    def __init__(self, program: AskingProgram) -> None:
        self.program: AskingProgram = program
        self.rows = self.tokens = 0
        self._passes: deque[tuple[float, int, int]] = deque()
        self._ended = 0.0

    def add(self, begun: float, ended: float, rows: int, tokens: int) -> None:
        self._passes.append((begun, rows, tokens))
        self._ended = ended
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        while len(self._passes) > 1 and self._passes[0][0] < ended - WINDOW_S:
            _, rows, tokens = self._passes.popleft()
            self.rows, self.tokens = self.rows - rows, self.tokens - tokens

    @property
    def rows_per_pass(self) -> float:
        return self.rows / len(self._passes) if self._passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        elapsed = self._ended - self._passes[0][0] if self._passes else 0.0
        return self.tokens / elapsed if elapsed > 0 else 0.0


class PassLog:
    """Counts the rows of each pass of decoding by the answers that had them. Not thread-safe.

    An answer is known by any object of its own. A step of a beam search has several rows and gives one token.
    """

    def __init__(self) -> None:
        self._answers: dict[object, _Recent] = {}
        self._all = _Recent("")

    @property
    def answers(self) -> int:
        """Number of answers under way."""
        return len(self._answers)

    @property
    def rows_per_pass(self) -> float:
        """Mean number of rows of a pass."""
        return self._all.rows_per_pass

    def begin(self, answer: object, program: AskingProgram) -> None:
        """``answer``, for which a ``program`` asked, is under way."""
        self._answers[answer] = _Recent(program)

    def end(self, answer: object) -> None:
        """``answer`` has ended."""
        del self._answers[answer]
        if not self._answers:
            self._all = _Recent("")

    def decoded(self, begun: float, ended: float, steps: Iterable[tuple[object, int]]) -> None:
        """Count a pass from ``begun`` to ``ended``: the answer and the number of rows of each of its ``steps``."""
        rows, tokens = Counter[object](), Counter[object]()
        for answer, count in steps:
            rows[answer] += count
            tokens[answer] += 1
        self._all.add(begun, ended, rows.total(), tokens.total())
        for answer, count in rows.items():
            if answer in self._answers:
                self._answers[answer].add(begun, ended, count, tokens[answer])

    def under_way(self, answer: object) -> UnderWay | None:
        """What ``answer`` has of all that is generated; None if it is the only one."""
        own = self._answers.get(answer)
        if own is None or len(self._answers) < 2:
            return None
        return UnderWay(
            answers=len(self._answers),
            own_tokens_per_s=own.tokens_per_s,
            tokens_per_s=sum(each.tokens_per_s for each in self._answers.values()),
        )

    def shares(self) -> list[PassShare]:
        """The parts of the programs that ask, by their names."""
        shares = []
        for program in sorted({answer.program for answer in self._answers.values()}):
            answers = [answer for answer in self._answers.values() if answer.program == program]
            shares.append(
                PassShare(
                    program=program,
                    answers=len(answers),
                    rows=sum(answer.rows_per_pass for answer in answers),
                    tokens_per_s=sum(answer.tokens_per_s for answer in answers),
                )
            )
        return shares
