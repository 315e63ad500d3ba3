"""transformers' own models, which every runtime must be equal to: running them and ours, and comparing the two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.stand_in_device import StandInDevice
from engine.ipc.messages import ExpertPolicy, Load
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, Logits
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.runtime import TorchRuntime
from tests.engine.runtimes.subjects import prompt_of
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.transformers_models import transformers_language_model

STEPS = 7
EXACT = 1e-5
"""Both compute in float32; the order of the sums differs."""


def load(folder: Path, **options: Any) -> TorchModel:
    """``folder`` loaded by our runtime."""
    loaded = runtime_named("torch").load(folder, Load(id=1, model=folder.name, **options), quiet)
    assert isinstance(loaded, TorchModel)
    return loaded


def prompt(model: TorchModel, length: int, seed: int = 3) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.facts.vocabulary, (length,), generator=generator).tolist()


def chunks_of(tokens: list[int], chunks: int) -> list[list[int]]:
    size = -(-len(tokens) // chunks)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@functools.lru_cache(maxsize=4)
def library_model(folder: Path, dtype: str = "auto") -> Any:
    """transformers' own model of ``folder``, which nobody may change. Of all of them only a few fit into memory."""
    return transformers_language_model(folder, dtype=dtype)


def library_run(
    folder: Path, tokens: Sequence[int], chunks: int, dtype: str = "auto"
) -> tuple[list[int], list[Logits]]:
    """transformers' own model and cache: greedy tokens of STEPS steps, and the logits each was chosen from. Run once a
    session for the same arguments, whichever runtime is compared."""
    answer, logits = _library_run(folder, tuple(tokens), chunks, dtype)
    return list(answer), list(logits)


@functools.cache
def _library_run(
    folder: Path, tokens: tuple[int, ...], chunks: int, dtype: str
) -> tuple[tuple[int, ...], tuple[Logits, ...]]:
    model = library_model(folder, dtype)
    answer: list[int] = []
    logits: list[Logits] = []
    past = None
    with torch.inference_mode():
        for chunk in chunks_of(list(tokens), chunks):
            out = model(torch.tensor([chunk]), past_key_values=past, use_cache=True)
            past = out.past_key_values
        while True:
            logits.append(out.logits[0, -1].float().numpy())
            answer.append(int(logits[-1].argmax()))
            if len(answer) == STEPS:
                break
            out = model(torch.tensor([[answer[-1]]]), past_key_values=past, use_cache=True)
    return tuple(answer), tuple(logits)


def our_run(model: LoadedModel, tokens: list[int], chunks: int, answer: list[int]) -> list[Logits]:
    """Our logits where the library chose ``answer``."""
    rows = model.start()
    *first, last = chunks_of(tokens, chunks)
    for chunk in first:
        assert rows.extend(chunk, want_logits=False) is None
    logits = [rows.extend(last)]
    logits += [rows.step([token])[0] for token in answer[:-1]]
    assert rows.length == len(tokens) + len(answer) - 1
    return [each for each in logits if each is not None]


def worst(ours: list[Logits], theirs: list[Logits]) -> float:
    """The largest difference of any logit, relative to the largest logit of its step."""
    assert len(ours) == len(theirs)
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) if np.isfinite(a).all() else float("inf")
        for a, b in zip(ours, theirs, strict=True)
    )


def other_choices(ours: list[Logits], theirs: list[Logits], margin: float) -> int:
    """Number of steps whose likeliest token is not the library's, although that is ahead by ``margin`` of the logits'
    spread."""
    others = 0
    for found, wanted in zip(ours, theirs, strict=True):
        second, first = np.sort(wanted)[-2:]
        others += bool(first - second > margin * wanted.std() and found.argmax() != wanted.argmax())
    return others


def typical(ours: list[Logits], theirs: list[Logits]) -> float:
    """The median over the steps of the root mean square difference, relative to the logits'.

    In bfloat16 a router may choose another expert of two that are as good, which one step's worst logit shows and the
    median does not.
    """
    return float(np.median(steps_apart(ours, theirs)))


def steps_apart(ours: list[Logits], theirs: list[Logits]) -> list[float]:
    """The root mean square difference of each step, relative to the logits'."""
    assert len(ours) == len(theirs)
    steps = [float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean())) for a, b in zip(ours, theirs, strict=True)]
    assert np.isfinite(steps).all()
    return steps


def assert_shared_on_a_device(folder: Path, truth: Path, policy: ExpertPolicy) -> None:
    """``folder`` gives the logits of ``truth`` with a device that has room for three of its experts, and nothing but
    whole experts, as they are kept in memory, is copied to it."""
    experts = experts_of(folder)
    device = StandInDevice(2 * GPU_RUNTIME_BYTES)
    room = 3 * experts.place(experts.layers[0], 0).nbytes + 1000
    request = Load(id=1, model="packed", cpu_threads=1, dtype="float32", policy=policy, gpu_expert_bytes=room)
    model = TorchRuntime(lambda: device).load(folder, request, quiet)
    tokens = prompt_of(40)
    answer, theirs = library_run(truth, tokens, chunks=1)
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT
    copied = {op.nbytes for op in device.trace if op.kind in ("copy", "fill")}
    assert copied <= {experts.place(layer, 0).nbytes for layer in experts.layers}, "packed bytes travel, nothing else"
    assert copied or policy in ("layers", "twiddler")
    assert model.facts.expert_bytes == experts.nbytes
    model.close()
