"""Experts never become anonymous memory: what a process takes on top of what it had before it loaded a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.folders.prepare import prepare
from tests.engine.runtimes import taken_memory
from tests.support.engine_forks import with_libraries
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

LONG_PROMPT = 2500


def write_model(folder: Path, intermediate_size: int) -> Path:
    """A mixtral of two layers in bfloat16. The numbers only need to send tokens everywhere."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=160,
        hidden_size=512,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.fill_(0.001)
            else:
                parameter.normal_(0.0, 1.0 if "gate" in name or "embed" in name else 0.02)
    model.save_pretrained(folder)
    return folder


def measured(folder: Path, prompt_tokens: int, tiny: Path) -> dict[str, Any]:
    """What a process says of itself that ran so many tokens of a prompt, and some steps after a short one."""
    options = {"folder": str(folder), "tokens": prompt_tokens, "tiny": str(tiny)}
    process = with_libraries(hooked(taken_memory.run, **options), os.environ)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        said = process.stdout.read()
    assert process.wait() == 0
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["plain", "prepared"])
def test_experts_stay_file_backed(kind: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """What is taken beside the trunk is less than one layer has in experts: they were not copied."""
    folder = write_model(tmp_path / "plain", 1408)
    if kind == "prepared":
        prepare(folder, tmp_path / "prepared", lambda *_: None)
        folder = tmp_path / "prepared"
    found = measured(folder, 128, tiny_model("mixtral", dtype="bfloat16"))
    one_layer = found["experts"] // 2
    assert one_layer > 34 * 10**6
    assert found["used"] == [8, 8]
    assert found["taken"] <= found["trunk"] + one_layer * 2 // 3
    # All experts were read, and are there as pages of the file.
    assert found["mapped"] >= 0.9 * found["experts"]


def test_a_long_prompt_costs_its_keys_and_values(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """And what one chunk needs; never something per pair of positions, which would be 200 MB of float32."""
    found = measured(write_model(tmp_path / "long", 64), LONG_PROMPT, tiny_model("mixtral", dtype="bfloat16"))
    chunk = 512 * LONG_PROMPT * 8 * 4
    assert found["taken"] <= found["trunk"] + 1.2 * found["cached"] + chunk
