"""Whoever asks the same thing again gets the same answer: the same logits to the bit, whatever was asked between.

The other runtimes promise equal distributions, not bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ipc.messages import Finished, Generate, Load, Message, Piece, Prefill, RuntimeName, Sampling
from engine.runtimes import runtime_named
from engine.session import prefix_cache
from engine.session.prefix_cache import CHECKPOINT_TAIL
from engine.session.session import Session
from engine.session.token_history import TokenHistory
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.session.asking import LetterTokenizer
from tests.engine.session.watched_model import WatchedModel
from tests.support.random_examples import examples

CASES: list[tuple[RuntimeName, str]] = [("native", "qwen3_moe"), ("native", "mistral"), ("native", "qwen3_5_text")]
WITH_STATES = [case for case in CASES if case[1] == "qwen3_5_text"]

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _near_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "CHECKPOINT_TOKENS", 40)


class Person:
    """Somebody at a session who cancels after ``patience`` tokens, and the digests of the logits of an answer."""

    def __init__(self, folder: Path, runtime: RuntimeName, kept_tokens: int = 0) -> None:
        request = Load(id=1, model="tiny", runtime=runtime, dtype="bfloat16", cpu_threads=1)
        self.model = WatchedModel(runtime_named(runtime).load(folder, request, lambda *_: None))
        tokenizer = LetterTokenizer()
        facts = self.model.facts
        kept = kept_tokens * facts.key_value_bytes_per_token + (12 * facts.state_bytes if kept_tokens else 0)
        self.session = Session(self.model, tokenizer, ends={7}, defaults={}, prefill_chunk=24, prefix_bytes=kept)
        self.session._history = TokenHistory(tokenizer)
        self.patience: int | None = None
        self.told: Prefill | None = None
        self._tokens = 0
        self.owner = "somebody"

    def cancelled(self) -> bool:
        return self.patience is not None and self._tokens >= self.patience

    def watching(self) -> bool:
        return False

    def __call__(self, messages: list[Message], **options: Any) -> tuple[Finished, list[str]]:
        self._tokens = 0
        self.model.seen.clear()
        self.model.passes.clear()
        asked = Generate(id=1, messages=messages, max_tokens=10, **options)
        answer = self.session.generate(asked, self._take, self)
        rows = self.session._cache.rows
        assert (rows.length if rows is not None else 0) == len(self.session.cached_tokens)
        # The logits after the prompt may be known from before; those that follow are the answer's.
        return answer, self.model.seen[-len(answer.token_ids) + 1 :] if len(answer.token_ids) > 1 else []

    def _take(self, event: Any) -> None:
        self._tokens = event.tokens if isinstance(event, Piece) else getattr(event, "step", self._tokens)
        if isinstance(event, Prefill):
            self.told = event


@dataclass(frozen=True)
class Question:
    messages: tuple[Message, ...]
    beams: int
    seed: int | None

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def options(self) -> dict[str, Any]:
        if self.beams > 1:
            return {"beams": self.beams}
        sampling = Sampling(temperature=0.0) if self.seed is None else Sampling(temperature=1.3, seed=self.seed)
        return {"sampling": sampling}


@dataclass
class Asked:
    """Every question so far with its answer, and where the conversation stands."""

    person: Person
    answers: dict[Question, tuple[list[int], list[str]]] = field(default_factory=dict)
    texts: dict[Question, str] = field(default_factory=dict)
    now: tuple[Message, ...] = ()

    def ask(self, question: Question) -> None:
        found, logits = self.person(list(question.messages), **question.options)
        known = self.answers.setdefault(question, (found.token_ids, logits))
        assert (found.token_ids, logits) == known
        self.texts[question] = found.text
        self.now = (*question.messages, Message("assistant", found.text))

    def stop(self, question: Question, after: int) -> None:
        """The beginning of the answer; what was not said is not known."""
        self.person.patience = after
        found, logits = self.person(list(question.messages), **question.options)
        self.person.patience = None
        if question in self.answers and question.beams == 1 and found.token_ids:
            tokens, expected = self.answers[question]
            assert found.token_ids == tokens[: len(found.token_ids)]
            assert logits == expected[: len(logits)]
        if found.text:
            self.now = (*question.messages, Message("assistant", found.text))

    def drawn(self) -> None:
        """An answer that nobody can ask for again: it may be made in the quickest way."""
        found, _ = self.person([*self.now, Message("user", "?")], sampling=Sampling(temperature=1.3))
        self.now = (*self.now, Message("user", "?"), Message("assistant", found.text))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "again", "again", "back", "back", "edit", "fresh", "stop", "drawn"]),
        st.integers(0, 2**16),
    ),
    min_size=4,
    max_size=12,
)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def person(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Person]:
    runtime, family = request.param
    made = Person(tiny_model(family, dtype="bfloat16"), runtime)
    yield made
    made.session.close()


@pytest.fixture(params=[case for case in CASES if case[1] in ("qwen3_moe", "qwen3_5_text")], ids="-".join)
def keeper(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Person]:
    """A session that keeps some conversations, until others take their place."""
    runtime, family = request.param
    monkeypatch.setattr(prefix_cache, "FORK_TOKENS", 3)
    made = Person(tiny_model(family, dtype="bfloat16"), runtime, kept_tokens=200)
    yield made
    made.session.close()


def kind_of(number: int) -> tuple[int, int | None]:
    """Beams and seed: greedy, sampled with a seed, now and then a search."""
    return [(1, None), (1, 5), (1, 6), (1, 5), (3, None)][number % 5]


@pytest.mark.sampled
@settings(max_examples=examples(2))
@given(steps=STEPS)
def test_every_question_has_one_answer(person: Person, steps: list[tuple[str, int]]) -> None:
    check_one_answer(person, steps)


@pytest.mark.soak
@settings(max_examples=examples(8))
@given(steps=STEPS)
def test_every_question_has_one_answer_in_many_conversations(person: Person, steps: list[tuple[str, int]]) -> None:
    check_one_answer(person, steps)


@pytest.mark.soak
@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_question_has_one_answer_whatever_else_is_kept(keeper: Person, steps: list[tuple[str, int]]) -> None:
    check_one_answer(keeper, steps)


@pytest.mark.soak
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_question_has_one_answer_whatever_many_keep(keeper: Person, steps: list[tuple[str, int]]) -> None:
    check_one_answer(keeper, steps)


@pytest.mark.sampled
def test_two_who_ask_in_turn_do_not_evict_one_another(keeper: Person) -> None:
    """Each is answered as if it were alone, and only what it says is run."""
    said: list[list[Message]] = [[], []]
    for turn in range(3):
        for number, words in enumerate(("what one says first and", "what the other begins with")):
            said[number].append(Message("user", f"{words} {turn}"))
            before = keeper.session._cache
            found, _ = keeper(said[number], sampling=Sampling(temperature=0.0))
            if turn:
                assert found.prefilled_tokens < found.prompt_tokens / (turn + 1) + CHECKPOINT_TAIL, before.kept_tokens
            said[number].append(Message("assistant", found.text))
    kept = keeper.session._cache.kept_tokens
    assert len(kept) == 1 and kept[0] > 40
    keeper.session._cache.forget_others()
    assert keeper.session._cache.kept_tokens == []


@pytest.mark.sampled
def test_a_changed_question_leaves_the_old_branch_in_place(keeper: Person) -> None:
    greedy = {"sampling": Sampling(temperature=0.0)}
    begin = [Message("user", "the beginning that two branches have in common")]
    first, _ = keeper(begin, **greedy)
    branches = [[*begin, Message("assistant", first.text), Message("user", words)] for words in ("left", "right")]
    answers = [keeper(branch, **greedy)[0] for branch in branches]
    for branch, answer in zip(branches, answers, strict=True):
        longer = [*branch, Message("assistant", answer.text), Message("user", "on")]
        assert keeper(longer, **greedy)[0].prefilled_tokens <= 24


@pytest.mark.sampled
def test_the_least_recently_used_is_forgotten_first(keeper: Person) -> None:
    for letter in "abcdefghijkl":
        keeper([Message("user", letter * 60)], sampling=Sampling(temperature=0.0))
    kept = keeper.session._cache._kept
    assert 0 < len(kept) < 11
    tokenizer = LetterTokenizer()
    words = [tokenizer.decode(row.tokens[2:4]).lower() for row in kept]
    assert words == [2 * letter for letter in "kjihgfedcba"[: len(kept)]]


def check_one_answer(person: Person, steps: list[tuple[str, int]]) -> None:
    asked = Asked(person)
    for what, number in steps:
        before = list(asked.answers)
        words = "abcdefghijklmnopqrstuvwxyz"[number % 7 :] * (1 + number % 3)
        beams, seed = kind_of(number)
        if what == "drawn" and asked.now:
            asked.drawn()
        elif what == "again" and before:
            asked.ask(before[-1])
        elif what == "back" and before:
            asked.ask(before[number % len(before)])
        elif what == "edit" and before:
            old = before[number % len(before)]
            asked.ask(Question((*old.messages[:-1], Message("user", words)), beams, seed))
        elif what == "stop":
            question = before[number % len(before)] if before else Question((Message("user", words),), beams, seed)
            asked.stop(question, number % 9)
        elif sum(len(message.content) for message in asked.now) < 300:
            start = () if what == "fresh" else asked.now
            asked.ask(Question((*start, Message("user", words)), beams, seed))
    for question in asked.answers:
        asked.ask(question)


@pytest.mark.sampled
def test_asked_again_at_once_nothing_is_run_before_the_answer(person: Person) -> None:
    question = Question((Message("user", "what was that again?"),), 1, 5)
    first, _ = person(list(question.messages), **question.options)
    again, _ = person(list(question.messages), **question.options)
    assert again.token_ids == first.token_ids
    if person.session._cache.rows is not None and person.session._cache.rows.can_truncate:
        assert again.prefilled_tokens == 0
        assert all(tokens == -1 for tokens in person.model.passes)


@pytest.mark.sampled
def test_what_was_written_in_a_branch_is_written_again(person: Person) -> None:
    one = [Message("user", "the first question of a conversation")]
    first, _ = person(one, sampling=Sampling(temperature=0.0))
    two = [*one, Message("assistant", first.text), Message("user", "and another")]
    second, logits = person(two, sampling=Sampling(temperature=0.0))
    person([Message("user", "something else altogether")], sampling=Sampling(temperature=0.0))
    found, again = person(two, sampling=Sampling(temperature=0.0))
    assert (found.token_ids, again) == (second.token_ids, logits)
    said = len(first.token_ids) - 1
    assert -sum(count for count in person.model.passes if count < 0) == said + len(found.token_ids) - 1
    assert person.told is not None and (person.told.done, person.told.total) == (found.prompt_tokens,) * 2
    # What is drawn without a seed does not wait for that.
    person([Message("user", "something else altogether")], sampling=Sampling(temperature=0.0))
    drawn, _ = person(two, sampling=Sampling(temperature=1.0))
    assert person.model.passes.count(-1) == len(drawn.token_ids) - 1
    assert person(two, sampling=Sampling(temperature=0.0))[1] == logits


def test_a_prompt_is_said_in_the_tokens_it_was_said_in() -> None:
    """Two answers of the same letters and other tokens: a question after the first keeps its tokens."""
    rendered = LetterTokenizer().render_chat
    history = TokenHistory(LetterTokenizer())
    first = [Message("user", "hi")]
    history.answered(history.prompt(rendered(first)), "$&", [3, 5])
    after = [*first, Message("assistant", "$&"), Message("user", "so")]
    said = history.prompt(rendered(after)).tokens
    history.answered(history.prompt(rendered(first)), "$&", [93, 95])
    assert history.prompt(rendered(after)).tokens == said
    other = history.prompt(rendered([*after[:2], Message("user", "no")])).tokens
    assert other[: len(said) - 5] == said[: len(said) - 5]
    history.answered(history.prompt(rendered(first)), "$&", [93, 95])
    assert 93 in history.prompt(rendered([*after[:2], Message("user", "or")])).tokens


def test_two_conversations_in_turn_keep_the_tokens_of_both() -> None:
    rendered = LetterTokenizer().render_chat
    history = TokenHistory(LetterTokenizer())
    first, other = [Message("user", "hi")], [Message("user", "ho")]
    history.answered(history.prompt(rendered(first)), "$&", [93, 95])
    history.answered(history.prompt(rendered(other)), "$&", [3, 95])
    for number in range(3):
        so = [*first, Message("assistant", "$&"), Message("user", f"so {number}")]
        assert 93 in history.prompt(rendered(so)).tokens
        tokens = history.prompt(rendered([*other, Message("assistant", "$&"), Message("user", f"no {number}")])).tokens
        assert 95 in tokens and 93 not in tokens


@pytest.mark.parametrize(("runtime", "family"), WITH_STATES)
def test_checkpoints_go_before_a_conversation_does(
    tiny_model: Callable[..., Path], runtime: RuntimeName, family: str
) -> None:
    person = Person(tiny_model(family, dtype="bfloat16"), runtime)
    facts, greedy = person.model.facts, {"sampling": Sampling(temperature=0.0)}
    talk = [Message("user", "a long talk " * 36)]
    tokens = 12 * 36 + 20
    # Room for both conversations with a checkpoint each.
    person.session._prefix_bytes = (tokens + 60) * facts.key_value_bytes_per_token + 4 * facts.state_bytes
    first, _ = person(talk, **greedy)
    assert tokens - 20 < first.prompt_tokens + len(first.token_ids) < tokens
    for other in ("another one, with a checkpoint", "and one more, with one, too"):
        person([Message("user", other)], **greedy)
    again, _ = person([*talk, Message("assistant", first.text), Message("user", "and?")], **greedy)
    assert again.prefilled_tokens < 60


@pytest.mark.sampled
@pytest.mark.parametrize(("runtime", "family"), WITH_STATES)
def test_states_that_cannot_be_cut_back_go_on_before_the_end_of_the_last_prompt(
    tiny_model: Callable[..., Path], runtime: RuntimeName, family: str
) -> None:
    """As when a template leaves a model's thoughts out of the next prompt."""
    folder = tiny_model(family, dtype="bfloat16")
    person, other = Person(folder, runtime), Person(folder, runtime)
    greedy = {"sampling": Sampling(temperature=0.0)}
    asked = [Message("user", "what a long question this is, and it goes on and on")]
    first, _ = person(asked, **greedy)
    # The answer that is sent back is not the one that was generated.
    following = [*asked, Message("assistant", "short"), Message("user", "and then?")]
    second, logits = person(following, **greedy)
    saved = first.prompt_tokens - CHECKPOINT_TAIL
    assert second.prefilled_tokens == second.prompt_tokens - saved
    again, repeated = person(asked, **greedy)
    assert again.token_ids == first.token_ids
    alone, expected = other(following, **greedy)
    assert alone.prefilled_tokens == alone.prompt_tokens and alone.token_ids == second.token_ids
    back, once_more = person(following, **greedy)
    assert (back.token_ids, once_more) == (second.token_ids, logits)
    assert repeated and expected


@pytest.mark.parametrize(("runtime", "family"), WITH_STATES)
@pytest.mark.parametrize("kept", [0, 10**6])
def test_who_changes_an_early_question_reads_again_from_the_last_checkpoint_before_it(
    tiny_model: Callable[..., Path], runtime: RuntimeName, family: str, kept: int
) -> None:
    """Without memory for them there is one checkpoint only, and everything is read again."""
    folder = tiny_model(family, dtype="bfloat16")
    greedy = {"sampling": Sampling(temperature=0.0)}
    person = Person(folder, runtime, kept)
    system = Message("system", "the same long instructions for whoever asks something, whatever it may be " * 3)
    talk = [system]
    for number in range(4):
        talk += [Message("user", f"question number {number} of a long talk"), Message("assistant", "so it is")]
        person(talk[:-1], **greedy)
    edited = [*talk[:3], Message("user", "another second question")]
    other = [system, Message("user", "another talk altogether")]
    for changed, least in ((edited, CHECKPOINT_TAIL), (other, 40 + 24)):
        found, logits = person(changed, **greedy)
        alone, expected = Person(folder, runtime)(changed, **greedy)
        assert (found.token_ids, logits) == (
            alone.token_ids,
            expected,
        ) and alone.prefilled_tokens == alone.prompt_tokens
        shared = found.prompt_tokens - len(changed[-1].content) - CHECKPOINT_TAIL
        again = found.prefilled_tokens - (found.prompt_tokens - shared)
        assert again <= least if kept else found.prefilled_tokens == found.prompt_tokens
