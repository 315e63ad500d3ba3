"""Tools in a model's own chat template, and which template takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.ipc.messages import Message, Tool, ToolCall
from engine.models.text.tokenizer import Tokenizer, load_tokenizer
from engine.models.text.tool_formats import tool_format_of
from tests.engine.models.text.test_tokenizer import CHATML, write_tokenizer_folder

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %} ({{ m.name }}, {{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOCK = Tool(name="clock", description="The time <|im_end|>", parameters='{"type": "object", "x": "<|im_start|>"}')
SAID = [
    Message("user", "When?"),
    Message("assistant", "", tool_calls=[ToolCall(id="c1", name="clock", arguments='{"zone": "<|im_end|>"}')]),
    Message("tool", "noon<|im_end|>", tool_call_id="c1"),
]


def open_tokenizer(folder: Path, template: str | None = HERMES, **options: Any) -> Tokenizer:
    tokenizer = load_tokenizer(write_tokenizer_folder(folder, template, **options))
    assert tokenizer is not None
    return tokenizer


def test_tools_calls_and_results_are_rendered_and_act_on_nothing(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.tool_format is not None and tokenizer.tool_format.name == "hermes"
    ids = tokenizer.encode_rendered(tokenizer.render_chat(SAID, tools=[CLOCK]))
    text = tokenizer.decode_exactly(ids)
    assert json.loads(text.split("\n")[1])["function"] == {
        "name": "clock",
        "description": "The time <|im_end|>",
        "parameters": {"type": "object", "x": "<|im_start|>"},
    }
    assert '<tool_call>{"name": "clock", "arguments": {"zone": "<|im_end|>"}}</tool_call>' in text
    assert "noon<|im_end|> (clock, c1)" in text
    end = tokenizer.encode("<|im_end|>")
    # One at the end of each message is the template's; those that were spelled out are text.
    assert len(end) == 1 and ids.count(end[0]) == 4
    plain = tokenizer.decode_exactly(tokenizer.encode_rendered(tokenizer.render_chat(SAID[:1])))
    assert plain == "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_template_without_tools_says_so(tmp_path: Path, template: str | None) -> None:
    tokenizer = open_tokenizer(tmp_path, template)
    with pytest.raises(ModelError, match="takes no tools") as caught:
        tokenizer.render_chat(SAID[:1], tools=[CLOCK])
    assert caught.value.kind == "bad-input"
    assert "[The result of clock]\nnoon" in tokenizer.render_chat(SAID)


def test_thoughts_before_a_call_are_kept_for_the_template(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(
        tmp_path, HERMES.replace("{{ m.content }}", "[{{ m.reasoning_content }}]{{ m.content }}")
    )
    call = ToolCall(id="c1", name="clock", arguments="{}")
    said = [Message("assistant", "", "hm", tool_calls=[call]), Message("assistant", "", "no call, no thoughts")]
    text = tokenizer.render_chat([*SAID[:1], *said])
    assert "assistant\n[hm]<tool_call>" in text and "no call" not in text


def test_arguments_that_were_cut_are_rendered_as_far_as_they_were_written(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path)
    call = ToolCall(id="c1", name="clock", arguments='{"zone": "Ro')
    text = tokenizer.render_chat([*SAID[:1], Message("assistant", "", tool_calls=[call])])
    assert '"arguments": {"zone": "Ro"}' in text


def test_marks_that_are_special_tokens_are_text_beside_calls_only(tmp_path: Path) -> None:
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    tokenizer = open_tokenizer(tmp_path, special=marks)
    ids = tokenizer.encode("<tool_call>{}</tool_call><|im_end|>")
    assert tokenizer.decode(ids) == "{}"
    assert tokenizer.decode_with_calls(ids) == "<tool_call>{}</tool_call>"


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ('{{ tools }}<tool_call>{"name": ', {"</tool_call>"}, "hermes"),
        ("{{ tools }}<tool_call></tool_call><call name=", (), None),
        ("{{ tools }}<tool_call></tool_call><function=f><parameter=p></parameter>", (), "qwen-coder"),
        ("{{ tools }}<tool_call></tool_call><arg_key></arg_key><arg_value></arg_value>", (), "glm"),
        ("{{ tools }}", {"[TOOL_CALLS]"}, "mistral-list"),
        ("{{ tools }}", {"[TOOL_CALLS]", "[ARGS]"}, "mistral"),
        ("{{ tools }}", {"<|python_tag|>", "<|eom_id|>"}, "llama"),
        ("{{ tools }}", {"<|channel|>", "<|message|>", "<|call|>"}, "gpt-oss"),
        ("{{ tools }}", (), None),
        ("{{ messages }}<tool_call></tool_call>", (), None),
    ],
)
def test_the_format_is_known_by_its_marks(template: str, tokens: Any, name: str | None) -> None:
    found = tool_format_of(template, tokens)
    assert (found and found.name) == name


def test_tokens_have_the_bytes_of_their_text(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, added=("<think>",))
    ids = tokenizer.encode("é 日<think>\n<|im_end|>")
    table = tokenizer.token_bytes
    assert table.exact and b"".join(map(table.of, ids)).decode() == "é 日<think>\n<|im_end|>"
    assert table.of(10**6) == b"" and len(table.all(5)) == 5
    assert {tokenizer.decode_exactly([token]) for token in table.special} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }


def test_pieces_of_sentences_have_bytes_too() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models

    from engine.models.text.token_bytes import TokenBytes

    words = {"<unk>": 0, "<0xE9>": 1, "▁the": 2, "re": 3, "<0x0A>": 4}
    library = Library(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert TokenBytes(library, {}).all(5) == [b"<unk>", b"\xe9", b" the", b"re", b"\n"]
    library.decoder = decoders.WordPiece()
    assert not TokenBytes(library, {}).exact and TokenBytes(library, {}).of(3) == b"re"
