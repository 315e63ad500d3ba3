"""The way out that is named where a model sees no pictures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.session.refusals import way_to_see


@pytest.mark.parametrize(
    ("family", "has_tower", "in_ring", "said"),
    [
        ("llama", False, False, "load a model that sees"),
        ("unheard_of", False, True, "load a model that sees"),
        ("gemma4_text", True, True, "on this machine alone"),
        ("gemma4_text", False, False, "safetensors files as published"),
        ("qwen3_5_moe_text", True, False, "as mlx shows it none"),
    ],
)
def test_the_way_to_see(family: str, has_tower: bool, in_ring: bool, said: str) -> None:
    facts = SimpleNamespace(family=family, runtime="mlx")
    assert said in way_to_see(facts, has_tower=has_tower, in_ring=in_ring)  # type: ignore[arg-type]
