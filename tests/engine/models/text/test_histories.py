"""Conversations of other programs through templates that are particular about them, as published ones are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Message, PictureFile, ToolCall
from engine.models.text.histories import Histories, paired
from engine.models.text.tokenizer import content_parts
from tests.engine.models.text.test_tool_formats import open_tokenizer

WRITTEN = (
    '{% if tools %}<tool_call>{"name": "x"}</tool_call>{% endif %}'
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %} <- {{ m.tool_call_id }} {{ m.name }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def refusing(condition: str, inside: str = "m in messages") -> str:
    """A template that refuses a conversation for one of whose messages ``condition`` holds."""
    return (
        "{% for " + inside + " %}{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + WRITTEN
    )


SYSTEM, LATE = Message("system", "Be brief."), Message("system", "Be kind.")
QUESTION, NEXT, ANSWER = Message("user", "When?"), Message("user", "Where?"), Message("assistant", "Now.")


def called(*calls: tuple[str, str], content: str = "", thoughts: str = "") -> Message:
    found = [ToolCall(id=identifier, name=name, arguments="{}") for identifier, name in calls]
    return Message("assistant", content, thoughts, tool_calls=found)


def result(identifier: str, text: str) -> Message:
    return Message("tool", text, tool_call_id=identifier)


TWO = [QUESTION, called(("a", "clock"), ("b", "map")), result("b", "here"), result("a", "noon")]
LOOP = [QUESTION, called(("a", "clock")), result("a", "noon")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("template", "messages", "written"),
    [
        pytest.param(
            WRITTEN, TWO,
            "[user]When?\n[assistant]<tool_call>a clock {}</tool_call><tool_call>b map {}</tool_call>\n"
            "[tool]noon <- a clock\n[tool]here <- b map\n[assistant]",
            id="results in the order of their calls",
        ),
        pytest.param(
            WRITTEN.replace("{{ call.function.name }} ", "").replace("{{ m.name }}", ""), [*TWO, *LOOP],
            "[user]When?\n[assistant]<tool_call>functions.clock:0 {}</tool_call>"
            "<tool_call>functions.map:1 {}</tool_call>\n"
            "[tool]noon <- functions.clock:0 \n[tool]here <- functions.map:1 \n"
            "[user]When?\n[assistant]<tool_call>functions.clock:2 {}</tool_call>\n[tool]noon <- functions.clock:2 \n"
            "[assistant]",
            id="a tool is named by its call's id",
        ),
        pytest.param(
            refusing("m.tool_calls and m.tool_calls | length > 1"), TWO,
            "[user]When?\n[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n"
            "[assistant]<tool_call>b map {}</tool_call>\n[tool]here <- b map\n[assistant]",
            id="one call at a time",
        ),
        pytest.param(
            WRITTEN.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"), TWO,
            "[user]When?\n[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n"
            "[assistant]<tool_call>b map {}</tool_call>\n[tool]here <- b map\n[assistant]",
            id="one call is written, others are lost",
        ),
        pytest.param(
            refusing("m.role == 'tool' and m.tool_call_id | length != 9"), LOOP,
            "[user]When?\n[assistant]<tool_call>333fcb4ee clock {}</tool_call>\n[tool]noon <- 333fcb4ee clock\n"
            "[assistant]",
            id="ids of nine letters",
        ),
        pytest.param(
            WRITTEN, [QUESTION, called(("", "clock"), ("", "map")), result("", "noon"), result("", "here")],
            "[user]When?\n[assistant]<tool_call>call00100 clock {}</tool_call><tool_call>call00101 map {}</tool_call>\n"
            "[tool]noon <- call00100 clock\n[tool]here <- call00101 map\n[assistant]",
            id="no ids",
        ),
        pytest.param(
            refusing("m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role == 'user')"),
            [QUESTION, result("x", "noon")],
            "[user]When?\n[user][The result of a tool]\nnoon\n[assistant]",
            id="a result of no call",
        ),
        pytest.param(
            refusing("m.tool_calls and m.content and m.thinking"),
            [QUESTION, called(("a", "clock"), content="I look.", thoughts="hm"), result("a", "noon"),
             called(("b", "map"), content="And there.")],
            "[user]When?\n[assistant](hm)<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n"
            "[assistant]And there.<tool_call>b map {}</tool_call>\n[assistant]",
            id="thoughts or text beside a call",
        ),
        pytest.param(
            refusing("m.tool_calls"), LOOP,
            '[user]When?\n[assistant][I call clock with {}]\n[user][The result of clock]\nnoon\n[assistant]',
            id="calls are refused",
        ),
        pytest.param(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}", LOOP,
            "[user]When?\n[assistant][I call clock with {}]\n[user][The result of clock]\nnoon\n",
            id="no tools",
        ),
        pytest.param(
            WRITTEN, [SYSTEM, QUESTION, ANSWER, LATE, NEXT],
            "[system]Be brief.\n[user]When?\n[assistant]Now.\n[system]Be kind.\n[user]Where?\n[assistant]",
            id="late systems are taken",
        ),
        pytest.param(
            refusing("m.role == 'system' and not loop.first"), [SYSTEM, QUESTION, ANSWER, LATE, NEXT],
            "[system]Be brief.\n[user]When?\n[assistant]Now.\n[user]Be kind.\n\nWhere?\n[assistant]",
            id="late systems are refused",
        ),
        pytest.param(
            WRITTEN.replace("in messages %}", "in messages if loop.index0 == 0 or m.role != 'system' %}")
            .replace("loop.index0 == 0", "m == messages[0]"),
            [SYSTEM, *LOOP, LATE],
            "[system]Be brief.\n[user]When?\n[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n"
            "[user]Be kind.\n[assistant]",
            id="late systems are lost",
        ),
        pytest.param(
            refusing("m.role == 'system' and not loop.first"), [QUESTION, called(("a", "clock")), LATE, *LOOP[2:]],
            "[user]When?\n[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n[user]Be kind.\n"
            "[assistant]",
            id="a system between a call and its result",
        ),
        pytest.param(
            refusing("m.role == 'system'"), [SYSTEM, QUESTION, LATE],
            "[user]Be brief.\n\nWhen?\n\nBe kind.\n[assistant]",
            id="no system at all",
        ),
        pytest.param(
            refusing("m.role == 'tool'", "m in messages if messages[0].role == 'system'"), [SYSTEM, *LOOP],
            "[user]Be brief.\n\nWhen?\n[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n"
            "[assistant]",
            id="no system beside calls",
        ),
        pytest.param(
            "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no') }}{% endif %}"
            + WRITTEN,
            [SYSTEM], "[user]Be brief.\n[assistant]",
            id="a system alone",
        ),
        pytest.param(
            "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no') }}{% endif %}"
            + WRITTEN,
            LOOP[1:],
            "[user][What was said before is left out.]\n[assistant]<tool_call>a clock {}</tool_call>\n"
            "[tool]noon <- a clock\n[assistant]",
            id="no question",
        ),
        pytest.param(
            refusing("(m.role == 'user') != (loop.index0 % 2 == 0)",
                     "m in messages if m.role != 'tool' and not m.tool_calls"),
            [ANSWER, QUESTION, NEXT, *LOOP[1:], QUESTION, ANSWER, ANSWER, called(("a", "clock")), NEXT],
            "[user][What was said before is left out.]\n[assistant]Now.\n[user]When?\n\nWhere?\n"
            "[assistant]<tool_call>a clock {}</tool_call>\n[tool]noon <- a clock\n[assistant]OK.\n[user]When?\n"
            "[assistant]Now.\n\nNow.<tool_call>a clock {}</tool_call>\n[assistant]OK.\n[user]Where?\n[assistant]",
            id="questions and answers by turns",
        ),
    ],
)  # fmt: skip
def test_no_history_is_refused_and_nothing_of_it_lost(
    tmp_path: Path, template: str, messages: list[Message], written: str
) -> None:
    assert open_tokenizer(tmp_path, template).render_chat(messages) == written


def test_an_answer_may_call_as_many_tools_as_the_template_writes(tmp_path: Path) -> None:
    one = refusing("m.tool_calls and m.tool_calls | length > 1")
    for template, several in ((WRITTEN, True), (one, False), (refusing("m.tool_calls"), True)):
        assert open_tokenizer(tmp_path, template).takes_several_calls() is several


def test_an_answer_that_is_continued_stays_the_last(tmp_path: Path) -> None:
    alternating = refusing("(m.role == 'user') != (loop.index0 % 2 == 0)")
    text = open_tokenizer(tmp_path, alternating).render_chat([QUESTION, ANSWER, ANSWER], continue_last=True)
    assert text == "[user]When?\n[assistant]Now.\n\nNow."


def test_trials_are_made_once_and_end_when_somebody_leaves(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, WRITTEN)
    with pytest.raises(Cancelled):
        tokenizer.render_chat(TWO, should_stop=lambda: True)
    assert "clock" in tokenizer.render_chat(TWO)
    assert tokenizer._template is not None
    rendered: list[int] = []
    before = tokenizer._template.render
    tokenizer._template.render = lambda *given: (rendered.append(1), before(*given))[1]  # type: ignore[method-assign]
    tokenizer.render_chat(TWO)
    assert rendered == [1]


def test_long_histories_are_paired_in_one_pass() -> None:
    turn = [called(("a", "clock"), ("b", "map")), result("b", "x"), result("a", "y"), result("c", "z")]
    found = paired(turn * 20_000)
    assert len(found) == 80_000 and [message.content for message in found[:4]] == [
        "", "y", "x", "[The result of a tool]\nz",
    ]  # fmt: skip


def test_pictures_move_with_their_text() -> None:
    def render(messages: Sequence[Message]) -> str:
        roles = [message.role for message in messages]
        if "system" in roles or any(role == other for role, other in pairwise(roles)):
            raise ModelError("no")
        return "".join(message.content for message in messages)

    first, second = PictureFile(b"first", 1), PictureFile(b"second", 2)
    asked = [SYSTEM, Message("user", "ab", pictures=[first]), Message("user", "cd", pictures=[second])]
    (fitted,) = Histories(takes_tools=False).fitted(asked, render)
    assert fitted.content == "Be brief.\n\nab\n\ncd"
    assert [(each.data, fitted.content[each.place :]) for each in fitted.pictures] == [
        (b"first", "b\n\ncd"),
        (b"second", ""),
    ]


def test_pictures_stand_between_parts_of_the_text() -> None:
    pictures = [PictureFile(b"1", 0), PictureFile(b"2", 2), PictureFile(b"3", 2), PictureFile(b"4", 9)]
    text, image = "text", {"type": "image"}
    assert content_parts(Message("user", "abcd", pictures=pictures)) == [
        image,
        {"type": text, text: "ab"},
        image,
        image,
        {"type": text, text: "cd"},
        image,
    ]
