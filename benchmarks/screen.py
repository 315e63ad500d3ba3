"""What the screen costs: decoding with the chat open and its timing panel on, against ``ask`` without a screen.

    python -m benchmarks.screen

The real chat runs in a pseudo-terminal of its own, in a home of its own; what is typed and what is drawn go through
that terminal. Tokens per second are those of the engine's Finished events: the chat keeps them with each answer,
``ask --json`` prints them. The question and the answer (temperature 0) are the same in both. A character's echo is the
time from writing it to the terminal until the terminal is told to draw it, while an answer is being written.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.compare import machine
from benchmarks.measuring import table
from benchmarks.processes import ROOT
from benchmarks.subjects import say
from benchmarks.targets import screen_verdicts, targets_table
from benchmarks.terminal import Terminal, TerminalError
from engine.calibration.samples import Spread

QUESTION = "Write a long story about a lighthouse keeper who finds a message in a bottle."
PROBES = "ЖЩЫЮЯЭФЦЧШЪЬБДЗИЛПУ"
"""Letters that an English answer does not hold: where one is drawn, it is what was typed."""

PLACEHOLDER = b"Ask something"
"""What the chat draws where one types, once it is ready for typing."""
CTRL_N, CTRL_Q, F5, BACKSPACE = b"\x0e", b"\x11", b"\x1b[15~", b"\x7f"
ANSWER_LIMIT = 120.0
NO_ANSWER = (0, "", 0, 0.0, 0)


def make_home(home: Path, models: Path, model: str, tokens: int, threads: int) -> dict[str, str]:
    """A home with the models of another and settings of its own; the environment of programs that live in it."""
    from app.settings.file import SettingsFile

    home.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models, target_is_directory=True)
    settings = SettingsFile(home / "config" / "settings.toml")
    wanted = {"model": model, "temperature": 0.0, "max_tokens": tokens, "cpu_threads": threads, "partitioning": "cpu"}
    for key, value in wanted.items():
        settings.change(key, value)
    # COLUMNS and LINES would be believed before the terminal's own size.
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    return {**inherited, "PRIVATELLM_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": "truecolor"}


def ask(environment: dict[str, str]) -> dict[str, Any]:
    """One answer without a screen: the object that ``ask --json`` prints. Raises TerminalError."""
    command = [sys.executable, "-m", "app.cli", "ask", QUESTION, "--json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TerminalError(f"`privatellm ask` failed: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class Chat:
    """The chat in a terminal, and its database beside it."""

    def __init__(self, environment: dict[str, str], home: Path) -> None:
        command = [sys.executable, "-m", "app.cli"]
        self.terminal = Terminal(command, environment, ROOT, columns=160, rows=48)
        self._database = home / "data" / "conversations.sqlite"
        self._known = 0

    def _newest(self) -> tuple[int, str, int, float, int]:
        """(id, state, tokens, tokens per second, characters) of the newest answer; id 0 if there is none."""
        if not self._database.is_file():
            return NO_ANSWER
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, timeout=5)) as connection:
            fields = "id, state, tokens, tokens_per_s, length(content)"
            query = f"SELECT {fields} FROM message WHERE role = 'assistant' ORDER BY id DESC LIMIT 1"
            try:
                row = connection.execute(query).fetchone()
            except sqlite3.OperationalError:  # the tables are being made
                row = None
        return row or NO_ANSWER

    def ask(self) -> None:
        """Put the question in a conversation of its own; returns when its answer has begun to arrive."""
        self.terminal.write(CTRL_N)
        time.sleep(0.5)
        self.terminal.write(QUESTION.encode() + b"\r")
        self._wait(lambda newest: newest[0] > self._known and newest[4] > 0, "the beginning of the answer")

    def answered(self) -> tuple[int, float]:
        """Wait for the end of the answer: (tokens, tokens per second) as the engine's Finished event told them."""
        self._wait(lambda newest: newest[1] != "writing", "the end of the answer")
        self._known, state, tokens, speed, _ = self._newest()
        if state != "complete":
            raise TerminalError(f"The answer ended as {state}.")
        return tokens, speed

    def writing(self) -> bool:
        return self._newest()[1] == "writing"

    def _wait(self, condition: Any, what: str) -> None:
        end = time.monotonic() + ANSWER_LIMIT
        while not condition(self._newest()):
            if not self.terminal.alive():
                raise TerminalError("The chat ended while it was measured.")
            if time.monotonic() > end:
                raise TerminalError(f"The chat did not come to {what} in {ANSWER_LIMIT:.0f} s.")
            time.sleep(0.1)

    def echoes(self) -> list[float]:
        """Type letters while the answer runs, one at a time; seconds until each is drawn."""
        found = []
        for letter in PROBES:
            if not self.writing():
                break
            found.append(self.terminal.echo(letter.encode(), timeout=5.0))
            self.terminal.write(BACKSPACE)
            time.sleep(0.15)
        return found


def measure(environment: dict[str, str], home: Path, rounds: int, panel: bool) -> dict[str, Any]:
    """Alternating answers of ``ask`` and of the chat, then the echo. The first of each is not counted."""
    result: dict[str, Any] = {"headless": [], "chat": [], "echo_s": [], "tokens": []}
    chat = Chat(environment, home)
    try:
        chat.terminal.wait_for(PLACEHOLDER, timeout=60.0)
        if panel:
            chat.terminal.write(F5)
        for index in range(rounds + 1):
            say(f"  round {index} of {rounds}" + (" (not counted)" if not index else ""))
            headless = ask(environment)
            chat.ask()
            tokens, speed = chat.answered()
            if tokens != headless["completion_tokens"]:
                raise TerminalError(f"The chat answered {tokens} tokens, ask {headless['completion_tokens']}.")
            if index:
                result["headless"].append(headless["tokens_per_s"])
                result["chat"].append(speed)
                result["tokens"].append(tokens)
                chat.ask()
                result["echo_s"] += chat.echoes()
                chat.answered()
            result["runs"] = {key: headless.get(key) for key in ("runtime", "trunk", "executor")}
    finally:
        chat.terminal.close(CTRL_Q)
    return result


def report(result: dict[str, Any]) -> str:
    """Markdown: tokens per second of both and the echo, then their targets."""
    spreads = [("`ask`, tokens/s", result["headless"]), ("chat, tokens/s", result["chat"])]
    if result["echo_s"]:
        milliseconds = [1000 * seconds for seconds in result["echo_s"]]
        spreads.append((f"echo of {len(milliseconds)} characters while answering, ms", milliseconds))
    rows = []
    for what, values in spreads:
        spread = Spread.of(values)
        rows.append([what, f"{spread.median:.1f} ({spread.low:.1f}–{spread.high:.1f})"])
    panel = "timing panel on" if result["panel"] else "no panel"
    title = f"{result['model']}, {panel}, answers of {result['tokens'][0]} tokens"
    lines = [title, "", *table(["", "median (range)"], rows), "", targets_table(screen_verdicts(result))]
    if not result["echo_s"]:
        lines += ["", "The answers were too short for typing in between: give more --tokens."]
    return "\n".join(lines)


def main(values: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter", help="a model that is on this machine, with a tokenizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="length of an answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-panel", action="store_true", help="leave the timing panel closed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(values)
    if min(arguments.rounds, arguments.tokens, arguments.threads) < 1:
        parser.error("--rounds, --tokens and --threads must be 1 or more")
    from engine.system.locations import locate

    panel = not arguments.no_panel
    with tempfile.TemporaryDirectory(prefix="privatellm-screen-") as folder:
        home = Path(folder) / "home"
        environment = make_home(home, locate("models"), arguments.model, arguments.tokens, arguments.threads)
        try:
            result = measure(environment, home, arguments.rounds, panel)
        except TerminalError as error:
            say(str(error))
            return 1
    result |= {"machine": machine(arguments.threads), "model": arguments.model, "panel": panel}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    print(report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
