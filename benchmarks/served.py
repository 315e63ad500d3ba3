"""`privatellm serve` beside `llama_cpp.server`: the same packed file, the same requests, in one run.

    python -m benchmarks.served --models dense-q4 qwen3-q4 --work FOLDER [--rounds 5]

Both servers run at once and are asked in turns. An answer is read as clients read it, from a stream. ``one client`` and
``four clients``: tokens per second from the first request to the last token, of short prompts. ``first token``: seconds
from a request to the first text of its answer; ``fresh``: of a prompt that the server has not seen; ``kept``: the same
beginning with another question; ``kept, four clients``: likewise, for clients with beginnings of their own that ask in
turns. Needs `pip install "llama-cpp-python[server]"`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import table
from benchmarks.packed_export import SCALE, write_packed
from benchmarks.processes import ROOT
from benchmarks.subjects import PACKED, say, work_folder
from engine.calibration.samples import Spread

OURS, THEIRS = "privatellm serve", "llama_cpp.server"
CLIENTS = 4
CONTEXT = 4096
QUESTION = 32
"""Letters of a question after a kept beginning."""
SPEEDS = ("one client", "four clients")
WAITS = ("first token, fresh", "first token, kept", "first token, kept, four clients")
STARTED_S = 300.0
"""Seconds that a server may take to load its model."""


@dataclass(frozen=True)
class Reply:
    """What a client saw of an answer: seconds from its request to the first text and to the end, and its length."""

    first_s: float
    whole_s: float
    tokens: int


@dataclass(frozen=True)
class ServerProcess:
    """A server that runs, and its address."""

    name: str
    port: int
    model: str

    def ask(self, prompt: str, tokens: int) -> Reply:
        """One question of a client with a connection of its own. Raises RuntimeError if the answer is not whole."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": True,
            **{"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        with contextlib.closing(connection):
            begun = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.name}: {response.status} {response.read(500).decode(errors='replace')}")
            first, reason = 0.0, ""
            for choice in choices_of(response):
                if not first and choice["delta"].get("content"):
                    first = time.perf_counter() - begun
                reason = choice.get("finish_reason") or reason
            whole = time.perf_counter() - begun
        if reason != "length":
            raise RuntimeError(f"{self.name} ended an answer by {reason or 'nothing'} before its limit")
        return Reply(first, whole, tokens)


def choices_of(lines: Iterator[bytes] | Any) -> Iterator[dict[str, Any]]:
    """The choices in the events of a stream."""
    for line in lines:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise RuntimeError(f"an answer failed: {event['error']}")
            yield from event["choices"]


def letters(count: int, generator: random.Random) -> str:
    """A text of ``count`` tokens."""
    return "".join(generator.choices(ascii_lowercase + " ", k=count))


# --- the servers ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(name: str, model: Path, threads: int, home: Path, log: Path) -> Iterator[ServerProcess]:
    """Start the server ``name``, which is ended with the block. Raises RuntimeError if it does not start."""
    port = free_port()
    if name == OURS:
        command = ["app.cli", "serve", "--listen", f"127.0.0.1:{port}", "--partitioning", "cpu"]
        command += ["--model", str(model), "--threads", str(threads), "--context", str(CONTEXT)]
    else:
        command = ["llama_cpp.server", "--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
        command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", str(CONTEXT)]
        # Its defaults end the stream of one client when another one asks, and compute the logits of every token.
        command += ["--interrupt_requests", "false", "--logits_all", "false"]
        command += ["--use_mlock", "false", "--verbose", "false"]
    environment = {**os.environ, "PRIVATELLM_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield ServerProcess(name, port, started(name, process, port, log))
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def started(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """The name of the model, once the server answers with it. Raises RuntimeError."""
    deadline = time.monotonic() + STARTED_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/v1/models")
            models = json.loads(connection.getresponse().read())["data"]
            if name != OURS or is_loaded(port):
                found: str = models[0]["id"]
                return found
        time.sleep(0.2)
    raise RuntimeError(f"{name} does not start; its output is in {log}.")


def is_loaded(port: int) -> bool:
    """Ours listens before its model is loaded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


# --- what is measured -------------------------------------------------------------------------------------------------

Measured = dict[str, dict[str, float]]
"""[server][measure]: tokens per second, or seconds."""


def measure_round(asked: Sequence[ServerProcess], seed: int, arguments: argparse.Namespace) -> Measured:
    """The servers take turns at each measure."""
    found: Measured = {each.name: {} for each in asked}
    for measure in (*SPEEDS, *WAITS):
        for each in asked:
            generator = random.Random(f"{seed} {measure}")
            if measure in SPEEDS:
                clients = 1 if measure == "one client" else CLIENTS
                found[each.name][measure] = tokens_per_s(each, clients, generator, arguments)
            else:
                clients = CLIENTS if measure.endswith("four clients") else 1
                found[each.name][measure] = first_token_s(each, clients, generator, arguments, measure != WAITS[0])
    return found


def tokens_per_s(asked: ServerProcess, clients: int, generator: random.Random, arguments: argparse.Namespace) -> float:
    """Of ``clients`` that ask at once."""
    prompts = [letters(arguments.short, generator) for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        begun = time.perf_counter()
        replies = list(pool.map(lambda prompt: asked.ask(prompt, arguments.tokens), prompts))
        return sum(reply.tokens for reply in replies) / (time.perf_counter() - begun)


def first_token_s(
    asked: ServerProcess, clients: int, generator: random.Random, arguments: argparse.Namespace, kept: bool
) -> float:
    """The median over ``clients`` that ask one after another, each with its own beginning."""
    beginnings = [letters(arguments.prompt, generator) for _ in range(clients)]
    if kept:
        for beginning in beginnings:
            asked.ask(beginning + letters(QUESTION, generator), 2)
    replies = [asked.ask(beginning + letters(QUESTION, generator), 2) for beginning in beginnings]
    return statistics.median(reply.first_s for reply in replies)


def report(title: str, rounds: Sequence[Measured]) -> str:
    """Markdown: medians over the rounds with their range, and how much better ours is."""
    rows = []
    for measure in (*SPEEDS, *WAITS):
        values = {name: [each[name][measure] for each in rounds] for name in (OURS, THEIRS)}
        faster = [a / b if measure in SPEEDS else b / a for a, b in zip(values[OURS], values[THEIRS], strict=True)]
        ours, theirs = (statistics.median(values[name]) for name in (OURS, THEIRS))
        ratio = ours / theirs if measure in SPEEDS else theirs / ours
        rows.append(
            [
                measure + (", tokens/s" if measure in SPEEDS else ", ms"),
                *(cell(values[name], 1 if measure in SPEEDS else 1000) for name in (OURS, THEIRS)),
                f"{ratio:.2f} ({min(faster):.2f}–{max(faster):.2f})",
            ]
        )
    return "\n".join([f"### {title}", "", *table(["", OURS, THEIRS, "times as fast"], rows)])


def cell(values: Sequence[float], scale: float) -> str:
    spread = Spread.of([scale * value for value in values])
    digits = 1 if spread.median < 100 else 0
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def measure_model(name: str, arguments: argparse.Namespace) -> list[Measured]:
    """All rounds on one model, which is written if it is not there."""
    _, shape, mix = PACKED[name]
    scale = getattr(shape, "embedding_scale", SCALE)
    model = write_packed(arguments.work / f"{name}-letters.gguf", shape.config(), mix, scale, letters=True)
    log = arguments.work / "servers.log"
    rounds = []
    with TemporaryDirectory() as home, contextlib.ExitStack() as running:
        servers = [
            running.enter_context(server(each, model, arguments.threads, Path(home), log)) for each in (OURS, THEIRS)
        ]
        # A round that is not counted: pages come in, threads start.
        for each in servers:
            each.ask(letters(arguments.short, random.Random(0)), 8)
        for number in range(arguments.rounds):
            say(f"{name}, round {number + 1} of {arguments.rounds}")
            rounds.append(measure_round(servers[:: 1 if number % 2 else -1], number, arguments))
    return rounds


def parse(values: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PACKED), default=["dense-q4", "qwen3-q4"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=64, help="tokens of the prompts whose answers are timed")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of these answers")
    parser.add_argument("--prompt", type=int, default=1200, help="tokens of the beginnings that are kept")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    arguments = parser.parse_args(values)
    for flag in ("rounds", "short", "tokens", "prompt", "threads"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag} must be 1 or more")
    arguments.work = work_folder(arguments)
    return arguments


def main(values: Sequence[str] | None = None) -> int:
    arguments = parse(values)
    if importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("sse_starlette") is None:
        raise SystemExit('llama_cpp.server is not installed: pip install "llama-cpp-python[server]".')
    everything = {}
    for name in arguments.models:
        everything[name] = rounds = measure_model(name, arguments)
        print(report(f"{PACKED[name][1].title}, {PACKED[name][2]}", rounds), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
