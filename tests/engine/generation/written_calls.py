"""Calls of ``weather`` and ``clock`` as each format of ``assets/tool_calls.toml`` writes them."""

from __future__ import annotations

_ARGUMENTS = '{"city": "12", "days": 3}'
_WEATHER = f'{{"name": "weather", "arguments": {_ARGUMENTS}}}'
_CLOCK = '{"name": "clock", "arguments": {}}'
_OTHER_WEATHER = f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {_ARGUMENTS}}}'
_OTHER_CLOCK = '{"tool_call_id": "1", "tool_name": "clock", "parameters": {}}'


def _elements(outer: str, call: str, argument: str) -> str:
    """Calls in elements with attributes, in one element for all."""
    return (
        f'<{outer}>\n<{call} name="weather">\n<{argument} name="city">12</{argument}>\n'
        f'<{argument} name="days">3</{argument}>\n</{call}>\n<{call} name="clock">\n</{call}>\n</{outer}>'
    )


SAID = {
    "hermes": f"<tool_call>\n{_WEATHER}\n</tool_call>\n<tool_call>{_CLOCK}</tool_call>",
    "qwen-coder": "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>12</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>clock\n</tool_call>",
    "longcat": "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>12"
    "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
    "</longcat_tool_call>\n<longcat_tool_call>clock\n</longcat_tool_call>",
    "hunyuan": "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
    "</arg_key:opensource>\n<arg_value:opensource>12</arg_value:opensource>\n<arg_key:opensource>days"
    "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
    "<tool_call:opensource>clock<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "hunyuan-plain": "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock<tool_sep>\n</tool_call>\n"
    "</tool_calls>",
    "step": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
    '<steptml:parameter name="city">12</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="clock">\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "olmo": "<function_calls>weather(city='12', days=3)\nclock()</function_calls>",
    "intern": f"<|action_start|><|plugin|>\n{_WEATHER.replace('arguments', 'parameters')}<|action_end|>"
    f"<|action_start|><|plugin|>{_CLOCK}<|action_end|>",
    "granite-function": f"<function_call> {_WEATHER}\n<function_call> {_CLOCK}",
    "minimax": _elements("minimax:tool_call", "invoke", "parameter"),
    "muse": _elements("atem:function_calls", "atem:invoke", "atem:parameter"),
    "deepseek-dsml": _elements("｜DSML｜function_calls", "｜DSML｜invoke", "｜DSML｜parameter")
    .replace('"city"', '"city" string="true"')
    .replace('"days"', '"days" string="false"'),
    "minicpm": '<function name="weather"><param name="city">12</param><param name="days">3</param></function>\n'
    '<function name="clock"></function>',
    "minimax-m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>12]<]minimax[>['
    '</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="clock">'
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>12<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument'
    '<|sep|><|close|>call<|sep|><|open|>call tool="clock" index="2"<|sep|><|open|>json type="object"<|sep|>{}<|close|>'
    "json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "solar": f"<|tool_call:begin|>a1b2<|tool_call:name|>weather<|tool_call:args|>{_ARGUMENTS}<|tool_call:end|>"
    "<|tool_call:begin|>a1b3<|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|>",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]clock[ARGS]{{}}",
    "functionary": f"<function=weather>{_ARGUMENTS}</function><function=clock>{{}}</function>",
    "functionary-recipients": f">>>weather\n{_ARGUMENTS}>>>clock\n{{}}",
    "gpt-oss": f"<|recipient|>functions.weather<|message|>{_ARGUMENTS}<|recipient|>functions.clock<|message|>{{}}",
    "mistral-list": f"[TOOL_CALLS] [{_WEATHER}, {_CLOCK}]",
    "phi": f'<|tool_call|>[{_WEATHER}, {{"name": "clock"}}]<|/tool_call|>',
    "granite": f'<|tool_call|>[{_WEATHER}, {{"name": "clock"}}]',
    "tool-calls": f"<tool_calls>\n{_WEATHER}\n{_CLOCK}\n</tool_calls>",
    "nemotron": f"<TOOLCALL>[{_WEATHER}, {_CLOCK}]</TOOLCALL>",
    "gigachat": f"<|function_call|>{_WEATHER}<|function_call|>{_CLOCK}",
    "gigachat-role": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_WEATHER}<|message_sep|>\n\nfunction call"
    f"<|role_sep|>\n{_CLOCK}",
    "command": f"<|START_ACTION|>[\n    {_OTHER_WEATHER},\n    {_OTHER_CLOCK}\n]<|END_ACTION|>",
    "command-r": f"Action: ```json\n[{_OTHER_WEATHER}, {_OTHER_CLOCK}]\n```",
    "apertus": f'<|tools_prefix|>[{{"weather": {_ARGUMENTS}}}, {{"clock": {{}}}}]<|tools_suffix|>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {_ARGUMENTS}}};{{"name": "clock", "parameters": {{}}}}',
    "llama4": '<|python_start|>[weather(city="12", days=3), clock()]<|python_end|>',
    "lfm": "<|tool_call_start|>[weather(city='12', days=3), clock()]<|tool_call_end|>",
    "functiongemma": "<start_function_call>call:weather{city:<escape>12<escape>,days:3}<end_function_call>"
    "<start_function_call>call:clock{}<end_function_call>",
    "gemma": '<|tool_call>call:weather{city:<|"|>12<|"|>,days:3}<tool_call|><|tool_call>call:clock{}<tool_call|>',
}
