"""Models that also see pictures (Qwen 3.5 and 3.6, Gemma 4, Llama 4): their language model runs, plain and as mlx-lm
quantises it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.weight_layout import layout_of
from engine.runtimes.choosing import refuse_download
from engine.runtimes.protocol import LoadedModel
from tests.engine.runtimes.composite_models import write_composite
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import MLX, logits_along, needs_mlx, prompt_of
from tests.engine.runtimes.torch_oracle import library_run, load, our_run, typical, worst
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_models import write_tiny_model

EXACT = 1e-4
ROUNDED = 0.2
"""Largest usual error where inputs are rounded to eight bits: routers of small models choose other experts then."""


def load_mlx(folder: Path, **options: Any) -> LoadedModel:
    return MLX.load(folder, **options)


Published = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The folder of a model as its authors publish it, and of its language model alone, as transformers saves it."""
    root = tmp_path_factory.mktemp("composite")
    written: dict[str, tuple[Path, Path]] = {}

    def folders(family: str) -> tuple[Path, Path]:
        if family not in written:
            alone = write_tiny_model(root / f"{family}_text", f"{family}_text", **whole_blocks(f"{family}_text"))
            written[family] = write_composite(root / family, alone, family), alone
        return written[family]

    return folders


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma4", "qwen3_vl"])
@pytest.mark.parametrize("loader", [load_native, load, pytest.param(load_mlx, marks=needs_mlx)])
def test_the_language_model_is_that_of_its_own_family(
    published: Published, family: str, loader: Callable[..., LoadedModel]
) -> None:
    folder, alone = published(family)
    tokens = prompt_of(40)
    answer, theirs = library_run(alone, tokens, chunks=1)
    model = loader(folder, dtype="float32")
    assert model.facts.family == f"{family}_text"
    limit = 10 * EXACT if model.facts.runtime == "mlx" else EXACT
    assert worst(our_run(model, tokens, 2, answer), theirs) < limit


@needs_kernels
def test_the_language_model_of_qwen_4_runs_with_tables_in_their_files(tmp_path: Path) -> None:
    alone = write_tiny_model(tmp_path / "alone", "qwen4_exp_text")
    folder = write_composite(tmp_path / "whole", alone, "qwen4_exp")
    tokens = prompt_of(40)
    answer, theirs = library_run(alone, tokens, chunks=1)
    for loader in (load, load_native):
        model = loader(folder, dtype="float32")
        assert model.facts.family == "qwen4_exp_text"
        assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


def test_the_language_model_of_glm_5_next_runs(tmp_path: Path) -> None:
    alone = write_tiny_model(tmp_path / "alone", "glm5_next_text")
    folder = write_composite(tmp_path / "whole", alone, "glm5_next")
    tokens = prompt_of(40)
    answer, theirs = library_run(alone, tokens, chunks=1)
    model = load(folder, dtype="float32")
    assert model.facts.family == "glm5_next_text"
    assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@needs_kernels
@pytest.mark.parametrize("family", ["llama4", "qwen3_vl_moe"])
def test_a_language_model_with_transposed_experts_is_prepared_and_run(
    published: Published, prepared: Callable[[Path], Path], family: str
) -> None:
    folder, alone = published(family)
    tokens = prompt_of(40)
    answer, theirs = library_run(alone, tokens, chunks=1)
    for model in (load(folder), load(prepared(folder)), load_native(prepared(folder))):
        assert model.facts.family == f"{family}_text"
        assert worst(our_run(model, tokens, 2, answer), theirs) < EXACT


@pytest.mark.soak
@needs_kernels
@pytest.mark.parametrize("loader", [load_native, load, pytest.param(load_mlx, marks=needs_mlx)])
def test_layers_with_numbers_of_two_digits_have_heads_of_their_own(
    tmp_path: Path, loader: Callable[..., LoadedModel]
) -> None:
    """transformers then writes the number of a layer with two digits."""
    kinds = ["sliding_attention", "full_attention"] * 6
    folder = write_tiny_model(tmp_path / "m", "gemma4_text", num_hidden_layers=12, layer_types=kinds)
    assert "01" in json.loads((folder / "config.json").read_text())["per_layer_config"]
    tokens = prompt_of(40)
    answer, theirs = library_run(folder, tokens, chunks=1)
    model = loader(folder, dtype="float32")
    limit = 10 * EXACT if model.facts.runtime == "mlx" else EXACT
    assert worst(our_run(model, tokens, 2, answer), theirs) < limit
    assert model.facts.key_value_bytes_per_token == 4 * 6 * 2 * (3 * 16 + 2 * 24)


@pytest.mark.soak
@needs_mlx
@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma4", "qwen3_vl", "qwen3_vl_moe"])
def test_what_mlx_lm_quantises_gives_mlx_lms_logits(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """mlx-lm adds one to norms, exchanges the axes of convolutions, and quantises the gates in eight bits."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    folder, _ = published(family)
    library, _ = load_model(folder)
    library, config = quantize_model(library, json.loads((folder / "config.json").read_text()), 64, 4)
    save_model(tmp_path / "quantised", library)
    save_config(config, tmp_path / "quantised" / "config.json")
    mx.save_safetensors(
        str(tmp_path / "quantised" / "model-pictures.safetensors"),
        {"vision_tower.blocks.0.norm.weight": mx.ones((1000,))},
    )
    quantised, tokens = tmp_path / "quantised", prompt_of(32)
    theirs = list(np.array(library(mx.array([tokens]))[0, 19:].astype(mx.float32)))
    for loader in (load_native, load):
        assert typical(logits_along(loader(quantised), tokens, 20), theirs) < ROUNDED
    with monkeypatch.context() as patch:
        patch.setenv("PRIVATELLM_KERNELS", "off")
        exact = load(quantised, dtype="float32")
    assert worst(logits_along(exact, tokens, 20), theirs) < EXACT
    in_mlx = load_mlx(quantised)
    assert worst(logits_along(in_mlx, tokens, 20), theirs) < EXACT
    # What sees pictures is neither counted nor loaded.
    layout = layout_of(quantised)
    names = {name for piece in layout.trunk for name, _, _ in piece}
    assert names and not any("vis" in name for name in names)
    assert layout.trunk_bytes == in_mlx.facts.trunk_bytes
    refuse_download(read_config(quantised), 1)


def test_a_family_that_is_not_known_stays_refused_by_its_own_name(published: Published, tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((published("qwen3_5")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen9_vl"}))
    with pytest.raises(ModelError, match="family 'qwen9_vl' are not supported"):
        open_model(tmp_path)
