"""Answers with guessed tokens are those without, to the last token and probability, whatever is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.generation.drafts import PassCosts, Repetitions, TokenDraft
from engine.ipc.messages import Constraint, Finished, Generate, Load, Message, Sampling
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, TokenRows
from engine.session.session import Session
from engine.session.token_history import TokenHistory
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.session.asking import Ask, LetterTokenizer

FAMILIES = ("qwen3_moe", "mistral", "gemma3_text", "deepseek_v3", "qwen3_5_text")

pytestmark = needs_kernels


@pytest.fixture(params=FAMILIES)
def both(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[tuple[Ask, Ask]]:
    """Somebody with guesses, all of which are run, and somebody without."""
    made = []
    for drafts in (True, False):
        model = loaded(tiny_model, request.param)
        tokenizer = LetterTokenizer()
        session = Session(model, tokenizer, ends={7}, defaults={}, prefill_chunk=24, drafts=drafts)
        session._history = TokenHistory(tokenizer)
        made.append(Ask(session))
    yield made[0], made[1]
    for each in made:
        each.session.close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassCosts, "worth", lambda self, chance, most: most)


@pytest.fixture
def half_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses go wrong at another place each time."""
    guess = Repetitions.guess
    made = 0

    def wrong(self: Repetitions, token: int, most: int) -> TokenDraft | None:
        nonlocal made
        found = guess(self, token, most)
        if found is None:
            return None
        made += 1
        at = made % 5
        return replace(found, tokens=[*found.tokens[:at], *(each ^ 1 for each in found.tokens[at:])])

    monkeypatch.setattr(Repetitions, "guess", wrong)


SCHEMA = json.dumps({"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 30})
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "drawn": {"sampling": Sampling(temperature=0.4, seed=3, top_k=4)},
    "penalised": {"sampling": Sampling(temperature=0.3, seed=5, presence_penalty=0.2)},
    "of a form": {"sampling": Sampling(temperature=0.0), "constraint": Constraint(kind="schema", text=SCHEMA)},
    "stopped": {"sampling": Sampling(temperature=0.0), "stop": ["!!", "$$"]},
    "three": {"sampling": Sampling(temperature=0.4, seed=4), "samples": 3},
}
SAID = "one and two and three and one and two and three and one and two"


def facts(found: Finished) -> tuple[Any, ...]:
    return found.token_ids, found.text, found.finish_reason, found.stop_string, found.logprobs, found.samples


@pytest.mark.sampled
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_same_answer_as_without(
    both: tuple[Ask, Ask], kind: str, wrong: bool, request: pytest.FixtureRequest
) -> None:
    if wrong:
        request.getfixturevalue("half_right")
    drafted, plain = both
    messages, accepted = [Message("user", SAID)], 0
    for turn in range(3):
        options: dict[str, Any] = {"messages": messages, "max_tokens": 60, "logprobs": turn or None, **REQUESTS[kind]}
        found, expected = drafted(**options), plain(**options)
        assert facts(found) == facts(expected)
        assert expected.drafted_tokens == 0 <= found.accepted_tokens <= found.drafted_tokens
        accepted += found.accepted_tokens
        rows = [ask.session._cache.rows for ask in (drafted, plain)]
        contents = [each is not None and [array.read().tobytes() for array in each.contents() or ()] for each in rows]
        assert contents[0] == contents[1] and contents[0]
        messages = [*messages, Message("assistant", found.text), Message("user", SAID)]
    verifies = drafted.session.model.start().verified_together
    assert verifies or not accepted
    if verifies and kind == "of a form" and not wrong:
        assert accepted > 30


@pytest.mark.usefixtures("eager")
def test_answers_one_after_another_are_guessed_from_the_prompt_anew(both: tuple[Ask, Ask]) -> None:
    """There is no memory for several at once, so the row is cut back to the prompt between them."""
    for ask in both:
        ask.session._memory = lambda: 0
    prompt = [*range(9, 20)] * 3
    options: dict[str, Any] = {"max_tokens": 40, "sampling": Sampling(temperature=0.2, seed=1, top_k=2), "samples": 4}
    found, expected = (ask(prompt, **options) for ask in both)
    assert facts(found) == facts(expected) and len(found.samples) == 4


@pytest.mark.usefixtures("eager")
def test_who_is_stopped_keeps_nothing_that_was_guessed(both: tuple[Ask, Ask]) -> None:
    prompt, greedy = [*range(9, 20)] * 3, {"sampling": Sampling(temperature=0.0)}
    stopped = []
    for ask in both:
        stopped.append(stopped_after(25, ask)(prompt, max_tokens=90, **greedy))
        ask.cancel_when = lambda events: False
    assert {each.finish_reason for each in stopped} == {"cancelled"}
    assert 0 < len(stopped[0].token_ids) < 90
    after = [ask([*prompt, *stopped[0].token_ids, 5], max_tokens=20, **greedy) for ask in both]
    assert facts(after[0]) == facts(after[1])


@pytest.mark.usefixtures("eager")
def test_rows_hold_no_guess_while_another_answer_may_take_them(tiny_model: Callable[..., Path]) -> None:
    session = Session(loaded(tiny_model, "qwen3_moe"), None, ends=set(), defaults={}, memory=lambda: 1 << 40)
    alone = Session(loaded(tiny_model, "qwen3_moe"), None, ends=set(), defaults={}, drafts=False)
    prompt, options = [*range(9, 20)] * 3, {"max_tokens": 60, "sampling": Sampling(temperature=0.0)}
    expected = Ask(alone)(prompt, **options)
    scheduler, ends, rounds, told = session.scheduler(), list[Finished](), 0, 0
    while len(ends) < 2:
        if rounds in (0, 6):
            request = Generate(id=1, prompt_ids=prompt, **options)
            control = Ask(session)
            scheduler.add(session.answer(request, control.events.append, control), ends.append, raised, owner=control)
        scheduler.round()
        rounds += 1
        for row in session._cache._used:
            assert row.rows is None or row.rows.length == len(row.tokens)
        told = max([told, *(end.drafted_tokens for end in ends)])
    assert told > 0 and [found.token_ids for found in ends] == [expected.token_ids] * 2
    session.close()
    alone.close()


@pytest.mark.parametrize("row_s", [0.0, 3.0])
def test_guesses_are_run_as_long_as_they_are_measured_to_pay(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, row_s: float
) -> None:
    """A pass takes a second, and so much more for each guess."""
    now = 0.0
    model = loaded(tiny_model, "qwen3_moe")
    kind = type(model.start())
    step, verify = kind.step, kind.verify

    def slow_step(self: TokenRows, tokens: Sequence[int]) -> Any:
        nonlocal now
        now += 1.0
        return step(self, tokens)

    def slow_verify(self: TokenRows, tokens: Sequence[int]) -> Any:
        nonlocal now
        now += 1.0 + row_s * (len(tokens) - 1)
        return verify(self, tokens)

    monkeypatch.setattr(kind, "step", slow_step)
    monkeypatch.setattr(kind, "verify", slow_verify)
    session = Session(model, None, ends=set(), defaults={}, clock=lambda: now)
    said = [*range(9, 30)]
    constraint: dict[str, Any] = {"sampling": Sampling(temperature=0.0, logit_bias=dict.fromkeys(said[:1], 100.0))}
    found = Ask(session)(said * 3, max_tokens=80, **constraint)
    assert set(found.token_ids) == {said[0]}
    if row_s:
        assert found.drafted_tokens < 20
    else:
        assert found.accepted_tokens > 60
    session.close()


def loaded(tiny_model: Callable[..., Path], family: str) -> LoadedModel:
    load = Load(id=1, model="tiny", runtime="native", dtype="bfloat16", cpu_threads=1)
    return runtime_named("native").load(tiny_model(family, dtype="bfloat16"), load, lambda *_: None)


def stopped_after(checks: int, ask: Ask) -> Ask:
    """``ask``, which stops its next answer when it was looked at so many times."""
    ask.checks = 0
    ask.cancel_when = lambda events: ask.checks > checks
    return ask


def raised(error: BaseException) -> None:
    raise error
