"""The calibration prompts: a model's experts counted over texts of different kinds, to seed its popularity profile."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.bench.setting import Setting, read_prompt
from engine.errors import Cancelled
from engine.ipc.messages import Message
from engine.moe.popularity import Popularity

PROMPTS_FILE = "calibration_prompts.txt"
ANSWER_TOKENS = 12
"""Decoded greedily after each prompt: answers use other experts than questions."""
BUDGET_S = 20.0
"""No prompt is begun later than this."""


class PromptTokenizer(Protocol):
    """What is needed of :class:`engine.models.tokenizer.Tokenizer`."""

    def encode_chat(self, messages: Sequence[Message], continue_last: bool = False) -> list[int]: ...


def calibration_prompts() -> list[str]:
    """The prompts, which blank lines part."""
    text = importlib.resources.files("assets").joinpath(PROMPTS_FILE).read_text(encoding="utf-8")
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def count_routes(
    setting: Setting, popularity: Popularity, tokenizer: PromptTokenizer, prompts: Sequence[str]
) -> tuple[dict[int, list[float]], int]:
    """Routes per layer and expert over ``prompts`` and the beginnings of their answers, and how many prompts were run.

    Raises Cancelled.
    """
    before = {layer: popularity.counts(layer) for layer in popularity.layers}
    start = setting.clock()
    done = 0
    for done, prompt in enumerate(prompts):
        if done and setting.clock() - start > BUDGET_S:
            break
        setting.report("running the calibration prompts", done, len(prompts), "")
        tokens = tokenizer.encode_chat([Message("user", prompt)])
        run_prompt(setting, tokens[: max(0, setting.facts.context_limit - ANSWER_TOKENS)])
    else:
        done = len(prompts)
    return _difference(before, popularity), done


def run_prompt(setting: Setting, tokens: Sequence[int]) -> None:
    """Read ``tokens`` and decode the beginning of the likeliest answer. Does nothing without tokens."""
    if not tokens:
        return
    rows = setting.model.start()
    read_prompt(setting, rows, tokens[:-1])
    token = tokens[-1]
    for _ in range(ANSWER_TOKENS):
        if setting.cancelled():
            raise Cancelled("Stopped while running the calibration prompts.")
        token = int(np.argmax(rows.step([token])[0]))


def _difference(before: Mapping[int, Sequence[int]], popularity: Popularity) -> dict[int, list[float]]:
    return {
        layer: [float(now - was) for now, was in zip(popularity.counts(layer), row, strict=True)]
        for layer, row in before.items()
    }
