"""Timing by hooks: each second lands in one part of a layer, and nothing is hooked while nobody looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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


def test_the_decoder_layers_are_those_of_the_model(model: TorchModel) -> None:
    assert len(decoder_layers(model._module)) == model.facts.layers
