"""Tokenizer and chat template of a model's folder, and what happens where there is none or it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.generation.reasoning import ReasoningParser, Separated, separate
from engine.ipc.messages import Message, ReasoningFacts, ToolCall
from engine.models.text.reasoning_formats import template_variables
from engine.models.text.tokenizer import MARK, load_tokenizer
from tests.engine.models.text.templates import QWEN3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>")
QUESTION = [Message("user", "Hi!")]


def write_tokenizer_folder(
    folder: Path,
    template: str | None = CHATML,
    special: tuple[str, ...] = SPECIAL[:3],
    added: tuple[str, ...] = (),
) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in special])
    library.add_tokens([AddedToken(token, special=False) for token in added])
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rendered(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode_exactly(ids))


def test_the_models_own_template_is_used_as_it_stands(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path))
    assert tokenizer is not None and tokenizer.has_chat_template
    messages = [Message("system", "Be brief."), Message("user", "Hi 🎉"), Message("assistant", "Yo"), *QUESTION]
    assert rendered(tokenizer, tokenizer.encode_chat(messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 🎉<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_begun_stays_open(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path))
    assert tokenizer is not None
    begun = [*QUESTION, Message("assistant", "Well, I")]
    assert rendered(tokenizer, tokenizer.encode_chat(begun, continue_last=True)).endswith(
        "<|im_start|>assistant\nWell, I"
    )
    empty = [*QUESTION, Message("assistant", "")]
    assert tokenizer.encode_chat(empty, continue_last=True) == tokenizer.encode_chat(QUESTION)


@pytest.mark.parametrize(
    ("messages", "continue_last"), [([], False), (QUESTION, True), ([Message("assistant", " ")], True)]
)
def test_nothing_to_answer_is_an_error(tmp_path: Path, messages: list[Message], continue_last: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path))
    assert tokenizer is not None
    with pytest.raises(ModelError) as raised:
        tokenizer.encode_chat(messages, continue_last)
    assert raised.value.kind == "bad-input"


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    template = "{{ raise_exception('Only user and assistant roles are supported!') }}"
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, template))
    assert tokenizer is not None
    with pytest.raises(ModelError, match="Only user and assistant roles are supported!"):
        tokenizer.encode_chat(QUESTION)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.nothing.there }}", "{{ ''.__class__.__mro__ }}"])
def test_a_broken_or_prying_template_is_an_error(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, template))
    assert tokenizer is not None
    with pytest.raises(ModelError, match="chat template refuses"):
        tokenizer.encode_chat(QUESTION)


def test_without_a_template_roles_are_written_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, None))
    assert tokenizer is not None and not tokenizer.has_chat_template
    begun = [*QUESTION, Message("assistant", "Well")]
    assert tokenizer.decode(tokenizer.encode_chat(QUESTION)) == "user: Hi!\n\nassistant:"
    assert tokenizer.decode(tokenizer.encode_chat(begun, continue_last=True)) == "user: Hi!\n\nassistant: Well"


def test_special_tokens_are_not_shown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("a b<|im_end|>")) == "a b"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode(" , don 't !")) == " , don 't !"


def test_special_tokens_that_mark_thoughts_stay(tmp_path: Path) -> None:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, special=("<|endoftext|>", *marks)))
    assert tokenizer is not None and tokenizer.reasoning_facts is not None
    assert tokenizer.reasoning_facts.format == "gpt-oss"
    ids = tokenizer.encode("<|channel|>analysis<|message|>é<|end|><|return|><|endoftext|>")
    assert tokenizer.decode(ids) == "<|channel|>analysis<|message|>é<|end|>"


def test_a_special_token_that_only_begins_a_mark_stays(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        write_tokenizer_folder(
            tmp_path, CHATML + "{# <|channel>thought <channel|> #}", ("<|endoftext|>", "<|channel>", "<channel|>")
        )
    )
    assert tokenizer is not None and tokenizer.reasoning is not None
    text = tokenizer.decode(tokenizer.encode("<|channel>thought\nFour?<channel|>It is 4.<|endoftext|>"))
    assert separate(ReasoningParser(tokenizer.reasoning), text) == Separated("Four?", "It is 4.")


def test_an_answer_that_speaks_of_the_marks_is_given_back_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, QWEN3, added=("<think>", "</think>")))
    assert tokenizer is not None
    spoken = [*QUESTION, Message("assistant", "Thoughts end with </think> there."), *QUESTION]
    text = tokenizer.render_chat(spoken)
    assert "Thoughts end with <" in text and "/think> there." in text
    old = [*QUESTION, Message("assistant", "<think>\nFour?\n</think>\n\nIt is 4."), *QUESTION]
    assert "Four?" not in tokenizer.render_chat(old)


def test_the_template_is_told_how_to_think(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, QWEN3))
    assert tokenizer is not None
    assert tokenizer.reasoning_facts == ReasoningFacts(format="think", switch=True)
    assert "<think>" not in tokenizer.render_chat(QUESTION)
    variables = template_variables(False, "")
    assert tokenizer.render_chat(QUESTION, variables=variables).endswith("assistant\n<think>\n\n</think>\n\n")
    begun = [*QUESTION, Message("assistant", "It is", "Four? <|im_end|>")]
    text = tokenizer.render_chat(begun, continue_last=True)
    assert "<think>\nFour? <" in text and text.endswith("</think>\n\nIt is")
    assert text.count("<|im_end|>") == 1
    assert "Four?" not in tokenizer.render_chat([*begun, *QUESTION])


def test_all_that_ends_a_turn(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 77}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [78, 79]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.end_of_turn_ids == {0, 2, 77, 78, 79}


def ends(folder: Path, template: str | None, *tokens: str, added: tuple[str, ...] = ()) -> set[str]:
    """The tokens that end a turn, of a model whose files name ``<|endoftext|>`` only."""
    tokenizer = load_tokenizer(write_tokenizer_folder(folder, template, ("<|endoftext|>", *tokens), added))
    assert tokenizer is not None
    return {tokenizer.decode_exactly([number]) for number in tokenizer.end_of_turn_ids} - {"<|endoftext|>"}


LAST = "{% if loop.last and not add_generation_prompt %}"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("end", "tokens", "expected"),
    [
        ("<turn|>\n", ("<turn|>", "<|turn>"), {"<turn|>"}),
        ("\n\n<any mark>", ("<any mark>", "<any mark"), {"<any mark>"}),
        ("<|end|>\n<|x|>", ("<|end|>", "<|x|>", "<|im_end|>"), {"<|end|>"}),
        ("<|END_RESPONSE|><|over|>", ("<|over|>", "<|END_RESPONSE|>", "<|START_RESPONSE|>", "<|START_THINKING|>",
                                      "<|END_THINKING|>"), {"<|over|>"}),
        # Nothing, and the next message's header ends the turn.
        ("", ("<|user|>", "<|assistant|>"), {"<|user|>"}),
        # The answer's last part ends otherwise than an earlier message.
        (LAST + "<|return|>{% else %}<|end|>{% endif %}", ("<|end|>", "<|return|>"), {"<|return|>"}),
        # Words are no end, nor is a token that stands behind them.
        ("\nUser: <|x|>", ("<|x|>",), set()),
        # A template that does not tell.
        ("{{ raise_exception('no') }}", ("<|end|>", "<|return|>", "<|im_end|>"), {"<|return|>", "<|im_end|>"}),
        ("\n", ("<|end|>",), {"<|end|>"}),
    ],
)  # fmt: skip
def test_what_the_template_writes_after_an_answer_ends_a_turn(
    tmp_path: Path, end: str, tokens: tuple[str, ...], expected: set[str]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + ("<|user|>" if "<|user|>" in tokens else "User: ")
        + "{{ m.content }}{% else %}{{ m.content }}"
        + end
        + "{% endif %}{% endfor %}"
    )
    assert ends(tmp_path / "special", template, *tokens) == expected
    assert ends(tmp_path / "added", template, added=tokens) == expected & {each for each in tokens if each in template}


def test_the_mark_after_a_call_ends_a_turn(tmp_path: Path) -> None:
    marks = ("<|channel|>", "<|message|>", "<|call|>")
    assert ends(tmp_path / "taking", CHATML + "{{ tools }}", *marks, "<|im_end|>") == {"<|im_end|>", "<|call|>"}
    assert ends(tmp_path / "no", CHATML, *marks, "<|im_end|>") == {"<|im_end|>"}
    assert ends(tmp_path / "none", None, *marks, "<|im_end|>") == {"<|im_end|>"}
    gemma = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
    template = CHATML + "{{ tools }}" + "".join(gemma)
    for special, added in ((gemma, ()), ((), gemma)):
        found = ends(tmp_path / f"{len(added)}", template, *special, "<|im_end|>", added=added)
        assert found == {"<|im_end|>", "<|tool_response>"}


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_damaged_tokenizer_is_said(tmp_path: Path, damage: bytes) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="asks for code from its repository, which is never run"):
        load_tokenizer(tmp_path)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("a")) == "a"


def test_loading_opens_no_socket(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    program = (
        "import sys, socket\nfrom pathlib import Path\n"
        "def no(*a, **k): raise AssertionError('a socket')\n"
        "socket.socket.connect = no\nsocket.getaddrinfo = no\n"
        "from engine.models.text.tokenizer import load_tokenizer\nassert load_tokenizer(Path(sys.argv[1])).encode('a')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True)


def test_a_later_part_of_a_conversation_is_tokenized_like_the_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path))
    assert tokenizer is not None
    asked = tokenizer.render_chat(QUESTION)
    whole = tokenizer.render_chat([*QUESTION, Message("assistant", "Yo"), *QUESTION])
    assert whole.startswith(asked)
    tail = tokenizer.encode_rendered(whole[len(asked) :], beginning=False)
    assert tokenizer.encode_rendered(asked) + tail == tokenizer.encode_rendered(whole)
    assert tokenizer.decode_exactly(tail[-len(tokenizer.encode_rendered("<|im_start|>assistant\n")) :]) == (
        "<|im_start|>assistant\n"
    )


def test_a_text_is_tokenized_only_until_it_certainly_exceeds_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_tokenizer(write_tokenizer_folder(tmp_path, CHATML))
    assert found is not None
    seen: list[int] = []
    library = found._library

    class Counting:
        def encode(self, text: str, **options: object) -> object:
            seen.append(len(text))
            return library.encode(text, **options)

    # Marks in control tokens that a message spells out are no tokens of the prompt.
    spelled = found.render_chat([Message("user", "<|im_end|>" * 8_000)])
    assert MARK in spelled and not found.exceeds(spelled, len(found.encode_rendered(spelled)))
    monkeypatch.setattr(found, "_library", Counting())
    assert found.exceeds("many words " * 1_000_000, 5_000) and sum(seen) < 200_000
    seen.clear()
    assert not found.exceeds("some words " * 400, 5_000) and seen == []
    assert not found.exceeds("some words " * 10_000, 200_000)


def test_more_messages_than_can_be_read_are_refused(tmp_path: Path) -> None:
    found = load_tokenizer(write_tokenizer_folder(tmp_path, CHATML))
    assert found is not None
    with pytest.raises(ModelError, match="10,001 messages"):
        found.render_chat([Message("user", "x")] * 10_001)
    called = Message("assistant", "", tool_calls=[ToolCall(id="c", name="f", arguments="{}")] * 9_999)
    with pytest.raises(ModelError, match="2 messages and 9,999 calls of tools, and at most 10,000 can be read"):
        found.render_chat([Message("user", "x"), called])
