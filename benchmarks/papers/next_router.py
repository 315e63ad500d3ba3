"""Prefetching by the next layer's router under a memory limit, executed on the starter: does it guess, does it pay.

While a layer waits for its experts, the router of the layer after it is asked about this layer's hidden state, and what
it chooses is read from disk already. Beside it: no guess at all, and guesses that are always right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.papers.beam_rows import prompts_of
from benchmarks.papers.capped_experts import CappedBackend, CappedExperts, Guess, LayerRun, reads_past_the_cache
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.store.catalogue import STARTER
from engine.runtimes import runtime_named
from engine.runtimes.choosing import on_one_machine
from engine.runtimes.common.loading import load_model
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.session.loading import find_folder

WARM, STEPS = 8, 24
"""Tokens decoded before the measured ones, and these."""
ROUNDS = 3
SHARE = 0.5
"""Part of the experts that is in memory."""
_ROUTER = re.compile(r"\.layers\.(\d+)\..*(?:gate|router)\.weight$")


@dataclass(frozen=True)
class Reading:
    """Decoding with experts read from disk: seconds and bytes of STEPS tokens, and of the experts that layers needed,
    the share that was guessed (0.0 without guesses)."""

    seconds: float
    bytes_read: int
    recall: float
    runs: tuple[LayerRun, ...]
    tokens: tuple[int, ...]

    @property
    def per_s(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def megabytes(self) -> float:
        """Read from disk per token."""
        return self.bytes_read / len(self.tokens) / 1e6


@dataclass(frozen=True)
class Prefetched:
    """The best round of each way to guess, and what a guess by chance would hit."""

    none: Reading
    router: Reading
    known: Reading
    chance: float


def routers_of(folder: Path, experts: int) -> dict[int, torch.Tensor]:
    """The routers' weights [experts, width] of the model in ``folder``, by layer."""
    found = {}
    for name, stored in open_model(folder).trunk():
        match = _ROUTER.search(name)
        if match and stored.shape[0] == experts:
            words = stored.words.astype(np.uint32) << 16 if stored.dtype == "BF16" else stored.words
            found[int(match[1])] = torch.from_numpy(np.ascontiguousarray(words).view(np.float32).copy())
    return found


def by_next_router(routers: dict[int, torch.Tensor], per_token: int) -> Guess:
    """What the next layer's router chooses from this layer's hidden state."""

    def guess(layer: int, hidden: torch.Tensor) -> list[int]:
        found: list[int] = torch.topk(routers[layer + 1] @ hidden[0].float(), per_token).indices.tolist()
        return found

    return guess


def as_it_will_be(runs: Sequence[LayerRun]) -> Guess:
    """What the same passes needed in an earlier run."""
    first = runs[0].layer
    following = iter([each.needed for each in runs if each.layer != first])
    return lambda layer, hidden: next(following)


def recall_of(runs: Sequence[LayerRun]) -> float:
    """The share of the needed experts that was guessed, the first layer left out."""
    later = [each for each in runs if each.layer != runs[0].layer]
    right = sum(len(set(each.needed) & set(each.guessed)) for each in later)
    return right / max(1, sum(len(each.needed) for each in later))


def read_while_decoding(model: TorchModel, prompt: Sequence[int], slots: int, guess: Guess | None) -> Reading:
    """Decode greedily after ``prompt``. Raises OSError."""
    assert model.executor is not None
    inner = model.executor.backend
    assert isinstance(inner, TensorBackend)
    with CappedExperts(inner.experts, slots) as capped:
        backend = CappedBackend(inner, capped)
        model.executor.backend = backend
        try:
            rows = model.start()
            logits = rows.extend(prompt)
            backend.runs.clear()
            backend.guess = guess
            tokens: list[int] = []
            began, before = time.perf_counter(), 0
            for step in range(WARM + STEPS):
                if step == WARM:
                    began, before = time.perf_counter(), capped.bytes_read
                assert logits is not None
                tokens.append(int(logits.argmax()))
                logits = rows.step([tokens[-1]]).reshape(-1)
            seconds = time.perf_counter() - began
        finally:
            model.executor.backend = inner
        runs = tuple(backend.runs)
        return Reading(seconds, capped.bytes_read - before, recall_of(runs), runs, tuple(tokens[WARM:]))


def prefetched_starter() -> Prefetched | None:
    """All ways on the starter; None if it is not here, or reads cannot pass the system's cache."""
    if not reads_past_the_cache():
        return None
    try:
        _, folder = find_folder(STARTER, lambda *_: None, None)
    except ModelError:
        return None
    load = Load(id=0, model=STARTER, runtime="torch", keep_resident=False)
    model = load_model(runtime_named("torch"), STARTER, folder, on_one_machine(load, "torch"), lambda *_: None)
    assert isinstance(model, TorchModel)
    try:
        return prefetched(model, folder, prompts_of(folder)[0])
    except OSError:
        return None
    finally:
        model.close()


def prefetched(model: TorchModel, folder: Path, prompt: Sequence[int]) -> Prefetched:
    """The three ways in turns, each ROUNDS times; the fastest counts. Raises OSError, and RuntimeError if a way gives
    other tokens."""
    experts, per_token = model.facts.experts, model.facts.experts_per_token
    routers = routers_of(folder, experts)
    slots = int(SHARE * experts)
    rounds: list[tuple[Reading, Reading, Reading]] = []
    for _ in range(ROUNDS):
        none = read_while_decoding(model, prompt, slots, None)
        router = read_while_decoding(model, prompt, slots, by_next_router(routers, per_token))
        known = read_while_decoding(model, prompt, slots, as_it_will_be(none.runs))
        if not none.tokens == router.tokens == known.tokens:
            raise RuntimeError("reading ahead changed what was decoded: that is a bug")
        rounds.append((none, router, known))
    best = [min(found, key=lambda each: each.seconds) for found in zip(*rounds, strict=True)]
    return Prefetched(best[0], best[1], best[2], per_token / experts)
