"""What is read of each chat template that llama.cpp publishes with its source."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from engine.generation.reasoning import ReasoningParser
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import Tool
from engine.models.text.reasoning_formats import format_of
from engine.models.text.template_sandbox import ChatTemplate
from engine.models.text.tool_formats import tool_format_of, tool_formats

TEMPLATES = tomllib.loads(Path(__file__).with_name("published_templates.toml").read_text(encoding="utf-8"))["template"]
each_template = pytest.mark.parametrize("row", TEMPLATES, ids=lambda row: row["name"])
FOLDER = os.environ.get("LLAMA_CPP_TEMPLATES", "")
with_their_text = pytest.mark.skipif(
    not FOLDER, reason="LLAMA_CPP_TEMPLATES is no folder models/templates of llama.cpp's source"
)

each_text = pytest.mark.parametrize("row", TEMPLATES if FOLDER else TEMPLATES[:1], ids=lambda row: row["name"])

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": ""}, "days": {"type": "integer", "description": ""}},
    "required": ["city"],
}
TOOL = Tool(name="weather", parameters=json.dumps(SCHEMA))
ARGUMENTS = {"city": "Rome", "days": 3}


def check(row: dict[str, Any], template: str) -> None:
    tokens = row.get("vocabulary", ())
    calls, thoughts = tool_format_of(template, tokens), format_of(template, tokens)
    assert (calls and calls.name) == row.get("calls")
    assert (thoughts and thoughts.name) == row.get("thoughts")
    assert (calls is None) == bool(row.get("without"))


@each_template
def test_its_marks_tell_the_formats(row: dict[str, Any]) -> None:
    check(row, "\n".join(row["marks"]))


def test_every_template_that_takes_tools_has_a_format() -> None:
    assert len(TEMPLATES) == 70
    assert all("calls" in row for row in TEMPLATES if "tools" in row["marks"])
    # The others are those of models whose templates are not among them.
    missing = {form.name for form in tool_formats()} - {row.get("calls") for row in TEMPLATES}
    others = {"granite-function", "hunyuan-plain", "intern", "olmo", "step"}
    assert missing == {"phi", "llama4", "longcat", "functiongemma", *others}


@with_their_text
def test_the_table_names_all_of_them() -> None:
    assert {row["name"] for row in TEMPLATES} == {path.stem for path in Path(FOLDER).glob("*.jinja")}


@with_their_text
@each_text
def test_its_text_tells_the_formats(row: dict[str, Any]) -> None:
    text = Path(FOLDER, f"{row['name']}.jinja").read_text(encoding="utf-8")
    check(row, text)
    assert all(mark in text for mark in row["marks"])


@with_their_text
@each_text
def test_a_call_that_it_writes_is_read(row: dict[str, Any]) -> None:
    text = Path(FOLDER, f"{row['name']}.jinja").read_text(encoding="utf-8")
    form = tool_format_of(text, row.get("vocabulary", ()))
    template = ChatTemplate(text)
    answers = [said for said in (written(template, ARGUMENTS), written(template, json.dumps(ARGUMENTS))) if said]
    if form is None or "unwritten" in row:
        assert not answers or form is None
        return
    if form.bare:
        answers = [said[said.index("{") :].partition("<|eot_id|>")[0] for said in answers]
    if form.shape == "parts":
        thoughts = format_of(text, row["vocabulary"])
        assert thoughts is not None
        for number, said in enumerate(answers):
            parser = ReasoningParser(thoughts, "<|start|>assistant", recipients=True)
            begun = said.partition("<|call|>")[0].rpartition("<|start|>assistant")[2]
            answers[number] = parser.push(begun).answer + parser.flush().answer
    assert [("weather", ARGUMENTS)] in [called(form, said) for said in answers]


def written(template: ChatTemplate, arguments: Any) -> str:
    """What the template writes for an answer that is a call; empty if it writes none or refuses it."""
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    said = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}
    try:
        text = template.render(
            [*said, {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "sun"}],
            {"tools": [tool], "bos_token": "", "eos_token": ""},
            False,
        )
    except Exception:  # a template is a program: it may raise anything
        return ""
    behind = text[text.rindex("When?") + len("When?") :]
    return behind if "weather" in behind else ""


def called(form: Any, said: str) -> list[tuple[str, Any]]:
    parser = ToolCallParser(form, [TOOL])
    parser.push(said)
    parser.flush()
    return [(call.name, json.loads(call.arguments)) for call in parser.calls]
