"""Beam search over any runtime: all beams step together, and keys and values move only when a beam changes parent.

Sequences and scores equal ``transformers.generate(num_beams=W, do_sample=False)``: the same candidates are kept, the
same ones count as finished, and the search ends at the same step. The selection (:class:`BeamState`) is pure; the
cache is moved by :class:`BeamRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.errors import ModelError, PeerLost
from engine.generation.programs import Program, decode
from engine.generation.sampling import TokenGuide, greedy_token, largest, penalised
from engine.runtimes.protocol import Logits, TokenRows

MAX_BEAMS = 16

IMPOSSIBLE = np.float32(-1.0e9)
"""Score of a token that cannot be chosen, as in transformers. Sums are float32 as there, which decides ties."""

_HOPELESS = IMPOSSIBLE / 2
"""Score below every sum of real log-probabilities. A beam with it continues past its end only if there are too few
others."""


@dataclass(frozen=True)
class BeamRule:
    """The parameters of a search with ``width`` beams.

    A score is the sum of log-probabilities / generated length ** ``length_penalty``.

    ``early_stopping``: end as soon as ``width`` sequences are finished, whatever the others might still reach.
    ``ends`` are the token ids that finish a sequence; ``hits_stop`` may finish one by its generated tokens.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    ends: Collection[int] = ()
    hits_stop: Callable[[Sequence[int]], bool] | None = None
    repetition_penalty: float = 1.0
    """Factor of the repetition penalty, as in sampling. 1 changes nothing."""
    penalises_logits: bool = False
    """Whether the penalty changes logits, as in sampling, or log-probabilities, as in transformers' beam search. The
    log-probability of a token that is nearly certain is nearly 0, which no factor changes, so a loop goes on."""
    prompt: frozenset[int] = frozenset()
    """The tokens of the prompt, which a repetition penalty counts, too."""
    guide: TokenGuide | None = None
    """Guide that says which tokens may come next, from the first one on. Other tokens have no log-probability, and the
    rest is not normalised again."""


@dataclass(frozen=True)
class Hypothesis:
    """A sequence of generated tokens, without the prompt, and its score. It may be finished or still running."""

    tokens: tuple[int, ...]
    score: float
    finished: bool
    over: bool = False
    """Whether the rule's guide ended the sequence."""


@dataclass(frozen=True)
class _Running:
    tokens: tuple[int, ...]
    total: np.float32
    row: int
    guide: TokenGuide | None = None
    """State of the beam's guide. None if no rule guides the beams, or if the beam's score is hopeless."""


@dataclass(frozen=True)
class _Candidate:
    total: np.float32
    parent: int
    token: int
    ends: bool
    guide: TokenGuide | None = None

    @property
    def over(self) -> bool:
        return self.guide is not None and self.guide.over


@dataclass(frozen=True)
class Move:
    """Changes of the cache before the next step: row i becomes a copy of row ``parents[i]``, then takes
    ``tokens[i]``."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


def check_beams(width: int, length_penalty: float) -> None:
    """Raises ModelError (bad-input) for an impossible width or penalty."""
    if not 1 <= width <= MAX_BEAMS:
        raise ModelError(f"Beam width is {width}, which is not between 1 and {MAX_BEAMS}.", kind="bad-input")
    if not np.isfinite(length_penalty) or abs(length_penalty) > 100:
        raise ModelError(f"Length penalty is {length_penalty}, which is not between -100 and 100.", kind="bad-input")


def assign_rows(parents: Sequence[int]) -> list[int]:
    """A row for each survivor, so that as few rows as possible change. ``parents[i]`` is the row that survivor i comes
    from.

    The first child of each parent keeps its row. The others take the rows of parents without children. The result is a
    permutation of the rows.
    """
    rows = [-1] * len(parents)
    taken: set[int] = set()
    for index, parent in enumerate(parents):
        if parent not in taken:
            rows[index] = parent
            taken.add(parent)
    free = iter(row for row in range(len(parents)) if row not in taken)
    return [next(free) if row < 0 else row for row in rows]


def _top(scores: Sequence[np.float32], count: int) -> list[int]:
    """Indices of the ``count`` largest scores, largest first, the first among equals first."""
    order = np.argsort(-np.asarray(scores, dtype=np.float32), kind="stable")
    return [int(index) for index in order[:count]]


@dataclass
class BeamState:
    """The state of a search. ``running`` and ``finished`` are ordered best first."""

    rule: BeamRule
    step: int = 0
    running: list[_Running] = field(init=False)
    finished: list[Hypothesis] = field(default_factory=list)
    _done: bool = False

    def __post_init__(self) -> None:
        self.running = [_Running((), np.float32(0.0), 0, self.rule.guide)]

    @property
    def done(self) -> bool:
        return self._done

    def advance(self, logits: Logits) -> Move:
        """One step of selection. ``logits`` is [rows, vocabulary], by cache row; the first step has one row.

        Afterwards :attr:`done` says whether the search is over; if not, the cache makes the returned move.
        """
        candidates = self._candidates(logits)
        width = self.rule.width
        self.step += 1
        # Finished sequences do not run on, except with a hopeless score if too few others are left.
        totals = [entry.total + IMPOSSIBLE if entry.ends else entry.total for entry in candidates]
        chosen = _top(totals, width)
        parents = [self.running[candidates[index].parent].row for index in chosen]
        rows = assign_rows(parents) if len(self.running) == width else list(range(len(chosen)))
        survivors = [
            _Running(self._tokens(candidates[index]), totals[index], row, candidates[index].guide)
            for index, row in zip(chosen, rows, strict=True)
        ]
        self._finish(candidates)
        self.running = survivors
        self._done = all(entry.ends for entry in candidates) or not self._may_go_on()
        by_row = sorted(range(len(rows)), key=rows.__getitem__)
        return Move(
            parents=tuple(parents[index] for index in by_row),
            tokens=tuple(survivors[index].tokens[-1] for index in by_row),
        )

    def hypotheses(self) -> list[Hypothesis]:
        """The current candidates, best first, at most ``width``.

        They are the finished ones and, during the search, running ones with the score that they would have if they
        ended here.
        """
        if self._done:
            return list(self.finished)
        length = np.float32(float(max(1, self.step)) ** self.rule.length_penalty)
        running = [
            Hypothesis(beam.tokens, float(beam.total / length), False)
            for beam in self.running
            if beam.tokens and beam.total > _HOPELESS
        ]
        return sorted([*self.finished, *running], key=lambda entry: -entry.score)[: self.rule.width]

    def _tokens(self, candidate: _Candidate) -> tuple[int, ...]:
        return (*self.running[candidate.parent].tokens, candidate.token)

    def _candidates(self, logits: Logits) -> list[_Candidate]:
        """The best continuations over all beams, best first: enough that ``width`` of them do not end."""
        rule = self.rule
        keep = max(2, 1 + len(set(rule.ends))) * rule.width
        if keep > logits.shape[-1]:
            raise ModelError(
                f"{rule.width} beams need {keep} candidates, but the model knows {logits.shape[-1]} tokens; "
                "use fewer beams.",
                kind="bad-input",
            )
        totals: list[np.float32] = []
        origins: list[tuple[int, int]] = []
        for index, beam in enumerate(self.running):
            tokens, log_probabilities = self._continuations(logits[beam.row], beam, keep)
            totals.extend(value + beam.total for value in log_probabilities)
            origins.extend((index, token) for token in tokens)
        last = self.step + 1 >= rule.max_tokens
        candidates = []
        for place in _top(totals, keep):
            parent, token = origins[place]
            ends = last or token in rule.ends
            if not ends and rule.hits_stop is not None:
                ends = rule.hits_stop((*self.running[parent].tokens, token))
            candidates.append(self._guided(_Candidate(totals[place], parent, token, ends)))
        return candidates

    def _guided(self, candidate: _Candidate) -> _Candidate:
        """``candidate`` with its own guide, if there is one. Tokens that the guide refuses get a hopeless score."""
        before = self.running[candidate.parent].guide
        if self.rule.guide is None or before is None or candidate.total <= _HOPELESS:
            return candidate
        guide = before.copy()
        if not guide.take(candidate.token):
            return replace(candidate, total=IMPOSSIBLE)
        return replace(candidate, ends=candidate.ends or guide.over, guide=guide)

    def _continuations(self, row: Logits, beam: _Running, count: int) -> tuple[list[int], list[np.float32]]:
        rule = self.rule
        if rule.repetition_penalty == 1.0 and rule.guide is None:
            return _continuations(row, count)
        penalises = rule.repetition_penalty != 1.0
        seen = rule.prompt | set(beam.tokens)
        if penalises and rule.penalises_logits:
            row = penalised(row, seen, rule.repetition_penalty)
        top = row[greedy_token(row)]
        scores = row - top - np.log(np.exp(row - top).sum(dtype=np.float32))
        if penalises and not rule.penalises_logits:
            scores = penalised(scores, seen, rule.repetition_penalty)
        if rule.guide is not None:
            scores = np.where(beam.guide.allowed(), scores, IMPOSSIBLE) if beam.guide else np.full_like(row, IMPOSSIBLE)
        return _best(scores, count)

    def _finish(self, candidates: Sequence[_Candidate]) -> None:
        """Let the sequences that end now compete with those already finished, if they are among the ``width`` best
        candidates."""
        length = np.float32(float(self.step) ** self.rule.length_penalty)
        ended = [
            Hypothesis(self._tokens(entry), float(entry.total / length), True, entry.over)
            for entry in candidates[: self.rule.width]
            if entry.ends and entry.total > _HOPELESS
        ]
        merged = [*self.finished, *ended]
        self.finished = [merged[index] for index in _top([np.float32(h.score) for h in merged], self.rule.width)]

    def _may_go_on(self) -> bool:
        """Whether a running beam may still become one of the finished ones, by the estimate that transformers makes."""
        if self.running[0].total < _HOPELESS:
            return False
        if len(self.finished) < self.rule.width:
            return True
        if self.rule.early_stopping:
            return False
        length = np.float32(float(self.step) ** self.rule.length_penalty)
        return bool(self.running[0].total / length > np.float32(self.finished[-1].score))


def _continuations(row: Logits, count: int) -> tuple[list[int], list[np.float32]]:
    """The ``count`` likeliest tokens of [vocabulary] with their log-probabilities, likeliest first, lower ids first
    among equals."""
    top = row[greedy_token(row)]
    tokens, values = _best(row, count)
    log_sum = np.log(np.exp(row - top).sum(dtype=np.float32))
    return tokens, [value - top - log_sum for value in values]


def _best(scores: Logits, count: int) -> tuple[list[int], list[np.float32]]:
    """The ``count`` tokens of [vocabulary] with the largest scores, and their scores, in the same order."""
    tokens = largest(scores, count)
    tokens = tokens[np.argsort(-scores[tokens], kind="stable")[:count]]
    return [int(token) for token in tokens], list(scores[tokens])


@dataclass
class BeamRun:
    """A search from ``rows``, one row that holds the prompt and is not changed.

    ``restore`` makes another such row if a machine that held a part of it is lost; without it, PeerLost is raised.
    ``check`` is called before each step that is run again, and may raise. Iterate as :meth:`begin` and then
    :meth:`step`, until the state is done; stop to cancel.

    Its rows are discarded afterwards: the bits of a beam's keys and values depend on the other beams of its passes, so
    they could not be reproduced.
    """

    state: BeamState
    rows: TokenRows
    restore: Callable[[PeerLost], Program[TokenRows]] | None = None
    check: Callable[[], None] = lambda: None
    bytes_moved: int = 0
    _wide: TokenRows | None = None
    _moves: list[Move] = field(default_factory=list)
    """The moves that were run, and the next one."""

    def begin(self, logits: Logits) -> None:
        """Take the first step, from the logits after the prompt, [vocabulary]."""
        self._moves = [self.state.advance(logits[None, :])]

    def step(self) -> Program[None]:
        """Run the next step. If a machine that held a part of the rows is lost, they are computed again."""
        move = self._moves[-1]
        try:
            if self._wide is None:
                self._wide = self.rows.fan_out(len(move.tokens))
            elif _moves_rows(move):
                self.bytes_moved += self._wide.reorder(move.parents)
            logits = yield from decode(self._wide, move.tokens)
        except PeerLost as lost:
            logits = yield from self._again(lost)
        self._moves.append(self.state.advance(logits))

    def _again(self, lost: PeerLost) -> Program[Logits]:
        """Compute new rows with every move since the prompt. Returns the logits after the last one.

        Rows that were discarded meanwhile are run again, too: the rounding of sums may depend on the rows in a pass.
        """
        if self.restore is None:
            raise lost
        while True:
            self.rows = yield from self.restore(lost)
            try:
                self._wide = self.rows.fan_out(len(self._moves[-1].tokens))
                for number, move in enumerate(self._moves):
                    self.check()
                    if number and _moves_rows(move):
                        self.bytes_moved += self._wide.reorder(move.parents)
                    stepped = yield from decode(self._wide, move.tokens)
                return stepped
            except PeerLost as again:
                lost = again


def _moves_rows(move: Move) -> bool:
    return any(parent != row for row, parent in enumerate(move.parents))
