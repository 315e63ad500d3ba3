"""``privatellm serve`` as a person runs it: a process, the real engine, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from app.commands.root import run

pytestmark = pytest.mark.slow


def test_it_serves_until_it_is_told_to_end(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(["serve", "--status"]) == 1 and "no `privatellm serve`" in capsys.readouterr().err
    command = [sys.executable, "-P", "-m", "app.cli", "serve", "--listen", "127.0.0.1:0", "--runtime", "native"]
    process = subprocess.Popen(
        [*command, "--model", str(tiny_model("mixtral")), "--alias", "mine"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "is loaded" in line:
                break
        (serving,) = (line for line in said if line.startswith("Serving"))
        url = serving.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{url}/models") as answer:
            assert "mine" in [model["id"] for model in json.load(answer)["data"]]
        assert run(["serve", "--status"]) == 0
        out = capsys.readouterr().out
        assert url in out and "no key, this machine only" in out and "loaded; 0 answered now" in out
        port = url.split(":")[2].removesuffix("/v1")
        assert run(["serve", "--listen", f"127.0.0.1:{port}", "--model", str(tiny_model("mixtral"))]) == 1
        assert f"port {port} is in use" in capsys.readouterr().err.lower()
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "") and "Nothing is served" in rest
    finally:
        process.kill()
        process.communicate()
    assert run(["serve", "--status"]) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--listen", "0.0.0.0:0"], 1, "--new-key"),
        (["--require-key"], 1, "--new-key"),
        (["--listen", "x:99999"], 2, "65536"),
        (["--tls", "--allow-host", "ä.example"], 2, "--allow-host takes"),
        (["--allow-host", "proxy.example:443"], 2, "--allow-host takes"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    assert run(["serve", *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
