"""What a reader has of an answer whose tokens arrive one by one: thoughts, text and calls of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.generation.reasoning import ReasoningParser
from engine.generation.text import IncrementalDecoder, StopStrings
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import AnyEvent, Generate, Piece, Tool
from engine.models.text.reasoning_formats import formats
from engine.models.text.tool_formats import tool_formats
from engine.moe.timing import Recorder
from engine.session.sharing import PassLog
from engine.session.turn import Turn
from tests.support.controls import Nobody

THOUGHTS = {form.name: form for form in formats()}
CALLS = {form.name: form for form in tool_formats()}
TOOLS = [Tool(name="weather"), Tool(name="clock")]


def read(
    thoughts: str, calls: str, prompt: str, text: str, size: int, cut: bool = False, recipients: bool = True
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, text and calls of an answer each of whose tokens is ``size`` letters of ``text``."""
    events: list[AnyEvent] = []
    turn = Turn(Generate(id=1), Recorder(1, [], 0), PassLog(), events.append, Nobody(), lambda: 0.0, 1)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    stream = turn.stream(
        IncrementalDecoder(lambda ids: "".join(pieces[number] for number in ids)),
        StopStrings(()),
        ReasoningParser(THOUGHTS[thoughts], prompt, recipients=recipients),
        ToolCallParser(CALLS[calls], TOOLS),
    )
    for number in range(len(pieces)):
        stream.count_token()
        stream.push(number)
    found = stream.finish(cut)
    sent = [event for event in events if isinstance(event, Piece)]
    assert "".join(piece.reasoning for piece in sent) == stream.thoughts
    assert stream.thought_tokens <= len(pieces)
    return stream.thoughts, found, [(call.name, call.arguments) for call in stream.calls]


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "qwen-coder": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm": "<tool_call>clock\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "granite": '<|tool_call|>[{"name": "clock", "arguments": {}}]',
}
CALLED = [("clock", "{}")]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_ends_thoughts_that_were_never_closed(name: str, size: int) -> None:
    said = WRITTEN[name]

    def found(text: str, prompt: str = "assistant\n<think>\n", **options: Any) -> Any:
        return read("think", name, prompt, text, size, **options)

    assert found(f"I need it.\n{said}") == ("I need it.", "", CALLED)
    assert found(f"<think>I need it.\n\n{said}\n", "") == ("I need it.", "", CALLED)
    assert found(said) == ("", "", CALLED)
    assert found(f"Both.\n{said}\n{said}") == ("Both.", "", CALLED * 2)
    # In thoughts that end, it was only spoken of.
    assert found(f"I could write {said} here.</think>\nNoon.") == (f"I could write {said} here.", "Noon.", [])
    assert found(f"I could.\n{said}</think>\n{said}") == (f"I could.\n{said}", "", CALLED)
    # Nothing is lost of what is no call, or of none of these tools.
    other = said.replace("clock", "other")
    assert found(f"Or\n{other}") == (f"Or\n{other}", "", [])
    assert found(f"Not {said[:9]} but {said}") == (f"Not {said[:9]} but", "", CALLED) or name in ("deepseek", "kimi")
    assert found("Never ended") == ("Never ended", "", [])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_limit_in_thoughts_that_were_never_closed(size: int) -> None:
    written = "I need it.\n" + WRITTEN["hermes"]
    prompt = "<think>"
    whole = read("think", "hermes", prompt, written[: written.index("}\n") + 1], size, cut=True)
    assert whole == ("I need it.", "", CALLED)
    thoughts, text, calls = read("think", "hermes", prompt, written[: written.index("{}")], size, cut=True)
    assert (thoughts, text, [name for name, _ in calls]) == ("I need it.", "", ["clock"])
    before = written[: written.index("clock")]
    assert read("think", "hermes", prompt, before, size, cut=True) == (before, "", [])
    assert read("think", "hermes", prompt, before, size) == (before, "", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "thoughts", "answer", "called"),
    [
        (' to=functions.clock<|channel|>commentary json<|message|>{"a": 2}', "", "", [("clock", '{"a": 2}')]),
        (" to=functions.clock<|channel|>analysis<|message|>{}", "", "", CALLED),
        (" to=functions.clock<|channel|>commentary<|message|>", "", "", CALLED),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.clock<|channel|>commentary json"
         "<|message|>{}", "Hm.", "", CALLED),
        ("<|channel|>commentary to=functions.clock<|constrain|>json<|message|>{}", "", "", CALLED),
        ("<|channel|>commentary to=functions.clock <|constrain|>json<|message|> ", "", "", CALLED),
        ("<|channel|>commentary to=other json<|message|>print(1)", "", "print(1)", []),
        ("<|channel|>commentary to=user<|message|>I look.<|end|><|start|>assistant to=functions.clock<|channel|>"
         "commentary<|message|>{}", "", "I look.", CALLED),
        ("<|channel|>commentary to=functions.clock<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>4",
         "", "4", CALLED),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
         "<|message|>4", "Hm.", "4", []),
    ],
)  # fmt: skip
def test_a_part_for_a_tool(text: str, thoughts: str, answer: str, called: Any, size: int) -> None:
    found, rest, calls = read("gpt-oss", "gpt-oss", "<|end|><|start|>assistant", text, size)
    assert (found, rest) == (thoughts, answer)
    assert [(name, json.loads(given)) for name, given in calls] == [(name, json.loads(given)) for name, given in called]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("thoughts", "calls", "prompt", "text"),
    [
        ("gemma", "gemma", "<|turn>model\n",
         "<|channel>thought\nHm.<channel|>I look.<|tool_call>call:clock{}<tool_call|>"),
        ("solar", "solar", "<|begin|>assistant", "<|think|>Hm.<|end|><|begin|>assistant<|content|>I look.<|end|>"
         "<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|>"),
        ("kimi-k3", "kimi-k3", "<|open|>think<|sep|>", "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>"
         'response<|sep|><|open|>tools<|sep|><|open|>call tool="clock" index="1"<|sep|><|close|>call<|sep|><|close|>'
         "tools<|sep|><|close|>message<|sep|>"),
        ("muse", "muse", "<|start|>assistant", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>I "
         'look.<|eom|><|start|>assistant to=clock<|message|><atem:function_calls>\n<atem:invoke name="clock">\n</atem:'
         "invoke>\n</atem:function_calls>"),
        ("muse", "muse", "<|start|>assistant", " to=self<|message|>Hm.<|eom|><|start|>assistant to=clock<|message|>"
         '<atem:invoke name="clock">\n</atem:invoke><|eom|><|start|>assistant to=user<|message|>I look.'),
        ("minimax", "minimax-m3", "ai\n<mm:think>", "Hm.</mm:think>I look.]<]minimax[>[<tool_call>\n]<]minimax[>["
         '<invoke name="clock">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>'),
        ("command-text", "command", "", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>I look.<|END_TEXT|>"
         '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "clock", "parameters": {}}]<|END_ACTION|>'),
        ("hunyuan", "hunyuan", "<think:opensource>", "Hm.</think:opensource>I look.<tool_calls:opensource>\n"
         "<tool_call:opensource>clock<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"),
        ("think", "lfm", "", "<think>Hm.</think>I look.<|tool_call_start|>[clock()]<|tool_call_end|>"),
        ("apertus", "apertus", "", '<|inner_prefix|>Hm.<|inner_suffix|>I look.<|tools_prefix|>[{"clock": {}}]'
         "<|tools_suffix|>"),
        ("seed", "seed", "", "<seed:think>Hm.</seed:think>I look.<seed:tool_call>\n<function=clock>\n</function>\n"
         "</seed:tool_call>"),
    ],
)  # fmt: skip
def test_thoughts_words_and_a_call(thoughts: str, calls: str, prompt: str, text: str, size: int) -> None:
    form = CALLS[calls]
    assert read(thoughts, calls, prompt, text, size, recipients=form.shape == "parts") == ("Hm.", "I look.", CALLED)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_that_is_shown_to_the_user_is_none(size: int) -> None:
    def found(text: str) -> tuple[str, str, list[tuple[str, str]]]:
        return read("muse", "muse", "<|start|>assistant", text, size, recipients=False)

    call = '<atem:invoke name="clock">\n</atem:invoke>'
    said = f" to=user<|message|>Write {call} here.\n"
    wanted = f"Write {call} here."
    assert found(said) == ("", f"{wanted}\n", [])
    after = f"{said}<|eom|><|start|>assistant to=clock<|message|>{call}"
    assert found(after) == ("", wanted, CALLED)
    begun = f" to=clock<|message|>{call[:12]}<|eom|><|start|>assistant{after}"
    assert found(begun) == ("", f"{call[:12]}\n\n{wanted}", CALLED)
    open_argument = f'{call[: call.index(">") + 1]}\n<atem:parameter name="a">1<|eom|><|start|>assistant'
    assert found(f" to=clock<|message|>{open_argument}{said}")[1] == f"{wanted}\n"
