"""``privatellm`` as a person and a script run it: a process, the real engine, a tiny model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.commands.root import run
from tests.app.scripted import SCRIPT, fork_engines, install

pytestmark = pytest.mark.slow

PROMPT = "5,17,33,101,8"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PRIVATELLM_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


def privatellm(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "app.cli", *arguments]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def engines(environment: dict[str, str]) -> list[int]:
    """Engine processes that belong to this test."""
    found = []
    for process in psutil.process_iter():
        try:
            is_engine = not {"engine.host", str(SCRIPT)}.isdisjoint(process.cmdline())
            if is_engine and process.environ().get("PRIVATELLM_HOME") == environment["PRIVATELLM_HOME"]:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def ask_json(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        privatellm("ask", "--json", *arguments), env=environment, capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.soak
def test_greedy_tokens_equal_transformers(model: Path, environment: dict[str, str]) -> None:
    answer = ask_json(
        environment, "--model", str(model), "--prompt-ids", PROMPT, "--temperature", "0", "--max-tokens", "12",
    )  # fmt: skip
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([[int(token) for token in PROMPT.split(",")]])
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert answer["token_ids"] == expected
    assert (answer["prompt_tokens"], answer["prefilled_tokens"]) == (5, 5)
    assert answer["completion_tokens"] == len(expected)
    assert answer["finish_reason"] == ("length" if len(expected) == 12 else "stop")
    assert len(answer["timing"]["layers"]) == theirs.config.num_hidden_layers
    assert set(answer["timing"]["layers"][0]) == {"attention", "router", "experts", "exchange", "wait", "other"}
    assert answer["timing"]["per_token_ms"] > 0
    assert sum(map(sum, answer["timing"]["expert_use"])) > 0


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """``ask(*arguments)``: status, output and errors of a question of this process, to a forked engine."""
    monkeypatch.setenv("PRIVATELLM_HOME", environment["PRIVATELLM_HOME"])
    fork_engines(monkeypatch)

    def asked(*arguments: str) -> tuple[int, str, str]:
        return run(["ask", "--no-stdin", *arguments]), *capsys.readouterr()

    return asked


def test_beams(model: Path, ask: Ask) -> None:
    status, out, _ = ask("--json", "--model", str(model), "--prompt-ids", PROMPT, "--beams", "3", "--max-tokens", "6")
    answer = json.loads(out)
    scores = [beam["score"] for beam in answer["beams"]]
    assert status == 0 and len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert answer["beams"][0]["token_ids"] == answer["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--prompt-ids", "5,100000"), 2, "100000"),
        (("--prompt-ids", ",".join(["7"] * 600)), 1, "600"),
        (("a text without a tokenizer",), None, "tokenizer"),
    ],
)
def test_what_the_engine_refuses(
    model: Path, ask: Ask, arguments: tuple[str, ...], status: int | None, said: str
) -> None:
    ended, out, errors = ask("--model", str(model), *arguments)
    assert ended == status or (status is None and ended in (1, 2))
    assert said in errors and "Traceback" not in errors and out == ""


def test_a_damaged_model_is_one_line(model: Path, ask: Ask, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        data = file.read_bytes()
        (damaged / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    status, out, errors = ask("--model", str(damaged), "--prompt-ids", "1")
    assert (status, out) == (1, "")
    assert errors.count("\n") == 1 and "safetensors" in errors


# --- ctrl-c -------------------------------------------------------------------------------------------------------


_SCRIPTED = f"""
import sys
from app import engine_process
engine_process.host_command = lambda: (sys.executable, {str(SCRIPT)!r})
from app.cli import main
sys.exit(main())
"""


def asking(model: Path) -> list[str]:
    """A question whose answer is long."""
    return privatellm("ask", "--model", str(model), "--prompt-ids", PROMPT, "--max-tokens", "480")


def over_the_script(environment: dict[str, str], *arguments: str) -> list[str]:
    """A command over the scripted engine, whose answers last as long as a test wants."""
    install(Path(environment["PRIVATELLM_HOME"]))
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    return [sys.executable, "-P", "-c", _SCRIPTED, *arguments]


class Interrupted:
    """A run of a command that is followed import by import, so that ctrl-c can come at a chosen moment.

    ``-X importtime`` writes a line per import. The first line after the module that answers ctrl-c means that it does.
    """

    def __init__(self, environment: dict[str, str], command: list[str], stdout: int = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [command[0], "-X", "importtime", *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.said = ""
        self.until("app.interrupts")
        self.imports(1)

    def imports(self, count: int) -> bool:
        """Read ``count`` more lines; false at the end."""
        assert self.process.stderr is not None
        for _ in range(count):
            line = self.process.stderr.readline()
            self.said += line
            if not line:
                return False
        return True

    def until(self, text: str) -> None:
        """Read up to the line with ``text``."""
        while text not in self.said:
            assert self.imports(1), self.said

    def interrupt(self) -> tuple[int, str, str]:
        """Ctrl-c in the terminal reaches the whole foreground group; exit status, stdout, stderr."""
        os.killpg(self.process.pid, signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        errors = [line for line in (self.said + err).splitlines() if not line.startswith("import time:")]
        return self.process.returncode, out or "", "\n".join(errors)


SOAK = pytest.mark.soak


@pytest.mark.parametrize("imports", [0, 40, 100, *(pytest.param(n, marks=SOAK) for n in (1, 5, 20, 60, 80, 120))])
def test_ctrl_c_while_starting(model: Path, environment: dict[str, str], imports: int) -> None:
    asked = Interrupted(environment, asking(model))
    asked.imports(imports)
    assert asked.interrupt()[::2] == (130, "")
    wait_until(lambda: engines(environment) == [], "the engine ends")


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 6))])
def test_ctrl_c_at_any_later_moment(model: Path, environment: dict[str, str], seed: int) -> None:
    asked = Interrupted(environment, asking(model))
    wait_until(lambda: bool(engines(environment)), "the engine starts")
    time.sleep(random.Random(seed).uniform(0, 4))
    ended_before = asked.process.poll() is not None
    if ended_before:
        assert asked.process.communicate()[0] and asked.process.returncode == 0
    else:
        status, _, errors = asked.interrupt()
        assert (status, errors) in ((130, ""), (0, ""))
    wait_until(lambda: engines(environment) == [], "the engine ends")


def test_ctrl_c_during_the_answer_keeps_what_was_printed(environment: dict[str, str]) -> None:
    asked = Interrupted(environment, over_the_script(environment, "ask", "--no-stdin", "wait:"))
    assert asked.process.stdout is not None
    first = asked.process.stdout.read(1)
    status, rest, errors = asked.interrupt()
    # The rest of the word is in the buffer of the text that was read.
    assert (status, first, rest[-1:]) == (130, "u", "\n") and "Traceback" not in errors
    wait_until(lambda: engines(environment) == [], "the engine ends")


def test_ctrl_c_with_json_gives_the_answer_so_far(environment: dict[str, str]) -> None:
    asked = Interrupted(environment, over_the_script(environment, "ask", "--no-stdin", "--json", "wait:noted"))
    asked.until("the answer began")
    status, out, errors = asked.interrupt()
    assert status == 130 and "Traceback" not in errors
    assert json.loads(out)["finish_reason"] == "cancelled"
    wait_until(lambda: engines(environment) == [], "the engine ends")


def test_kill_9_leaves_no_engine(model: Path, environment: dict[str, str]) -> None:
    asked = Interrupted(environment, asking(model))
    wait_until(lambda: bool(engines(environment)), "the engine starts")
    asked.process.kill()
    asked.process.communicate()
    wait_until(lambda: engines(environment) == [], "the engine ends")


def test_a_reader_that_leaves_is_no_failure(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        over_the_script(environment, "ask", "--no-stdin", "many:30000"),  # more than a pipe holds
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    errors = [line for line in process.stderr if not line.startswith("note: ")]
    assert (process.wait(), errors) == (0, [])
    process.stderr.close()
    assert engines(environment) == []


@pytest.mark.parametrize(("arguments", "status"), [(("x", "--no-such-flag"), 2), (("x", "--model", "nope"), 1)])
def test_what_is_refused_leaves_no_engine(environment: dict[str, str], arguments: tuple[str, ...], status: int) -> None:
    command = privatellm("ask", *arguments)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (status, "") and "Traceback" not in result.stderr
    assert engines(environment) == []


def test_a_model_without_a_tokenizer_answers_in_ids(model: Path, ask: Ask) -> None:
    flags = ("--model", str(model), "--prompt-ids", PROMPT, "--temperature", "0", "--max-tokens", "4")
    _, out, _ = ask(*flags)
    assert [int(token) for token in out.split(",")] == json.loads(ask("--json", *flags)[1])["token_ids"]


def test_without_a_terminal_there_is_no_chat(environment: dict[str, str]) -> None:
    result = subprocess.run(
        privatellm(), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "the chat needs a terminal" in result.stderr and result.stderr.count("\n") == 1


def test_commands_load_only_what_they_need(environment: dict[str, str]) -> None:
    program = "import sys, app.commands.ask, app.commands.question, app.commands.models, app.commands.doctor, " \
        "app.commands.root, app.conversations.database, app.settings.file; print(*sys.modules)"  # fmt: skip
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert loaded & {"textual", "rich", "torch", "transformers", "mlx", "grpc", "numpy", "huggingface_hub"} == set()
    result = subprocess.run(
        [sys.executable, "-c", "import sys, app.cli; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert set(result.stdout.split()) & {"click", "asyncio", "msgspec", "psutil", "sqlite3", "tomlkit"} == set()


def test_a_question_is_read_without_importing_what_takes_long(environment: dict[str, str]) -> None:
    settings = Path(environment["PRIVATELLM_HOME"]) / "config" / "settings.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[model]\nmodel = 'starter'\n")
    program = (
        "import sys; from app.commands.root import run; run(['locate', 'data'])\n"
        "from app.commands.question import Flags, question_from\n"
        "assert question_from(Flags(prompt='x', stdin=False)).load.model == 'starter'\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    slow = {"typer", "pydantic", "importlib.metadata", "email", "tomlkit", "hashlib", "difflib", "psutil", "sqlite3"}
    assert set(result.stdout.split()) & slow == set()
