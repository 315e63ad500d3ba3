"""Calls as models misspell them: read where it is clear what was meant, and text otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.tool_arguments import read_json
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import Tool
from engine.models.text.tool_formats import tool_formats
from tests.engine.generation.written_calls import SAID
from tests.support.random_examples import examples

BY_NAME = {form.name: form for form in tool_formats()}
TEXTS = {"type": "object", "properties": {"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [
    Tool(name="f", parameters=json.dumps(TEXTS)),
    Tool(name="clock"),
    Tool(name="weather"),
    Tool(name="r&d", parameters=json.dumps({"type": "object", "properties": {"a&b": {}, "c&amp;d": {}}})),
    Tool(name="a.b", parameters=json.dumps({"type": "object", "properties": {"x": {"type": "array"}}})),
]
Calls = list[tuple[str, Any]]
CLOCK: Calls = [("clock", {})]


def read(name: str, pieces: list[str], prompt: str = "") -> tuple[str, Calls]:
    parser = ToolCallParser(BY_NAME[name], TOOLS, prompt=prompt)
    found = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = [call for part in found for call in part.calls]
    return "".join(part.text for part in found), [(call.name, _loaded(call.arguments)) for call in calls]


def _loaded(arguments: str) -> Any:
    """The arguments; of a call that was not written to its end the text."""
    found = read_json(arguments)
    return arguments if found is None else found


def check(name: str, said: str, text: str, calls: Calls, prompt: str = "") -> None:
    assert read(name, [said], prompt) == (text, calls)
    assert read(name, list(said), prompt) == (text, calls)
    assert read(name, [said[at : at + 3] for at in range(0, len(said), 3)], prompt) == (text, calls)


ONE = [("f", {"s": "a", "n": 2})]
ONE_TURNED = [("f", {"n": 2, "s": "a"})]
BODY = '{"name": "f", "arguments": {"s": "a", "n": 2}}'


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (f"```json\n{BODY}\n```", ONE),
        (f"```\n{BODY}```", ONE),
        (f"{BODY}}}", ONE),
        (f"[{BODY}]]", ONE),
        (f"[{BODY}, {{'name': 'clock'}}]", ONE + CLOCK),
        (f"{BODY}\n{BODY}", ONE * 2),
        (f"{BODY}; {BODY}", ONE * 2),
        ('{"name": "f", "arguments": {"s": "one;\ntwo"}}', [("f", {"s": "one;\ntwo"})]),
        ('{"name": "f", "arguments": {"s": "a\n\tb"}}', [("f", {"s": "a\n\tb"})]),
        ('{"name": "clock", "arguments": null}', CLOCK),
        ('{"name": "clock", "arguments": ""}', CLOCK),
        ('{"name": "clock", "arguments": "{}"}', CLOCK),
        ('{"name": "clock"}', CLOCK),
        ('{"name": "clock", "arguments": []}', None),
        ('{"name": "clock", "arguments": 0}', None),
        ('{"name": "clock", "arguments": false}', None),
        ('{"name": "clock", "arguments": "noon"}', None),
        ('{"type": "function", "function": {"name": "f", "arguments": {"s": "a", "n": 2}}}', ONE),
        ('{"function": {"name": "f", "arguments": "{\\"s\\": \\"a\\", \\"n\\": 2}"}, "id": "x"}', ONE),
        ('{"function": "f", "parameters": {"s": "a", "n": 2}}', ONE),
        ('{"f": {"s": "a", "n": 2}}', ONE),
        ('{"other": {"s": "a"}}', None),
        ("{'name': 'f', 'arguments': {'s': 'a', 'n': 2}}", ONE),
        ("[{'name': 'f', 'arguments': {'s': 'it\\'s', 'n': -2}}]", [("f", {"s": "it's", "n": -2})]),
        ("{'name': 'weather', 'arguments': {'a': None, 'b': True, 'c': false}}",
         [("weather", {"a": None, "b": True, "c": False})]),
        ("{'name': 'f', 'arguments': {'s': open('x')}}", None),
        ('{"name": "f", "arguments": {"s": "a", "n": 2}} and more', None),
        ("[" * 3000, None),
        ("{'a':" * 3000, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "tool-calls", "granite", "mistral-list", "mistral", "lfm", "gigachat"])
def test_json_as_models_write_it(name: str, body: str, calls: Calls | None) -> None:
    form = BY_NAME[name]
    said = f"{form.begin}{body}{form.end}"
    if body.endswith(" and more"):
        check(name, said, "and more", ONE)
    else:
        check(name, said, "" if calls else said, calls or [])


@pytest.mark.parametrize(
    ("name", "said", "text", "calls"),
    [
        # Mistral
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"s": "a", "n": 2}', "", ONE),
        ("mistral", '[TOOL_CALLS]f{"s": "a", "n": 2}', "", ONE),
        ("mistral", '[TOOL_CALLS] f\n{"s": "a", "n": 2}', "", ONE),
        ("mistral", "[TOOL_CALLS]clock[ARGS]", "", CLOCK),
        ("mistral", "[TOOL_CALLS]clock[CALL_ID]abc123456[ARGS]", "", CLOCK),
        ("mistral", "[TOOL_CALLS]clock", "[TOOL_CALLS]clock", []),
        ("mistral", "[TOOL_CALLS]the clock[ARGS]{}", "[TOOL_CALLS]the clock[ARGS]{}", []),
        ("mistral", "[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]clock[ARGS]{} Wait.", "Wait.", CLOCK * 2),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "a", "n": 2}clock[ARGS]{} Wait.', "Wait.", ONE + CLOCK),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{}other[ARGS]{}', "other[ARGS]{}", CLOCK),
        ("mistral-list", '[TOOL_CALLS][{"name": "clock", "arguments": {}}]\n\nI look now.', "I look now.", CLOCK),
        ("mistral-list", '[TOOL_CALLS]f{"s": "a", "n": 2}', '[TOOL_CALLS]f{"s": "a", "n": 2}', []),
        # Qwen3-Coder
        ("qwen-coder", "<function=clock>\n</function>\n</tool_call>", "", CLOCK),
        ("qwen-coder", "Now.\n<function=clock></function>", "Now.", CLOCK),
        ("qwen-coder", "<function=clock>\n</function>\n</tool_call>\n<function=clock>\n</function>\n</tool_call>", "",
         CLOCK * 2),
        ("qwen-coder", "<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>", "",
         ONE),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n2\n</parameter>\n</function>\n"
         "</tool_call>", "", ONE),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=n>\n2\n</function>\n"
         "</tool_call>", "", ONE),
        ("qwen-coder", "<tool_call>\n<function=clock>\n</function>\n<function=f>\n<parameter=s>\na\n</parameter>\n"
         "<parameter=n>2</parameter>\n</function>\n</tool_call>", "", CLOCK + ONE),
        ("qwen-coder", '<tool_call>\n<function=f>\n{"s": "a", "n": 2}\n</function>\n</tool_call>', "", ONE),
        ("qwen-coder", f"<tool_call>\n{BODY}\n</tool_call>", "", ONE),
        ("qwen-coder", "<tool_call>\n<function=clock>\n</function>", "", CLOCK),
        ("qwen-coder", "<tool_call>\n<function=clock>\n</tool_call>", "", CLOCK),
        ("qwen-coder", "<tool_call>\n<function=clock\n</parameter>\n</function>\n</tool_call>", "", CLOCK),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s\na>b\n</parameter>\n<parameter=n\n2\n</parameter>\n"
         "</function>\n</tool_call>", "", [("f", {"s": "a>b", "n": 2})]),
        ("qwen-coder", "<function=other>\n</function>\n</tool_call>",
         "<function=other>\n</function>\n</tool_call>", []),
        ("qwen-coder", "Say <function=x> or </tool_call>.", "Say <function=x> or </tool_call>.", []),
        # Values with their own marks, and their white space
        ("qwen-coder", '<tool_call>\n<function=f>\n<parameter=s>\nx = "</parameter>"\ny = 2\n</parameter>\n</function>'
         "\n</tool_call>", "", [("f", {"s": 'x = "</parameter>"\ny = 2'})]),
        ("qwen-coder", '<tool_call>\n<function=f>\n<parameter=s>\nx = "<parameter=n>"\n</parameter>\n</function>\n'
         "</tool_call>", "", [("f", {"s": 'x = "<parameter=n>"'})]),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s>\n</tool_call>\n</parameter>\n</function>\n"
         "</tool_call>", "", [("f", {"s": "</tool_call>"})]),
        ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s>\n\n  a\n\n</parameter>\n</function>\n</tool_call>", "",
         [("f", {"s": "\n  a\n"})]),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>  a\n</arg_value>\n<arg_key>t</arg_key><arg_value>"
         "</arg_value> b</arg_value>\n</tool_call>", "", [("f", {"s": "  a\n", "t": "</arg_value> b"})]),
        ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>", "",
         [("f", {"s": "a</tool_call>b"})]),
        ("minimax", '<minimax:tool_call><invoke name="f">\n<parameter name="s">\n a </parameter>\n</invoke>'
         "</minimax:tool_call>", "", [("f", {"s": "\n a "})]),
        ("minicpm", '<function name="f"><param name="s"><![CDATA[a</param>\n<b>&]]></param><param name="n">2</param>'
         "</function>", "", [("f", {"s": "a</param>\n<b>&", "n": 2})]),
        ("seed", "<function=clock></function></seed:tool_call>", "", CLOCK),
        ("glm", '<tool_call>f\n{"s": "a", "n": 2}\n</tool_call>', "", ONE),
        # Several calls, not all of which are whole
        ("hermes", '<tool_call>{"name": </tool_call>\n<tool_call>{"name": "clock"}</tool_call>',
         '<tool_call>{"name": </tool_call>', CLOCK),
        ("hermes", '<tool_call>{"name": "clock"}\n<tool_call>{"name": "clock"}</tool_call>', "", CLOCK * 2),
        ("hermes", '<tool_call><tool_call>{"name": "clock"}</tool_call>', "", CLOCK),
        ("hermes", '<tool_call>{"name": "clock"}</tool_call', "", CLOCK),
        ("hermes", 'The mark <tool_call> begins <tool_call>{"name": "clock"}</tool_call>',
         "The mark <tool_call> begins", CLOCK),
        ("kimi", "<|tool_call_begin|>clock:0<|tool_call_argument_begin|>{}<|tool_call_begin|>functions.clock:1"
         "<|tool_call_argument_begin|>{}", "", CLOCK * 2),
        ("kimi", "<|tool_call_begin|>clock:0<|tool_call_argument_begin|>{}<|tool_call_begin|>functions.clock:1"
         "<|tool_call_argument_begin|>{}<|tool_call_end|>Now.", "Now.", CLOCK * 2),
        ("glm", "<tool_call>clock\n<tool_call>clock\n</tool_call>", "", CLOCK * 2),
        ("gemma", "<|tool_call>call:clock{}<|tool_call>call:clock{}<tool_call|>", "", CLOCK * 2),
        ("granite", '<tool_call>[{"name": "clock", "arguments": {}}]</tool_call>', "", CLOCK),
        ("granite", '<|tool_call|>[{"name": "clock", "arguments": {}}]', "", CLOCK),
        ("command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "directly_answer", "parameters": {}}]'
         "<|END_ACTION|>", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "directly_answer", "parameters": {}}]'
         "<|END_ACTION|>", []),
        ("phi", f"functools[{BODY}, {BODY}]", "", ONE * 2),
        ("phi", 'functools[\n  {"name": "clock", "arguments": {}}\n] Now.', "Now.", CLOCK),
        ("phi", "Use functools [1] or functools.cache.", "Use functools [1] or functools.cache.", []),
        ("granite-function", '<function_call> {"name": "clock", "arguments": {}} Now.', "Now.", CLOCK),
        # Python
        ("llama", '<|python_tag|>f.call(s="a", n=2)', "", ONE),
        ("llama", '<|python_tag|>f(s="a", n=2)', "", ONE),
        ("llama", '[f(s="a", n=2), clock()]', "", ONE + CLOCK),
        ("llama", '{"name": "f", "parameters": {"s": "a;b"}}; {"name": "clock", "parameters": {}}', "",
         [("f", {"s": "a;b"}), *CLOCK]),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("llama4", '[f(s="a", n=2)]', "", ONE),
        ("llama4", '{"name": "f", "parameters": {"s": "a", "n": "2"}}', "", ONE),
        ("llama4", "[1] is a list.", "[1] is a list.", []),
        ("lfm", "<|tool_call_start|>[f(s='a;\"', n=2), a.b(x=[1, {'k': None}, (2,)])]<|tool_call_end|>And?",
         "And?", [("f", {"s": 'a;"', "n": 2}), ("a.b", {"x": [1, {"k": None}, [2]]})]),
        ("lfm", '<|tool_call_start|>f({"s": "a", "n": 2})<|tool_call_end|>', "", ONE),
        ("lfm", "<|tool_call_start|>[f(s='a\n\\'b\\n\0', t=\"it's\n\r\", n=2)]<|tool_call_end|>", "",
         [("f", {"s": "a\n'b\n\0", "t": "it's\n\r", "n": 2})]),
        ("lfm", "<|tool_call_start|>[f(s='sed -n '1,2p' \\'a\\' b', t='print(x, y='\\,')\n\"c\"', n=2), clock()]"
         "<|tool_call_end|>", "",
         [("f", {"s": "sed -n '1,2p' 'a' b", "t": "print(x, y='\\,')\n\"c\"", "n": 2}), *CLOCK]),
        ("lfm", '<|tool_call_start|>[f(s="a "b" c", t="d")]<|tool_call_end|>', "",
         [("f", {"s": 'a "b" c', "t": "d"})]),
        ("lfm", "<|tool_call_start|>[f(n=007, s=02134, t='a 01'), a.b(x=[01, 1.05, 0, 00])]<|tool_call_end|>", "",
         [("f", {"n": 7, "s": "02134", "t": "a 01"}), ("a.b", {"x": [1, 1.05, 0, 0]})]),
        ("lfm", "<|tool_call_start|>[a.b(x={'b', 'a'})]<|tool_call_end|>", "", [("a.b", {"x": ["b", "a"]})]),
        ("lfm", "<|tool_call_start|>clock()\nclock()<|tool_call_end|>", "", CLOCK * 2),
        ("lfm", "<|tool_call_start|>[f(s=open('x'))]<|tool_call_end|>",
         "<|tool_call_start|>[f(s=open('x'))]<|tool_call_end|>", []),
        ("lfm", "<|tool_call_start|>[f('a')]<|tool_call_end|>", "<|tool_call_start|>[f('a')]<|tool_call_end|>", []),
        ("lfm", "<|tool_call_start|>[f(s='<|tool_call_end|>')]<|tool_call_end|>", "",
         [("f", {"s": "<|tool_call_end|>"})]),
        # Gemma
        ("gemma", '<|tool_call>call:weather{a:[<|"|>b,c<|"|>,true,null,-1.5e3,{d:[]}],<|"|>e f<|"|>:{}}<tool_call|>',
         "", [("weather", {"a": ["b,c", True, None, -1500.0, {"d": []}], "e f": {}})]),
        ("gemma", '<|tool_call>call:f{s:<|"|>{a}\n<tool_call|> "<|"|>, n: 2}<tool_call|>', "",
         [("f", {"s": '{a}\n<tool_call|> "', "n": 2})]),
        ("gemma", '<|tool_call>call:f{"s": "a", "n": 2}<tool_call|>', "", ONE),
        ("gemma", '<|tool_call>call:f{s:<|"|>a<|"|>,n:2}call:clock{}\nclock{}<tool_call|>', "", ONE + CLOCK * 2),
        ("gemma", "<|tool_call>call:clock{}call:other{}<tool_call|>",
         "<|tool_call>call:clock{}call:other{}<tool_call|>", []),
        ("gemma", "<|tool_call>f{s:a,n:2}<tool_call|>", "", ONE),
        ("gemma", "<|tool_call>call:f{s:}<tool_call|>", "<|tool_call>call:f{s:}<tool_call|>", []),
        ("gemma", f"<|tool_call>call:f{'{a:' * 2000}<tool_call|>", f"<|tool_call>call:f{'{a:' * 2000}<tool_call|>", []),
        ("gemma", "<|tool_call>:f{s:a,n:2}<tool_call|><|tool_call>:clock{}<tool_call|>", "", ONE + CLOCK),
        # Quotation marks of another kind, and pairs
        ("minicpm", "<function name='f'>\n<param name='s'>a</param>\n<param name=\"n\">2</param></function>", "", ONE),
        ("minicpm", "<function name=\"f\"><param name=\"s\">a</param><param name='n'>2</param></function>", "", ONE),
        ("minicpm", "<function name=\"f\"><param name=\"s\">a <param name='n'>2</param> b</param></function>", "",
         [("f", {"s": "a <param name='n'>2</param> b"})]),
        ("minicpm", "<function name='other'></function>", "<function name='other'></function>", []),
        ("minimax", "<invoke name='f'>\n<parameter name='s'>a</parameter>\n<parameter name='n'>2</parameter>\n"
         "</invoke>", "", ONE),
        ("glm", "<tool_call>f s=a n=2</tool_call>", "", ONE),
        ("glm", "<tool_call>f s='a b' t=\"c\"</tool_call>", "", [("f", {"s": "a b", "t": "c"})]),
        ("glm", "<tool_call>f s=a m=2</tool_call>", "<tool_call>f s=a m=2</tool_call>", []),
        ("glm", "<tool_call>f s=a and more</tool_call>", "<tool_call>f s=a and more</tool_call>", []),
        # An end that was forgotten
        ("minicpm", '<function name="f"><param name="n">2</param><param name="s">a</function>', "", ONE_TURNED),
        ("minicpm", '<function name="f"><param name="s">a</function> b</param><param name="n">2</param></function>', "",
         [("f", {"s": "a</function> b", "n": 2})]),
        ("apertus", '<|tools_prefix|>[{"f": {"s": "a", "n": 2}}]', "", ONE),
        ("apertus", '<|tools_prefix|>[{"f": {"s": "a", "n": 2}}', "", ONE),
        ("apertus", '<|tools_prefix|>[{"f": {"s": "a", "n": 2}<|tools_suffix|>', "", ONE),
        ("apertus", '<|tools_prefix|>[{"f": {"s": "a", "n": 2', '<|tools_prefix|>[{"f": {"s": "a", "n": 2', []),
        # Arguments within one
        ("deepseek-dsml", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="arguments" string="false">{"s": "a", '
         '"n": "2"}</｜DSML｜parameter>\n</｜DSML｜invoke>', "", ONE),
        ("deepseek-dsml", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="input" string="true">{"s": "a", "n": 2}'
         "</｜DSML｜parameter>\n</｜DSML｜invoke>", "", ONE),
        ("minicpm", "<function name=\"f\"><param name=\"properties\">{'s': 'a', 'n': 2}</param></function>", "", ONE),
        ("minicpm", '<function name="f"><param name="properties">{"other": 2}</param></function>', "",
         [("f", {"properties": {"other": 2}})]),
        ("minicpm", '<function name="clock"><param name="input">{"s": 2}</param></function>', "",
         [("clock", {"input": {"s": 2}})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"parameters": {"s": "a", "n": 2}}}</tool_call>', "", ONE),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"input": "a"}}</tool_call>', "", [("f", {"input": "a"})]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"arguments": "{\\"s\\": \\"a\\", \\"n\\": 2}"}', "", ONE),
        # Elements
        ("minimax-m3", ']<]minimax[>[<invoke name="weather">]<]minimax[>[<a>]<]minimax[>[<item>x</b>]<]minimax[>['
         "</item>]<]minimax[>[<item>y]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[<b>]<]minimax[>[<c> d\n]<]"
         "minimax[>[</c>]<]minimax[>[</b>]<]minimax[>[</invoke>", "",
         [("weather", {"a": ["x</b>", "y"], "b": {"c": " d\n"}})]),
        ("minimax-m3", ']<]minimax[>[<invoke name="a.b">]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[<x>2]<]'
         "minimax[>[</x>]<]minimax[>[<y>]<]minimax[>[<z>3]<]minimax[>[</z>]<]minimax[>[<z>4]<]minimax[>[</z>]<]"
         "minimax[>[</y>]<]minimax[>[</invoke>", "", [("a.b", {"x": ["1", "2"], "y": {"z": ["3", "4"]}})]),
        ("minimax-m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<s>a]<]minimax[>[</invoke>',
         ']<]minimax[>[<invoke name="f">]<]minimax[>[<s>a]<]minimax[>[</invoke>', []),
        # Others
        ("kimi-k3", '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"s": "a", "n": 2}<|close|>'
         "json<|sep|><|close|>call<|sep|>", "", ONE),
        ("kimi-k3", '<|open|>call tool="r&amp;d" index="1"<|sep|><|open|>argument key="a&amp;b" type="string"<|sep|>'
         '&amp;<|close|>argument<|sep|><|open|>argument key="c&amp;d" type="string"<|sep|>x<|close|>argument<|sep|>'
         "<|close|>call<|sep|>", "", [("r&d", {"a&b": "&amp;", "c&amp;d": "x"})]),
        ("glm", "<tool_call>r&d</tool_call>", "", [("r&d", {})]),
        ("kimi-k3", '<|open|>call tool="clock" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>{"b": 1}'
         '<|close|>argument<|sep|><|open|>argument key="c" type="number"<|sep|>5<|close|>argument<|sep|><|close|>call'
         "<|sep|>", "", [("clock", {"a": '{"b": 1}', "c": 5})]),
        ("deepseek-dsml", '<｜DSML｜invoke name="clock">\n<｜DSML｜parameter name="a" string="true">5'
         '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>", "", [("clock", {"a": "5", "b": 5})]),
        ("deepseek-dsml", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="true">2</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="s" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>', "",
         [("f", {"n": 2, "s": "2"})]),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "```", "n": 2}\n```<｜tool▁call▁end'
         "｜>", "", [("f", {"s": "```", "n": 2})]),
        ("command-r", 'Action: I act.', 'Action: I act.', []),
    ],
)  # fmt: skip
def test_second_spellings(name: str, said: str, text: str, calls: Calls) -> None:
    check(name, said, text, calls)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("lfm", "[f(n=1e999)]"),
        ("lfm", "[f(n=-1e999)]"),
        ("lfm", f"[f(n={'-' * 9999}1)]"),
        ("lfm", f"[f{'.a' * 9999}()]"),
        ("lfm", "[f(s=b'a')]"),
        ("lfm", "[f(**{'s': 'a'})]"),
        ("lfm", "[f(n=-True, s={'a': {1: 2}})]"),
        ("qwen-coder", '<function=f>{"n": Infinity}</function>'),
        ("minimax-m3", 'f">{"n": NaN}'),
    ],
)
def test_what_json_cannot_write_is_no_argument(name: str, body: str) -> None:
    said = f"{BY_NAME[name].begin}{body}{BY_NAME[name].end}"
    check(name, said, said, [])


@pytest.mark.parametrize(
    ("name", "body"), [("hermes", '{"name": "f", "arguments": {"n": NaN}}'), ("mistral", 'f[ARGS]{"n": NaN}')]
)
def test_a_call_that_was_announced_stays_one_with_its_arguments_as_they_are(name: str, body: str) -> None:
    """Its beginning was sent before the rest was there."""
    said = f"{BY_NAME[name].begin}{body}{BY_NAME[name].end}"
    check(name, said, "", [("f", body[body.index('{"n"') :])])


def test_a_prompt_may_begin_a_call() -> None:
    prompt = "<|start_header_id|>assistant<|end_header_id|>\n\n>>>"
    check("functionary-recipients", 'f\n{"s": "a", "n": 2}', "", ONE, prompt)
    check("functionary-recipients", 'all\nI look.\n>>>f\n{"s": "a", "n": 2}', "I look.", ONE, prompt)
    check("functionary-recipients", "all\nNoon.", "Noon.", [], prompt)
    check("functionary-recipients", '>>>f\n{"s": "a", "n": 2}', "", ONE, prompt)
    check("hermes", f"{BODY}</tool_call>", "", ONE, "assistant\n<tool_call>")


@pytest.mark.sampled
@pytest.mark.parametrize("name", SAID)
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_how_a_stream_is_cut_changes_nothing(name: str, data: st.DataObject) -> None:
    form, said = BY_NAME[name], SAID[name]
    marks = [*form.all_marks, *(mark[:-1] for mark in form.all_marks), '{"name": "clock"}', "clock", "clock()", "{}"]
    parts = st.sampled_from([said, said[: len(said) // 2], *marks, "word", "call:", " ", "\n", '"', "}", "all\n"])
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[left:right] for left, right in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    assert read(name, list(text)) == whole
    if not whole[1] and not any(mark in text for mark in form.hidden) and form.shape != "parts":
        assert whole[0] == text
