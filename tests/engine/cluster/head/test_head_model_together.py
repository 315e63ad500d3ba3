"""Several answers at the same time over a ring in threads: each is what it is alone, also after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import commands
from engine.errors import ModelError
from engine.ipc.messages import AnyEvent, Finished, Generate, Piece, Sampling
from tests.engine.cluster.ring_chat import Setting
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.support.controls import Nobody
from tests.support.tiny_models import write_tiny_model

TOKENS = 10

QUESTIONS: list[dict[str, Any]] = [
    {"prompt_ids": [10, 3, 77, 21, 9, 14, 60, 8, 33], "sampling": Sampling(temperature=0.0)},
    {"prompt_ids": [11, 5, 30], "sampling": Sampling(seed=3)},
    {"prompt_ids": [12, *range(20, 45)], "sampling": Sampling(seed=5, temperature=0.7, repetition_penalty=1.3)},
    {"prompt_ids": [13, 50, 51, 52, 53], "beams": 3},
    {"prompt_ids": [14, 80, 81], "samples": 2, "sampling": Sampling(seed=8)},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write_tiny_model(tmp_path_factory.mktemp("ring") / family, family)
        return made[family]

    return folder


@pytest.fixture(
    params=[
        pytest.param(("native", "qwen3_moe"), marks=needs_kernels),
        pytest.param(("native", "qwen3_next"), marks=needs_kernels),
        pytest.param(("torch", "qwen3_moe"), marks=pytest.mark.soak),
    ],
    ids="-".join,
)
def setting(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Iterator[Setting]:
    runtime, family = request.param
    made = Setting(folders(family), runtime)
    yield made
    made.close()


class Asking(Nobody):
    """One who asks: what was told, and whether the answer is stopped."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.stopped = False
        self.on_event: Callable[[AnyEvent], None] = lambda event: None
        self.ended: Finished | BaseException | None = None

    def cancelled(self) -> bool:
        return self.stopped

    def tell(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.on_event(event)


def ask_all(setting: Setting, asking: list[Asking], rounds: int = 0) -> None:
    """Every question at the same time, each so many ``rounds`` after the one before."""
    session = setting.ring.session
    scheduler = session.scheduler()
    for number, (who, question) in enumerate(zip(asking, QUESTIONS, strict=False)):
        request = Generate(id=number, max_tokens=TOKENS, **question)

        def ended(outcome: Any, who: Asking = who) -> None:
            who.ended = outcome

        scheduler.add(session.answer(request, who.tell, who), ended, ended)
        for _ in range(rounds):
            scheduler.round()
    while scheduler.active:
        scheduler.round()


def told(finished: Finished | BaseException | None) -> tuple[Any, ...]:
    assert isinstance(finished, Finished), finished
    beams = [(beam.token_ids, round(beam.score, 3)) for beam in finished.beams]
    return finished.token_ids, [sample.token_ids for sample in finished.samples], beams


def expected(setting: Setting) -> list[tuple[Any, ...]]:
    session = setting.alone.session
    answers = []
    for question in QUESTIONS:
        request = Generate(id=1, max_tokens=TOKENS, **question)
        answers.append(told(session.generate(request, lambda event: None, Nobody())))
    return answers


def all_in_step(setting: Setting) -> None:
    assert not setting.formation.failures
    setting.model.recorder.enabled = True
    setting.model.recorder.frame(0)
    setting.model.recorder.enabled = False
    for rows in (row.rows for row in (setting.ring.session._cache._latest, *setting.ring.session._cache._kept)):
        if rows is None:
            continue
        for follower in setting.formation.followers.values():
            held, prefixes = follower._rows[rows._number]  # type: ignore[attr-defined]
            assert held.length == rows.length
            assert prefixes.state == rows._prefixes.state  # type: ignore[attr-defined]


@pytest.mark.parametrize("rounds", [0, 2])
def test_each_answer_is_what_it_is_alone(setting: Setting, rounds: int) -> None:
    asking = [Asking() for _ in QUESTIONS]
    ask_all(setting, asking, rounds)
    assert [told(who.ended) for who in asking] == expected(setting)
    all_in_step(setting)
    assert len(setting.former.formations) == 1


@needs_kernels
def test_steps_of_all_share_the_exchanges(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers take hardly more passes than one."""
    count = 3
    setting = Setting(folders("qwen3_moe"), "native")
    try:
        alike = {"sampling": Sampling(temperature=0.0)}
        monkeypatch.setattr(
            f"{__name__}.QUESTIONS", [{"prompt_ids": [10 + number, 7], **alike} for number in range(count)]
        )
        asking = [Asking() for _ in range(count)]
        layers = setting.formation.layers
        before = layers._gather.number
        ask_all(setting, asking)
        passes = (layers._gather.number - before) / len(setting.model.facts.moe_layers)
        assert passes <= 1.5 * TOKENS  # by turns: 3 * TOKENS
        assert [told(who.ended) for who in asking] == expected(setting)
    finally:
        setting.close()


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("rank", [1, 2])
def test_each_goes_on_with_its_own_text_after_a_loss(setting: Setting, at: int, rank: int) -> None:
    asking = [Asking() for _ in QUESTIONS]
    doomed = setting.formation

    def kill(event: AnyEvent) -> None:
        if isinstance(event, Piece) and event.tokens >= at and doomed.lost() is None:
            setting.former.names = [name for at, name in doomed.names.items() if at != rank]
            doomed.kill(rank)

    asking[2].on_event = kill
    ask_all(setting, asking)
    assert doomed.lost() is not None
    assert [told(who.ended) for who in asking] == expected(setting)
    # It was formed once for all, and each was told no token twice.
    assert len(setting.former.formations) == 2
    for who in asking[:3]:
        counts = [event.tokens for event in who.events if isinstance(event, Piece)]
        assert counts == sorted(counts)
    all_in_step(setting)


def test_both_are_lost_while_several_go_on(setting: Setting) -> None:
    """The second one while the first answer is run again."""
    asking = [Asking() for _ in QUESTIONS]

    def kill(event: AnyEvent) -> None:
        formed = setting.formation
        due = isinstance(event, Piece) and event.tokens >= 3 * len(setting.former.formations)
        if due and not formed.lost() and len(formed.names) > 1:
            setting.former.names = list(formed.names.values())[:-1]
            formed.kill(len(formed.names) - 1)

    for who in asking:
        who.on_event = kill
    ask_all(setting, asking)
    assert [told(who.ended) for who in asking] == expected(setting)
    assert [len(formed.names) for formed in setting.former.formations] == [3, 2, 1]


def test_a_machine_comes_back_while_another_answers(setting: Setting) -> None:
    """The ring is formed for the next question, and who was answered goes on with its own text."""
    setting.former.names = ["head", "attic"]
    setting.ring()
    assert len(setting.formation.names) == 2
    asking = [Asking() for _ in QUESTIONS]

    def return_(event: AnyEvent) -> None:
        if isinstance(event, Piece):
            setting.former.names = ["head", "attic", "cellar"]

    asking[0].on_event = return_
    ask_all(setting, asking, rounds=4)
    assert [told(who.ended) for who in asking] == expected(setting)
    assert len(setting.formation.names) == 3
    # What all would have had to run again was weighed.
    assert setting.former.again[2].read >= len(QUESTIONS[0]["prompt_ids"])
    all_in_step(setting)


def test_one_is_stopped_and_the_others_go_on(setting: Setting) -> None:
    asking = [Asking() for _ in QUESTIONS]

    def stop(event: AnyEvent) -> None:
        asking[1].stopped = asking[1].stopped or isinstance(event, Piece)

    asking[1].on_event = stop
    ask_all(setting, asking)
    wanted = expected(setting)
    for number, who in enumerate(asking):
        if number != 1:
            assert told(who.ended) == wanted[number]
    stopped = asking[1].ended
    assert isinstance(stopped, Finished) and stopped.finish_reason == "cancelled"
    assert stopped.token_ids == wanted[1][0][: len(stopped.token_ids)]
    assert len(setting.former.formations) == 1
    all_in_step(setting)


def test_who_is_stopped_in_a_loss_leaves_nothing_void(setting: Setting) -> None:
    doomed = setting.formation
    asking = [Asking() for _ in QUESTIONS]
    setting.ring.session._prefix_bytes = 1 << 30

    def kill(event: AnyEvent) -> None:
        if isinstance(event, Piece) and event.tokens >= 3 and doomed.lost() is None:
            setting.former.names = ["head", "attic"]
            doomed.kill(2)
            asking[1].stopped = True

    asking[0].on_event = kill
    ask_all(setting, asking)
    wanted = expected(setting)
    assert [told(who.ended) for who in (asking[0], *asking[2:])] == [wanted[0], *wanted[2:]]
    assert isinstance(asking[1].ended, Finished) and asking[1].ended.finish_reason == "cancelled"
    all_in_step(setting)


def test_nobody_goes_on_if_too_few_are_left(setting: Setting) -> None:
    setting.former.least = 3
    doomed = setting.formation
    asking = [Asking() for _ in range(2)]

    def kill(event: AnyEvent) -> None:
        if isinstance(event, Piece) and event.tokens >= 3 and doomed.lost() is None:
            setting.former.names = ["head", "attic"]
            doomed.kill(2)

    asking[0].on_event = kill
    ask_all(setting, asking)
    for who in asking:
        assert isinstance(who.ended, ModelError) and "1 GB are missing" in str(who.ended)
    setting.former.names = ["head", "attic", "cellar"]
    again = [Asking() for _ in QUESTIONS]
    ask_all(setting, again)
    assert [told(who.ended) for who in again] == expected(setting)


@needs_kernels
def test_a_step_of_the_same_rows_twice_is_refused(folders: Callable[[str], Path]) -> None:
    setting = Setting(folders("qwen3_moe"), "native")
    try:
        rows = setting.model.start()
        rows.extend([5, 6, 7])
        epoch = setting.model._epoch
        step = rows.step_command([8])  # type: ignore[attr-defined]
        follower = setting.formation.followers[1]
        while follower._get(step.rows)[1].state != step.before:  # a node ends its pass a moment after the head
            time.sleep(0.01)
        for steps in ([step, step], []):
            with pytest.raises(ValueError, match="in one pass"):
                follower.do(commands.StepTogether(steps))
        assert not epoch.ended
    finally:
        setting.close()
