"""The timings of an answer: llama.cpp's figures, and why a prompt was read again, which only its own client is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from app.commands.serve import show_status
from app.running_servers import RunningServer, announced, servers_folder
from app.serve.gate import Rules, hash_of
from tests.app.serve.served import MODEL, TEMPLATE, Served, served
from tests.support.speaking_model import write_speaking_model


@pytest.fixture(scope="module", params=["no key", "key"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, bool]]:
    folder = tmp_path_factory.mktemp("timings")
    keyed = request.param == "key"
    rules = Rules(key_hash=hash_of("secret"), token_hash=hash_of("token")) if keyed else Rules()
    with served(write_speaking_model(folder / MODEL, TEMPLATE), folder / "home", rules) as server:
        yield server, keyed


def messages(day: str, question: str = "Why?") -> Any:
    return [{"role": "system", "content": f"Today is {day}, all is well."}, {"role": "user", "content": question}]


def test_a_changed_date_is_told_in_both_protocols(
    asked: tuple[Served, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, keyed = asked
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        first = chat(client, "Monday")
        assert first["cache_n"] == 0 and first["prompt_n"] > 40 and first["predicted_n"] == 2
        assert first["read_again"] is None and first["prompt_ms"] > 0 and first["predicted_per_second"] > 0
        changed = chat(client, "Sunday")
        why = changed["read_again"]
        assert (why["cause"], why["message"], why["role"]) == ("changed", 0, "system")
        assert (why["before"] != "") == (why["now"] != "") == keyed
        if keyed:
            assert "Mon" in why["before"] and "Sun" in why["now"]
        *_, last = client.chat.completions.create(
            model=MODEL, messages=messages("Friday"), max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        assert extra(last)["read_again"]["cause"] == "changed"
        assert chat(client, "Sunday, my dear", user="another")["read_again"] is None
        answer = client.responses.create(model=MODEL, input="Hello, what is this?", max_output_tokens=2)
        assert extra(answer)["predicted_n"] == 2
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as claude:
        said = claude.messages.create(
            model=MODEL, max_tokens=2, system="Today is Tuesday, all is well.", messages=messages("")[1:]
        )
        assert extra(said)["read_again"] is None
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    running = RunningServer(
        pid=os.getpid(), url=server.url, host="127.0.0.1", port=server.port, model=MODEL, since=time.time(), tls=False,
        key=keyed, token="token",
    )  # fmt: skip
    with announced(servers_folder(), running):
        assert show_status() == 0
    out = capsys.readouterr().out
    assert "read again: 2 prompts, because an earlier message differs from what was kept (system)" in out
    assert "day" not in out, "no text of clients"


def chat(client: openai.OpenAI, day: str, **more: Any) -> dict[str, Any]:
    return extra(client.chat.completions.create(model=MODEL, messages=messages(day), max_tokens=2, **more))


def extra(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["timings"]
    return found
