"""Calls that must be made satisfy the whole schema of their tool, in every format."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest

from engine.errors import ModelError
from engine.generation.call_grammars import call_grammar, text_without
from engine.generation.constraints import AnswerGuide, ConstraintVocabulary, GuideVocabulary
from engine.generation.reasoning import ReasoningParser
from engine.generation.sampling import Sampler, SamplingRule
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import Constraint, Tool
from engine.models.text.reasoning_formats import formats
from engine.models.text.tool_formats import ToolFormat, tool_formats

BY_NAME = {form.name: form for form in tool_formats()}
PARTS = next(each for each in formats() if each.headers)
CHECKED = jsonschema.FormatChecker(["uuid", "ipv4", "email"])
WORDS = ['{"', '": ', '", ', '"}', "]}", "true", "null", " the", "x y", "12", "\n\n", "<", "</", ">", "é", "日本"]


class Entry(pydantic.BaseModel):
    """An entry."""

    name: str
    level: int = 0
    inner: list[Entry] = pydantic.Field(default_factory=list, max_length=2)


class Filing(pydantic.BaseModel):
    """Files entries."""

    first: Entry
    items: list[Entry] = pydantic.Field(max_length=2)
    note: str | None = None


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas, "required": list(schemas), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": properties(s={"type": "string", "enum": ["x y", 'quo"ted', "a\\b", "<b>"]}),
    "enum without a type": properties(s={"enum": ["1", 2, None, True]}, t={"enum": [3, "4"]}),
    "const": properties(s={"const": "x\ny"}, n={"const": 7}),
    "a choice of a string and a number": properties(s={"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}),
    "nullable number": properties(n={"anyOf": [{"type": "integer", "maximum": 50}, {"type": "null"}]}),
    "nullable string": properties(s={"type": ["string", "null"], "maxLength": 4}, t={"type": ["string", "null"]}),
    "lengths": properties(s={"type": "string", "minLength": 3, "maxLength": 6}),
    "pattern": properties(
        s={"type": "string", "pattern": "^[a-z]{2,4}$"},
        t={"type": "string", "pattern": r"\d/\d", "maxLength": 9},
        u={"type": "string", "pattern": "^a|b$", "maxLength": 5},
    ),
    "formats": properties(
        **{
            key: {"type": "string", "format": key}
            for key in ("date", "time", "date-time", "uuid", "ipv4", "hostname", "email", "uri")
        }
    ),
    "numbers": properties(
        n={"type": "integer", "minimum": 1, "maximum": 9}, x={"type": "number", "exclusiveMinimum": 0}
    ),
    "lists": properties(a={"type": "array", "items": {"enum": ["a", "b c"]}, "minItems": 1, "maxItems": 3}),
    "no type": properties(x={}, y={"description": "anything"}, z={"minimum": 3}, w={"maxLength": 2}),
    "reference": {
        **properties(e={"$ref": "#/$defs/E"}, f={"allOf": [{"$ref": "#/definitions/F"}], "description": "text"}),
        "$defs": {"E": properties(s={"enum": ["x"]}, more={"$ref": "#/definitions/F"})},
        "definitions": {"F": {"type": "string", "maxLength": 3}},
    },
    "reference to a sibling": properties(a={"type": "string", "enum": ["x y"]}, b={"$ref": "#/properties/a"}),
    "reference to the root": {
        "type": "object",
        "properties": {"s": {"const": "x"}, "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["s", "more"],
        "additionalProperties": False,
    },
    "nested models": Filing.model_json_schema(),
    "one of": properties(v={"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 4, "maximum": 99}]}),
    "all of": properties(v={"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}, {"pattern": "^[xyz]"}]}),
    "the whole is a reference": {"$ref": "#/$defs/A", "$defs": {"A": properties(s={"enum": ["x"]})}},
    "one of two sets": {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}, "b": {"const": 2}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    "a key that is only required": {"type": "object", "required": ["k"], "additionalProperties": {"const": "v"}},
    "optional": {"type": "object", "properties": {"a b": {"enum": ["x"]}, "c": {"type": "boolean"}}},
    "no arguments": {"type": "object", "properties": {}},
    "nothing said": {},
}


class Model:
    """A model that knows nothing but how a value ends. ``control``: the marks are tokens that are no text."""

    def __init__(self, form: ToolFormat, control: bool) -> None:
        marks = list(dict.fromkeys([*form.all_marks, *PARTS.marks, "<|constrain|>"]))
        words = WORDS if control else [*WORDS, *marks]
        self._single = marks if control else []
        self._texts = [*words, *self._single]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in self._texts)]
        self.control = frozenset(range(len(self.tokens) - len(self._single), len(self.tokens)))
        self.end = len(self.tokens)
        self.tokens.append(b"")
        self.forms = ConstraintVocabulary(self.tokens, self.control | {self.end})
        self.known = GuideVocabulary(
            len(self.tokens), self.tokens.__getitem__, [self.end], self.encode, self.forms.spelled
        )
        self._helpful = [
            256 + self._texts.index(mark) for mark in (*form.tags[3:], '"}', PARTS.end) if mark in self._texts
        ]

    def encode(self, text: str) -> list[int]:
        return [256 + self._texts.index(text)] if text in self._single else list(text.encode())

    def forced(self, form: ToolFormat, tools: Sequence[Tool]) -> Constraint:
        return call_grammar(form, tools, self.encode, self.control, PARTS if form.shape == "parts" else None)

    def drawn(self, constraint: Constraint, seed: int, most: int = 3000) -> str | None:
        """The text of an answer; None if it did not end by itself."""
        random = np.random.default_rng(seed)
        sampler = Sampler(
            SamplingRule(temperature=1.0, seed=seed), guide=AnswerGuide(self.forms.begin(constraint), self.known, None)
        )
        tokens: list[int] = []
        while len(tokens) < most:
            logits = random.normal(0, 3, len(self.tokens)).astype(np.float32)
            logits[[*self._helpful, *b'"}],0']] += 6
            tokens.append(sampler.choose(logits))
            if tokens[-1] == self.end or sampler.over:
                return b"".join(self.tokens[token] for token in tokens).decode()
        return None


@cache
def model(name: str, control: bool) -> Model:
    return Model(BY_NAME[name], control)


@cache
def validator(what: str) -> jsonschema.protocols.Validator:
    """That of a schema of SCHEMAS, which is checked once."""
    kind = jsonschema.validators.validator_for(SCHEMAS[what])
    kind.check_schema(SCHEMAS[what])
    return kind(SCHEMAS[what], format_checker=CHECKED)


def read(form: ToolFormat, tools: Sequence[Tool], text: str) -> list[tuple[str, Any]]:
    if form.shape == "parts":
        parser = ReasoningParser(PARTS, "<|start|>assistant", recipients=True)
        text = parser.push(text).answer + parser.flush().answer
    calls = ToolCallParser(form, tools)
    assert (calls.push(text).text + calls.flush().text).strip() == ""
    return [(call.name, json.loads(call.arguments)) for call in calls.calls]


def _is_ambiguous(form: ToolFormat, text: str) -> bool:
    """Whether a string within JSON holds the mark that ends a value."""
    return form.shape == "tagged" and text.count(form.tags[0]) < text.count(form.tags[3])


WRITTEN = [(name, control) for name, form in BY_NAME.items() for control in (True, False)
           if control or form.shape == "tagged" or name == "hermes"]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "control"), WRITTEN)
def test_a_forced_call_satisfies_its_schema(name: str, control: bool) -> None:
    form, spoken = BY_NAME[name], model(name, control)
    for seed, (what, schema) in enumerate(SCHEMAS.items()):
        tools = [Tool(name="f", parameters=json.dumps(schema))]
        constraint, checked = spoken.forced(form, tools), validator(what)
        ended = 0
        for again in range(2):
            text = spoken.drawn(constraint, 100 * seed + again)
            ended += text is not None
            if text is not None and not _is_ambiguous(form, text):
                calls = read(form, tools, text)
                assert [each for each, _ in calls] == ["f"], (what, text)
                try:
                    checked.validate(calls[0][1])
                except jsonschema.ValidationError as error:
                    raise AssertionError(f"{what}: {text!r} is read as {calls[0][1]}: {error.message}") from error
        assert ended, what


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen-coder"])
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("str", "string"),
        ("int", "integer"),
        ("float", "number"),
        ("double", "number"),
        ("bool", "boolean"),
        (["str", "None"], ["string", "null"]),
        ("dict", "object"),
        ("list", "array"),
        ("tuple", "array"),
    ],
)
def test_types_by_their_names_in_python_are_forced(name: str, written: Any, named: Any) -> None:
    by_name = [
        [
            Tool(
                name="f",
                parameters=json.dumps(properties(s={"type": each}, a={"type": "array", "items": {"type": each}})),
            )
        ]
        for each in (written, named, "null")
    ]
    found = [model(name, True).forced(BY_NAME[name], tools) for tools in by_name]
    assert found[0] == found[1] != found[2]


@pytest.mark.sampled
@pytest.mark.parametrize("name", BY_NAME)
def test_one_of_several_tools_is_called(name: str) -> None:
    form, spoken = BY_NAME[name], model(name, True)
    tools = [Tool(name="f", parameters=json.dumps(SCHEMAS["enum"])), Tool(name="g"), Tool(name="f.h")]
    constraint = spoken.forced(form, tools)
    texts = [spoken.drawn(constraint, seed) for seed in range(12)]
    called = [read(form, tools, text)[0][0] for text in texts if text is not None]
    assert len(set(called)) > 1


@pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if form.shape == "tagged"])
def test_a_free_string_may_hold_anything_but_marks(name: str) -> None:
    form, spoken = BY_NAME[name], model(name, False)
    tools = [Tool(name="f", parameters=json.dumps(properties(code={"type": "string"})))]
    key_begin, key_end, value_begin, value_end = form.tags
    before = f"{form.begin}{(form.prefixes or ('',))[0]}f{form.name_end}{key_begin}code{key_end}{value_begin}"
    after = f"{value_end}{form.last}{form.end}"
    for value in ("if a < b && c > d:", "<b>bold</b>", 'x = "</param"', "\n  indented\n\n", "", "日本", "</</"):
        state = spoken.forms.begin(spoken.forced(form, tools))
        assert state.take(list(f"{before}{value}{after}".encode())) and state.complete
    state = spoken.forms.begin(spoken.forced(form, tools))
    assert state.take(list(f"{before}a{value_end}".encode()))
    assert not state.take(list(f"a{value_end}".encode()))


def test_thoughts_may_come_before_a_call_that_is_a_part() -> None:
    form, spoken = BY_NAME["gpt-oss"], model("gpt-oss", True)
    tools = [Tool(name="f", parameters=json.dumps(properties(s={"enum": ["x"]})))]
    said = (
        "<|channel|>", "analysis", "<|message|>", "I think < so.", "<|end|>", "<|start|>", "assistant", "<|channel|>",
        "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"s": "x"}',
    )  # fmt: skip
    for begin in (0, 7):
        led = AnswerGuide(spoken.forms.begin(spoken.forced(form, tools)), spoken.known, None)
        assert all(led.allowed()[token] and led.take(token) for mark in said[begin:] for token in spoken.encode(mark))
        assert led.over or led.allowed()[spoken.end]
        assert read(form, tools, "".join(said[begin:])) == [("f", {"s": "x"})]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "properties": {}, "if": {}}, "of the tool f cannot be used: if is not supported"),
        (properties(s={"type": "string", "pattern": "(?=a)b"}), "cannot be used"),
        (properties(s={"allOf": [{"anyOf": [{"pattern": f"{n}{m}"} for n in range(9)]} for m in range(3)],
                       "type": "string"}), "more than 64 alternatives"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(schema: Any, said: str) -> None:
    spoken = model("qwen-coder", False)
    with pytest.raises(ModelError, match=said) as caught:
        tools = [Tool(name="f", parameters=json.dumps(schema))]
        spoken.forms.begin(spoken.forced(BY_NAME["qwen-coder"], tools))
    assert caught.value.kind == "bad-input"


def test_a_schema_cannot_change_how_it_is_read() -> None:
    spoken = model("hermes", False)
    schema = {**properties(s={"type": "hiccup-free"}), "x-guidance": {"lenient": True}}
    with pytest.raises(ModelError):
        spoken.forms.begin(spoken.forced(BY_NAME["hermes"], [Tool(name="f", parameters=json.dumps(schema))]))


def test_a_text_without_marks_is_any_other_text() -> None:
    marks = ["<a>", "<ab", "</a>"]
    expression = re.compile(text_without(marks))
    for length in range(7):
        for letters in itertools.product("<ab/>", repeat=length):
            text = "".join(letters)
            assert (expression.fullmatch(text) is not None) == (not any(mark in text for mark in marks)), text
