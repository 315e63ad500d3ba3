"""Chat templates: the text is transformers' to the byte, and no template can hold anybody up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Message
from engine.models.text.template_process import TemplateProcess
from engine.models.text.template_sandbox import ChatTemplate
from tests.engine.models.text.templates import TEMPLATES, conversations
from tests.engine.models.text.test_tokenizer import write_tokenizer_folder

MARKS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<think>", "</think>")
"""Control tokens of some of the templates; the others' are text like any other."""
PLAIN = [
    [{"role": "user", "content": "Grüße, 你好 🎉"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello.\n\n- one"},
        {"role": "user", "content": "  And now?\n"},
    ],
]
"""Conversations without control tokens, which transformers takes from a message and we do not."""
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def transformers_text(template: str, chat: list[dict[str, str]], **choices: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([chat], chat_template=template, **choices, **NAMED)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    for chat in conversations():
        assert template.render(chat, NAMED, continue_last=False) == transformers_text(
            TEMPLATES[name], chat, add_generation_prompt=True
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_goes_on_is_transformers(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    for chat in conversations():
        begun = [*chat, {"role": "assistant", "content": "Well, I "}]
        if name == "mistral" and chat[-1]["role"] == "assistant":
            continue
        assert template.render(begun, NAMED, continue_last=True) == transformers_text(
            TEMPLATES[name], begun, continue_final_message=True
        )


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[TemplateProcess]:
    made = TemplateProcess(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hostile() -> Iterator[TemplateProcess]:
    """One process for many templates: each comes with the request that renders it."""
    made = TemplateProcess("")
    yield made
    made.close()


@pytest.mark.parametrize("process", [TEMPLATES["qwen3"]], indirect=True)
def test_the_process_renders_as_the_template_does(process: TemplateProcess) -> None:
    template = ChatTemplate(TEMPLATES["qwen3"])
    for chat in conversations():
        assert process.render(chat, NAMED) == template.render(chat, NAMED, continue_last=False)
    assert any("<|im_start|>" in text for text in process.facts({}).literals)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ [0] * 3000000000 }}",
        "{{ 3000000000 * 'a' }}",
        "{{ 'a'.ljust(4000000000) }}",
        "{{ 'a'.rjust(4000000000) }}",
        "{{ 'a'.center(4000000000) }}",
        "{{ 'a'.zfill(4000000000) }}",
        "{{ '\t'.expandtabs(4000000000) }}",
        "{{ 'a' | center(4000000000) }}",
        "{{ 'a\nb' | indent(4000000000) }}",
        "{{ '{:4000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 4000000000) }}",
        "{{ '%4000000000d' % 1 }}",
        "{{ '%*d' % (4000000000, 1) }}",
        "{{ '%4000000000d' | format(1) }}",
        "{{ 10 ** 1000000000 }}",
        "{{ (2 ** 4000) * (2 ** 4000) }}",
        "{{ ('a' * 4000).replace('a', 'b' * 40000) }}",
        "{{ ('b' * 40000).join(['a'] * 4000) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ ['a' * 1000000] * 1000 | join }}",
        "{{ (['a' * 1000000] * 9000) | join }}",
        "{{ [1] | tojson(indent=4000000000) }}",
        "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ '\ud800' }}",
        "{% set l = [1] %}{% for a in l %}{% set _ = l.append(a) %}{% endfor %}",
    ],
)
def test_what_would_take_memory_is_refused_in_a_sentence(hostile: TemplateProcess, template: str) -> None:
    hostile._template = template
    with pytest.raises(ModelError, match=r"The model's chat template refuses this conversation: ."):
        hostile.render([{"role": "user", "content": "Hi"}], {})


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_what_takes_too_long_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess(ENDLESS, cpu_s=0.2)
    try:
        # Of processor time, which it gets slowly on a busy machine.
        monkeypatch.setattr("engine.system.confined.DEADLINE_S", 1e6)
        with pytest.raises(ModelError, match=r"does not end within 0\.2 seconds"):
            process.render([{"role": "user", "content": "Hi"}], {})
    finally:
        process.close()
    process = TemplateProcess(ENDLESS, cpu_s=1e6)
    try:
        monkeypatch.setattr("engine.system.confined.DEADLINE_S", 0.5)
        with pytest.raises(ModelError, match=r"does not end within 0\.5 seconds"):
            process.render([{"role": "user", "content": "Hi"}], {})
    finally:
        process.close()


@pytest.mark.parametrize("process", [ENDLESS], indirect=True)
def test_a_rendering_is_given_up_when_somebody_says_so(process: TemplateProcess) -> None:
    renderer = process._renderer.process
    asked = itertools.count()
    with pytest.raises(Cancelled):
        process.render([{"role": "user", "content": "Hi"}], {}, should_stop=lambda: next(asked) > 10)
    assert renderer.returncode is not None, "the process that was at it is gone"


PICKY = "{% for m in messages %}{% if m.content == 'loop' %}" + ENDLESS + "{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("process", [PICKY], indirect=True)
def test_the_next_question_is_answered_after_one_was_given_up(process: TemplateProcess) -> None:
    with pytest.raises(Cancelled):
        process.render([{"role": "user", "content": "loop"}], {}, should_stop=lambda: True)
    assert process.render([{"role": "user", "content": "Hi"}], {}) == "Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'Call 99999999999 at %s' % 'noon' }}",
        "{{ '{} of 12345678901'.format(1) }}",
        "{{ '%05.2f' % 3.14159 }}",
        "{{ '{:>8}'.format('a') }}",
        "{{ '-' * 80 }}{{ 'ab'.center(10) }}{{ 2 ** 10 }}{{ [1, 2] + [3] }}{{ {'a': 1} | tojson(indent=2) }}",
        "{{ 'a\nb' | indent(2) }}{{ 'ab' | center(10) }}{{ 'a,b'.split(',') | join('; ') }}",
    ],
)
def test_ordinary_operations_are_as_in_transformers(template: str) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert ChatTemplate(template).render(chat, {}, continue_last=False) == transformers_text(template, chat)


def test_lists_are_queues_and_nothing_else_is_changed() -> None:
    import jinja2
    import jinja2.ext

    queue = (
        "{% set q = namespace(ids=[]) %}{% for m in messages %}{% set _ = q.ids.append(m.content ~ loop.index) %}"
        "{% endfor %}{{ q.ids.pop(0) }} {{ q.ids }}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    template = ChatTemplate(queue)
    for _ in range(2):
        assert template.render(chat, {}, continue_last=False) == plain.from_string(queue).render(messages=chat)
    for changed in ("[].extend([1])", "[2, 1].sort()", "{'a': 1}.pop('a')", "{}.update({})", "[].append.__self__"):
        with pytest.raises(jinja2.exceptions.TemplateError):
            ChatTemplate("{{ " + changed + " + 1 }}").render(chat, {}, continue_last=False)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_goes_on_has_transformers_tokens(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    from engine.models.text.tokenizer import load_tokenizer

    folder = write_tokenizer_folder(tmp_path, TEMPLATES[name], special=("<|endoftext|>", *MARKS))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", chat_template=TEMPLATES[name]
    )
    ours = load_tokenizer(folder)
    assert ours is not None
    for chat, thoughts in product(PLAIN, ("", "Two and two, then.")):
        messages = [Message(said["role"], said["content"]) for said in chat]  # type: ignore[arg-type]
        begun = [*messages, Message("assistant", "Well, I ", thoughts)]
        last = {"role": "assistant", "content": "Well, I "}
        if thoughts:
            last |= {"reasoning_content": thoughts, "thinking": thoughts}
        ids = theirs.apply_chat_template([*chat, last], continue_final_message=True, return_dict=False)
        assert ours.encode_chat(begun, continue_last=True) == ids
