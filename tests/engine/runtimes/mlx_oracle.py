"""mlx-lm's own models of the tiny checkpoints: what the mlx runtime must be equal to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import gpt_oss, step3p5
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from numpy.typing import NDArray
from safetensors.numpy import load_file

from engine.ipc.messages import Load
from engine.models.folders.opening import read_config
from engine.runtimes.mlx.configuration import complete_config, translate_config
from engine.runtimes.mlx.model import MlxModel, MlxRows
from engine.runtimes.mlx.runtime import MlxRuntime
from tests.engine.runtimes.composite_models import write_composite
from tests.engine.runtimes.subjects import REGULAR
from tests.support.published_step import as_published
from tests.support.tiny_models import write_tiny_model

MOE_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe_text",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "granitemoe",
    "phimoe",
    "glm4_moe",
    "glm4_moe_lite",
    "dbrx",
    "qwen3_next",
    "lfm2_moe",
    "gemma4_text",
    "minimax_m2",
    "dots1",
    "exaone_moe",
    "granitemoehybrid",
    "solar_open",
    "afmoe",
    "mimo_v2_flash",
    "mistral4",
    "kimi_linear",
    "step3p5",
)
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_vl_text",
    "qwen3_5_text",
    "gemma4_dense",
    "gemma4_e2b",
    "gemma4_unified_text",
    "gemma3_text",
    "ministral3",
    "phi3",
    "glm4",
    "ernie4_5",
    "hunyuan_v1_dense",
    "cohere",
    "cohere2",
    "granite",
    "lfm2",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "exaone4",
    "granitemoehybrid_dense",
    "gemma2",
    "apertus",
    *MOE_FAMILIES,
)

OVERRIDES: dict[str, dict[str, Any]] = {
    # Settings of the shared tiny models that mlx-lm does not know; the runtime refuses them, see mlx/test_loading.py.
    "olmoe": {"clip_qkv": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "glm4_moe": {"n_group": 1},
    "dots1": {"n_group": 1},
    "gemma2": {"sliding_window": 512},
    "solar_open": {"n_group": 1},
    "exaone_moe": {"n_group": 1},
    "qwen3_next": {"layer_types": REGULAR},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "granitemoehybrid_dense": {"mamba_n_groups": 1},
}
_DELTA_NET = {"linear_value_head_dim": 16}
_LATENTS = {
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
QUANTISABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen3_vl_text": {},
    "qwen3_vl_moe_text": {"moe_intermediate_size": 32},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v3": _LATENTS,
    "granitemoe": {},
    "phimoe": {},
    "glm4_moe": {"moe_intermediate_size": 32},
    "glm4_moe_lite": _LATENTS,
    "mistral4": _LATENTS,
    "dbrx": {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 2}},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**_DELTA_NET, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "lfm2_moe": {"moe_intermediate_size": 32},
    "gemma4_text": {"moe_intermediate_size": 32, "global_head_dim": 32, "num_key_value_heads": 2},
    "gemma4_unified_text": {"global_head_dim": 32, "num_key_value_heads": 2},
    **{
        name: {}
        for name in (
            "granite",
            "smollm3",
            "seed_oss",
            "olmo2",
            "olmo3",
            "exaone4",
            "gemma3_text",
            "ministral3",
            "phi3",
            "glm4",
            "ernie4_5",
            "hunyuan_v1_dense",
            "cohere",
            "cohere2",
        )
    },
    "lfm2": {"block_multiple_of": 32},
    **{
        name: {"shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_head": "auto"}
        for name in ("granitemoehybrid", "granitemoehybrid_dense")
    },
    "minimax_m2": {},
    "dots1": {"moe_intermediate_size": 32},
    "afmoe": {"moe_intermediate_size": 32},
    "mimo_v2_flash": {"moe_intermediate_size": 32},
    "step3p5": {"moe_intermediate_size": 32, "share_expert_dim": 64},
    "gemma2": {},
    "apertus": {},
    "solar_open": {"moe_intermediate_size": 32},
    "exaone_moe": {"moe_intermediate_size": 32},
    "kimi_linear": {
        "moe_intermediate_size": 32,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gemma4_dense": {"global_head_dim": 32, "num_key_value_heads": 2},
    "gemma4_e2b": {"global_head_dim": 32, "num_key_value_heads": 2, "hidden_size_per_layer_input": 32},
}
"""Sizes that groups of 32 weights divide."""
IN_A_WHOLE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Families that mlx-lm quantises together with what sees pictures."""

FORMS: dict[str, dict[str, Any]] = {
    "8-bit": {"bits": 8, "group": 64},
    "mixed": {"own": ({"bits": 8, "group_size": 64}, ("down_proj", "v_proj", "lm_head"))},
    "MXFP4": {"mode": "mxfp4"},
    "groups of 128": {"group": 128},
}
"""Other forms in which mlx-lm quantises than in 4 bits and groups of 32, by a name."""

ROUNDED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "original_max_position_embeddings": 64,
}
"""gpt-oss with the rounding that mlx-lm always does: the two can be compared."""

WINDOWED_HERE_ALONE = ("mistral", "phimoe", "phi3")
"""Families whose sliding windows mlx-lm ignores."""


def write_model(folder: Path, family: str, **overrides: Any) -> Path:
    return write_tiny_model(folder, family, **(OVERRIDES.get(family, {}) | overrides))


def write_comparable(folder: Path, family: str, **overrides: Any) -> Path:
    """A tiny model that mlx-lm itself understands completely."""
    if family == "gpt_oss":
        overrides.setdefault("rope_parameters", ROUNDED_YARN)
    if family in WINDOWED_HERE_ALONE:
        overrides.setdefault("sliding_window", None)
    return write_model(folder, family, **overrides)


def write_quantised(
    folder: Path,
    family: str,
    mode: str = "affine",
    bits: int = 4,
    group: int = 32,
    own: tuple[dict[str, Any], tuple[str, ...]] | None = None,
) -> Path:
    """A tiny model, quantised by mlx-lm, usually to 4 bits in groups of 32, and written as mlx-lm writes it.

    ``own``: other settings, and the ends of the names of the modules that have them.
    """
    width = max(64, group)
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": 4} | QUANTISABLE[family]
    if group > 32:
        sizes |= {name: width for name in sizes if name.endswith("intermediate_size")}
    if family != "dbrx":
        sizes.setdefault("intermediate_size", width)
    if family in ("deepseek_v3", "glm4_moe_lite", "kimi_linear"):
        sizes["num_key_value_heads"] = 4
    source = write_comparable(folder / "source", family, **sizes)
    if family in IN_A_WHOLE:
        source = write_composite(folder / "whole", source, family.removesuffix("_text"))
    model = library_model(source)
    plain = json.loads((source / "config.json").read_text())

    def settings_of(path: str, module: Any) -> bool | dict[str, Any]:
        assert own is not None
        return own[0] if path.endswith(own[1]) else True

    predicate = None if own is None else settings_of
    model, config = quantize_model(model, plain, group, bits, mode=mode, quant_predicate=predicate)
    save_model(folder / "quantised", model)
    save_config(config, folder / "quantised" / "config.json")
    return folder / "quantised"


def library_model(folder: Path) -> Any:
    """mlx-lm's own model of ``folder``, with its configuration translated and nothing else of ours."""
    if "text_config" in json.loads((folder / "config.json").read_text()):
        return load_model(folder)[0]
    config = translate_config(complete_config(folder, read_config(folder)))
    if config["model_type"] == "step3p5" and "quantization" not in config:
        return _library_step(folder, config)
    if config["model_type"] == "gpt_oss" and "quantization" not in config:
        return _library_gpt_oss(folder, config)
    if config["model_type"] == "qwen3_5_text":
        config["model_type"] = "qwen3_5"  # mlx-lm defines it with what sees pictures
    if config["model_type"] == "gemma4_unified_text":
        config["model_type"] = "gemma4_text"  # mlx-lm has one definition for both
    if config["model_type"].startswith("qwen3_vl"):  # which mlx-lm knows whole alone
        whole = folder.with_name(f"{folder.name}-whole")
        return load_model(write_composite(whole, folder, config["model_type"].removesuffix("_text")))[0]
    model, _ = load_model(folder, model_config=config)
    return model


def _library_gpt_oss(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm does not read the experts of gpt-oss as transformers writes them: transposed, gate and up interleaved."""
    weights: dict[str, Any] = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            rows = array.swapaxes(1, 2)
            weights[f"{stem}.gate_proj.weight"], weights[f"{stem}.up_proj.weight"] = rows[:, ::2], rows[:, 1::2]
        elif kind == "gate_up_proj_bias":
            weights[f"{stem}.gate_proj.bias"], weights[f"{stem}.up_proj.bias"] = array[:, ::2], array[:, 1::2]
        elif kind == "down_proj" and "experts" in stem:
            weights[f"{stem}.down_proj.weight"] = array.swapaxes(1, 2)
        elif kind == "down_proj_bias":
            weights[f"{stem}.down_proj.bias"] = array
        else:
            weights[name] = array
    model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(config))
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def _library_step(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm reads Step 3.5 as it is published, not as transformers writes it."""
    weights = as_published(load_file(folder / "model.safetensors"))
    model = step3p5.Model(step3p5.ModelArgs.from_dict(config))
    model.eval()
    arrays = model.sanitize({name: mx.array(values) for name, values in weights.items()})
    model.load_weights(list(arrays.items()), strict=True)
    return model


def library_generate(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
    """Greedy tokens and log-probabilities [count, vocabulary] by mlx-lm's generate_step."""
    tokens, rows = [], []
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=count):
        tokens.append(int(token))
        rows.append(np.array(logprobs.astype(mx.float32)))
    return tokens, np.stack(rows)


def load(folder: Path, **options: Any) -> MlxModel:
    model = MlxRuntime().load(folder, Load(id=1, model=str(folder), **options), lambda *_: None)
    assert isinstance(model, MlxModel)
    return model


def generate(
    rows: MlxRows, prompt: Sequence[int], count: int, chunks: Sequence[int]
) -> tuple[list[int], NDArray[np.float32]]:
    """Greedy tokens and log-probabilities [count, vocabulary]; the prompt is prefilled in ``chunks`` (lengths)."""
    assert sum(chunks) == len(prompt)
    position = 0
    for length in chunks[:-1]:
        assert rows.extend(prompt[position : position + length], want_logits=False) is None
        position += length
    logits = rows.extend(prompt[position:])
    tokens, found = [], []
    for _ in range(count):
        assert logits is not None
        found.append(log_softmax(logits))
        tokens.append(int(logits.argmax()))
        logits = rows.step([tokens[-1]])[0]
    return tokens, np.stack(found)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float32)


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def prompt_of(length: int, seed: int = 0, vocabulary: int = 160) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, length)]
