"""Every family gives the logits that ``logits.txt`` keeps, in every form on every runtime, and without each setting."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.runtimes.subjects import NATIVE, needs_mlx

mlx_oracle = pytest.importorskip("tests.engine.runtimes.mlx_oracle", reason="mlx is not installed")

from tests.inventory.logits_of_models import (  # noqa: E402
    EXACT,
    FAMILIES,
    SMALL,
    Outcome,
    differences,
    lines_of,
    outcome_of,
    outcomes,
    read_lines,
    with_small_embedding,
)
from tests.inventory.write_inventory import LOGITS  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("home")


@functools.cache
def kept() -> dict[str, Outcome]:
    return read_lines(LOGITS.read_text("utf-8").splitlines())


@pytest.mark.soak
@needs_kernels
@needs_mlx
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_that_are_kept(family: str, tmp_path: Path) -> None:
    before = {name: outcome for name, outcome in kept().items() if outcome.family == family}
    changed = differences(before, list(outcomes(family, tmp_path)))
    assert not changed, "`make logits` keeps the new ones:\n" + "\n".join(changed)


def test_each_family_is_kept_with_logits_and_without_its_settings() -> None:
    for family in FAMILIES:
        mine = [outcome for outcome in kept().values() if outcome.family == family]
        assert any(outcome.form == "float32" and outcome.sums is not None for outcome in mine), family
        assert any(outcome.form.startswith("without ") and outcome.sums is not None for outcome in mine), family


@needs_kernels
@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": 2e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 11_000.0}},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"hidden_act": "gelu"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_number_of_a_family_would_be_noticed(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = with_small_embedding(write_tiny_model(tmp_path / "model", "qwen3_moe"))
    right = outcome_of(NATIVE, "qwen3_moe", SMALL, folder)
    assert differences({right.name: kept()[right.name]}, [right]) == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    changed = differences({right.name: kept()[right.name]}, [outcome_of(NATIVE, "qwen3_moe", SMALL, folder)])
    assert len(changed) == 1 and changed[0].startswith(f"{right.name}: differs by ")


SUMS = np.array([[1.0, 2.0, 3.0, -4.0, 5.0, 6.0]])
RAN = Outcome("llama", SMALL, "native", SUMS)


def test_what_is_written_is_read_again() -> None:
    same, other = replace(RAN, form="without head_dim"), replace(RAN, form="without bias", sums=SUMS + 1)
    refused = Outcome("llama", "GGUF F32", "mlx", refused="mlx reads no GGUF: take another.")
    found = [RAN, replace(RAN, runtime="torch"), same, other, refused]
    lines = lines_of(found)
    assert lines == [
        "llama, small embedding, native torch: 1 2 3 -4 5 6",
        "llama, without head_dim, native: as with it",
        "llama, without bias, native: 2 3 4 -3 6 7",
        "llama, GGUF F32, mlx: refused: mlx reads no GGUF: take another.",
    ]
    assert differences(read_lines(sorted(lines)), found) == []


def test_differences_are_named() -> None:
    other = replace(RAN, sums=SUMS + 10 * EXACT)
    refused, new = replace(RAN, sums=None, refused="too old"), replace(RAN, runtime="mlx")
    assert differences({RAN.name: RAN}, [other])[0].startswith("llama, small embedding, native: differs by 0.0015 of")
    assert differences({RAN.name: RAN}, [refused]) == [f"{RAN.name}: was {RAN}, is too old"]
    assert differences({RAN.name: RAN}, [new]) == [f"{new.name}: is new", f"{RAN.name}: is gone"]
