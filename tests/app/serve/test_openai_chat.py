"""``/v1/chat/completions`` as OpenAI's own client uses it."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from typing import Any

import openai
import pytest

from app.engine_client import EngineClient
from app.serve import model_service
from tests.app.serve.served import MODEL, Served
from tests.support.eventually import eventually

QUESTION: Any = [{"role": "user", "content": "ab"}]


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_completion_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert whole.usage is not None and chunks[-1].usage is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 8
    assert whole.usage.prompt_tokens == 3 + len("user\nabassistant\n")
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    def said(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="other", messages=QUESTION, max_tokens=8, temperature=2.0, seed=seed
        )
        return answer.choices[0].message.content

    assert said(1) == said(1) != said(2)


def test_beams_give_several_answers(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "n": 2, "extra_body": {"beams": 3}}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 2
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("wrong", "status", "parameter", "said"),
    [
        ({"model": "nobody"}, 404, "model", "--alias nobody"),
        ({"max_tokens": "many"}, 400, "max_tokens", "int"),
        ({"temperature": 3}, 400, "temperature", "2.0"),
        ({"messages": []}, 400, "messages", "length"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content", "text only"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "maximum context length"),
        ({"guided_json": {"type": "object"}}, 400, "guided_json", "leave guided_json out"),
        ({"structured_outputs": {"regex": "a"}}, 400, "structured_outputs", "leave structured_outputs out"),
        ({"grammar": "root ::= x"}, 400, "grammar", "leave grammar out"),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, 400, None, "hiccup"),
        ({"n": 3, "beams": 2}, 400, "n", "2 beams"),
        ({"response_format": {"type": "poem"}}, 400, "response_format", "poem"),
        ({"tool_choice": "required"}, 400, "tool_choice", "no tools"),
        ({"reasoning_effort": "endless"}, 400, "reasoning_effort", "endless"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_said_in_the_form_of_the_protocol(
    client: openai.OpenAI, wrong: dict[str, Any], status: int, parameter: str | None, said: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "stream": stream, **wrong}
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.status_code == status and said in str(caught.value)
    assert isinstance(caught.value.body, dict) and caught.value.body["param"] == parameter
    assert str(caught.value.body["message"]).endswith(".")


def test_fields_that_nobody_knows_are_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, store=False, service_tier="auto", extra_body={"x": {"y": [None]}}
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_client_that_leaves_ends_its_answer(client: openai.OpenAI, server: Served) -> None:
    before = server.service.metrics.answers.get("cancelled", 0)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=450, stream=True, stop=["\x00\x00\x00\x00"]
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: server.service.metrics.answers.get("cancelled", 0) == before + 1)
    eventually(lambda: server.service.running == 0)


def test_ten_at_once_are_answered(client: openai.OpenAI, server: Served) -> None:
    said: list[str | None] = []

    def ask(number: int) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=6, user=f"user {number % 3}")
        said.append(answer.choices[0].message.content)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 10 and len(set(said)) == 1
    assert server.service.waiting == server.service.running == 0


def test_models_health_and_metrics(client: openai.OpenAI, server: Served) -> None:
    assert MODEL in [model.id for model in client.models.list()] and client.models.retrieve("other").id == "other"
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert "privatellm_model_loaded 1" in lines
    assert any(line.startswith('privatellm_requests_total{path="/v1/chat/completions",status="200"}') for line in lines)
    client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert server.service.metrics.measured_tokens > 0  # somebody has read the figures
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_too_many_that_wait_are_refused(client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_service, "MOST_WAITING", 0)
    with pytest.raises(openai.RateLimitError, match="waiting already"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert server.service.waiting == 0


def test_one_that_waits_outlives_the_engine(client: openai.OpenAI, server: Served) -> None:
    engine = server.service._engine
    assert isinstance(engine, EngineClient) and engine.pid is not None
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=450, stream=True, stop=["\x00\x00\x00\x00"]
    )
    next(iter(stream))
    os.kill(engine.pid, signal.SIGSTOP)
    assert server.service.running == 1
    said: list[str | None] = []

    def ask() -> None:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2, user="another")
        said.append(answer.choices[0].message.content)

    waiting = threading.Thread(target=ask)
    waiting.start()
    eventually(lambda: server.service.waiting == 1)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine was killed"):
        list(stream)
    waiting.join(60)
    assert len(said) == 1 and said[0]
    assert server.service.waiting == server.service.running == 0


def test_an_engine_that_dies_is_started_again(client: openai.OpenAI, server: Served) -> None:
    engine = server.service._engine
    assert isinstance(engine, EngineClient) and engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    eventually(lambda: not engine.running)
    with urllib.request.urlopen(f"{server.url}/") as answer:
        assert answer.status == 200
    assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2).choices[0].message.content
