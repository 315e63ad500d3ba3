"""The functions within networks and experts, with limits where settings give them."""

from __future__ import annotations

import json

import pytest

from engine.errors import ModelError
from engine.moe.kernels.layers import Gate
from engine.runtimes.native.activations import expert_gates, read_gate
from engine.runtimes.native.shape import read_shape
from tests.support.tiny_families import tiny_config

STEP = json.loads(tiny_config("step3p5").to_json_string(use_diff=False))
SILU = Gate("silu")


def test_limits_of_networks_and_of_experts_are_those_of_their_layers() -> None:
    shape = read_shape(STEP, (2, 3, 4))
    assert shape.network_gates == (SILU, limited(0.4), SILU, SILU, limited(0.5))
    assert shape.expert_gates == expert_gates(STEP) == (SILU, SILU, SILU, limited(0.3), limited(0.2))


def limited(limit: float) -> Gate:
    return Gate("clamped_silu", limit=limit)


def test_other_families_have_one_function_in_all_layers() -> None:
    for family, kind in (("llama", "silu"), ("gemma3_text", "gelu_tanh"), ("gpt_oss", "clamped")):
        config = json.loads(tiny_config(family).to_json_string(use_diff=False))
        assert read_gate(config).kind == kind
        assert expert_gates(config) == (read_gate(config),) * config["num_hidden_layers"]


def test_a_list_of_limits_that_is_too_short_is_a_sentence() -> None:
    with pytest.raises(ModelError, match="for swiglu_limits, which must be a limit for each layer"):
        expert_gates({**STEP, "swiglu_limits": [0.0]})
