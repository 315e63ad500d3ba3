"""Several programs at the same time: each gets what it would get alone, and nobody waits longer than it must."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.programs import Decoding, MemoryWanted, Program, Reading, together
from engine.generation.sampling import Sampler, SamplingRule
from engine.ipc.messages import (
    AnyEvent,
    BeamEstimate,
    EstimateBeams,
    Finished,
    Generate,
    Load,
    Piece,
    Prefill,
    Progress,
    Sampling,
    Timing,
)
from engine.moe.timing import Phase, Recorder
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits
from engine.session.loading import load_session
from engine.session.scheduler import READING_SHARE, Scheduler
from engine.session.session import Session
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.support.controls import Nobody, Watching
from tests.support.progress import quiet
from tests.support.random_examples import examples
from tests.support.tiny_models import write_tiny_model

CASES = [
    pytest.param(("native", "mixtral"), marks=needs_kernels),
    pytest.param(("native", "qwen3_next"), marks=needs_kernels),
    ("torch", "gpt_oss"),
]


def prompt(first: int, length: int) -> list[int]:
    """Tokens of which no other ``first`` begins alike."""
    return [first, *(np.random.default_rng(first).integers(5, 90, length - 1).tolist())]


QUESTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_ids": prompt(10, 23), "max_tokens": 9, "logprobs": 0, "sampling": Sampling(temperature=0.0)},
    "drawn": {"prompt_ids": prompt(11, 5), "max_tokens": 12, "logprobs": 0, "sampling": Sampling(seed=3)},
    "penalised": {
        "prompt_ids": prompt(12, 40),
        "max_tokens": 7,
        "logprobs": 2,
        "sampling": Sampling(seed=5, temperature=0.7, repetition_penalty=1.3),
    },
    "beams": {"prompt_ids": prompt(13, 17), "max_tokens": 6, "beams": 3},
    "samples": {"prompt_ids": prompt(14, 9), "max_tokens": 4, "samples": 3, "sampling": Sampling(seed=8)},
    "read only": {"prompt_ids": prompt(15, 33), "max_tokens": 0},
}

LONG: dict[str, Any] = {
    "prompt_ids": prompt(16, 400),
    "max_tokens": 1,
    "logprobs": 3,
    "sampling": Sampling(temperature=0.0),
}


class Loaded:
    """A loaded model, and what each question is answered alone."""

    def __init__(self, session: Session) -> None:
        self._first = session
        self.exact = session.facts.runtime == "native"
        """Whether rows get the same bits beside others."""
        self.alone = {name: self._only(name) for name in QUESTIONS}

    def fresh(self, chunk: int = 8) -> Session:
        """A session that has read nothing."""
        return Session(self._first.model, None, ends=(), defaults={}, prefill_chunk=chunk)

    def _only(self, name: str) -> tuple[Any, ...]:
        request = Generate(id=1, **QUESTIONS[name])
        return told(self.fresh().generate(request, lambda event: None, Nobody()))


def told(finished: Finished) -> tuple[Any, ...]:
    return (
        finished.token_ids,
        finished.finish_reason,
        finished.prefilled_tokens,
        finished.logprobs,
        [(sample.token_ids, sample.logprobs) for sample in finished.samples],
        [(beam.token_ids, beam.score) for beam in finished.beams],
    )


def alike(mine: Any, theirs: Any, exact: bool) -> bool:
    """Whether both are equal, or not ``exact``, but for the rounding of their numbers."""
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(alike(*pair, exact) for pair in zip(mine, theirs, strict=True))
    if isinstance(mine, msgspec.Struct):
        return alike(msgspec.structs.astuple(mine), msgspec.structs.astuple(theirs), exact)
    return bool(mine == (pytest.approx(theirs, abs=1e-4) if isinstance(mine, float) and not exact else theirs))


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    runtime, family = request.param
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / family, family)
    session = load_session(Load(id=1, model=str(folder), runtime=runtime), quiet)
    yield Loaded(session)
    session.close()


Asked = st.lists(
    st.tuples(st.sampled_from(sorted(QUESTIONS)), st.integers(0, 12), st.booleans()), min_size=1, max_size=6
)


@settings(max_examples=examples(8))
@given(asked=Asked)
def test_each_answer_is_what_it_is_alone(loaded: Loaded, asked: list[tuple[str, int, bool]]) -> None:
    """Questions are asked after any number of rounds. To the bit, where a question was not asked before."""
    session = loaded.fresh()
    scheduler = session.scheduler()
    answers: dict[int, Finished] = {}
    for number, (name, rounds, first) in enumerate(asked):
        for _ in range(rounds):
            scheduler.round()
        request = Generate(id=number, **QUESTIONS[name])
        program = session.answer(request, lambda event: None, Nobody())
        scheduler.add(program, lambda found: answers.__setitem__(found.id, found), fail, first=first)
    while scheduler.active:
        scheduler.round()
    seen: set[str] = set()
    for number, (name, _, _) in enumerate(asked):
        mine, alone = told(answers[number]), loaded.alone[name]
        if name in seen:
            # What is in the cache already is not read again.
            mine, alone = (*mine[:2], *mine[3:]), (*alone[:2], *alone[3:])
        assert alike(mine, alone, loaded.exact), name
        seen.add(name)


def fail(error: BaseException) -> None:
    raise error


def test_a_conversation_in_use_is_copied(loaded: Loaded) -> None:
    """A question that goes on from what another answer reads does not read it again, and disturbs nothing."""
    session = loaded.fresh()
    scheduler = session.scheduler()
    answers: list[Finished] = []
    first = Generate(id=1, **QUESTIONS["greedy"])
    scheduler.add(session.answer(first, lambda event: None, Nobody()), answers.append, fail)
    for _ in range(6):
        scheduler.round()
    longer = Generate(id=2, prompt_ids=[*prompt(10, 23), 7, 8, 9], max_tokens=20, sampling=Sampling(seed=1))
    events: list[AnyEvent] = []
    scheduler.add(session.answer(longer, events.append, Nobody()), answers.append, fail)
    while scheduler.active:
        scheduler.round()
    assert alike(told(answers[0]), loaded.alone["greedy"], loaded.exact)
    assert len(answers[1].token_ids) == 20
    read = next(event for event in events if isinstance(event, Prefill))
    assert read.reused >= 7, "up to the checkpoint at least"


def test_beams_are_estimated_with_what_an_answer_has_read_so_far(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = loaded.fresh()
    scheduler = session.scheduler()

    def estimate() -> BeamEstimate:
        return session.estimate_beams(EstimateBeams(id=3, widths=[1], context_tokens=400)).estimates[0]

    too_few = estimate().memory_bytes - 1
    monkeypatch.setattr(session, "_memory", lambda: too_few)
    assert not estimate().fits
    scheduler.add(
        session.answer(Generate(id=1, **QUESTIONS["greedy"]), lambda event: None, Nobody()), lambda _: None, fail
    )
    while not session._cache.newest_tokens:
        scheduler.round()
    assert estimate().fits
    run_all(scheduler)
    assert estimate().fits


def test_a_cancelled_answer_leaves_the_others(loaded: Loaded) -> None:
    session = loaded.fresh()
    scheduler = session.scheduler()
    answers: dict[int, Finished] = {}

    class Impatient(Nobody):
        asked = 0

        def cancelled(self) -> bool:
            self.asked += 1
            return self.asked > 6

    for number, control in ((0, Nobody()), (1, Impatient())):
        request = Generate(id=number, **QUESTIONS["greedy" if number == 0 else "drawn"])
        program = session.answer(request, lambda event: None, control)
        scheduler.add(program, lambda found: answers.__setitem__(found.id, found), fail)
    while scheduler.active:
        scheduler.round()
    assert alike(told(answers[0]), loaded.alone["greedy"], loaded.exact)
    alone = loaded.alone["drawn"][0]
    assert answers[1].finish_reason == "cancelled" and answers[1].token_ids == alone[: len(answers[1].token_ids)]


def test_what_fails_fails_alone(loaded: Loaded) -> None:
    session = loaded.fresh()
    scheduler = session.scheduler()
    answers: list[Finished] = []
    errors: list[BaseException] = []
    good = Generate(id=1, **QUESTIONS["greedy"])
    bad = Generate(id=2, **QUESTIONS["drawn"])
    scheduler.add(session.answer(good, lambda event: None, Nobody()), answers.append, fail)

    def refuse(event: AnyEvent) -> None:
        raise OSError("the disk is full")

    scheduler.add(session.answer(bad, refuse, Nobody()), answers.append, errors.append)
    while scheduler.active:
        scheduler.round()
    assert [type(error) for error in errors] == [OSError]
    assert [told(answer) for answer in answers] == [loaded.alone["greedy"]]


@pytest.mark.parametrize("loaded", CASES[:2], indirect=True)
def test_steps_run_between_the_layers_of_a_prompt(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk does not make another answer wait, also while both are measured."""
    session = loaded.fresh(4096)
    scheduler = session.scheduler()
    steps: list[tuple[str, int]] = []
    recorder = session.model.recorder
    begin = recorder.begin_step

    def noted(phase: Phase, tokens: int) -> None:
        steps.append((phase, tokens))
        begin(phase, tokens)

    monkeypatch.setattr(recorder, "begin_step", noted)
    answers: dict[int, Finished] = {}
    for number, asked in enumerate(({**QUESTIONS["drawn"], "max_tokens": 60}, LONG)):
        request = Generate(id=number, **asked)
        program = session.answer(request, lambda event: None, Watching())
        scheduler.add(program, lambda found: answers.__setitem__(found.id, found), fail)
        scheduler.round()
        scheduler.round()
    run_all(scheduler)
    begun = steps.index(max(steps, key=lambda step: step[1]))
    assert steps[begun + 1] == ("decode", 1), "before the chunk ended"
    timing = answers[1].timing
    assert isinstance(timing, Timing) and timing.prefill.tokens == 405
    ours = loaded.alone["drawn"][0]
    assert answers[0].token_ids[: len(ours)] == ours
    assert told(answers[1]) == told(loaded.fresh(4096).generate(Generate(id=1, **LONG), lambda event: None, Nobody()))


# --- the order of passes ----------------------------------------------------------------------------------------------


class Passes(LoadedModel):
    """A model whose passes take the seconds that they are told to, and are only noted."""

    def __init__(self, read_s: float = 1.0, step_s: float = 1.0, layers: int = 1) -> None:
        self.read_s, self.step_s, self.layers = read_s, step_s, layers
        self.now = 0.0
        self.done: list[str] = []
        self.at: list[float] = []
        self._recorder = Recorder(1, [], 0, self.clock)

    facts = None  # type: ignore[assignment]

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    def clock(self) -> float:
        return self.now

    def start(self) -> Any:
        raise AssertionError("its rows are made by tests")

    def close(self) -> None:
        return

    def note(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.done.append(what)
        self.at.append(self.now)


class Rows:
    """Rows of :class:`Passes`, of one name."""

    void = False

    def __init__(self, model: Passes, name: str) -> None:
        self.model, self.name = model, name
        self.settled = 0

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        for layer in range(self.model.layers):
            if self.model.between_layers is not None:
                self.model.between_layers()
            if layer and self.model.beside is not None:
                self.model.beside()
            self.model.now += self.model.read_s / self.model.layers
        self.model.note(f"{self.name} reads", 0)
        return np.zeros(1, np.float32)

    def step(self, tokens: Sequence[int]) -> Logits:
        self.model.note(f"{self.name} steps", self.model.step_s)
        return np.zeros((1, 1), np.float32)

    def step_choosing(self, token: int, sampler: Sampler) -> int:
        self.model.note(f"{self.name} chooses", self.model.step_s)
        return 7

    def settle(self) -> None:
        self.settled += 1


def program(rows: Rows, reads: int = 0, steps: int = 0, check: Callable[[], None] = lambda: None) -> Program[str]:
    for _ in range(reads):
        yield Reading(rows, [1], True, check=check)  # type: ignore[arg-type]
    for _ in range(steps):
        yield Decoding(rows, [1], Sampler(SamplingRule()))  # type: ignore[arg-type]
    return rows.name


def run_all(scheduler: Scheduler) -> None:
    for _ in range(10_000):
        if not scheduler.active:
            return
        scheduler.round()
    raise AssertionError("the programs never end")


def test_prompts_are_read_by_turns_and_a_persons_first() -> None:
    model = Passes()
    scheduler, ended = Scheduler(model, clock=model.clock), list[str]()
    for name, first in (("a", False), ("b", False), ("me", True)):
        scheduler.add(program(Rows(model, name), reads=3), ended.append, fail, first=first)
    run_all(scheduler)
    assert model.done == ["me reads"] * 3 + ["a reads", "b reads"] * 3
    assert ended == ["me", "a", "b"]


@given(
    read_s=st.floats(0.01, 50),
    step_s=st.floats(0.01, 5),
    layers=st.sampled_from([1, 4, 48]),
    prompts=st.integers(1, 3),
)
def test_an_answer_keeps_its_share_beside_prompts(read_s: float, step_s: float, layers: int, prompts: int) -> None:
    """Between two steps goes at most one layer of a prompt, or about a step's time, and half of the time is theirs."""
    model = Passes(read_s, step_s, layers)
    scheduler, ended = Scheduler(model, clock=model.clock), list[str]()
    scheduler.add(program(Rows(model, "answer"), steps=400), ended.append, fail)
    for number in range(prompts):
        scheduler.add(program(Rows(model, f"prompt {number}"), reads=30 // prompts), ended.append, fail)
    run_all(scheduler)
    assert len(ended) == prompts + 1
    reading = max(at for at, what in zip(model.at, model.done, strict=True) if what.endswith("reads"))
    steps = [at for at, what in zip(model.at, model.done, strict=True) if what.endswith("steps") and at <= reading]
    layer_s = read_s / layers
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    if len(steps) < 400:
        assert all(gap <= 2 * step_s + 2 * layer_s + 1e-6 for gap in gaps), max(gaps)
        share = len(steps) * step_s / reading
        assert abs(share - (1 - READING_SHARE)) < 0.1 or reading < 20 * (step_s + layer_s)


def test_a_token_is_chosen_where_the_logits_are_while_nobody_else_is_there() -> None:
    model = Passes()
    scheduler, ended = Scheduler(model, clock=model.clock), list[str]()
    rows = Rows(model, "a")
    scheduler.add(program(rows, steps=4), ended.append, fail)
    scheduler.round()
    scheduler.add(program(Rows(model, "b"), steps=1), ended.append, fail)
    run_all(scheduler)
    assert model.done == ["a chooses", "a steps", "b steps", "a chooses", "a chooses"]
    assert rows.settled == 1, "before the pass of another"


def test_room_is_given_in_turn() -> None:
    model, free, waits = Passes(), [100], list[str]()
    scheduler, ended = Scheduler(model, lambda: free[0], model.clock), list[str]()

    def asking(name: str, nbytes: int, cancelled: Callable[[], bool] = lambda: False) -> Program[str]:
        yield MemoryWanted(nbytes, cancelled, lambda: waits.append(name))
        return (yield from program(Rows(model, name), steps=3))

    for name, nbytes in (("first", 500), ("small", 40), ("large", 70), ("gone", 10**9)):
        scheduler.add(asking(name, nbytes, lambda name=name: name == "gone"), ended.append, fail)  # type: ignore[misc]
    run_all(scheduler)
    # The first may take what there is. Beside it nothing fits, and what is cancelled goes on at once.
    assert waits == ["small", "large"]
    assert ended[0] in ("first", "gone") and set(ended) == {"first", "small", "large", "gone"}
    assert model.done.index("small steps") > model.done.index("first steps")


def test_a_program_waits_for_its_parts_which_run_at_the_same_time() -> None:
    model = Passes()
    scheduler, ended = Scheduler(model, clock=model.clock), list[object]()

    def whole() -> Program[list[str]]:
        found = yield from together([program(Rows(model, name), steps=count) for name, count in (("a", 1), ("b", 3))])
        return [*found, *(yield from together([program(Rows(model, "c"), steps=1)]))]

    scheduler.add(whole(), ended.append, fail)
    assert scheduler.active == 1
    run_all(scheduler)
    assert ended == [["a", "b", "c"]]
    assert model.done == ["a steps", *["b chooses"] * 3, "c chooses"], "chosen there as soon as it is alone"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_part_that_fails_ends_the_others(failing: int) -> None:
    model = Passes()
    scheduler, ended, closed = Scheduler(model, clock=model.clock), list[object](), list[int]()

    def part(number: int) -> Program[str]:
        try:
            yield from program(Rows(model, str(number)), steps=2 - (number == failing))
            if number == failing:
                raise LookupError("lost")
            yield from program(Rows(model, str(number)), steps=50)
            return ""
        except GeneratorExit:
            closed.append(number)
            raise

    def whole() -> Program[list[str]]:
        with pytest.raises(LookupError):
            yield from together([part(number) for number in range(3)])
        return (yield from together([program(Rows(model, "after"), steps=1)]))

    scheduler.add(whole(), ended.append, fail)
    scheduler.add(program(Rows(model, "other"), steps=4), ended.append, fail)
    run_all(scheduler)
    assert sorted(closed) == [number for number in range(3) if number != failing]
    assert sorted(map(str, ended)) == ["['after']", "other"]


def test_who_is_interrupted_goes_on_at_once() -> None:
    model = Passes()
    scheduler, ended = Scheduler(model, clock=model.clock), list[str]()

    def check() -> None:
        raise Interrupted

    def interrupted() -> Program[str]:
        with pytest.raises(Interrupted):
            yield from program(Rows(model, "gone"), reads=1, check=check)
        return "gone"

    scheduler.add(interrupted(), ended.append, fail)
    run_all(scheduler)
    assert ended == ["gone"] and model.done == []


def test_each_answer_is_told_of_the_others_and_their_rows(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral")
    session = load_session(Load(id=1, model=str(folder), runtime="torch"), quiet)
    try:
        scheduler, ended = session.scheduler(), list[Finished]()
        events: dict[str, list[AnyEvent]] = {}
        for name, asks in (("drawn", "chat"), ("samples", "serve"), ("beams", "ask")):
            request = Generate(id=1, program=asks, with_timing=True, **QUESTIONS[name])
            owner = Watching()
            program = session.answer(request, events.setdefault(name, []).append, owner)
            scheduler.add(program, ended.append, fail, owner=owner)
        run_all(scheduler)
        told = [event.under_way for event in events["samples"] if isinstance(event, Piece)]
        assert told and all(each is not None and each.answers in (2, 3) for each in told)
        assert any(0 < each.own_tokens_per_s < each.tokens_per_s for each in told if each is not None)
        first = next(one.timing for one in ended if one.samples)
        assert first is not None and all(share.answers == 1 for share in first.shares)
        rows = {share.program: share.rows for share in first.shares}
        assert rows["serve"] >= 1 and first.rows_per_pass > 1
        shares = [share for one in ended if one.timing for share in one.timing.shares]
        assert max(share.rows for share in shares if share.program == "ask") == 3, "those of its beams"
        alone = session.generate(Generate(id=9, **QUESTIONS["drawn"]), events["drawn"].append, Nobody())
        last = [event for event in events["drawn"] if isinstance(event, Piece)][-1]
        assert alone.token_ids and last.under_way is None
    finally:
        session.close()


def test_a_session_says_that_a_question_waits_for_memory(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral")
    session = load_session(Load(id=1, model=str(folder), runtime="torch"), quiet)
    try:
        session._memory = lambda: 1000
        scheduler = session.scheduler()
        events: list[AnyEvent] = []
        for number, name in enumerate(("greedy", "drawn")):
            request = Generate(id=number, **QUESTIONS[name])
            scheduler.add(session.answer(request, events.append, Nobody()), events.append, fail)
        run_all(scheduler)
        waiting = [event.id for event in events if isinstance(event, Progress)]
        assert waiting == [1] and [event.id for event in events if isinstance(event, Finished)] == [0, 1]
    finally:
        session.close()
