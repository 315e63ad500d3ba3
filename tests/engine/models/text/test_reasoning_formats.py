"""Which format a template declares, and what it can be told."""

from __future__ import annotations

import pytest

from engine.models.text.reasoning_formats import format_of, formats, has_effort, has_switch, template_variables
from tests.engine.models.text.templates import TEMPLATES


@pytest.mark.parametrize(
    ("name", "expected", "switch", "effort"),
    [
        ("chatml", None, False, False),
        ("llama3", None, False, False),
        ("mistral", None, False, False),
        ("qwen3", "think", True, False),
        ("harmony", "gpt-oss", False, False),
        ("deepseek", "think", False, False),
    ],
)
def test_templates_of_families(name: str, expected: str | None, switch: bool, effort: bool) -> None:
    template = TEMPLATES[name]
    tokens = {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} if name == "harmony" else {"<think>", "</think>"}
    found = format_of(template, tokens if expected else ())
    assert (found.name if found is not None else None) == expected
    assert (has_switch(template), has_effort(template)) == (switch, effort)


def test_a_variable_of_the_template_is_an_effort() -> None:
    assert has_effort("{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}")
    assert not has_effort("{{ message.reasoning_effort }}{{ message['reasoning_effort'] }}")


def test_tokens_declare_a_format_that_the_template_does_not_write() -> None:
    found = format_of("{{ messages }}", {"[THINK]", "[/THINK]", "<think>"})
    assert found is not None and found.name == "mistral"
    assert format_of("{{ messages }}", {"<think>"}) is None


def test_a_message_s_thoughts_are_no_switch() -> None:
    assert not has_switch("{% if message.thinking %}{{ message['thinking'] }}{% endif %}")
    assert has_switch("{% if thinking %}<think>{% endif %}")


def test_names_are_unique_and_marks_are_complete() -> None:
    found = formats()
    assert len({form.name for form in found}) == len(found)
    assert all(form.end and (bool(form.begin) != bool(form.headers and form.body and form.thoughts)) for form in found)


def test_the_variables_are_only_what_was_asked_for() -> None:
    assert template_variables(None, "") == {}
    assert template_variables(False, "") == {"enable_thinking": False, "thinking": False}
    assert template_variables(None, "low") == {"reasoning_effort": "low"}
