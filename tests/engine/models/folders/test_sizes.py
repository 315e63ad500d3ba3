"""Sizes from headers alone are those that the loaded model tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import experts_per_token, key_value_numbers, sizes_of, state_bytes
from tests.support.tiny_families import TINY_FAMILIES


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_headers_tell_what_the_loaded_model_tells(tiny_model: Callable[..., Path], family: str) -> None:
    from engine.runtimes.torch.runtime import TorchRuntime

    folder = tiny_model(family)
    for dtype in ("auto", "bfloat16"):
        load = Load(id=1, model=family, partitioning="cpu", dtype=dtype)  # type: ignore[arg-type]
        model = TorchRuntime().load(folder, load, lambda *progress: None)
        facts = model.facts
        sizes = sizes_of(open_model(folder), dtype)
        assert (sizes.family, sizes.dtype, sizes.layers) == (facts.family, facts.dtype, facts.layers)
        assert (sizes.experts, sizes.experts_per_token) == (facts.experts, facts.experts_per_token)
        assert sizes.moe_layers == len(facts.moe_layers)
        assert (sizes.hidden, sizes.vocabulary) == (facts.hidden, facts.vocabulary)
        assert sizes.context_limit == facts.context_limit
        assert sizes.expert_bytes == facts.expert_bytes
        # transformers keeps the small matrices of residual streams in float32, which are much of a tiny model.
        apart = 0.15 if family == "deepseek_v4" else 0.02
        assert sizes.trunk_bytes == pytest.approx(facts.trunk_bytes, rel=apart)
        assert sizes.key_value_bytes_per_token == facts.key_value_bytes_per_token
        assert sizes.state_bytes == facts.state_bytes
        with_states = (
            "qwen3_5",
            "qwen3_next",
            "qwen4_exp",
            "lfm2",
            "granitemoehybrid",
            "nemotron_h",
            "kimi",
            "bailing_hybrid",
            "glm5_next",
            "deepseek_v4",
        )
        assert (sizes.state_bytes > 0) == family.startswith(with_states)
        model.close()


def test_tables_are_no_part_of_the_trunk_and_of_no_plan_for_memory(tiny_model: Callable[..., Path]) -> None:
    files = open_model(tiny_model("qwen4_exp_text"))
    sizes = sizes_of(files)
    tables = dict(files.tables())
    assert len(tables) == 5 and not tables.keys() & dict(files.trunk()).keys()
    assert sizes.table_bytes == sum(tensor.nbytes for tensor in tables.values()) > 0
    assert sizes.trunk_bytes == sum(tensor.nbytes for _, tensor in files.trunk())
    assert sizes.trunk_file_bytes == sizes.trunk_bytes + sizes.table_bytes
    assert sizes_of(open_model(tiny_model("qwen3_next"))).table_bytes == 0


def test_only_a_row_of_an_embedding_beside_the_head_is_read(tiny_model: Callable[..., Path]) -> None:
    untied = sizes_of(open_model(tiny_model("mixtral")))
    assert untied.embedding_bytes == untied.vocabulary * untied.hidden * untied.width
    assert sizes_of(open_model(tiny_model("llama"))).embedding_bytes == 0  # tied: read as the head


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_shared_experts_are_counted_apart_from_the_rest_of_the_trunk(
    tiny_model: Callable[..., Path], family: str
) -> None:
    files = open_model(tiny_model(family))
    sizes = sizes_of(files)
    config = files.config
    # Gate, up and down, and the row that weighs them.
    shared = 3 * int(config.get("shared_expert_intermediate_size") or 0) * sizes.hidden
    expected = sizes.moe_layers * (shared + sizes.hidden) * sizes.width if shared else 0
    assert sizes.shared_bytes == expected < sizes.trunk_bytes
    assert sizes_of(files, "bfloat16").shared_bytes == expected // 2


def test_latent_and_linear_attention_keep_less() -> None:
    common = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
    assert key_value_numbers(common) == 4 * 2 * 4 * 8
    assert key_value_numbers({**common, "num_key_value_heads": 2, "head_dim": 16}) == 4 * 2 * 2 * 16
    assert key_value_numbers({**common, "kv_lora_rank": 10, "qk_rope_head_dim": 6}) == 4 * 16
    kinds = ["linear_attention", "full_attention"] * 2
    assert key_value_numbers({**common, "layer_types": kinds}) == 2 * 2 * 4 * 8


def test_delta_nets_keep_states() -> None:
    config: dict[str, object] = {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    assert state_bytes(config) == 3 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert state_bytes({**config, "linear_num_key_heads": None}) == state_bytes(config)
    assert state_bytes({**config, "model_type": "qwen3"}) == 0


def test_every_second_layer_of_minimax_keeps_a_state_if_none_is_named() -> None:
    from transformers import MiniMaxConfig

    config: dict[str, object] = {"num_hidden_layers": 5, "num_attention_heads": 4, "hidden_size": 32}
    named = {**config, "model_type": "minimax", "layer_types": MiniMaxConfig(num_hidden_layers=5).layer_types}
    assert key_value_numbers({**config, "model_type": "minimax"}) == key_value_numbers(named) == 3 * 2 * 4 * 8


def test_native_keeps_states_in_blocks_of_columns(tiny_model: Callable[..., Path]) -> None:
    sizes = sizes_of(open_model(tiny_model("qwen3_5_text")))  # heads of 20 columns
    assert sizes.for_runtime("torch").state_bytes == sizes.state_bytes
    assert sizes.for_runtime("native").state_bytes > sizes.state_bytes > 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("setting", [{}, {"full_attention_interval": 2}])
def test_the_kinds_of_layers_need_not_be_named(family: str, setting: dict[str, int]) -> None:
    config: dict[str, object] = {
        "model_type": family,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    interval = setting.get("full_attention_interval", 4)
    named = {**config, "layer_types": (["linear_attention"] * (interval - 1) + ["full_attention"]) * (8 // interval)}
    assert key_value_numbers(config | setting) == key_value_numbers(named) == 8 // interval * 2 * 4 * 8
    assert state_bytes(config | setting) == state_bytes(named) > 0


def test_experts_per_token_wherever_the_family_says_it() -> None:
    assert experts_per_token({"num_experts_per_tok": 8}) == 8
    assert experts_per_token({"ffn_config": {"moe_top_k": 4}}) == 4
    assert experts_per_token({}) == 2


def test_a_size_that_is_missing_or_nonsense_is_named() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        key_value_numbers({"num_attention_heads": 4, "hidden_size": 32})
    with pytest.raises(ModelError, match="num_attention_heads"):
        key_value_numbers({"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 32})
