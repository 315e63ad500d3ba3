"""The measurement of passes, on every runtime: the parts of a layer add up, the routes are counted, and nothing is
measured while nobody looks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from engine.runtimes.protocol import LoadedModel, Logits
from tests.engine.runtimes.subjects import MLX, NATIVE, TORCH, Subject, case, prompt_of

TOKENS = prompt_of(25)
MOE = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "dbrx")


def answered(model: LoadedModel) -> list[Logits | None]:
    """The logits of a prompt in two chunks, five steps, and a step of three beams."""
    rows = model.start()
    found = [rows.extend(TOKENS[:10], want_logits=False), rows.extend(TOKENS[10:])]
    found += [rows.step([token]) for token in range(3, 8)]
    return [*found, rows.fan_out(3).step([5, 6, 7])]


def counted(model: LoadedModel) -> list[int]:
    popularity = model.popularity
    return [] if popularity is None else [sum(popularity.counts(layer)) for layer in popularity.layers]


@pytest.mark.sampled(least=4)
@pytest.mark.parametrize(
    ("subject", "family"),
    [
        case(NATIVE, "mixtral"),
        case(NATIVE, "qwen2_moe"),
        *(case(TORCH, family) for family in (*MOE, "llama", "minimax", "llama4_text", "phimoe")),
        *(case(MLX, family) for family in (*MOE, "llama", "qwen3_moe", "qwen3_next", "lfm2_moe", "gemma4_text")),
    ],
)
def test_every_layer_is_measured_while_somebody_looks(
    subject: Subject, family: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(subject, family)
    recorder, facts = model.recorder, model.facts
    expected, before = answered(model), counted(model)
    frame = recorder.frame(0)
    assert (frame.prefill.steps, frame.decode.steps) == (0, 0) and not any(map(sum, frame.expert_use))
    if subject is not NATIVE:  # whose kernels have their own clock
        # Every look at this clock takes a second: a part is as long as the looks in it.
        monkeypatch.setattr(recorder, "clock", itertools.count(0.0).__next__)
    monkeypatch.setattr(recorder, "enabled", True)
    found = answered(model)
    monkeypatch.undo()
    frame = recorder.frame(7)
    after = counted(model)
    answered(model)
    assert recorder.frame(7) == frame, "nobody looked any more"
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs), "looking changed the logits"
    assert (frame.id, frame.prefill.steps, frame.prefill.tokens) == (7, 2, 25)
    assert (frame.decode.steps, frame.decode.tokens) == (6, 6), "a step of beams counts as one token"
    for phase in (frame.prefill, frame.decode):
        assert len(phase.layers) == facts.layers and phase.outside_layers > 0
        inside = 0.0
        for index, layer in enumerate(phase.layers):
            assert layer.attention > 0 and layer.other > 0 and layer.exchange == layer.wait == 0
            assert (layer.router > 0) == (layer.experts > 0) == (index in facts.moe_layers)
            inside += layer.attention + layer.router + layer.experts + layer.other
        assert phase.per_token == pytest.approx(inside + phase.outside_layers)
    assert frame.moe_layers == facts.moe_layers
    routes = [sum(counts) for counts in frame.expert_use]
    for layer, counts in zip(frame.moe_layers, frame.expert_use, strict=True):
        # Of a prompt, only the last position's logits are asked for, so the last layer's experts run for no other.
        prompt = 25 if subject is MLX or layer < facts.layers - 1 else 1
        assert len(counts) == facts.experts and sum(counts) == (prompt + 5 + 3) * facts.experts_per_token
    assert not before or [new - old for new, old in zip(after, before, strict=True)] == routes
    recorder.reset()
