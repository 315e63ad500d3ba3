"""Answers that must have a form: whatever a model would like to say, what it says has it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.generation.beams import BeamRule, BeamState
from engine.generation.constraints import LARGEST_CONSTRAINT, AnswerGuide, ConstraintVocabulary, GuideVocabulary
from engine.generation.reasoning import ReasoningParser
from engine.generation.sampling import Sampler, SamplingRule
from engine.ipc.messages import Constraint
from engine.models.text.reasoning_formats import ReasoningFormat, formats
from tests.support.random_examples import examples

WORDS = ['{"', '": "', '", "', '"}', "]}", "true", "null", " the", "12", "\n\n", "  ", "é", "日本", "<", "think", ">"]
MARKS = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "[END]", "[STOP]"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), *(m.encode() for m in MARKS)]
SPECIAL = frozenset(range(len(TOKENS) - len(MARKS), len(TOKENS)))
ENDS = frozenset({len(TOKENS) - 2, len(TOKENS) - 1})
FORMS = ConstraintVocabulary(TOKENS, SPECIAL)


def encode(text: str) -> list[int]:
    return [TOKENS.index(text.encode())] if text in MARKS else list(text.encode())


VOCABULARY = GuideVocabulary(
    len(TOKENS), TOKENS.__getitem__, ENDS, encode, FORMS.spelled, [TOKENS.index(b"\n"), TOKENS.index(b"\n\n")]
)


def guide(constraint: Constraint, parser: ReasoningParser | None = None) -> AnswerGuide:
    return AnswerGuide(FORMS.begin(constraint), VOCABULARY, parser)


def schema(form: Any) -> Constraint:
    return Constraint(kind="schema", text=json.dumps(form))


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token not in ENDS).decode()


def drawn(led: AnswerGuide, seed: int, most: int = 400, greedy: bool = False) -> tuple[list[int], bool]:
    """The tokens of a model that knows nothing, and whether it ended by itself."""
    random = np.random.default_rng(seed)
    sampler = Sampler(SamplingRule(temperature=0.0 if greedy else 2.0, seed=seed), guide=led)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(sampler.choose(random.normal(0, 4, len(TOKENS)).astype(np.float32)))
        if tokens[-1] in ENDS or sampler.over:
            return tokens, True
    return tokens, False


def searched(led: AnswerGuide, seed: int, width: int = 3, most: int = 400) -> tuple[list[int], bool]:
    """The best of some beams, and whether it ended by itself."""
    random = np.random.default_rng(seed)
    state = BeamState(BeamRule(width=width, max_tokens=most, ends=ENDS, guide=led, early_stopping=True))
    while not state.done:
        state.advance(random.normal(0, 4, (max(1, len(state.running)), len(TOKENS))).astype(np.float32))
    best = state.hypotheses()[0]
    return list(best.tokens), best.over or best.tokens[-1] in ENDS


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 1000},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["red", "gr\u00fcn", 3, None]},
        {"const": {"a": [1]}},
        {"type": "string", "format": "date"},
    ]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)}
    )
    objects = st.dictionaries(st.sampled_from(["a", "b b", "\u00e9", '"']), inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
                "additionalProperties": st.just(False),
            }
        )
    )
    return arrays | objects | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(leaves, containers, max_leaves=5), st.integers(0, 2**32), st.sampled_from(["greedy", "draw", "beam"])
)
def test_every_answer_that_ends_validates(form: dict[str, Any], seed: int, how: str) -> None:
    tokens, ended = (
        searched(guide(schema(form)), seed)
        if how == "beam"
        else drawn(guide(schema(form)), seed, greedy=how == "greedy")
    )
    assert ended
    jsonschema.validate(json.loads(text_of(tokens)), form)


@pytest.mark.parametrize("seed", range(3))
def test_regular_expressions_and_grammars(seed: int) -> None:
    tokens, ended = drawn(guide(Constraint(kind="regex", text="[a-f]{3}(-[0-9]{2}){1,2}")), seed)
    assert ended and re.fullmatch("[a-f]{3}(-[0-9]{2}){1,2}", text_of(tokens))
    tokens, ended = drawn(guide(Constraint(kind="grammar", text='start: ("ab" | "(" start ")")')), seed)
    assert ended and re.fullmatch(r"\(*ab\)*", text_of(tokens))
    tokens, _ = drawn(guide(Constraint(kind="json")), seed)
    assert text_of(tokens[:20]).startswith("{")


def test_an_end_comes_only_where_the_form_is_complete() -> None:
    led = guide(Constraint(kind="regex", text="a{2,3}"))
    end = max(ENDS)
    for letter, may_end in zip("aaa", (False, False, True), strict=True):
        assert led.allowed()[end] == may_end and not led.over
        assert led.take(ord(letter))
    assert led.over


THINK = next(form for form in formats() if form.name == "think")
GPT_OSS = next(form for form in formats() if form.name == "gpt-oss")
ANSWER = Constraint(kind="regex", text="[xyz]{4}")


def walk(led: AnswerGuide, text: str) -> None:
    for token in as_tokens(text):
        assert led.allowed()[token], TOKENS[token]
        assert led.take(token)


def as_tokens(text: str) -> list[int]:
    pattern = "|".join(re.escape(mark) for mark in MARKS)
    return [token for part in re.split(f"({pattern})", text) if part for token in encode(part)]


@pytest.mark.parametrize(
    ("form", "prompt", "said"),
    [
        (THINK, "", "<think>I say {no}</think>\n\nxyzx"),
        (THINK, "", "xyzx"),
        (THINK, "<think>", "free </think>xyzx"),
        (THINK, "<think></think>", "xyzx"),
        (GPT_OSS, "", "<|channel|>analysis<|message|>hm, {<|end|><|start|>assistant<|channel|>final<|message|>xyzx"),
        (GPT_OSS, "", "<|channel|>final<|message|>xyzx"),
        (
            ReasoningFormat(name="w", begin="<w>", end="</w>", hidden=("<r>", "</r>")),
            "",
            "<w>words</w>\n<r>xyzx",
        ),
    ],
)
def test_thoughts_are_free_and_the_form_begins_with_the_answer(form: ReasoningFormat, prompt: str, said: str) -> None:
    led = guide(ANSWER, ReasoningParser(form, prompt))
    assert (not led.allowed()[max(ENDS)] and not led.allowed()[ord("a")]) or prompt == "<think>"
    walk(led, said)
    assert led.over and led.copy().over
    assert np.flatnonzero(led.allowed()).tolist() == sorted(ENDS)


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(THINK, ""), (THINK, "<think>"), (GPT_OSS, "")]), st.booleans())
def test_after_whatever_thoughts_the_answer_has_the_form(
    seed: int, how: tuple[ReasoningFormat, str], copied: bool
) -> None:
    led = guide(ANSWER, ReasoningParser(*how))
    tokens, ended = drawn(led.copy() if copied else led, seed, most=1500)
    if ended:
        parser = ReasoningParser(*how)
        raw = b"".join(TOKENS[token] for token in tokens if token not in ENDS).decode("utf-8", "replace")
        found = parser.push(raw)
        assert re.fullmatch("[xyz]{4}", found.answer + parser.flush().answer)


def test_a_token_that_ends_the_thoughts_may_begin_the_answer() -> None:
    form = ReasoningFormat(name="t", begin="<t>", end="</t")
    tokens = [*TOKENS, b"t x", b"t!", b"tx"]
    forms = ConstraintVocabulary(tokens, SPECIAL)
    known = GuideVocabulary(len(tokens), tokens.__getitem__, ENDS, encode, forms.spelled)
    led = AnswerGuide(forms.begin(ANSWER), known, ReasoningParser(form, "<t>"))
    for token in b"hm</":
        assert led.take(token)
    assert not led.take(len(tokens) - 2) and not led.take(len(tokens) - 3)
    assert led.take(len(tokens) - 1)
    for token in b"yzx":
        assert led.take(token)
    assert led.over


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(kind="schema", text=""), "it is empty"),
        (Constraint(kind="schema", text="{"), "it is no JSON"),
        (Constraint(kind="schema", text="[1]"), "no JSON object"),
        (Constraint(kind="schema", text='{"type": "strin"}'), "Invalid type: strin"),
        (Constraint(kind="schema", text='{"type": "object", "if": {}, "then": {}}'), "if"),
        (Constraint(kind="schema", text='{"type": "string", "minLength": 5, "maxLength": 2}'), "Unsatisfiable"),
        (Constraint(kind="schema", text='{"x": "' + "a" * LARGEST_CONSTRAINT + '"}'), "at most 131,072"),
        (Constraint(kind="schema", text='{"items":' * 5000 + "{}" + "}" * 5000), "brackets are open"),
        (Constraint(kind="schema", text=json.dumps({"$ref": "#"})), "defined by nothing but itself"),
        (Constraint(kind="schema", text=json.dumps({"type": "integer", "multipleOf": 999999937})), "fuel"),
        (
            Constraint(
                kind="schema",
                text=json.dumps(
                    {
                        "allOf": [
                            {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(9)]} for i in range(9)
                        ]
                    }
                ),
            ),
            "schema too large",
        ),
        (Constraint(kind="schema", text='{"x": "\ud800"}'), "surrogate"),
        (Constraint(kind="regex", text="(a"), ""),
        (Constraint(kind="regex", text="((((a{1,999}){1,999}){1,999}){1,999}){999}b"), ""),
        (Constraint(kind="grammar", text="start: nowhere"), "nowhere"),
        (Constraint(kind="grammar", text='start: "\x1b[2J'), ""),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(constraint: Constraint, text: str) -> None:
    with pytest.raises(ModelError) as caught:
        drawn(guide(constraint), 1, most=50)
        raise AssertionError("it was taken")
    found = str(caught.value)
    assert caught.value.kind == "bad-input" and text in found
    assert found.isprintable() and found.endswith(".") and len(found) < 400


def test_a_form_that_the_vocabulary_cannot_write_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be used"):
        ConstraintVocabulary([b"a", b"b"], ()).begin(Constraint(kind="json"))


def test_the_library_is_imported_for_a_constraint_only() -> None:
    import subprocess

    program = "import sys, engine.session.session; print('llguidance' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


class CountedLookups(dict[bytes, int]):
    """Counts how often it is looked into."""

    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


@pytest.mark.parametrize("form", [{"const": "ab" * 10_000}, {"enum": ["x" * 20_000]}])
def test_the_work_of_a_step_does_not_grow_with_the_text_that_must_follow(form: Any) -> None:
    vocabulary = ConstraintVocabulary(TOKENS, SPECIAL)
    numbers = CountedLookups(vocabulary._tokens._numbers)
    vocabulary._tokens._numbers = numbers
    state = vocabulary.begin(schema(form))
    begun = numbers.lookups
    for _ in range(200):
        assert state.take([int(state.allowed().nonzero()[0][0])])
    assert numbers.lookups == begun


@given(st.lists(st.sampled_from([*WORDS, "a", "\xff"]), max_size=12), st.integers(0, 40))
def test_the_rest_of_a_text_has_the_tokens_that_it_has_alone(words: list[str], begin: int) -> None:
    whole = "".join(words).encode("latin-1", "ignore")
    apart, together = (ConstraintVocabulary(TOKENS, SPECIAL)._tokens for _ in range(2))
    together(whole)
    for rest in (whole[begin:], b"b" + whole, whole):
        assert b"".join(TOKENS[token] for token in together(rest)) == rest
    tokens = apart(whole)
    left = whole
    for token in tokens:
        assert together(left) == apart(left)
        left = left[len(TOKENS[token]) :]


def test_a_byte_without_a_token_is_missed_each_time() -> None:
    few = ConstraintVocabulary([token for token in TOKENS[:256] if token != b"z"], ())
    for _ in range(2):
        with pytest.raises(ModelError, match="no token"):
            few.begin(schema({"const": "az"}))
