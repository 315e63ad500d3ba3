"""The mlx runtime against mlx-lm's own generation, and against transformers where rotary settings go astray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
import torch

from tests.engine.runtimes import torch_oracle
from tests.engine.runtimes.mlx_oracle import (
    FAMILIES,
    FORMS,
    QUANTISABLE,
    generate,
    library_generate,
    library_model,
    load,
    prompt_of,
    relative_error,
    write_comparable,
    write_model,
    write_quantised,
)
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import logits_along
from tests.engine.runtimes.torch_oracle import typical, worst
from tests.support.pairwise import in_turn
from tests.support.transformers_models import transformers_language_model

PROMPT = prompt_of(37)
TOKENS = 12


PLAIN = ("llama", "mixtral", "gpt_oss", "deepseek_v3")
"""Families that are compared with mlx-lm in float32; all of them are in four bits, and with transformers in float32."""
SEEDS = {"gemma3_text": 6, "gemma4_unified_text": 5}
"""Seeds of models that answer with several tokens: with tied embeddings others repeat two or three."""


@pytest.mark.parametrize(
    "family", [family if family in PLAIN else pytest.param(family, marks=pytest.mark.soak) for family in FAMILIES]
)
def test_equals_mlx_lm_in_float32(family: str, tmp_path: Path) -> None:
    folder = write_comparable(tmp_path / family, family, seed=SEEDS.get(family, 0))
    expected_tokens, expected = library_generate(library_model(folder), PROMPT, TOKENS)
    model = load(folder)
    assert len(set(expected_tokens)) > 3, "a degenerate model would prove nothing"
    for chunks in ([5, 20, 12], [36, 1]):
        tokens, found = generate(model.start(), PROMPT, TOKENS, chunks)
        assert tokens == expected_tokens
        assert relative_error(found, expected) < 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize("family", QUANTISABLE)
def test_equals_mlx_lm_in_four_bits(family: str, tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, family)
    expected_tokens, expected = library_generate(library_model(folder), PROMPT, TOKENS)
    model = load(folder)
    assert model.facts.dtype == "4-bit, float32"
    tokens, found = generate(model.start(), PROMPT, TOKENS, [5, 20, 12])
    assert tokens == expected_tokens
    assert relative_error(found, expected) < 1e-4


ELSEWHERE = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
)
"""Families that run quantised by mlx-lm in the other runtimes, too."""
BY_MLX_LM = ("deepseek_v3", "glm4_moe_lite", "lfm2_moe", "gemma4_text", "qwen3_next")
"""Those of which mlx-lm stores some tensors otherwise; Qwen 3.5 is in test_runtimes_composite_models.py."""
ROUNDED = 0.2
"""Largest usual error where inputs are rounded to eight bits: routers of small models choose other experts then."""


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "form"), in_turn(ELSEWHERE, tuple(FORMS)))
def test_equals_mlx_lm_in_other_forms(family: str, form: str, tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, family, **FORMS[form])
    expected_tokens, expected = library_generate(library_model(folder), PROMPT, TOKENS)
    tokens, found = generate(load(folder).start(), PROMPT, TOKENS, [5, 20, 12])
    assert tokens == expected_tokens
    assert relative_error(found, expected) < 1e-4


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(("family", "form"), in_turn(BY_MLX_LM, ({}, {"bits": 8, "group": 64}, {"mode": "mxfp4"})))
def test_the_other_runtimes_read_what_mlx_lm_stores_in_its_own_way(
    family: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_quantised(tmp_path, family, **form)
    theirs = list(np.array(library_model(folder)(mx.array([PROMPT]))[0, 19:].astype(mx.float32)))
    for loader in (load_native, torch_oracle.load):
        assert typical(logits_along(loader(folder), PROMPT, 20), theirs) < ROUNDED
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    exact = torch_oracle.load(folder, dtype="float32")
    assert worst(logits_along(exact, PROMPT, 20), theirs) < 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "llama"])
def test_rotary_base_is_honoured(family: str, tmp_path: Path) -> None:
    """Another rope_theta gives other logits: transformers 5 writes it where mlx-lm does not look."""
    logits = []
    for theta in (10_000.0, 200.0):
        rope = {"rope_type": "default", "rope_theta": theta}
        folder = write_model(tmp_path / str(theta), family, rope_parameters=rope)
        logits.append(load(folder).start().extend(PROMPT))
    assert relative_error(logits[0], logits[1]) > 1e-2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}),
        ("olmoe", {"rope_type": "linear", "factor": 2.0}),
        ("deepseek_v3", {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        ("deepseek_v3", {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0}),
        ("gpt_oss", {"rope_type": "yarn", "factor": 8.0, "truncate": True}),
    ],
)
def test_scaled_rotary_equals_transformers(family: str, rope: dict[str, float], tmp_path: Path) -> None:
    if rope["rope_type"] != "linear":
        rope = rope | {"original_max_position_embeddings": 64}
    folder = write_model(tmp_path, family, rope_parameters=rope | {"rope_theta": 10_000.0})
    assert_equals_transformers(folder)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"rope_parameters": _YARN | {"truncate": False}}),
        ("qwen3_5_moe_text", {"rope_parameters": _YARN | {"truncate": False}}),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}),
    ],
    ids=["rotary of qwen3_next", "rotary of qwen3_5_moe", "a setting that transformers does not know"],
)
def test_settings_of_delta_nets_equal_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert_equals_transformers(folder)


def assert_equals_transformers(folder: Path) -> None:
    reference = transformers_language_model(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1].float().numpy()
    found = load(folder).start().extend(PROMPT)
    assert found is not None
    assert relative_error(found, expected) < 1e-3


def test_a_mixed_up_expert_shows(tmp_path: Path) -> None:
    """The tolerance is tight enough: exchanging one matrix of two experts in one layer is seen."""
    model = load(write_model(tmp_path, "mixtral"))
    before = model.start().extend(PROMPT)
    assert before is not None
    experts = model._model.model.layers[1].block_sparse_moe._executor.backend._experts[1]
    experts.down_proj.weight = experts.down_proj.weight[np.array([1, 0, 2, 3, 4, 5, 6, 7]).tolist()]
    after = model.start().extend(PROMPT)
    assert after is not None
    assert relative_error(after, before) > 1e-2
