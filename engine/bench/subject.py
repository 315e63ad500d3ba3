"""The common parts of all measurements of a loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from engine.calibration.memory_rate import BUFFER_BYTES
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.runtimes.protocol import Interrupted, LoadedModel, TokenRows

PROMPT_TOKENS = 64
"""Tokens of the prompt before decoding is measured, so that there is something to attend to."""
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class BenchSubject:
    """A loaded model to measure. ``threads`` is its number of CPU threads. ``weight_bytes`` are read to decode a
    token."""

    model: LoadedModel
    facts: ModelFacts
    rounds: int
    prefill_chunk: int
    threads: int
    weight_bytes: int
    report: ProgressCallback
    """Raises Cancelled if somebody asked to stop."""
    cancelled: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    unsteady_reason: Callable[[Sequence[float]], str] = lambda samples: ""
    """Why what was measured is not to be kept for plans, given what one thing took again and again; empty: it is."""
    buffer_bytes: int = BUFFER_BYTES
    """Bytes that are read to measure the rate of memory."""

    @property
    def on_cpu(self) -> bool:
        return self.facts.device == "cpu"

    def prompt_tokens(self, room: int) -> int:
        """Tokens of the prompt before decoding, such that ``room`` more fit in the context.

        Raises ModelError if they do not.
        """
        tokens = min(PROMPT_TOKENS, self.facts.context_limit - room)
        if tokens < 1:
            raise ModelError(
                f"The context of {self.facts.context_limit} tokens is too short to measure {room} steps; "
                "load the model with a larger context limit.",
                kind="context",
            )
        return tokens


def random_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """Token ids without repetition, as greedy loops would use the same few experts again and again."""
    lowest = min(3, vocabulary - 1)
    tokens: list[int] = np.random.default_rng(seed).integers(lowest, vocabulary, count).tolist()
    return tokens


def read_prompt(subject: BenchSubject, rows: TokenRows, tokens: Sequence[int]) -> None:
    """Bring ``tokens`` into ``rows`` chunk by chunk, as a session does. Raises Cancelled within a chunk, too."""
    with _interruptible(subject):
        for start in range(0, len(tokens), subject.prefill_chunk):
            chunk = tokens[start : start + subject.prefill_chunk]
            rows.extend(chunk, want_logits=start + len(chunk) == len(tokens))


def steps(subject: BenchSubject, rows: TokenRows, count: int, seed: int) -> list[float]:
    """Seconds of each of ``count`` decoding steps of all rows, the first ones left out."""
    seconds = []
    for index in range(WARM_UP_STEPS + count):
        tokens = random_tokens(seed + index, rows.rows, subject.facts.vocabulary)
        if subject.cancelled():
            raise Cancelled("Stopped while measuring.")
        start = subject.clock()
        rows.step(tokens)
        seconds.append(subject.clock() - start)
    return seconds[WARM_UP_STEPS:]


def not_kept(why: str) -> str:
    """The line that says so, and what to do."""
    return f"Not kept for plans: {why}; measure again on an idle machine, or with --even-if-busy."


@contextmanager
def _interruptible(subject: BenchSubject) -> Iterator[None]:
    """Within it, a forward pass ends early if the benchmark is cancelled and the runtime can do that."""
    model = subject.model

    def check() -> None:
        if subject.cancelled():
            raise Interrupted

    model.between_layers = check
    try:
        yield
    except Interrupted:
        raise Cancelled("Stopped while measuring.") from None
    finally:
        model.between_layers = None
