"""The scheduler: runs the passes of all programs that generate at the same time, by turns, in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engine.generation.drafts import PassCosts
from engine.generation.programs import Decoding, MemoryWanted, Outcome, Program, Reading, Together, Work
from engine.runtimes.protocol import LoadedModel, TokenRows
from engine.session.sharing import PassLog

READING_SHARE = 0.5
"""Part of the time that goes to reading prompts while other answers are decoded."""

T = TypeVar("T")


@dataclass(eq=False)
class _RunningProgram:
    """A program that waits for ``work``."""

    program: Program[Any]
    returned: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    first: bool
    owner: object
    """The answer that it is, or is part of."""
    served: int
    """Number of the reading pass that it had last."""
    work: Work | None = None
    measured: bool = False
    """Whether the program wants its next pass to be measured."""
    promised: int = 0
    """Bytes of keys and values that it was given room for."""
    told: bool = False
    """Whether it was told that it waits for room."""
    top: bool = True
    """Whether it was added, and is no part of another program."""


class Scheduler:
    """Runs programs over one model. Not thread-safe.

    A round runs one step of every program that decodes, or one pass over a prompt. While both wait, time is shared by
    :data:`READING_SHARE`. On a runtime that lets others run between the layers of a pass, steps also run there, so that
    a long prompt does not make answers wait. A step has the rows of as many programs as get the same bits alone.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
        log: PassLog | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        """``memory`` gives the bytes that are free for keys and values. Passes of decoding are counted in ``log``, and
        the costs of those with guesses in ``costs``."""
        self._model = model
        self._memory = memory
        self._clock = clock
        self._log = log or PassLog()
        self._running: list[_RunningProgram] = []
        self._ahead: TokenRows | None = None
        """Rows in which the runtime may have begun a step ahead."""
        self._reading_s = self._decoding_s = 0.0
        """Seconds of both kinds of passes since both wait."""
        self._readings = 0
        self._costs = costs or PassCosts()

    @property
    def active(self) -> int:
        """Number of programs that have not ended."""
        return sum(running.top for running in self._running)

    def add(
        self,
        program: Program[T],
        returned: Callable[[T], None],
        failed: Callable[[BaseException], None],
        *,
        first: bool = True,
        owner: object = None,
    ) -> None:
        """Run ``program`` up to its first pass. When it ends, ``returned`` gets what it returns, or ``failed`` what it
        raises.

        ``first``: its prompt is read before those of programs without it. ``owner``: the answer for which its passes
        are counted.
        """
        self._begin(_RunningProgram(program, returned, failed, first, owner, served=self._readings))

    def _begin(self, running: _RunningProgram) -> None:
        self._running.append(running)
        self._resume(running, None)

    def run(self, program: Program[T], owner: object = None) -> T:
        """Run ``program`` of ``owner`` to its end. Returns what it returns, and raises what it raises."""
        outcome: list[T] = []
        errors: list[BaseException] = []
        self.add(program, outcome.append, errors.append, owner=owner)
        while not outcome and not errors:
            self.round()
        if errors:
            raise errors[0]
        return outcome[0]

    def round(self) -> None:
        """Run a step of each program that decodes, or a pass over one prompt."""
        self._give_room()
        reading = self._next_reading()
        if reading is None or not self._waiting_for(Decoding):
            self._reading_s = self._decoding_s = 0.0
        if reading is not None and self._reading_is_due():
            self._read(reading)
        else:
            self._decode()

    def _waiting_for(self, kind: type[Work]) -> list[_RunningProgram]:
        return [each for each in self._running if isinstance(each.work, kind)]

    def _give_room(self) -> None:
        for running in self._waiting_for(MemoryWanted):
            room = running.work
            assert isinstance(room, MemoryWanted)
            promised = [each.promised for each in self._running if each.promised]
            if not promised or room.cancelled() or room.nbytes + sum(promised) <= self._memory():
                running.promised = room.nbytes
                self._resume(running, None)
            elif not running.told:
                running.told = True
                room.waits()

    def _next_reading(self) -> _RunningProgram | None:
        """The program whose prompt is read next: those that are first, and of them the one that waits longest."""
        return min(self._waiting_for(Reading), key=lambda each: (not each.first, each.served), default=None)

    def _reading_is_due(self) -> bool:
        return self._reading_s * (1 - READING_SHARE) <= self._decoding_s * READING_SHARE

    def _decode(self) -> None:
        begun, batch, rows = self._clock(), list[_RunningProgram](), 0
        for running in self._waiting_for(Decoding):
            count = len(_decoding(running).tokens)
            if batch and rows + count > self._model.rows_together:
                self._step(batch)
                batch, rows = [], 0
            batch.append(running)
            rows += count
        if batch:
            self._step(batch)
        self._decoding_s += self._clock() - begun

    def _step(self, batch: Sequence[_RunningProgram]) -> None:
        """Run the next step of each of ``batch`` in one pass. Those whose rows are void learn that one by one."""
        whole = [running for running in batch if not _decoding(running).rows.void]
        if whole:
            self._step_of(whole)
        for running in batch:
            if running not in whole:
                self._step_of([running])

    def _step_of(self, batch: Sequence[_RunningProgram]) -> None:
        works = [_decoding(running) for running in batch]

        def steps() -> Sequence[Outcome]:
            begun = self._clock()
            outcomes: Sequence[Outcome]
            if len(works) == 1:
                outcomes = [self._single_step(works[0])]
            else:
                self._settle(None)
                outcomes = self._model.step_together([(work.rows, work.tokens) for work in works])
            rows = [(running.owner, len(work.tokens)) for running, work in zip(batch, works, strict=True)]
            self._log.decoded(begun, self._clock(), rows)
            return outcomes

        self._run(batch, steps)

    def _single_step(self, work: Decoding) -> Outcome:
        """Run ``work``. A token is chosen where the logits are, and guessed tokens are run, only if no other program's
        passes come between."""
        alone = sum(not isinstance(running.work, Together) for running in self._running) == 1
        self._settle(work.rows if alone and work.sampler is not None else None)
        if alone and work.draft is not None:
            most = work.rows.verified_together - 1
            draft = work.draft(most)
            count = 0 if draft is None else self._costs.worth(draft.chance, min(most, len(draft.tokens)))
            tokens = [*work.tokens, *(draft.tokens[:count] if draft is not None else ())]
            begun = self._clock()
            logits = work.rows.verify(tokens) if count else work.rows.step(tokens)
            self._costs.took(len(tokens), self._clock() - begun)
            return logits
        if alone and work.sampler is not None:
            chosen = work.rows.step_choosing(work.tokens[0], work.sampler)
            if chosen is not None:
                return chosen
        return work.rows.step(work.tokens)

    def _settle(self, rows: TokenRows | None) -> None:
        """Discard a step that a runtime began ahead in other rows than ``rows``, in which it may begin one now."""
        if self._ahead is not None and self._ahead is not rows:
            self._ahead.settle()
        self._ahead = rows

    def _read(self, running: _RunningProgram) -> None:
        work, begun = running.work, self._clock()
        assert isinstance(work, Reading)
        self._readings += 1
        running.served = self._readings

        def beside() -> None:
            nonlocal begun
            self._reading_s += self._clock() - begun
            with self._model.recorder.aside():
                while self._waiting_for(Decoding) and not self._reading_is_due():
                    self._decode()
            if not self._waiting_for(Decoding):
                self._reading_s = self._decoding_s = 0.0
            begun = self._clock()

        def pass_over() -> Sequence[Outcome]:
            work.check()
            self._settle(None)
            self._model.between_layers, self._model.beside = work.check, beside
            try:
                run = work.rows.replay if work.as_steps else work.rows.extend
                return [run(work.tokens, want_logits=work.want_logits)]
            finally:
                self._model.between_layers = self._model.beside = None

        self._run([running], pass_over)
        self._reading_s += self._clock() - begun

    def _run(self, batch: Sequence[_RunningProgram], run: Callable[[], Sequence[Outcome]]) -> None:
        """Run the pass that all of ``batch`` wait for, and each program with its outcome up to its next one."""
        for running in batch:
            running.work = None
        self._model.recorder.enabled = any(running.measured for running in batch)
        outcomes: Sequence[Outcome | BaseException]
        try:
            outcomes = run()
        except BaseException as error:
            outcomes = [error] * len(batch)
        for running, outcome in zip(batch, outcomes, strict=True):
            if running in self._running:  # one that failed may have ended others
                self._resume(running, outcome)

    def _resume(self, running: _RunningProgram, outcome: Outcome | BaseException) -> None:
        # A program switches the recorder on for its own passes and reads what was measured of them.
        recorder = self._model.recorder
        recorder.enabled = running.measured
        program = running.program
        try:
            if isinstance(outcome, BaseException):
                running.work = program.throw(outcome)
            else:
                running.work = program.send(outcome)
            running.measured = recorder.enabled
        except StopIteration as end:
            self._end(running, partial(running.returned, end.value))
        except BaseException as error:
            self._end(running, partial(running.failed, error))
        if isinstance(running.work, Together):
            self._branch(running, running.work.programs)

    def _branch(self, parent: _RunningProgram, programs: Sequence[Program[Any]]) -> None:
        """Run ``programs`` for ``parent``, which goes on when they have ended."""
        results: dict[int, Any] = {}
        branches: list[_RunningProgram] = []

        def returned(index: int, result: Any) -> None:
            results[index] = result
            if len(results) == len(programs):
                parent.work = None
                self._resume(parent, [results[index] for index in range(len(programs))])

        def failed(error: BaseException) -> None:
            over, branches[:] = list(branches), []
            for branch in over:
                if branch in self._running:
                    self._running.remove(branch)
                branch.program.close()
            parent.work = None
            self._resume(parent, error)

        for index, program in enumerate(programs):
            branches.append(
                _RunningProgram(
                    program, partial(returned, index), failed, parent.first, parent.owner, self._readings, top=False
                )
            )
        for branch in list(branches):
            if branches:  # none has failed
                self._begin(branch)

    def _end(self, running: _RunningProgram, tell: Callable[[], None]) -> None:
        self._running.remove(running)
        self._ahead = None
        self._model.recorder.enabled = False
        tell()


def _decoding(running: _RunningProgram) -> Decoding:
    assert isinstance(running.work, Decoding)
    return running.work
