"""Pictures in the requests of every protocol: what the engine gets, what is refused, and that a model answers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from app.serve.anthropic_messages import CountRequest
from app.serve.asking import Defaults
from app.serve.openai_chat import ChatRequest
from app.serve.openai_responses import ResponsesRequest
from app.serve.pictures import Composed, check_pictures, picture_file
from app.serve.replies import Refused
from engine.ipc.messages import LARGEST_PICTURE, MOST_PICTURE_BYTES, Message, PictureFile, Sampling
from tests.app.attachments.pictures import png
from tests.app.serve.served import TEMPLATE, Served, served
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.support.engine_forks import with_libraries
from tests.support.speaking_model import write_speaking_model
from tests.support.tiny_seeing import write_speaking_seeing

RED, BLUE = png(24, 16), png(16, 24, "blue")
Part = Callable[[bytes], dict[str, Any]]


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def input_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url(data), "detail": "auto"}


def source_part(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def asked(kind: Part, turns: list[dict[str, Any]], *, sees: bool = True) -> list[Message]:
    """What the engine gets of ``turns`` in the protocol of ``kind``."""
    request: ChatRequest | ResponsesRequest | CountRequest
    if kind is chat_part:
        request = msgspec.convert({"messages": turns}, ChatRequest)
    elif kind is input_part:
        request = msgspec.convert({"input": turns}, ResponsesRequest)
    else:
        request = msgspec.json.decode(msgspec.json.encode({"messages": turns}), type=CountRequest)
    return request.generate(Defaults(), sees=sees).messages or []


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


protocols = pytest.mark.parametrize("part", [chat_part, input_part, source_part])


@protocols
def test_pictures_stand_where_they_were_given(part: Part) -> None:
    turns = [
        user(text("one"), part(RED), text("two"), text("three"), part(BLUE)),
        {"role": "assistant", "content": "four"},
        user(part(RED), text("five")),
    ]
    assert asked(part, turns) == [
        Message("user", "onetwo\nthree", pictures=[PictureFile(RED, 3), PictureFile(BLUE, 12)]),
        Message("assistant", "four"),
        Message("user", "five", pictures=[PictureFile(RED, 0)]),
    ]
    assert asked(part, [user(part(RED))]) == [Message("user", "", pictures=[PictureFile(RED)])]


@protocols
def test_a_model_that_sees_nothing_refuses_a_picture_in_the_last_question_only(part: Part) -> None:
    old = [user(text("one"), part(RED)), {"role": "assistant", "content": "two"}]
    found = asked(part, [*old, user(text("three"))], sees=False)
    assert found[0] == Message("user", "one\n[a picture that this model is not shown]")
    with pytest.raises(Refused, match="reads text only"):
        asked(part, [*old, user(part(RED))], sees=False)


@protocols
def test_what_is_asked_in_another_form_is_still_refused(part: Part) -> None:
    with pytest.raises(Refused, match="reads text and pictures only, not 'input_audio'"):
        asked(part, [user(part(RED), {"type": "input_audio"})])


def test_pictures_of_tools_and_answers_are_lines() -> None:
    line = "[a picture that this model is not shown]"
    turns = [
        user(text("look")),
        {"role": "assistant", "content": [chat_part(RED)], "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [chat_part(RED)]},
    ]
    assert [(message.content, message.pictures) for message in asked(chat_part, turns)[1:]] == [(line, [])] * 2
    result = {"type": "tool_result", "tool_use_id": "c", "content": [source_part(RED)]}
    assert asked(source_part, [user(text("look")), user(result)])[1] == Message("tool", line, tool_call_id="c")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("https://example.com/a.png", "Pictures are not fetched from 'https://example.com/a.png'"),
        ({"url": "HTTP://127.0.0.1/a.png"}, "are not fetched from"),
        ({"url": "file:///etc/passwd"}, "are not fetched from"),
        ({"type": "url", "url": "https://example.com/a.png"}, "are not fetched from"),
        ({"type": "file", "file_id": "f"}, "no data that is known here"),
        (None, "no data that is known here"),
        ({"type": "base64", "data": 3}, "no data that is known here"),
        ({"type": "base64", "data": "%%%"}, "not in base64"),
        ({"type": "base64", "data": ""}, "is no PNG, JPEG, WebP, GIF or BMP file"),
        ("data:image/svg+xml,<svg></svg>", "is no PNG, JPEG, WebP, GIF or BMP file"),
        ("data:image/png;base64", "is no PNG, JPEG, WebP, GIF or BMP file"),
        (url(b"\x89PNG\r\n\x1a\n" + bytes(LARGEST_PICTURE)), "has 20 MB, and 20 MB is the limit"),
    ],
    ids=range(12),
)
def test_what_cannot_be_read_is_refused_in_a_sentence(given: Any, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        picture_file(given, "messages[0].content")
    assert (refused.value.status, refused.value.parameter) == (400, "messages[0].content")


def test_urls_of_data_are_read_in_both_forms() -> None:
    quoted = "data:image/png," + "".join(f"%{byte:02x}" for byte in RED)
    broken = url(RED).replace(",", ",\n", 1) + "\n"
    assert picture_file(quoted, "") == picture_file(broken, "") == picture_file({"url": url(RED)}, "") == RED


def test_all_pictures_together_have_a_limit() -> None:
    third = PictureFile(bytes(MOST_PICTURE_BYTES // 3))
    check_pictures([Message("user", "", pictures=[third] * 3)])
    with pytest.raises(Refused, match="64 MB together, and 48 MB is the limit"):
        check_pictures([Message("user", "", pictures=[third, third]), Message("user", "", pictures=[third, third])])


def test_a_message_without_parts_is_empty() -> None:
    found = Composed()
    assert found.empty
    found.text("")
    assert not found.empty


# --- a model that sees -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seeing")
    model = write_speaking_seeing(folder / "seeing", "qwen3_5")
    with served(model, folder / "home", None, Defaults(Sampling(temperature=0.0)), with_libraries) as running:
        yield running


def answers(server: Served, data: bytes) -> list[tuple[str, int]]:
    """The answer to the same question in each protocol, and the tokens of its prompt."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="seeing",
            max_tokens=6,
            messages=[user(text("see"), chat_part(data), text("?"))],  # type: ignore[list-item]
        )
        response = client.responses.create(
            model="seeing",
            max_output_tokens=6,
            input=[user({"type": "input_text", "text": "see"}, input_part(data), text("?"))],  # type: ignore[list-item]
        )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        turns: Any = [user(text("see"), source_part(data), text("?"))]
        said = claude.messages.create(model="seeing", max_tokens=6, messages=turns)
        counted = claude.messages.count_tokens(model="seeing", messages=turns).input_tokens
    assert chat.usage is not None and response.usage is not None
    written = said.content[0]
    assert isinstance(written, anthropic.types.TextBlock)
    assert counted == chat.usage.prompt_tokens
    return [
        (chat.choices[0].message.content or "", chat.usage.prompt_tokens),
        (response.output_text, response.usage.input_tokens),
        (written.text, said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)),
    ]


@needs_kernels
def test_every_protocol_shows_the_model_the_same_picture(seeing: Served) -> None:
    (first, tokens), *others = answers(seeing, RED)
    assert others == [(first, tokens)] * 2
    (other, more), *_ = answers(seeing, png(48, 32, "blue"))
    assert other != first and more > tokens


@needs_kernels
def test_a_damaged_picture_and_an_address_are_refused_by_every_protocol(seeing: Served) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        for part, reason in (
            (chat_part(RED[:60]), "cannot be read, because it is damaged"),
            ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "not fetched from"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                client.chat.completions.create(model="seeing", messages=[user(part)])  # type: ignore[list-item]


@needs_kernels
def test_models_say_whether_they_see(seeing: Served, tmp_path: Path) -> None:
    def sees(server: Served) -> bool:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
            (model,) = claude.models.list().data
        # Every key of the protocol is there.
        checked = anthropic.types.ModelCapabilities.model_validate(
            model.capabilities and model.capabilities.model_dump(), strict=True
        )
        return checked.image_input.supported

    assert sees(seeing)
    with served(write_speaking_model(tmp_path / "blind", TEMPLATE), tmp_path / "home") as blind:
        assert not sees(blind)
