"""Norms in one operation: the same model, and no norm that is another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.runtimes.torch.trunk_modules import FusedNorm, fuse_norms
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import library_run, load, our_run, worst
from tests.support.tiny_families import TINY_FAMILIES

OTHERS = (
    "gemma3_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
    "phimoe",
    "dbrx",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "gemma2",
    "step3p5",
)
"""Families with norms of another kind: centred ones, or with weights that are counted from one."""


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_family_with_fused_norms_gives_the_librarys_logits(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    model = load(folder)
    assert model._module is not None
    replaced = fuse_norms(model._module)
    assert (replaced == 0) == (family in OTHERS)
    tokens = prompt_of(30)
    answer, theirs = library_run(folder, tokens, chunks=1)
    assert worst(our_run(model, tokens, 1, answer), theirs) < 1e-5


class SomeRMSNorm(nn.Module):
    """``kind``: what is different."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = 1e-5 if kind != "epsilon" else 0.1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.kind == "from one":
            return hidden * scale * (1 + self.weight)
        if self.kind == "centred":
            return (hidden - hidden.mean(-1, keepdim=True)) * scale * self.weight
        return hidden * scale * self.weight


class Holder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = SomeRMSNorm(kind)


@pytest.mark.parametrize(("kind", "fused"), [("plain", 1), ("from one", 0), ("centred", 0), ("epsilon", 0)])
def test_only_what_is_the_same_is_replaced(kind: str, fused: int) -> None:
    holder = Holder(kind)
    assert fuse_norms(holder) == fused
    assert isinstance(holder.norm, FusedNorm) == bool(fused)


def test_in_bfloat16_the_result_is_a_rounding_apart() -> None:
    holder = Holder("plain").to(torch.bfloat16)
    hidden = torch.randn(7, 16).to(torch.bfloat16)
    before = holder.norm(hidden)
    assert fuse_norms(holder) == 1
    torch.testing.assert_close(holder.norm(hidden), before, rtol=2**-6, atol=0)
