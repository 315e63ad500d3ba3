"""What other programs ask of an answer: several samples, log-probabilities, penalties, stop strings by name."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ModelError
from engine.generation.constraints import ConstraintVocabulary, FormState
from engine.generation.sampling import Logprobs
from engine.ipc.messages import Constraint, Generate, Load, Message, Notice, Piece, Prefill, Sampling, Tool
from engine.session.loading import load_session
from engine.session.session import Session
from engine.session.token_history import TokenHistory
from tests.engine.session.asking import Ask, LetterBytes, LetterTokenizer
from tests.support.tiny_models import write_tiny_model

PROMPT = [5, 17, 101, 42, 9, 77, 30]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")
    session = load_session(Load(id=1, model=str(folder), runtime="torch", prefill_chunk=3), lambda *_: None)
    session._ends = frozenset()
    session._tokenizer = LetterTokenizer()
    session._history = TokenHistory(session._tokenizer)
    yield Ask(session)
    session.close()


def drawn(seed: int | None, **options: float) -> Sampling:
    return Sampling(temperature=1.5, seed=seed, **options)


def test_samples_are_the_answers_of_following_seeds(ask: Ask) -> None:
    alone = [ask(PROMPT, max_tokens=6, sampling=drawn(seed)).token_ids for seed in (3, 4, 5)]
    found = ask(PROMPT, max_tokens=6, sampling=drawn(3), samples=3)
    assert [sample.token_ids for sample in found.samples] == alone
    assert found.token_ids == alone[0] and found.text == found.samples[0].text
    assert (found.completion_tokens, found.prompt_tokens, found.prefilled_tokens) == (18, 7, 0)
    for place, sample in enumerate(found.samples):
        pieces = [piece for piece in ask.of(Piece) if piece.sample == place]
        assert "".join(piece.text for piece in pieces) == sample.text
        assert pieces[-1].tokens == 6


def test_each_sample_has_its_own_temperature(ask: Ask) -> None:
    alone = [
        ask(PROMPT, max_tokens=6, sampling=Sampling(temperature=each, seed=3 + number)).token_ids
        for number, each in enumerate((0.0, 1.5, 3.0))
    ]
    found = ask(PROMPT, max_tokens=6, sampling=Sampling(seed=3), samples=3, temperatures=[0.0, 1.5, 3.0])
    assert [sample.token_ids for sample in found.samples] == alone
    with pytest.raises(ModelError, match="2 temperatures were given for 3 answers"):
        ask(PROMPT, samples=3, temperatures=[0.1, 0.2])
    with pytest.raises(ModelError, match="Temperature"):
        ask(PROMPT, samples=2, temperatures=[0.1, -1.0])


def test_cancelling_ends_the_samples_that_are_under_way(ask: Ask) -> None:
    """Of ten, eight are under way at the same time."""
    alone = [ask(PROMPT, max_tokens=6, sampling=drawn(seed)).token_ids for seed in range(3, 11)]
    ask.cancel_when = lambda events: any(isinstance(event, Piece) and event.tokens > 2 for event in events)
    try:
        ask.session._clock = itertools.count().__next__  # every piece is due
        found = ask(PROMPT, max_tokens=6, sampling=drawn(3), samples=10)
    finally:
        ask.session._clock = time.perf_counter
        ask.cancel_when = lambda events: False
    assert [sample.finish_reason for sample in found.samples] == ["cancelled"] * 8
    for sample, whole in zip(found.samples, alone, strict=True):
        assert sample.token_ids == whole[: len(sample.token_ids)] and 2 <= len(sample.token_ids) < 6


def test_more_samples_than_fit_come_one_after_another(ask: Ask) -> None:
    alone = [ask(PROMPT, max_tokens=6, sampling=drawn(seed)).token_ids for seed in range(3, 13)]
    memory = ask.session._memory
    try:
        for free, together in ((0, 1), (1 << 40, 8)):
            ask.session._memory = lambda free=free: free  # type: ignore[misc]
            prompts = ask(PROMPT, max_tokens=6, sampling=drawn(3), samples=10)
            assert [sample.token_ids for sample in prompts.samples] == alone
            assert len(ask.of(Prefill)) == -(-10 // together)
    finally:
        ask.session._memory = memory


def test_the_only_one_of_several_that_was_begun_says_how_it_ended(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask.session, "_memory", lambda: 0)
    monkeypatch.setattr(ask, "cancel_when", lambda events: len([e for e in events if isinstance(e, Prefill)]) > 1)
    found = ask([*PROMPT, 5], max_tokens=1, sampling=drawn(3), samples=3)
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in found.samples] == [("length", 1)]


def test_log_probabilities_are_the_models_own(ask: Ask) -> None:
    plain = ask(PROMPT, max_tokens=5, sampling=drawn(8, top_k=3, frequency_penalty=0.5))
    found = ask(PROMPT, max_tokens=5, sampling=drawn(8, top_k=3, frequency_penalty=0.5), logprobs=4)
    assert found.token_ids == plain.token_ids and not plain.logprobs
    assert [entry.token for entry in found.logprobs] == found.token_ids
    sent = [entry for piece in ask.of(Piece) for entry in piece.logprobs]
    assert sent == found.logprobs
    model = ask.session.model
    expected = _teacher_forced(model, [*PROMPT, *found.token_ids])
    for entry, reference in zip(found.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(reference[entry.token], abs=1e-5)
        order = np.argsort(-reference, kind="stable")[:4]
        assert [likely.token for likely in entry.top] == order.tolist()
        assert entry.top[0].logprob == pytest.approx(reference[order[0]], abs=1e-5)
        assert entry.data == entry.text.encode() == chr(33 + entry.token % 90).encode()


def _teacher_forced(model: object, tokens: list[int]) -> list[np.ndarray]:
    rows = model.start()  # type: ignore[attr-defined]
    logits = [rows.extend(tokens[: len(PROMPT)])]
    logits += [rows.step([token])[0] for token in tokens[len(PROMPT) : -1]]
    return [torch.log_softmax(torch.tensor(row).double(), -1).numpy() for row in logits]


def test_a_reported_token_need_not_be_a_whole_character() -> None:
    report = Logprobs(2, lambda token: bytes([0xF0, token])).of(np.log(np.array([0.25, 0.5, 0.25], np.float32)), 2)
    assert (report.text, report.data) == ("\ufffd\x02", b"\xf0\x02")
    assert [entry.token for entry in report.top] == [1, 0]
    assert report.logprob == pytest.approx(np.log(0.25))


def test_penalties_and_bias_change_what_is_chosen(ask: Ask) -> None:
    greedy = ask(PROMPT, max_tokens=12).token_ids
    often = ask(PROMPT, max_tokens=12, sampling=Sampling(frequency_penalty=2.0)).token_ids
    assert len(set(often)) > len(set(greedy))
    held = ask(PROMPT, max_tokens=4, sampling=Sampling(logit_bias={7: 100.0})).token_ids
    assert held == [7, 7, 7, 7]
    never = ask(PROMPT, max_tokens=12, sampling=Sampling(logit_bias={greedy[0]: -100.0})).token_ids
    assert greedy[0] not in never


def test_the_stop_string_that_ended_an_answer_is_said(ask: Ask) -> None:
    whole = ask(PROMPT, max_tokens=8)
    found = ask(PROMPT, max_tokens=8, stop=["\u0416", whole.text[3:5], whole.text[3:4]])
    assert (found.text, found.stop_string) == (whole.text[:3], whole.text[3:4])
    assert whole.stop_string == ""


def test_a_prompt_of_text_has_no_template(ask: Ask) -> None:
    letters = "".join(chr(33 + token) for token in PROMPT if token < 90)
    text = ask.session.generate(Generate(id=7, prompt=letters, max_tokens=4), ask.events.append, ask)
    assert text.token_ids == ask([ord(letter) - 33 for letter in letters], max_tokens=4).token_ids
    assert text.prompt_tokens == len(letters)


@pytest.mark.parametrize("options", [{}, {"sampling": drawn(4)}, {"sampling": drawn(4), "samples": 3}, {"beams": 3}])
def test_an_answer_has_the_form_that_was_asked_for(ask: Ask, options: dict[str, Any]) -> None:
    plain = ask(PROMPT, max_tokens=12, **options).token_ids
    form = Constraint(kind="regex", text="[A-C]{2}-[0-9]{3}")
    found = ask(PROMPT, max_tokens=12, constraint=form, logprobs=None if "beams" in options else 1, **options)
    texts = [found.text, *(sample.text for sample in found.samples), *(beam.text for beam in found.beams)]
    assert all(re.fullmatch("[A-C]{2}-[0-9]{3}", text) for text in texts)
    assert found.finish_reason == "stop" and len(found.token_ids) == 6
    short = ask(PROMPT, max_tokens=4, constraint=form, **options)
    assert (len(short.text), short.finish_reason) == (4, "length")
    assert ask(PROMPT, max_tokens=12, **options).token_ids == plain


def test_a_form_that_takes_long_is_cancelled(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot be interrupted, and does not work on two forms at once."""
    may_end, begin, begun = threading.Event(), ConstraintVocabulary.begin, []

    def slow(vocabulary: ConstraintVocabulary, constraint: Constraint) -> FormState:
        begun.append(constraint)
        assert may_end.wait(30)
        return begin(vocabulary, constraint)

    monkeypatch.setattr(ConstraintVocabulary, "begin", slow)
    form = Constraint(kind="regex", text="[A-C]{2}")
    ask.cancel_when = lambda events: True
    try:
        for _ in range(2):
            assert ask(PROMPT, max_tokens=6, constraint=form).finish_reason == "cancelled"
        assert len(begun) == 1
        may_end.set()
    finally:
        ask.cancel_when = lambda events: False
    assert re.fullmatch("[A-C]{2}", ask(PROMPT, max_tokens=6, constraint=form).text) and len(begun) == 2


def test_a_form_needs_the_bytes_of_tokens(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, **options: Any) -> None:
        with pytest.raises(ModelError, match=text):
            ask.session.generate(Generate(id=7, max_tokens=3, **options), ask.events.append, ask)

    form = Constraint(kind="json")
    refused("cannot be used", prompt_ids=PROMPT, constraint=form)  # it has no letter {
    messages = [Message("user", "ab"), Message("assistant", "c")]
    refused("continued", messages=messages, continue_last=True, constraint=form)
    monkeypatch.setattr(ask.session, "_constraining", None)
    monkeypatch.setattr(LetterBytes, "exact", False)
    refused("bytes of its tokens", prompt_ids=PROMPT, constraint=form)


def calling_session(folder: Path, template: str, special: Sequence[str], marks: Sequence[str] = ()) -> Session:
    """A model whose template takes tools, and whose tokenizer has a token for each byte and for each mark."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    write_tiny_model(folder, "mixtral", vocab_size=300)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(mark, special=True) for mark in ("<end>", *special)])
    library.add_tokens([AddedToken(mark, special=False) for mark in marks])
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_session(Load(id=1, model=str(folder), runtime="torch"), lambda *_: None)


MESSAGES = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("models") / "caller"
    session = calling_session(folder, MESSAGES, (), ("<tool_call>", "</tool_call>"))
    yield Ask(session)
    session.close()


@pytest.fixture(scope="module")
def part_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A model that writes its calls as parts of its answer."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    folder = tmp_path_factory.mktemp("models") / "part-caller"
    session = calling_session(folder, MESSAGES + "<|start|>assistant", marks)
    yield Ask(session)
    session.close()


SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
)
CLOCK = {"tools": [Tool(name="clock", parameters=SCHEMA), Tool(name="other")], "messages": [Message("user", "When?")]}


def test_a_tool_that_must_be_called_is_called(caller: Ask) -> None:
    found = caller(max_tokens=200, forced_tool="clock", sampling=drawn(1), stop=["clock"], **CLOCK)
    assert (found.text, found.finish_reason, found.stop_string) == ("", "tool_calls", "")
    (call,) = found.tool_calls
    assert call.name == "clock" and json.loads(call.arguments)["n"] in (1, 2)
    first, *others = [piece for event in caller.of(Piece) for piece in event.tool_calls]
    assert (first.index, first.id, first.name) == (0, call.id, "clock")
    assert all((piece.index, piece.id, piece.name) == (0, "", "") for piece in others)
    assert "".join(piece.arguments for piece in (first, *others)) == call.arguments


@pytest.mark.soak
def test_a_call_that_is_a_part_of_the_answer_can_be_forced(part_caller: Ask) -> None:
    found = [part_caller(max_tokens=400, forced_tool="clock", sampling=drawn(seed), **CLOCK) for seed in range(4)]
    called = [each for each in found if each.finish_reason != "length"]
    assert called and all(each.finish_reason == "tool_calls" and not each.text for each in called)
    assert {each.tool_calls[0].name for each in called} == {"clock"}
    assert all(json.loads(each.tool_calls[0].arguments)["n"] in (1, 2) for each in called)


def test_a_tool_that_cannot_be_named_is_left_out_and_named(caller: Ask) -> None:
    odd = Tool(name="bad\nname")
    found = caller(
        max_tokens=200, tool_choice="required", sampling=drawn(1), **{**CLOCK, "tools": [odd, CLOCK["tools"][0]]}
    )
    assert [call.name for call in found.tool_calls] == ["clock"]
    (notice,) = caller.of(Notice)
    assert notice.id == found.id and "it is not told of that one" in notice.text


@pytest.mark.soak
def test_samples_have_calls_of_their_own(caller: Ask) -> None:
    found = caller(max_tokens=200, forced_tool="clock", sampling=drawn(1), samples=3, **CLOCK)
    assert len({sample.tool_calls[0].id for sample in found.samples}) == 3
    sent = [(event.sample, piece.index) for event in caller.of(Piece) for piece in event.tool_calls if piece.id]
    assert sent == [(0, 0), (1, 0), (2, 0)]


def test_tools_are_part_of_the_prompt_unless_none_may_be_called(caller: Ask) -> None:
    with_tools = caller(max_tokens=2, **CLOCK).prompt_tokens
    without = caller(max_tokens=2, tool_choice="none", **CLOCK).prompt_tokens
    assert with_tools > without == len("When?")
