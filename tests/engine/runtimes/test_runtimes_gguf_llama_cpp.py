"""The same GGUF file in llama.cpp: privatellm is as near to what the weights stand for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from engine.models.store.gguf_folder import open_gguf
from tests.engine.runtimes.native_oracle import FAMILIES as NATIVE
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of
from tests.engine.runtimes.torch_oracle import STEPS, library_run, load, our_run, steps_apart
from tests.support.prebuilt_llama_cpp import PrebuiltLlamaCpp
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = [needs_kernels, pytest.mark.soak]

ALIKE = 1.1
"""Largest error of ours as a multiple of llama.cpp's, the geometric mean over the steps of all prompts. Both round the
same inputs, so that the ratio of a single step says nothing."""
PROMPTS = 8
MORE_PROMPTS = {"glm_moe_dsa": 24}
"""Prompts of families of which a few leave the mean to chance."""
PLAIN = 0.0025
"""Error of llama.cpp on plain weights, which computes with keys and values in float16."""
PLAIN_FOR = {"gemma3n_text": 0.01}
"""The same where llama.cpp also looks up GELU in float16, and few gates count."""
FAMILIES = tuple(family for family in ARCHITECTURES if family != "mistral")
"""Families of which llama.cpp computes the same: it takes a mistral file for a llama without a window."""

CHOSEN: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 13},
    "glm_moe_dsa": {"index_topk": 13},
    "glm5_next_text": {"index_topk": 8},
    "deepseek_v4": {"index_topk": 3},
}
"""Indexers choose few positions, pools or compressed keys where weights are not rounded."""
LONG = {"deepseek_v4": 300}
"""Tokens of a text of which heavily compressed attention has keys."""

ALIKE_FOR: dict[str, dict[str, Any]] = {
    "olmoe": {"clip_qkv": None},
    "deepseek_v2": {"q_lora_rank": 256, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "phi3": {"sliding_window": None},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "granitemoehybrid_dense": {"shared_intermediate_size": 512},
}
"""What llama.cpp does otherwise is left out: it knows no limit of olmoe's queries and keys, which no published model
has, rounds the borders of yarn, which gpt-oss leaves as they are, chooses groups of experts by their best two where
DeepSeek V2 does it by the best, takes queries without latents for V2-Lite, of 27 layers, knows windows of EXAONE 4 only
in models of 64 layers, none of Phi 3, and one width of a dense Granite's networks."""


def errors(folder: Path, family: str, kind: str, prompts: int) -> tuple[list[float], list[float]]:
    """Our errors and llama.cpp's at each step of each prompt, relative to transformers' logits on what the weights
    stand for."""
    options = whole_blocks(family) | ALIKE_FOR.get(family, {})
    if kind == "F32":
        options |= CHOSEN.get(family, {})
    source = write_tiny_model(folder / "source", family, **options)
    truth, path = folder / "truth", folder / f"{kind}.gguf"
    write_tiny_gguf(path, source, ARCHITECTURES[family], quantised=GGMLQuantizationType[kind], truth=truth)
    loaded = load_native if family in NATIVE else load
    model, engine = loaded(open_gguf(path, quiet), dtype="float32"), PrebuiltLlamaCpp(path, 2)
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(prompts):
        tokens = prompt_of(LONG.get(family, 24) if kind == "F32" else 24, seed)
        answer, wanted = library_run(truth, tokens, chunks=1)
        ours += steps_apart(our_run(model, tokens, 1, answer), wanted)
        found = [engine.prompt(tokens)]
        engine.rows(1)
        found += [engine.step([token])[0] for token in answer[:-1]]
        theirs += steps_apart(found, wanted)
    return ours, theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_the_file_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    ours, theirs = errors(tmp_path, family, "F32", prompts=1)
    assert statistics.median(ours) < 1e-5
    assert statistics.median(theirs) < PLAIN_FOR.get(family, PLAIN)


@pytest.mark.parametrize("limit", [0.3, 1e4])
def test_limits_of_ling_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """transformers does not compute them."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    options = whole_blocks("bailing_hybrid") | {"expert_swiglu_limit_list": [0.0, 0.0, 0.2, 0.4]}
    options["share_expert_swiglu_limit_list"] = [0.0, limit, 0.0, limit]
    source, tokens = write_tiny_model(tmp_path / "source", "bailing_hybrid", **options), prompt_of(24)
    path = write_tiny_gguf(tmp_path / "model.gguf", source, "bailingmoe3")
    answer, unlimited = library_run(source, tokens, chunks=1)
    ours = our_run(load_native(open_gguf(path, quiet), dtype="float32"), tokens, 1, answer)
    theirs = PrebuiltLlamaCpp(path, 2).prompt(tokens)
    assert max(steps_apart(ours[:1], [theirs])) < PLAIN
    assert max(steps_apart(ours[:1], unlimited[:1])) > 10 * PLAIN


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_cost_no_more_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    prompts = MORE_PROMPTS.get(family, PROMPTS)
    ours, theirs = errors(tmp_path, family, kind, prompts)
    assert len(ours) == len(theirs) == prompts * STEPS
    assert statistics.geometric_mean(a / b for a, b in zip(ours, theirs, strict=True)) < ALIKE
