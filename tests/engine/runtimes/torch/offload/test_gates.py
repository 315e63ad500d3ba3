"""A family's gate is recognised by what it computes, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from engine.runtimes.torch.experts_module import find_experts, gate_of
from engine.runtimes.torch.loading import build_skeleton
from engine.runtimes.torch.offload.gates import Activation, family_gate
from tests.support.tiny_families import TINY_MOE_FAMILIES, tiny_config

_KNOWN = {
    "silu": Activation("silu"),
    "swish": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "gelu_new": Activation("gelu_tanh"),
    "gelu_fast": Activation("gelu_tanh"),
    "relu": Activation("relu"),
}
_UNKNOWN = ("relu2", "quick_gelu", "sigmoid", "tanh", "mish", "leaky_relu", "gelu_10", "linear", "prelu")


@pytest.mark.parametrize("name", [*_KNOWN, *_UNKNOWN])
def test_the_librarys_activations(name: str) -> None:
    from transformers.activations import ACT2FN

    activation = ACT2FN[name]
    gate = family_gate(lambda gate_out, up_out: activation(gate_out) * up_out)
    assert gate.activation == _KNOWN.get(name)


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_every_family_is_recognised(family: str) -> None:
    config = tiny_config(family).get_text_config(decoder=True)
    places = find_experts(build_skeleton(config, torch.bfloat16))
    found = {gate_of(place.experts).activation for place in places}
    expected = Activation("silu")
    if family == "step3p5":
        assert found == {expected, *(Activation("clamped_silu", limit=limit) for limit in config.swiglu_limits[3:])}
        return
    if family == "gpt_oss":
        expected = Activation("clamped", config.swiglu_alpha, config.swiglu_limit, 1.0)
    elif family in ("glm5_next_text", "deepseek_v4"):
        expected = Activation("clamped", 1.0, config.swiglu_limit)
    elif family == "gemma4_text":
        expected = Activation("gelu_tanh")
    elif family.startswith("nemotron_h"):  # whose experts multiply what they give by itself
        expected = Activation("relu")
    elif family == "dbrx":
        assert config.ffn_config.ffn_act_fn == {"name": "silu"}
    assert found == {expected}


@pytest.mark.parametrize(
    "almost",
    [
        lambda gate, up: functional.silu(gate.clamp(max=6.0)) * up.clamp(-7.0, 7.0),
        lambda gate, up: functional.silu(gate) * up.clamp(-100.0, 100.0),
        lambda gate, up: functional.silu(gate) * (up + 1e-3),
        lambda gate, up: functional.silu(up) * gate,
        lambda gate, up: (functional.silu(gate) * up)[:1],
    ],
)
def test_what_is_almost_silu_is_not(almost: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert family_gate(almost, alpha=1.0, limit=7.0).activation is None


def test_a_gate_that_fails_on_the_probe_is_left_to_the_library() -> None:
    weights = torch.rand(7)
    gate = family_gate(lambda gate_out, up_out: gate_out * weights * up_out)
    assert gate.activation is None
    assert torch.equal(gate(torch.ones(2, 7), torch.ones(2, 7)), weights.expand(2, 7))


def test_a_limit_alone_is_that_of_silu_behind_it() -> None:
    right = Activation("clamped_silu", limit=7.0)

    def limited(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)

    assert family_gate(limited, limit=7.0).activation == right
    assert family_gate(limited, limit=9.0).activation is None
    assert family_gate(limited).activation is None
    assert family_gate(right, limit=float("inf")).activation is None
    silu = Activation("silu")
    assert family_gate(silu, limit=float("inf")).activation == silu
    before = family_gate(lambda gate, up: functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0), limit=7.0)
    assert before.activation == Activation("clamped", 1.0, 7.0)


def test_the_clamped_gate_takes_its_numbers_from_the_module() -> None:
    right = Activation("clamped", 1.702, 7.0, 1.0)
    assert family_gate(right, alpha=1.702, limit=7.0).activation == right
    assert family_gate(right, alpha=1.0, limit=7.0).activation is None
    assert family_gate(right, alpha=1.702, limit=9.0).activation is None
    assert family_gate(right).activation is None
