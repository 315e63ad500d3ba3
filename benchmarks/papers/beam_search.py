"""Beam search as llama.cpp had it when the Twiddler paper was written, re-enacted on this engine, beside our own.

Theirs (its ``llama_beam_search``, removed since): the beams run one after another. For each beam and step it decodes
again every token since the last one that all beams have in common, and then takes them out of the cache. Ours decodes
one token per beam, all beams in one pass. The engine, the weights, the kernels and the selection of beams are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.generation.beams import BeamRule, BeamRun, BeamState, Hypothesis
from engine.generation.programs import Program
from engine.runtimes.protocol import LoadedModel, Logits, TokenRows
from engine.session.scheduler import Scheduler


@dataclass(frozen=True)
class Searched:
    """One search: its time without the prompt, the tokens it decoded, and the best sequence."""

    seconds: float
    decoded: int
    longest: int
    """Most tokens decoded for one beam and step."""
    best: Hypothesis


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of tokens with which all ``sequences`` begin."""
    shortest = min(map(len, sequences), default=0)
    first = sequences[0] if sequences else ()
    for place in range(shortest):
        if any(each[place] != first[place] for each in sequences):
            return place
    return shortest


def one_by_one(model: LoadedModel, prompt: Sequence[int], width: int, tokens: int) -> Searched:
    """The baseline: beams one after another, each decoded again since their common prefix."""
    rows, logits = _prompted(model, prompt)
    state = BeamState(BeamRule(width, tokens))
    decoded = longest = kept = 0
    began = time.perf_counter()
    state.advance(logits[None, :])
    while not state.done:
        beams = sorted(state.running, key=lambda beam: beam.row)
        # At least the last token of each is decoded, for its logits.
        common = min(common_prefix([beam.tokens for beam in beams]), len(beams[0].tokens) - 1)
        if common > kept:
            rows.extend(beams[0].tokens[kept:common], want_logits=False)
            decoded += common - kept
            kept = common
        found = []
        for beam in beams:
            suffix = beam.tokens[kept:]
            found.append(rows.extend(suffix))
            rows.truncate(len(prompt) + kept)
            decoded += len(suffix)
            longest = max(longest, len(suffix))
        state.advance(_stacked(found))
    return Searched(time.perf_counter() - began, decoded, longest, state.hypotheses()[0])


def together(model: LoadedModel, prompt: Sequence[int], width: int, tokens: int) -> Searched:
    """Ours: all beams in one pass per step."""
    rows, logits = _prompted(model, prompt)
    state = BeamState(BeamRule(width, tokens))
    run = BeamRun(state, rows)

    def search() -> Program[None]:
        run.begin(logits)
        while not state.done:
            yield from run.step()

    began = time.perf_counter()
    Scheduler(model).run(search())
    seconds = time.perf_counter() - began
    return Searched(seconds, (state.step - 1) * width, 1, state.hypotheses()[0])


def _prompted(model: LoadedModel, prompt: Sequence[int]) -> tuple[TokenRows, Logits]:
    rows = model.start()
    logits = rows.extend(prompt)
    assert logits is not None
    return rows, logits


def _stacked(found: Sequence[Logits | None]) -> Logits:
    return np.stack([each for each in found if each is not None])
