"""Every family of the native trunk equals transformers' own model on the same files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_oracle import FAMILIES, load_native, needs_kernels
from tiny_models import TINY_MOE_FAMILIES, write_tiny_model
from torch_oracle import library_run, no_progress, our_run, prompt, worst
from transformers import AutoModelForCausalLM

from engine.models.prepare import prepare
from engine.moe.kernels.bindings import available
from engine.runtimes.protocol import Logits

pytestmark = needs_kernels

LIMIT = 1e-5
"""Both compute in float32; the order of the sums differs."""

BFLOAT16_LIMIT = 2e-2


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def forms(plain: Path, family: str) -> list[Path]:
    """The model as transformers wrote it, and with experts also prepared."""
    if family not in TINY_MOE_FAMILIES:
        return [plain]
    prepare(plain, plain.with_name(plain.name + "-prepared"), no_progress)
    return [plain, plain.with_name(plain.name + "-prepared")]


def test_float32_equals_the_library_in_one_chunk_and_in_several(family: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / family, family)
    for form in forms(plain, family):
        model = load_native(form)
        tokens = prompt(model, 40)
        answer, theirs = library_run(plain, tokens, chunks=1)
        for chunks in (1, 3):
            ours = our_run(model, tokens, chunks, answer)
            assert [int(logits.argmax()) for logits in ours] == answer
            assert worst(ours, theirs) < LIMIT
        assert len(set(answer)) > 3, "the tiny model repeats itself, so it shows nothing"


def true_logits(folder: Path, tokens: list[int], answer: list[int]) -> list[Logits]:
    """transformers' logits at each token of ``answer``, computed in float32 from what is stored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1]
    return list(logits.numpy())


def errors(ours: list[Logits], true: list[Logits]) -> list[float]:
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, true, strict=True)]


def test_bfloat16_is_nearer_to_float32_than_the_library_in_bfloat16(family: str, tmp_path: Path) -> None:
    # Where two experts are about equally probable, a rounding anywhere sends a token to the other one, in the library
    # as here: the median step counts. What is stored as bfloat16 and computed in float32 is the truth for both.
    plain = write_tiny_model(tmp_path / family, family, dtype="bfloat16", shards=True)
    for form in forms(plain, family):
        model = load_native(form)
        assert model.facts.dtype == "bfloat16"
        tokens = prompt(model, 40)
        answer, theirs = library_run(plain, tokens, chunks=1)
        true = true_logits(plain, tokens, answer)
        for chunks in (1, 3):
            ours = errors(our_run(model, tokens, chunks, answer), true)
            assert np.median(ours) < BFLOAT16_LIMIT
            assert np.median(ours) < np.median(errors(theirs, true))


def test_bfloat16_weights_in_float32_are_exact(family: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / family, family, dtype="bfloat16")
    model = load_native(plain, dtype="float32")
    assert model.facts.dtype == "float32" and not model.facts.notices
    tokens = prompt(model, 20)
    answer, theirs = library_run(plain, tokens, chunks=1, dtype="float32")
    assert worst(our_run(model, tokens, 1, answer), theirs) < LIMIT


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd head width, one key/value head": ("llama", {"head_dim": 22, "num_key_value_heads": 1}),
    "a key/value head per head": ("mixtral", {"num_key_value_heads": 6}),
    "head width over a block": ("qwen3", {"head_dim": 72}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "biases of attention with head norms": ("qwen3_moe", {"attention_bias": True}),
    "no biases": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "window on late layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "window by layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "window on even layers": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),
    "window on all layers": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 11}),
    "window of two": ("mistral", {"sliding_window": 2}),
    "no window": ("mistral", {"sliding_window": None}),
    "tied": ("granitemoe", {"tie_word_embeddings": True, "attention_bias": True}),
    "whole norm, biases, grouped": ("olmoe", {"attention_bias": True, "norm_topk_prob": True, "clip_qkv": None}),
    "sparse step": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn, scales given": (
        "mixtral",
        {"head_dim": 8, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "yarn, factor given": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "another activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "many experts": ("mixtral", {"num_local_experts": 40, "num_experts_per_tok": 6}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_library(name: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    folder = write_tiny_model(tmp_path / "model", family, **options)
    model = load_native(folder)
    tokens = prompt(model, 37)
    answer, theirs = library_run(folder, tokens, chunks=1)
    for chunks in (1, 4):
        ours = our_run(model, tokens, chunks, answer)
        assert worst(ours, theirs) < 3 * LIMIT
        assert [int(logits.argmax()) for logits in ours] == answer


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_moe"])
def test_a_prompt_over_several_pieces_pages_and_score_tiles(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", family, max_position_embeddings=2048)
    model = load_native(folder)
    tokens = prompt(model, 1300)
    answer, theirs = library_run(folder, tokens, chunks=1)
    for chunks in (1, 7):
        assert worst(our_run(model, tokens, chunks, answer), theirs) < 10 * LIMIT


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads_gives_the_same(threads: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2_moe")
    one, other = load_native(folder, cpu_threads=1), load_native(folder, cpu_threads=threads)
    tokens = prompt(one, 60)
    assert worst([other.start().extend(tokens)], [one.start().extend(tokens)]) < LIMIT
    assert other.facts.trunk.endswith(f", {threads} thread{'s' if threads > 1 else ''})")


_IN_A_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from engine.ipc.messages import Load
from engine.runtimes import runtime_named
model = runtime_named("native").load(Path(sys.argv[1]), Load(id=1, model="m", cpu_threads=2), lambda *_: None)
assert model.facts.trunk.startswith(f"native ({sys.argv[3]}, "), model.facts.trunk
rows = model.start()
logits = [rows.extend([5, 6, 7] * 9)] + [rows.step([token])[0] for token in (8, 9)]
np.save(sys.argv[2], np.stack(logits))
assert not {"torch", "transformers", "mlx"} & set(sys.modules), "the native runtime imports none of them"
"""


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_every_instruction_set_gives_the_same(
    instructions: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", family, head_dim=20)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    runs = "avx512f" if instructions == "avx512_bf16" else instructions  # in float32
    arguments = [str(folder), str(tmp_path / "logits.npy"), runs]
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS, *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = reference(torch.tensor([[5, 6, 7] * 9 + [8, 9]])).logits[0, -3:].numpy()
    assert worst(list(np.load(tmp_path / "logits.npy")), list(theirs)) < LIMIT
