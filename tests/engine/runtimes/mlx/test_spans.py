"""Times per layer on mlx: measured only while somebody looks, and nothing of it stays in the model."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

from engine.errors import ModelError
from engine.runtimes.mlx.model import MlxModel
from tests.engine.runtimes.mlx_oracle import load, prompt_of, write_model

FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "dbrx",
    "llama",
    "qwen3_next",
    "lfm2_moe",
    "gemma4_text",
)


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_of_a_measured_turn(family: str, tmp_path: Path) -> None:
    model = load(write_model(tmp_path, family))
    prompt = prompt_of(12)
    plain = model.start()
    expected = [plain.extend(prompt), plain.step([5]), plain.fan_out(3).step([5, 6, 7])]
    assert model.recorder.frame(1).prefill.tokens == 0

    # Every look at this clock takes a second: a span is as long as the looks in it.
    model.recorder.clock = itertools.count(0.0).__next__
    model.recorder.enabled = True
    rows = model.start()
    found = [rows.extend(prompt), rows.step([5]), rows.fan_out(3).step([5, 6, 7])]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), "looking changed the logits"

    frame = model.recorder.frame(7)
    assert (frame.id, frame.prefill.steps, frame.prefill.tokens) == (7, 1, 12)
    assert (frame.decode.steps, frame.decode.tokens) == (2, 2)
    assert frame.moe_layers == model.facts.moe_layers
    for phase in (frame.prefill, frame.decode):
        assert len(phase.layers) == model.facts.layers
        inside = 0.0
        for index, layer in enumerate(phase.layers):
            routed = index in model.facts.moe_layers
            assert layer.attention > 0
            assert (layer.router > 0, layer.experts > 0) == (routed, routed)
            assert layer.other > 0
            assert layer.exchange == layer.wait == 0
            inside += layer.attention + layer.router + layer.experts + layer.other
        assert phase.outside_layers > 0
        assert phase.per_token == pytest.approx(inside + phase.outside_layers)
    for use in frame.expert_use:
        assert len(use) == model.facts.experts
        assert sum(use) == (12 + 1 + 3) * model.facts.experts_per_token


def test_hooks_are_there_only_while_measured(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, "mixtral"))
    before = types_of(model)
    rows = model.start()
    for enabled in (True, False, True, True, False):
        model.recorder.enabled = enabled
        rows.step([4])
        assert (types_of(model) == before) != enabled
    model.recorder.reset()
    rows.step([4])
    assert model.recorder.frame(1).decode.steps == 0
    assert sum(map(sum, model.recorder.frame(1).expert_use)) == 0


def types_of(model: MlxModel) -> list[tuple[str, str]]:
    return [(type(layer).__name__, type(layer.self_attn).__name__) for layer in model._model.model.layers]


def test_a_failed_measured_step_leaves_no_open_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_model(tmp_path, "mixtral"))
    rows = model.start()
    rows.extend([3, 4, 5])
    model.recorder.enabled = True
    executor = model._model.model.layers[1].block_sparse_moe._executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(ModelError):
            rows.step([5])
    rows.step([5])
    assert model.recorder.frame(1).decode.steps == 2
    assert rows.length == 4
