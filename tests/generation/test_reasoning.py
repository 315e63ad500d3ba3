"""Thoughts and answer are separated the same way however the stream is cut, and no mark is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine.generation.reasoning import ReasoningParser, Separated, separate
from engine.models.reasoning_formats import ReasoningFormat, formats

FORMATS = {form.name: form for form in formats()}
THINK, GPT_OSS = FORMATS["think"], FORMATS["gpt-oss"]


def streamed(form: ReasoningFormat, pieces: list[str], prompt: str = "") -> Separated:
    """What a reader has in the end who takes ``pieces`` one after the other."""
    parser = ReasoningParser(form, prompt)
    thoughts = answer = ""
    for found in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        if found.withdrawn:
            answer = ""
        thoughts, answer = thoughts + found.thoughts, answer + found.answer
    return Separated(thoughts, answer)


@pytest.mark.parametrize(
    ("text", "prompt", "thoughts", "answer"),
    [
        ("<think>\nFour?\n</think>\n\nIt is 4.", "", "Four?", "It is 4."),
        ("\n<think>a</think>b", "", "a", "b"),
        ("Four?\n</think>\n\nIt is 4.", "<|im_start|>assistant\n<think>\n", "Four?", "It is 4."),
        ("Only the end\n</think>\nis marked.", "", "Only the end", "is marked."),
        ("It is 4, without </think> thoughts.", "assistant\n<think>\n\n</think>\n\n", "",
         "It is 4, without </think> thoughts."),
        ("<think>never ended", "", "never ended", ""),
        ("<think></think>Hello", "", "", "Hello"),
        ("<think>a</think>The tag <think> begins thoughts, </think> ends them.", "", "a",
         "The tag <think> begins thoughts, </think> ends them."),
        ("The tag <think> begins them.", "", "", "The tag <think> begins them."),
        ("a < b, and <thin", "", "", "a < b, and <thin"),
        ("    indented()", "assistant\n<think>\n\n</think>\n\n", "", "    indented()"),
        ("    indented()", "", "", "    indented()"),
        ("Use `<think>.*?</think>` with re.S.\n</think>\nDone.", "", "",
         "Use `<think>.*?</think>` with re.S.\n</think>\nDone."),
        ("The tag </think> ends them.", "", "", "The tag </think> ends them."),
        ("<think>\nOnce more.\n</think>\nYes.", "<|Assistant|><think>\n", "Once more.", "Yes."),
        ("\nHi", "<|assistant|>\n<think></think>", "", "Hi"),
        ("<think>a</think>\n\n    indented()", "", "a", "    indented()"),
    ],
)  # fmt: skip
def test_tags(text: str, prompt: str, thoughts: str, answer: str) -> None:
    assert separate(ReasoningParser(THINK, prompt), text) == Separated(thoughts, answer)


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.",
         "Two and two.", "It is 4."),
        ("<|channel|>final<|message|>It is 4.", "", "It is 4."),
        ("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary to=user<|message|>I look."
         "<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final"
         "<|message|>4", "One.\n\nTwo.", "I look.\n\n4"),
        ("<|channel|>final<|message|>It is 4.<|end|>", "", "It is 4."),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>4", "",
         "I look.\n\n4"),
        ("<|channel|>final " + 100 * "word ", "", "final " + 100 * "word "),
        ("<|channel|>analysis<|message|>never ended", "never ended", ""),
        ("<|channel|>ana", "", ""),
    ],
)  # fmt: skip
def test_named_parts(text: str, thoughts: str, answer: str) -> None:
    found = separate(ReasoningParser(GPT_OSS, "<|start|>assistant"), text)
    assert found == Separated(thoughts, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><response>Yes, <response>ok</response></response>", "Yes, <response>ok</response>"),
        ("Say <response>ok</response>.", "Say <response>ok</response>."),
        ("<response>Yes</response>", "Yes"),
    ],
)
def test_hidden_marks_are_those_around_the_answer(text: str, answer: str) -> None:
    assert separate(ReasoningParser(FORMATS["granite"]), text).answer == answer


@pytest.mark.parametrize(
    ("text", "prompt"),
    [(" <response>Yes</response>", "</think>\n"), ("<response> <think>a</think>Yes", ""), (" Yes", "</think>\n")],
)
def test_spaces_before_a_mark_may_arrive_alone(text: str, prompt: str) -> None:
    form = FORMATS["granite"]
    assert streamed(form, list(text), prompt) == streamed(form, [text], prompt)


def test_an_answer_that_is_continued_holds_no_thoughts() -> None:
    found = separate(ReasoningParser(THINK, "and <think>", answering=True), " is a tag, </think> another.")
    assert found == Separated("", " is a tag, </think> another.")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_how_the_stream_is_cut_changes_nothing(form: ReasoningFormat, data: st.DataObject) -> None:
    words = st.sampled_from([*form.marks, *(mark[:-1] for mark in form.marks), "analysis", "final", "word", " ", "\n"])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    prompt = data.draw(st.sampled_from(["", form.begin, f"x {form.end}\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = streamed(form, [text], prompt)
    assert streamed(form, pieces, prompt) == whole
    assert separate(ReasoningParser(form, prompt), text) == whole


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=examples(40))
@given(thoughts=st.text("ab \n<|", max_size=20), answer=st.text("ab \n<|", max_size=20))
def test_every_format_keeps_the_text_and_shows_no_mark(form: ReasoningFormat, thoughts: str, answer: str) -> None:
    if form.headers:
        head, name = form.headers[-1], form.thoughts[0]
        text = f"{head}{name}{form.body}{thoughts}{form.end}{head}final{form.body}{answer}"
    else:
        text = f"{form.begin}{thoughts}{form.end}{answer}"
    found = separate(ReasoningParser(form), text)
    assert found == Separated(thoughts.strip(), answer.lstrip("\n"))
