"""The configuration that a GGUF file's metadata stand for: every number is carried over, or refused in a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_parts import llama3_divisors
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.folders.opening import read_config
from engine.models.formats.gguf_file import GgufFile
from engine.models.store.gguf_folder import open_gguf
from tests.support.progress import quiet
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("deepseek_v2", {"expert_gating_func": 3}, "routes by the function 3"),
        ("deepseek_v2", {"expert_weights_norm": True}, "normalises the weights of experts that a softmax gave"),
        ("deepseek_v2", {"attention.kv_lora_rank": 128}, r"attn_kv_a_mqa\.weight has the shape"),
        ("deepseek_v2", {"attention.key_length_mla": 4}, "qk_nope_head_dim, which must be a whole number from 1"),
        (
            "deepseek_v2",
            {"expert_group_count": 3, "expert_group_used_count": 1},
            "out of 1 of 3 groups of 8 experts, which do not fit",
        ),
        ("deepseek_v2", {"expert_group_count": 2, "expert_group_used_count": 4}, "out of 4 of 2 groups of 8 experts"),
        ("deepseek_v2", {"expert_group_count": 8, "expert_group_used_count": 8}, "out of 8 of 8 groups of 8 experts"),
        ("glm_moe_dsa", {"expert_gating_func": 1}, "routes by the function 1"),
        (
            "glm_moe_dsa",
            {"attention.indexer.types": 1},
            r"attention\.indexer\.types is 1, not 0 or 1 for each of 2 layers",
        ),
        ("glm_moe_dsa", {"attention.indexer.top_k": 0}, r"its attention\.indexer\.top_k is 0"),
        ("glm_moe_dsa", {"attention.indexer.key_length": 64}, r"indexer\.attn_q_b\.weight has the shape"),
        ("qwen3_5_text", {"ssm.group_count": 3}, "over 3 key heads, which do not fit together"),
        ("qwen3_5_text", {"ssm.inner_size": 33}, "value heads of 33 values in all over"),
        ("qwen3_5_text", {"rope.dimension_sections": 5}, r"rope\.dimension_sections is 5, not a list of numbers"),
        (
            "qwen3_5_text",
            {"rope.dimension_count": 1 << 30},
            r"partial_rotary_factor, which must be a number over 0, at most 1",
        ),
        ("step3p5", {"expert_gating_func": 1}, "routes by the function 1"),
        ("deepseek_v4", {"expert_gating_func": 2}, "routes by the function 2 with weights divided by their sum"),
        (
            "deepseek_v4",
            {"expert_weights_norm": False},
            "routes by the function 4 with weights not divided by their sum",
        ),
    ],
)
def test_settings_that_cannot_be_run_are_refused(
    tmp_path: Path, sources: Callable[[str], Path], family: str, extra: dict[str, Any], message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", sources(family), ARCHITECTURES[family], extra=extra)
    with pytest.raises(ModelError, match=message):
        open_gguf(path, quiet)


STEP_SCALING = {
    "rope_theta": 500_000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 131_072,
}
"""Settings by which Step 3.5 scales the positions of layers that see everything."""


def test_positions_of_step_are_scaled_as_its_divisors_say(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    divisors = llama3_divisors(STEP_SCALING, 32).astype(np.float32)
    assert len(np.unique(divisors)) > 3
    for factor in (1, 2):
        extra = {"rope_freqs.weight": divisors * np.float32(factor)}
        path = write_tiny_gguf(tmp_path / f"{factor}.gguf", sources("step3p5"), "step35", extra_tensors=extra)
        if factor > 1:
            with pytest.raises(ModelError, match=r"in a way that is not Step 3\.5's"):
                open_gguf(path, quiet)
            continue
        rope = read_config(open_gguf(path, quiet))["rope_parameters"]
        assert rope["full_attention"] == {**STEP_SCALING, "rope_type": "llama3", "partial_rotary_factor": 0.5}
        assert rope["sliding_attention"] == {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0,
        }  # fmt: skip


@pytest.mark.parametrize("scales", [[1.5], [1, 2, 3, 4, 5, 6], "few"])
def test_shares_of_gates_that_cannot_be_are_refused(
    tmp_path: Path, sources: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, scales: Any
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", sources("gemma3n_text"), "gemma3n")
    gguf = GgufFile(path)
    shares = config_of(gguf)["activation_sparsity_pattern"]
    assert shares == [0.95] * 6
    gguf.metadata["gemma3n.activation_sparsity_scale"] = scales
    with pytest.raises(ModelError, match="its activation_sparsity_scale is"):
        config_of(gguf)


def test_a_table_of_experts_holds_whole_numbers_and_no_other_tensor_does(
    tmp_path: Path, sources: Callable[[str], Path]
) -> None:
    gguf = GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources("deepseek_v4"), "deepseek4"))
    for name, number_format in (("blk.0.ffn_gate_tid2eid.weight", "F32"), ("blk.0.attn_kv.weight", "I32")):
        sound = gguf.tensors[name]
        gguf.tensors = gguf.tensors | {name: replace(sound, format=number_format)}
        with pytest.raises(ModelError, match=f"{name} is stored as {number_format}, which cannot be run"):
            entries_of(gguf, architecture_of(gguf), config_of(gguf))
        gguf.tensors = gguf.tensors | {name: sound}
    assert entries_of(gguf, architecture_of(gguf), config_of(gguf))


def test_layers_of_glm_next_have_indexers_of_their_own_unless_the_file_says_otherwise(
    tmp_path: Path, sources: Callable[[str], Path]
) -> None:
    gguf = GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources("glm5_next_text"), "glm5-next"))
    assert config_of(gguf)["indexer_types"].count("shared") == 1
    del gguf.metadata["glm5-next.attention.indexer.types"]
    assert config_of(gguf)["indexer_types"] == ["full"] * 4


@pytest.mark.parametrize("limits", [[0.5, 0.5, 0.5, 1.0], 0.5, None, [-1.0] * 4, [math.nan] * 4])
def test_several_limits_of_networks_are_refused(
    tmp_path: Path, sources: Callable[[str], Path], limits: list[float] | float | None
) -> None:
    gguf = GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources("glm5_next_text"), "glm5-next"))
    assert config_of(gguf)["swiglu_limit"] == 1.5
    gguf.metadata["glm5-next.swiglu_clamp_exp"] = limits
    if limits == 0.5:
        assert config_of(gguf)["swiglu_limit"] == 0.5
        return
    with pytest.raises(ModelError, match="one limit of all layers runs"):
        config_of(gguf)


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_llama_3_positions_are_recognised(tmp_path: Path, high: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    source = write_tiny_model(tmp_path / "source", "llama", head_dim=8, rope_parameters=rope)
    parameters = {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(parameters, 8).astype(np.float32)
    assert divisors[0] == 1.0 and divisors[-1] == 8.0
    path = write_tiny_gguf(tmp_path / "l3.gguf", source, "llama", extra_tensors={"rope_freqs.weight": divisors})
    config = json.loads((open_gguf(path, quiet) / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "llama3", **parameters}
    strange = write_tiny_gguf(
        tmp_path / "long.gguf", source, "llama", extra_tensors={"rope_freqs.weight": divisors[::-1].copy()}
    )
    with pytest.raises(ModelError, match="not Llama 3's"):
        open_gguf(strange, quiet)


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_llama_3_divisors_are_those_of_transformers(high: float) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    assert np.allclose(plain / scaled.numpy(), llama3_divisors(parameters, 64), rtol=1e-5)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaled_positions_are_carried_over(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any]) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen2")
    path = write_tiny_gguf(tmp_path / "scaled.gguf", source, "qwen2", extra=extra)
    with GgufFile(path) as gguf:
        assert config_of(gguf)["rope_parameters"] == {"rope_theta": 10000.0, **expected}


@pytest.mark.parametrize("family", ["phi3", "glm4", "glm4_moe", "minimax_m2", "qwen3_next"])
def test_what_is_rotated_is_a_part_of_the_heads_own_width(
    tmp_path: Path, sources: Callable[[str], Path], family: str
) -> None:
    extra = {"attention.key_length": 40, "rope.dimension_count": 10}
    with GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources(family), ARCHITECTURES[family], extra=extra)) as gguf:
        config = config_of(gguf)
    assert (config["head_dim"], config["rope_parameters"]["partial_rotary_factor"]) == (40, 0.25)


IMPOSSIBLE: tuple[Any, ...] = (
    None, 0, 1, -1, 7, 1.5, 0.0, 10**6, 2**31 - 1, 2**40, math.nan, math.inf, "", "x", True, False,
    [], [1], [0] * 6, [7] * 3, [""] * 6, ["x"] * 3, [False] * 2, [True] * 6,
)  # fmt: skip
"""Values of metadata, most of which no file has; None: it is missing."""
MORE = ("key_length", "sliding_window", "sliding_window_pattern", "head_count_kv")
"""Metadata of attention that only some architectures have."""


@pytest.mark.sampled
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_any_number_of_any_architecture_is_read_or_refused_in_a_sentence(
    tmp_path: Path, sources: Callable[[str], Path], family: str
) -> None:
    name = ARCHITECTURES[family]
    with GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources(family), name)) as gguf:
        sound = dict(gguf.metadata)
        keys = [key for key in sound if key.startswith(f"{name}.")] + [f"{name}.attention.{key}" for key in MORE]
        changes = [{key: value} for key in dict.fromkeys(keys) for value in IMPOSSIBLE]
        # Heads that would have no numbers.
        changes.append({f"{name}.attention.key_length": None, f"{name}.attention.head_count": 1000})
        for change in changes:
            gguf.metadata = {key: value for key, value in (sound | change).items() if value is not None}
            try:
                entries_of(gguf, architecture_of(gguf), config_of(gguf))
            except ModelError as error:
                assert str(error).isprintable()


@pytest.mark.sampled
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_any_tensor_that_is_missing_or_flat_is_read_without_or_named(
    tmp_path: Path, sources: Callable[[str], Path], family: str
) -> None:
    with GgufFile(write_tiny_gguf(tmp_path / "m.gguf", sources(family), ARCHITECTURES[family])) as gguf:
        sound = dict(gguf.tensors)
        for name, tensor in sound.items():
            columns = tensor.rows * tensor.columns
            flat = replace(tensor, shape=(columns,), rows=1, columns=columns)
            for changed in ({each: sound[each] for each in sound if each != name}, sound | {name: flat}):
                gguf.tensors = changed
                try:
                    entries_of(gguf, architecture_of(gguf), config_of(gguf))
                except ModelError as error:
                    assert str(error).isprintable()
