"""Answers with guessed tokens are those without, to the last token and probability, whatever is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.generation.drafts import PassCosts, Repetitions, TokenDraft
from engine.ipc.messages import Constraint, Finished, Generate, Load, Message, Sampling
from engine.runtimes import runtime_named
from engine.runtimes.protocol import TokenRows
from engine.session.scheduler import Scheduler
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
        load = Load(id=1, model="tiny", runtime="native", dtype="bfloat16", cpu_threads=1)
        model = runtime_named("native").load(tiny_model(request.param, dtype="bfloat16"), load, lambda *_: None)
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
def test_who_is_stopped_keeps_nothing_that_was_guessed(both: tuple[Ask, Ask]) -> None:
    drafted, plain = both
    for ask in both:
        ask.cancel_when = lambda events: len(events) > 3
        ask([*range(9, 20), *range(9, 15)], max_tokens=40, sampling=Sampling(temperature=0.0))
        ask.cancel_when = lambda events: False
    after = [ask([9, 10, 11], max_tokens=20, sampling=Sampling(temperature=0.0)) for ask in both]
    assert facts(after[0]) == facts(after[1])
    assert drafted.session.cached_tokens[:3] == plain.session.cached_tokens[:3]


@pytest.mark.usefixtures("eager")
def test_another_answer_that_begins_meanwhile_copies_no_guess(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one's rows hold guessed tokens, a second one with the same prompt copies them."""
    load = Load(id=1, model="tiny", runtime="native", dtype="bfloat16", cpu_threads=1)
    model = runtime_named("native").load(tiny_model("qwen3_moe", dtype="bfloat16"), load, lambda *_: None)
    prompt, options = [*range(9, 20)] * 3, {"max_tokens": 30, "sampling": Sampling(temperature=0.0)}
    expected = Ask(Session(model, None, ends=set(), defaults={}, drafts=False))(prompt, **options)
    session = Session(model, None, ends=set(), defaults={}, memory=lambda: 1 << 40)
    ask, scheduler = Ask(session), session.scheduler()
    ends: list[Finished] = []
    verify = type(model.start()).verify

    def verified(self: TokenRows, tokens: Any) -> Any:
        logits = verify(self, tokens)
        if len(later) < 2:
            later.append(len(tokens))
        return logits

    later: list[int] = []
    monkeypatch.setattr(type(model.start()), "verify", verified)
    begin(scheduler, ask, prompt, options, ends)
    while not later:
        scheduler.round()
    begin(scheduler, ask, prompt, options, ends)
    while len(ends) < 2:
        scheduler.round()
    assert [found.token_ids for found in ends] == [expected.token_ids] * 2
    model.close()


def begin(scheduler: Scheduler, ask: Ask, prompt: list[int], options: dict[str, Any], ends: list[Finished]) -> None:
    class Control:
        owner = f"client {len(ends)} {id(object())}"

        def cancelled(self) -> bool:
            return False

        def watching(self) -> bool:
            return False

    def failed(error: BaseException) -> None:
        raise error

    control = Control()
    request = Generate(id=1, prompt_ids=prompt, **options)
    scheduler.add(ask.session.answer(request, ask.events.append, control), ends.append, failed, owner=control)
