"""Timing: the parts of a layer add up, the routes are counted, and nothing is measured while nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ipc.messages import PhaseTimes
from engine.runtimes.torch.model import TorchModel, decoder_layers
from tests.engine.runtimes.torch_oracle import load, prompt
from tests.support.tiny_models import write_tiny_model

FAMILIES = ("llama", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "minimax", "dbrx", "llama4_text", "phimoe")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchModel]:
    loaded = load(write_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    yield loaded
    loaded.close()


def answer(model: TorchModel, tokens: list[int], steps: int) -> None:
    rows = model.start()
    rows.extend(tokens[:10], want_logits=False)
    rows.extend(tokens[10:])
    for token in range(3, 3 + steps):
        rows.step([token])


def hooks(model: TorchModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model._module.modules())


def check(phase: PhaseTimes, model: TorchModel) -> None:
    facts = model.facts
    assert len(phase.layers) == facts.layers
    for index, layer in enumerate(phase.layers):
        assert layer.attention > 0
        assert layer.other > 0
        assert (layer.router > 0) == (index in facts.moe_layers)
        assert (layer.experts > 0) == (index in facts.moe_layers)
        assert layer.exchange == layer.wait == 0
    inside = sum(layer.attention + layer.router + layer.experts + layer.other for layer in phase.layers)
    assert phase.outside_layers > 0
    assert inside + phase.outside_layers == pytest.approx(phase.per_token)


@pytest.mark.sampled
def test_parts_add_up_and_routes_are_counted(model: TorchModel) -> None:
    tokens = prompt(model, 25)
    model.recorder.reset()
    model.recorder.enabled = True
    answer(model, tokens, steps=6)
    model.recorder.enabled = False
    frame = model.recorder.frame(7)
    assert (frame.prefill.steps, frame.prefill.tokens) == (2, 25)
    assert (frame.decode.steps, frame.decode.tokens) == (6, 6)
    check(frame.prefill, model)
    check(frame.decode, model)
    assert frame.moe_layers == model.facts.moe_layers
    for layer, counts in zip(frame.moe_layers, frame.expert_use, strict=True):
        assert len(counts) == model.facts.experts
        # Of the prompt, only the last position's logits are asked for, so the last layer's experts run for no other.
        prompt_tokens = 1 if layer == model.facts.layers - 1 else 25
        assert sum(counts) == (prompt_tokens + 6) * model.facts.experts_per_token


def test_each_second_lands_in_one_part(model: TorchModel) -> None:
    ticks = iter(range(10**9))
    clock = model.recorder.clock
    model.recorder.clock = lambda: float(next(ticks))
    try:
        model.recorder.reset()
        model.recorder.enabled = True
        model.start().extend([5, 6, 7])
        model.recorder.enabled = False
    finally:
        model.recorder.clock = clock
    phase = model.recorder.frame(0).prefill
    per_second = 1000.0 / 3
    for index, layer in enumerate(phase.layers):
        moe = index in model.facts.moe_layers
        # One tick between the two looks at the clock around each part; the layer's own looks and gaps are the rest.
        assert layer.attention == pytest.approx(per_second)
        assert layer.router == pytest.approx(per_second if moe else 0)
        assert layer.experts == pytest.approx(per_second if moe else 0)
        assert layer.other == pytest.approx((1 + 1 + (2 if moe else 0)) * per_second)


@pytest.mark.sampled
def test_nothing_is_hooked_or_recorded_while_nobody_looks(model: TorchModel) -> None:
    model.recorder.reset()
    answer(model, prompt(model, 25), steps=2)
    before = hooks(model)
    assert model.recorder.frame(0).prefill.steps == 0
    assert all(sum(counts) == 0 for counts in model.recorder.frame(0).expert_use)
    model.recorder.enabled = True
    answer(model, prompt(model, 25), steps=1)
    assert hooks(model) >= before + 4 * model.facts.layers
    model.recorder.enabled = False
    answer(model, prompt(model, 25), steps=1)
    assert hooks(model) == before
    assert model.recorder.frame(0).decode.steps == 1


def test_looking_changes_no_bit(model: TorchModel) -> None:
    tokens = prompt(model, 25)
    unwatched = model.start().extend(tokens)
    model.recorder.enabled = True
    watched = model.start().extend(tokens)
    model.recorder.enabled = False
    assert (watched == unwatched).all()


def test_beams_count_a_step_as_one_token(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, "mixtral"))
    rows = model.start()
    rows.extend(prompt(model, 8))
    beams = rows.fan_out(4)
    model.recorder.enabled = True
    beams.step([3, 4, 5, 6])
    frame = model.recorder.frame(0)
    assert (frame.decode.steps, frame.decode.tokens) == (1, 1)
    assert all(sum(counts) == 4 * 2 for counts in frame.expert_use)
    model.close()
    assert len(decoder_layers(load(tmp_path)._module)) == 3
