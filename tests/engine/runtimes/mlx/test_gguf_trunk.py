"""GGUF files in the mlx runtime: the logits of the library's own model on what their weights stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
from gguf import GGMLQuantizationType as Kind
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from benchmarks.packed_blocks import WRITTEN
from engine.models.folders.opening import open_model
from engine.models.formats.number_formats import MLX_BITS
from engine.models.store.gguf_folder import open_gguf
from engine.planning.units import byte_size
from engine.runtimes.mlx.configuration import complete_config, translate_config
from engine.runtimes.mlx.families import family_of
from engine.runtimes.mlx.weights import from_files
from tests.engine.runtimes.mlx_oracle import (
    OVERRIDES,
    WINDOWED_HERE_ALONE,
    generate,
    library_generate,
    library_model,
    load,
    prompt_of,
    relative_error,
)
from tests.engine.runtimes.subjects import NOT_ON_MLX, logits_along
from tests.engine.runtimes.torch_oracle import library_run, worst
from tests.support.pairwise import in_turn
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")

PROMPT = prompt_of(37)
TOKENS = 12
BY_TRANSFORMERS = ("gpt_oss", "qwen3_5_moe_text")
"""Families that mlx-lm alone does not run as their files say: it rounds rotary frequencies, or has no such model."""
FAMILIES = tuple(family for family in ARCHITECTURES if family not in NOT_ON_MLX)
IN_TURN = tuple(in_turn(FAMILIES, tuple(name for name in MLX_BITS if name in WRITTEN)))
USUAL = tuple((family, name) for family in ("qwen3", "qwen3_moe") for name in ("Q4_0", "Q4_1", "Q8_0", "MXFP4"))
"""A dense family and one with experts, in the formats that most files for Macs have."""
SHOWN = {*USUAL, ("gpt_oss", "MXFP4"), ("qwen3_5_moe_text", "Q4_0"), ("glm4_moe_lite", "Q8_0"), ("qwen3_next", "Q4_K")}


def _case(family: str, name: str) -> object:
    marks = () if (family, name) in SHOWN else (pytest.mark.soak,)
    return pytest.param(family, name, marks=marks, id=f"{family}-{name}")


def write(
    folder: Path, family: str, kind: Callable[[str], Kind], layout: str = "stacked", merged: bool = False
) -> tuple[Path, Path]:
    """The model folder of a GGUF file, and that of what its weights stand for."""
    sizes = whole_blocks(family) | OVERRIDES.get(family, {})
    if family in WINDOWED_HERE_ALONE:
        sizes["sliding_window"] = None
    source = write_tiny_model(folder / "source", family, **sizes)
    path = write_tiny_gguf(
        folder / "m.gguf",
        source,
        ARCHITECTURES[family],
        quantised=lambda name: Kind.F32 if "ffn_gate_inp" in name else kind(name),
        layout=layout,  # type: ignore[arg-type]
        merged=merged,
        truth=folder / "truth",
    )
    return open_gguf(path, quiet, folder=folder / "opened"), folder / "truth"


def assert_equals_the_library(family: str, opened: Path, truth: Path) -> None:
    model = load(opened)
    if family in BY_TRANSFORMERS:
        tokens, expected = library_run(truth, PROMPT, 1)
        assert worst(logits_along(model, [*PROMPT, *tokens[:-1]], len(PROMPT)), expected) < 1e-4
        return
    tokens, expected = library_generate(library_model(truth), PROMPT, TOKENS)
    found_tokens, found = generate(model.start(), PROMPT, TOKENS, [5, 20, 12])
    assert found_tokens == tokens
    assert relative_error(found, expected) < 1e-4
    assert model.facts.dtype.endswith(", float32") and model.facts.runtime == "mlx"


@pytest.mark.parametrize(
    ("family", "name"),
    [_case(*pair) for pair in dict.fromkeys((*USUAL, *SHOWN, *IN_TURN))],
)
def test_equals_the_library_in_every_format_of_mlx(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtimes.mlx.gguf_files.MOST_GROWTH", 4)
    assert_equals_the_library(family, *write(tmp_path, family, lambda _: Kind[name]))


def mixed(name: str) -> Kind:
    """As files for phones and Macs mix: the embedding, which may be the head, in a format that mlx's kernels lack."""
    return Kind.Q6_K if name.startswith(("token_embd", "output")) else Kind.Q4_0


def as_medium(name: str) -> Kind:
    more = "attn_v" in name or name.startswith(("output", "blk.0.ffn_down"))
    return Kind.Q6_K if more else Kind.Q4_K


@pytest.mark.parametrize(
    ("family", "kind", "layout", "merged"),
    [
        ("gemma4_dense", mixed, "stacked", False),
        ("llama", as_medium, "stacked", False),
        ("qwen3_moe", mixed, "fused", True),
        pytest.param("mixtral", mixed, "separate", False, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", mixed, "separate", False, marks=pytest.mark.soak),
        pytest.param("qwen3_next", lambda name: Kind.Q8_0 if "attn_gate" in name else Kind.Q4_0, "stacked", False),
        pytest.param("gemma4_text", mixed, "fused", False, marks=pytest.mark.soak),
        pytest.param("olmoe", lambda name: Kind.F16, "stacked", False, marks=pytest.mark.soak),
        pytest.param("granitemoe", lambda name: Kind.BF16, "stacked", False, marks=pytest.mark.soak),
    ],
)
def test_equals_the_library_where_some_matrices_are_unpacked(
    family: str,
    kind: Callable[[str], Kind],
    layout: str,
    merged: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tiny models are mostly embedding, so that they grow more than real ones.
    monkeypatch.setattr("engine.runtimes.mlx.gguf_files.MOST_GROWTH", 4)
    opened, truth = write(tmp_path, family, kind, layout, merged)
    model = load(opened)
    tokens, expected = library_generate(library_model(truth), PROMPT, TOKENS)
    found_tokens, found = generate(model.start(), PROMPT, TOKENS, [36, 1])
    assert found_tokens == tokens
    assert relative_error(found, expected) < 1e-4
    said = "Q6_K of them unpacked to float32"
    assert any(said in notice for notice in model.facts.notices) == (kind in (mixed, as_medium))


@pytest.mark.parametrize(("name", "bits"), [("Q4_0", 4), ("Q4_K", 4), ("Q8_0", 8)])
def test_in_bfloat16_it_is_as_near_as_what_mlx_lm_quantises(name: str, bits: int, tmp_path: Path) -> None:
    opened, truth = write(tmp_path, "qwen3", lambda _: Kind[name])
    files = open_model(opened)
    config = complete_config(opened, files.config)
    loaded = from_files(files, None, translate_config(config), family_of(config), mx.bfloat16, quiet)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.uint32, mx.bfloat16}
    quantised = library_model(truth)
    nn.quantize(quantised, 32, bits)
    with_quantised = _logits(quantised)
    quantised.update(tree_map(_in_bfloat16, quantised.parameters()))
    ours = np.sqrt(((_logits(loaded.model) - _logits(library_model(truth))) ** 2).mean())
    theirs = np.sqrt(((_logits(quantised) - with_quantised) ** 2).mean())
    assert 0 < ours < 1.5 * theirs


def _in_bfloat16(array: Any) -> Any:
    return array.astype(mx.bfloat16) if array.dtype == mx.float32 else array


def _logits(model: Any) -> NDArray[np.float32]:
    return np.array(model(mx.array([PROMPT])).astype(mx.float32))


def test_memory_is_what_was_planned_and_said(tmp_path: Path) -> None:
    opened, _ = write(tmp_path, "qwen3_moe", lambda _: Kind.Q4_0)
    model = load(opened)
    held = model.facts.trunk_bytes + model.facts.expert_bytes
    assert any(f"{byte_size(held, fine=True)} in memory" in notice for notice in model.facts.notices)
    assert (model.facts.weights, model.facts.dtype) == ("Q4_0", "Q4_0, float32")
