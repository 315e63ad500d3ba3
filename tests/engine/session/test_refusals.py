"""The way out that is named where a model sees no pictures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.session.refusals import way_to_see


@pytest.mark.parametrize(
    ("family", "in_ring", "said"),
    [
        ("llama", False, "load a model that sees: Qwen 3.5 and 3.6, Qwen3-VL, Gemma 3, Gemma 4 or Mistral 3 and 4"),
        ("qwen3_vl_text", False, "safetensors files as published"),
        ("unheard_of", True, "load a model that sees"),
        ("gemma4_text", True, "on this machine alone"),
        ("gemma4_text", False, "safetensors files as published"),
    ],
)
def test_the_way_to_see(family: str, in_ring: bool, said: str) -> None:
    facts = SimpleNamespace(family=family)
    assert said in way_to_see(facts, in_ring=in_ring)  # type: ignore[arg-type]
