"""Loading on mlx: the kinds of folders, what is said about them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model
from safetensors.numpy import load_file

from engine.errors import ModelError
from engine.models.folders.prepare import prepare
from engine.runtimes.mlx import loading
from engine.runtimes.mlx.families import unsupported_config
from tests.engine.runtimes.mlx_oracle import (
    MOE_FAMILIES,
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
from tests.engine.runtimes.subjects import REGULAR

PROMPT = prompt_of(23)
ON_CPU = mx.default_device() == mx.cpu


STORED_ALIKE = ("mixtral", "gpt_oss", "dbrx")
"""An expert in a tensor of its own, stacked and transposed experts, and rows of one matrix: one family of each."""
each_layout = pytest.mark.parametrize(
    "family",
    [family if family in STORED_ALIKE else pytest.param(family, marks=pytest.mark.soak) for family in MOE_FAMILIES],
)


@each_layout
def test_a_prepared_model_is_the_same_to_the_bit(family: str, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", family, shards=True)
    prepared = tmp_path / "prepared"
    prepare(plain, prepared, lambda *_: None)
    first, second = load(plain), load(prepared)
    a, b = first.start(), second.start()
    assert np.array_equal(a.extend(PROMPT), b.extend(PROMPT))
    assert np.array_equal(a.step([5]), b.step([5]))
    assert first.facts.expert_bytes == second.facts.expert_bytes
    assert first.facts.trunk_bytes == second.facts.trunk_bytes


def test_facts(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "tiny", "deepseek_v3"), context_limit=100)
    facts = model.facts
    device = "cpu" if ON_CPU else "gpu"
    assert (facts.name, facts.family, facts.runtime, facts.device) == ("tiny", "deepseek_v3", "mlx", device)
    assert facts.executor == f"local (mlx, {device})"
    assert (facts.layers, facts.moe_layers, facts.experts, facts.experts_per_token) == (3, [1, 2], 8, 3)
    assert (facts.vocabulary, facts.hidden, facts.context_limit, facts.dtype) == (160, 48, 100, "float32")
    assert facts.expert_bytes == 2 * 8 * 3 * 40 * 48 * 4
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    assert facts.parameters == sum(array.size for array in stored.values())
    assert facts.trunk_bytes == facts.parameters * 4 - facts.expert_bytes
    # Compressed keys and values (16) and the rotary part (8), in float32, of three layers.
    assert facts.key_value_bytes_per_token == 3 * (16 + 8) * 4
    assert facts.load_s > 0
    assert facts.notices == []
    assert load(write_model(tmp_path / "dense", "llama")).facts.executor == "none (dense)"


@pytest.mark.skipif(not ON_CPU, reason="only mlx on a CPU needs float32")
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama"])
def test_bfloat16_becomes_float32_on_a_cpu_and_it_says_so(family: str, tmp_path: Path) -> None:
    folder = write_comparable(tmp_path, family, dtype="bfloat16")
    model = load(folder)
    assert model.facts.dtype == "float32"
    assert model.facts.notices == [
        "weights converted from bfloat16 to float32: mlx on a CPU computes in float32",
    ]
    library = library_model(folder)
    library.update(_as_float32(library.parameters()))
    expected_tokens, expected = library_generate(library, PROMPT, 8)
    tokens, found = generate(model.start(), PROMPT, 8, [23])
    assert tokens == expected_tokens
    assert relative_error(found, expected) < 1e-4
    assert load(folder, dtype="float32").facts.notices == []
    assert "bfloat16 is not used" in load(folder, dtype="bfloat16").facts.notices[0]


def _as_float32(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _as_float32(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_as_float32(value) for value in tree]
    return tree.astype(mx.float32)


@each_layout
def test_a_folder_written_by_mlx_lm_without_quantisation(family: str, tmp_path: Path) -> None:
    source = write_comparable(tmp_path / "source", family)
    library = library_model(source)
    save_model(tmp_path / "converted", library)
    save_config(json.loads((source / "config.json").read_text()), tmp_path / "converted" / "config.json")
    expected, found = load(source), load(tmp_path / "converted")
    assert np.array_equal(found.start().extend(PROMPT), expected.start().extend(PROMPT))
    assert found.facts.expert_bytes == expected.facts.expert_bytes
    assert found.facts.moe_layers == expected.facts.moe_layers


def test_quantised_facts_and_types(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, "qwen3_moe")
    plain = load(tmp_path / "source")
    model = load(folder)
    assert model.facts.parameters == plain.facts.parameters
    assert model.facts.experts == plain.facts.experts
    # 4 bits a weight, and a float32 scale and bias per 32 of them.
    assert model.facts.expert_bytes == plain.facts.expert_bytes * (4 + 2) // 32
    half = load(folder, dtype="bfloat16")
    assert half.facts.dtype == "4-bit, bfloat16"
    library = library_model(folder)
    library.set_dtype(mx.bfloat16)
    expected_tokens, expected = library_generate(library, PROMPT, 8)
    tokens, found = generate(half.start(), PROMPT, 8, [22, 1])
    assert tokens == expected_tokens
    assert relative_error(found, expected) < 2e-2


def test_mxfp4_as_gpt_oss_is_published(tmp_path: Path) -> None:
    """Blocks and scales beside a bfloat16 trunk, gate and up interleaved; equal to mlx-lm's own reading of it."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    source = write_comparable(tmp_path / "source", "gpt_oss", **sizes)
    tensors: dict[str, Any] = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = mx.quantize(array.swapaxes(1, 2), 32, 4, mode="mxfp4")
            tensors[f"{name}_blocks"] = mx.unflatten(blocks.view(mx.uint8), -1, (-1, 16))
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = array
    folder = tmp_path / "published"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = json.loads((source / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(quantised))

    expected_model, _ = quantize_model(
        library_model(source), config, 32, 4, mode="mxfp4", quant_predicate=lambda path, _: ".experts." in path
    )
    expected_tokens, expected = library_generate(expected_model, PROMPT, 8)
    model = load(folder)
    assert model.facts.dtype == "4-bit, float32"
    tokens, found = generate(model.start(), PROMPT, 8, [10, 13])
    assert tokens == expected_tokens
    assert relative_error(found, expected) < 1e-4


@pytest.mark.skipif(not ON_CPU, reason="mlx on a GPU runs it")
def test_half_quantised_bfloat16_on_a_cpu_is_refused_at_loading(tmp_path: Path) -> None:
    """Experts whose sizes no group of 32 divides stay in bfloat16, which mlx on a CPU cannot multiply gathered."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 56}
    source = write_comparable(tmp_path / "source", "mixtral", dtype="bfloat16", **sizes)
    config = json.loads((source / "config.json").read_text())
    model, quantised = quantize_model(library_model(source), config, 32, 4)
    save_model(tmp_path / "quantised", model)
    save_config(quantised, tmp_path / "quantised" / "config.json")
    with pytest.raises(ModelError, match="mlx cannot run this model here"):
        load(tmp_path / "quantised")
    assert load(tmp_path / "quantised", dtype="float32").facts.dtype == "4-bit, float32"


def test_memory_is_freed_on_close(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, "mixtral", vocab_size=20_000, hidden_size=192, num_hidden_layers=2))
    held = mx.get_active_memory()
    size = model.facts.trunk_bytes + model.facts.expert_bytes
    rows = model.start()
    model.close()
    assert held - mx.get_active_memory() > size * 0.9
    with pytest.raises(ModelError, match="closed"):
        rows.extend([3])


def test_experts_are_not_kept_twice(tmp_path: Path) -> None:
    """Loading needs the weights once and one layer's matrices of one kind on top."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 320, "num_hidden_layers": 8}
    folder = write_model(tmp_path, "mixtral", **sizes)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load(folder)
    size = model.facts.trunk_bytes + model.facts.expert_bytes
    part = model.facts.expert_bytes / 8 / 3
    assert mx.get_active_memory() - before < size * 1.02 + 100_000
    assert mx.get_peak_memory() - before < size + 2 * part + 1_000_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partitioning": "hybrid"}, "'hybrid' is not for the mlx runtime"),
    ],
)
def test_partitionings_that_mlx_does_not_have(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        load(write_model(tmp_path, "mixtral"), **options)
    assert caught.value.kind == "bad-input"


def test_threads_are_mlx_s_own_and_it_says_so(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, "llama"), cpu_threads=3)
    assert model.facts.notices == ["mlx chooses its own threads: the setting of 3 is not used"]


def test_families_and_settings_that_do_not_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not run the family 'minimax' .*--runtime torch"):
        load(write_model(tmp_path / "minimax", "minimax"))
    with pytest.raises(ModelError, match="n_group 2"):
        load(write_model(tmp_path / "glm", "glm4_moe", n_group=2))
    with pytest.raises(ModelError, match=r"clip_qkv 4\.0"):
        load(write_model(tmp_path / "olmoe", "olmoe", clip_qkv=4.0))
    with pytest.raises(ModelError, match="layer_types"):
        load(write_model(tmp_path / "next", "qwen3_next", layer_types=["full_attention"] * 2 + REGULAR[:2]))


@pytest.mark.parametrize(
    ("family", "settings", "text"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        (
            "gemma4_text",
            {"layer_types": ["full_attention"] * 12, "per_layer_config": {"01": {"head_dim": 8}}},
            "of layer 1",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn' of full_attention"),
        ("lfm2_moe", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    ],
)
def test_settings_that_mlx_lm_ignores_are_refused(family: str, settings: dict[str, Any], text: str) -> None:
    assert unsupported_config({"model_type": family}) is None
    found = unsupported_config({"model_type": family, **settings})
    assert found is not None and text in found


@pytest.mark.skipif(not ON_CPU, reason="the GPU's limit is another number")
def test_a_model_beyond_memory_is_refused_with_the_shortfall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, "mixtral")
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ModelError, match="GB too little: choose a smaller or a 4-bit model") as caught:
        load(folder)
    assert caught.value.kind == "memory"


def test_a_damaged_quantised_folder_is_one_sentence(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path / "q", "mixtral")
    path = folder / "model.safetensors"
    tensors = dict(mx.load(str(path)))
    removed = next(name for name in tensors if name.endswith("q_proj.scales"))
    mx.save_safetensors(str(path), {name: array for name, array in tensors.items() if name != removed})
    for text in ("mlx-lm cannot load", r"model\.safetensors"):
        with pytest.raises(ModelError, match=text) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
        path.write_bytes(path.read_bytes()[:5000])


def test_nothing_is_left_to_compute_after_loading(tmp_path: Path) -> None:
    """Weights are read when the model is loaded, not at the first token, and files may then be removed."""
    folder = write_quantised(tmp_path, "mixtral")
    model = load(folder)
    expected = load(folder).start().extend(PROMPT)
    for path in folder.iterdir():
        path.unlink()
    assert np.array_equal(model.start().extend(PROMPT), expected)
    assert len(tree_flatten(model._model.parameters())) > 10
