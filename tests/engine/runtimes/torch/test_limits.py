"""Limits that transformers does not compute: Ling 3 in torch and natively, beside transformers' model with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import library_model, load, our_run, worst
from tests.support.tiny_models import write_tiny_model

EXPERTS, SHARED = [0.0, 0.0, 0.2, 0.4], [0.0, 0.3, 0.0, 0.5]
"""Limits of each of four layers, 0 for none."""


def limited(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' logits after ``tokens``, with the limits written out."""
    model = library_model(folder, "float32")

    def of_shared(module: Any, limit: float) -> Any:
        return lambda x: module.down_proj(limited(module.gate_proj(x), module.up_proj(x), limit))

    def of_experts(module: Any, limit: float) -> Any:
        def run(hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for token in range(len(hidden)):
                for expert, weight in zip(indices[token], weights[token], strict=True):
                    gate, up = (module.gate_up_proj[expert] @ hidden[token]).chunk(2)
                    out[token] += weight * (module.down_proj[expert] @ limited(gate, up, limit))
            return out

        return run

    for layer, experts, shared in zip(model.model.layers, EXPERTS, SHARED, strict=True):
        if experts:
            layer.mlp.experts.forward = of_experts(layer.mlp.experts, experts)
        if shared:
            layer.mlp.shared_experts.forward = of_shared(layer.mlp.shared_experts, shared)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits


@pytest.mark.parametrize("loader", [load, pytest.param(load_native, marks=needs_kernels)])
def test_limits_are_computed_that_transformers_ignores(loader: Any, tmp_path: Path) -> None:
    limits = {"expert_swiglu_limit_list": EXPERTS, "share_expert_swiglu_limit_list": SHARED}
    folder, tokens = write_tiny_model(tmp_path / "limited", "bailing_hybrid", **limits), prompt_of(30)
    wanted = [expected(folder, tokens).numpy()]
    assert worst(our_run(loader(folder), tokens, 1, [0]), wanted) < 1e-5
    free = write_tiny_model(tmp_path / "free", "bailing_hybrid")
    assert worst(our_run(loader(free), tokens, 1, [0]), wanted) > 0.01
