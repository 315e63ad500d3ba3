"""The questions for a small model: what counts as right, as a run-away, and as the template without its own prompt."""

from __future__ import annotations

import re

import pytest

from benchmarks.starter_answers import PROMPTS, QUESTIONS, is_right, runs_away, with_prompt
from engine.models.text.template_sandbox import ChatTemplate

OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_there_are_sixty_questions_and_an_empty_answer_is_never_right() -> None:
    assert len({question for question, _ in QUESTIONS}) == 60
    assert not any(re.search(pattern, "") or re.search(pattern, "i do not know.") for _, pattern in QUESTIONS)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("Rain falls on the roof.\n" * 4, "stop", True),
        ("Rain falls on the roof.\n" * 3, "stop", False),
        ("- a\n" * 9, "stop", False),
        ("Short.", "length", True),
        ("Short.", "stop", False),
    ],
)
def test_an_answer_that_runs_away(text: str, reason: str, expected: bool) -> None:
    assert runs_away(text, reason) == expected


def test_what_is_right_stands_at_the_beginning() -> None:
    assert is_right("The capital of France is Paris.", r"\bparis\b")
    assert not is_right("word " * 40 + "Paris", r"\bparis\b")


@pytest.mark.parametrize("name", PROMPTS)
def test_the_template_says_the_prompt_to_a_conversation_without_one(name: str) -> None:
    question = [{"role": "user", "content": "Hi"}]
    template = with_prompt(OWN, PROMPTS[name])
    said = f"<|im_start|>system\n{PROMPTS[name]}<|im_end|>\n" if PROMPTS[name] else ""
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(template).render(question, {}, False) == said + asked
    system = [{"role": "system", "content": "Be brief."}, *question]
    assert ChatTemplate(template).render(system, {}, False) == ChatTemplate(OWN).render(system, {}, False)
