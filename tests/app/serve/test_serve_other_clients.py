"""Clients from the package index, each in an environment of its own, against the starter model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.serve.served import Served, served

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

LITELLM = """
import litellm, sys
url = sys.argv[1]
for model, base in (("openai/starter", url + "/v1"), ("anthropic/starter", url)):
    asked = dict(model=model, api_base=base, api_key="none", max_tokens=12, temperature=0)
    asked["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    whole = litellm.completion(**asked)
    assert whole.usage.completion_tokens > 0
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert streamed == whole.choices[0].message.content != "", (streamed, whole)
    asked["messages"] = [{"role": "user", "content": "word " * 9000}]
    try:
        litellm.completion(**asked)
    except litellm.ContextWindowExceededError:
        print("ok")
"""
"""Both protocols, whole and streamed; a prompt that is too long is known as one."""


@pytest.fixture(scope="module")
def starter_server(starter_home: Path) -> Iterator[Served]:
    with served(Path("starter"), starter_home) as running:
        yield running


def installed(request: pytest.FixtureRequest, package: str) -> Path:
    """The folder of programs of an environment with ``package``, kept in pytest's cache between runs."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("clients") / package
    programs = folder / "bin"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = subprocess.run([programs / "pip", "install", "-q", package], capture_output=True, text=True, check=False)
        if pip.returncode:
            pytest.skip(f"{package} cannot be installed here: {pip.stderr[-300:]}")
        (folder / "complete").touch()
    return programs


def test_llm(request: pytest.FixtureRequest, starter_server: Served, tmp_path: Path) -> None:
    programs = installed(request, "llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: starter\n  api_base: {starter_server.url}/v1\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        result = subprocess.run(
            [programs / "llm", "-m", "mine", "-o", "temperature", "0", "-o", "max_tokens", "8", *more, "Say hello."],
            capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert result.returncode == 0 and result.stdout.strip(), result.stderr


def test_litellm(request: pytest.FixtureRequest, starter_server: Served) -> None:
    programs = installed(request, "litellm")
    result = subprocess.run(
        [programs / "python", "-c", LITELLM, starter_server.url], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and result.stdout.count("ok") == 2, result.stderr[-2000:]


def test_aider(request: pytest.FixtureRequest, starter_server: Served, tmp_path: Path) -> None:
    programs = installed(request, "aider-chat")
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a\n")
    environment = {
        **os.environ, "HOME": str(tmp_path), "OPENAI_API_BASE": f"{starter_server.url}/v1", "OPENAI_API_KEY": "none",
    }  # fmt: skip
    result = subprocess.run(
        [
            programs / "aider", "--model", "openai/starter", "--no-git", "--yes-always", "--no-pretty",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--message", "Fix add.", "calc.py",
        ],
        capture_output=True, text=True, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert result.returncode == 0 and "tokens: " in result.stdout.lower(), result.stdout + result.stderr
