"""Keys and values in 8 and 4 bits against those in bfloat16: memory, speed in long contexts, and what is lost.

    python -m benchmarks.key_values --model starter --contexts 512 4096

The loss is of the model's next-token distribution, at every position of a text that is decoded token by token: the
mean and the largest Kullback-Leibler divergence, and how often the likeliest token is the same. The caches take
turns step by step, so that all meet the same minutes of the machine.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import statistics
import time
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.measuring import table
from benchmarks.worker import random_tokens
from engine.calibration.samples import Spread
from engine.ipc.messages import KeyValuesName, Load
from engine.models.store.local_models import resolve
from engine.models.text.tokenizer import load_tokenizer
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel


def divergence(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Kullback-Leibler divergence in nats of the distribution of logits ``found`` from that of ``expected``."""
    logs = [values - np.logaddexp.reduce(values) for values in (found.astype(np.float64), expected.astype(np.float64))]
    return float(np.sum(np.exp(logs[1]) * (logs[1] - logs[0])))


FORMS: dict[KeyValuesName, str] = {"auto": "bfloat16", "q8_0": "8 bits", "q4_0": "4 bits"}
"""Forms of keys and values, as a setting and in words; the first is what the others are compared with."""


def loss(truth: LoadedModel, model: LoadedModel, tokens: list[int]) -> tuple[list[float], float]:
    """The divergences of ``model`` at every position of ``tokens``, and the share of equal choices."""
    rows = truth.start(), model.start()
    divergences, equal = [], 0
    for token in tokens:
        expected, found = (row.step([token])[0] for row in rows)
        divergences.append(divergence(found, expected))
        equal += int(expected.argmax() == found.argmax())
    return divergences, equal / len(tokens)


def speeds(models: list[LoadedModel], context: int, steps: int, vocabulary: int) -> list[list[float]]:
    """Seconds of each of ``steps`` tokens after ``context`` of them, by model."""
    rows = [model.start() for model in models]
    for row in rows:
        for first in range(0, context, 512):
            row.extend(random_tokens(first, min(512, context - first), vocabulary), want_logits=False)
    seconds: list[list[float]] = [[] for _ in models]
    for step in range(steps + 2):
        for number in range(len(models)) if step % 2 else reversed(range(len(models))):
            (token,) = random_tokens(100_000 + step, 1, vocabulary)
            begun = time.perf_counter()
            rows[number].step([token])
            if step >= 2:  # the first steps warm up
                seconds[number].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter", help="a model that is on this machine, or its folder")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--text", type=int, default=1000, help="tokens of text that the loss is measured on")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    arguments = parser.parse_args()
    folder = resolve(arguments.model).folder or Path(arguments.model)
    models: list[LoadedModel] = []
    for kept in FORMS:
        request = Load(id=1, model=arguments.model, cpu_threads=arguments.threads, key_values=kept)
        models.append(runtime_named("native").load(folder, request, lambda stage, done, total, unit: None))
    rows = [["bytes per token", *(f"{model.facts.key_value_bytes_per_token:,}" for model in models)]]
    for context in arguments.contexts:
        seconds = speeds(models, context, arguments.steps, models[0].facts.vocabulary)
        times = [Spread.of([1000 * value for value in values]) for values in seconds]
        ratios = [f"{time.median / times[0].median:.2f}" for time in times]
        shown = [
            f"{time.median:.2f} ({time.low:.2f}–{time.high:.2f}), {by}" for time, by in zip(times, ratios, strict=True)
        ]
        rows.append([f"a token after {context:,}: ms, and to {FORMS['auto']}", *shown])
    print("\n".join(table(["", *FORMS.values()], rows)))
    words = load_tokenizer(folder)
    if words is None:
        print("\nThe model has no tokenizer, so no loss is measured.")
        return
    text = importlib.resources.files("assets").joinpath("calibration_prompts.txt").read_text(encoding="utf-8")
    tokens = words.encode(text)[: arguments.text]
    print(f"\nThe distribution of the next token after each of {len(tokens)} tokens of text, to {FORMS['auto']}:\n")
    rows = []
    for name, model in zip(list(FORMS.values())[1:], models[1:], strict=True):
        divergences, equal = loss(models[0], model, tokens)
        rows.append([name, f"{statistics.mean(divergences):.5f}", f"{max(divergences):.4f}", f"{equal:.1%}"])
    print("\n".join(table(["", "mean divergence, nats", "largest", "same likeliest token"], rows)))


if __name__ == "__main__":
    main()
