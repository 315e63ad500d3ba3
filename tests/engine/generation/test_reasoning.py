"""Thoughts and answer are separated the same way however the stream is cut, and no mark is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.reasoning import ReasoningParser, Separated, separate
from engine.models.text.reasoning_formats import ReasoningFormat, formats
from tests.support.random_examples import examples

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
        ('plan</think>{"a":1}', "", "plan", '{"a":1}'),
        ("Four?</think>\n\nIt is 4.", "", "Four?", "It is 4."),
        ("It ends with `</think>` here.", "", "", "It ends with `</think>` here."),
        ("</think>4", "", "", "4"),
        ("\n</think>\n\n4, not </think>", "", "", "4, not </think>"),
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
        # The prompt has begun the header; what is none is the answer.
        ("Hello", "", "Hello"),
        (" to", "", " to"),
        (" to be <|channel|>or not", "", " to be "),
        (" to=user<|channel|>final<|message|>It is 4.", "", "It is 4."),
        (" to=functions.f<|channel|>analysis<|message|>Four?", "Four?", ""),
        ("<|channel|>analysis<|constrain|>x<|message|>Four?<|end|>", "Four?", ""),
        ("<|channel|>final<|message|>4<|end|>5", "", "4\n\n5"),
    ],
)  # fmt: skip
def test_named_parts(text: str, thoughts: str, answer: str) -> None:
    prompt = "x<|end|><|start|>assistant"
    assert separate(ReasoningParser(GPT_OSS, prompt), text) == Separated(thoughts, answer)
    assert streamed(GPT_OSS, list(text), prompt) == Separated(thoughts, answer)


RECIPIENTS = [
    " to=functions.f<|channel|>commentary json<|message|>{}",
    " to=functions.f<|channel|>analysis<|message|>{}",
    " to=functions.f<|message|>{}",
    "<|channel|>commentary to=functions.f json<|message|>{}",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}",
    "<|channel|>analysis to=functions.f code<|message|>{}",
    "<|channel|>commentary json to=functions.f<|message|>{}",
]


@pytest.mark.parametrize("said", RECIPIENTS)
def test_a_recipient_may_stand_anywhere_in_a_header(said: str) -> None:
    expected = "<|recipient|>functions.f<|message|>{}"
    thought = "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant"
    for text, thoughts in ((said, ""), (thought + said, "I need it.")):
        for pieces in ([text], list(text)):
            parser = ReasoningParser(GPT_OSS, "<|end|><|start|>assistant", recipients=True)
            found = [*(parser.push(piece) for piece in pieces), parser.flush()]
            assert "".join(part.answer for part in found) == expected
            assert "".join(part.thoughts for part in found) == thoughts


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<|channel>thought\nFour?<channel|>It is 4.", "Four?", "It is 4."),
        ("<|channel>thought<channel|>It is 4.", "", "It is 4."),
        ("<|channel>thought\n<channel|>It is 4.<channel|>", "", "It is 4."),
        ("It is 4.<|channel>thought\n<channel|><channel|>", "", "It is 4."),
        ("<|channel><|channel>thought\nFour?<channel|>It is 4.", "Four?", "It is 4."),
        ("One.<|channel>thought\nTwo?<channel|>Two.<|channel>", "Two?", "One.\n\nTwo."),
        ("<channel|>It is <channel|>4.", "", "It is 4."),
        ("<|channel>thought\nOne <|channel>two<channel|>4", "One two", "4"),
    ],
)
def test_stray_marks_are_never_shown(text: str, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        assert streamed(FORMATS["gemma"], pieces) == Separated(thoughts, answer)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("\nI think.\n[BEGIN FINAL RESPONSE]\nFour.\n[END FINAL RESPONSE]", "Here are my reasoning steps:\n"),
        ("Here are my reasoning steps:\nI think.\n[BEGIN FINAL RESPONSE]\nFour.\n[END FINAL RESPONSE]", ""),
        ("I think.\n[BEGIN FINAL RESPONSE]\nFour.", ""),
    ],
)
def test_thoughts_may_be_marked_by_words(text: str, prompt: str) -> None:
    for pieces in ([text], list(text)):
        found = streamed(FORMATS["apriel"], pieces, prompt)
        assert (found.thoughts, found.answer.strip()) == ("I think.", "Four.")


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


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_how_the_stream_is_cut_changes_nothing(form: ReasoningFormat, data: st.DataObject) -> None:
    marks = (*form.marks, *form.within)
    words = st.sampled_from([*marks, *(mark[:-1] for mark in marks), "analysis", "final", " to=f", "word", " ", "\n"])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    prompt = data.draw(st.sampled_from(["", form.begin, f"x {form.end}\n", *form.headers[:1]]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = streamed(form, [text], prompt)
    assert streamed(form, pieces, prompt) == whole
    assert separate(ReasoningParser(form, prompt), text) == whole


@pytest.mark.sampled
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
