"""Worker processes: one engine each, asked over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import process_life

ROOT = Path(__file__).resolve().parents[1]


class WorkerFailed(Exception):
    """A worker could not do what it was asked; the text says what the engine said."""


def run_privatellm(arguments: Sequence[str], home: str, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON that `privatellm` prints, with its data in the folder ``home``. Raises SystemExit if it fails."""
    command = [*prefix, sys.executable, "-m", "app.cli", *arguments, "--json"]
    environment = {**os.environ, "PRIVATELLM_HOME": home}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"privatellm {' '.join(arguments)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Worker:
    """One ``benchmarks.worker`` process. Use as a context manager: leaving it ends the process.

    ``prefix`` is the beginning of its command line: a program that runs another, perhaps within a limit."""

    def __init__(self, engine: str, model: Path | None, threads: int, log: Path, prefix: Sequence[str] = ()) -> None:
        self.engine = engine
        self._log = log
        command = [*prefix, sys.executable, "-m", "benchmarks.worker", "--engine", engine, "--threads", str(threads)]
        if model is not None:
            command += ["--model", str(model)]
        # Ours runs as it does under the chat; the others as their users find them.
        product = process_life.environment(threads) if engine.startswith("privatellm") else {}
        environment = {**os.environ, **product, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment
            )
        self.load_s: float | None = None

    def __enter__(self) -> Worker:
        self.load_s = self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, do: str, **parameters: Any) -> Any:
        """Send one request and wait for its answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **parameters}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerFailed(f"The {self.engine} process ended with code {code}; its output is in {self._log}.")
        message = json.loads(line)
        if "error" in message:
            raise WorkerFailed(f"{self.engine}: {message['error']} (output in {self._log})")
        return message["ok"]
