"""The architectures whose GGUF files run, and the ``config.json`` that a file's metadata stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, shown
from engine.models.architectures import gguf_delta_net, gguf_gemma, gguf_latent, gguf_short_convolution
from engine.models.architectures.config_values import check_config
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor
from engine.models.formats.gguf_file import GgufFile, GgufTensor
from engine.models.formats.model_files import Change, Order

HeadNorm = Literal["none", "per-head", "optional", "whole"]
"""Norms of queries and keys: none, of every head, of every head if the file has them, or of whole rows."""
Settings = Callable[[Metadata], dict[str, Any]]
SharedExpert = Literal["none", "gated", "plain"]
Biases = Literal["none", "qkv", "all"]
"""Biases of no projection; of queries, keys and values; of every projection, the router's and the experts' included."""


@dataclass(frozen=True)
class Architecture:
    """What distinguishes an architecture of GGUF files. ``family`` and ``class_name`` are transformers' names."""

    family: str
    class_name: str
    paired_rotary: bool = False
    """Whether the two values that a rotation turns together lie side by side in queries and keys (llama.cpp's order),
    instead of half a head apart (transformers' order)."""
    biases: Biases = "none"
    sinks: bool = False
    """Whether every head has a logit besides those of the keys."""
    head_norm: HeadNorm = "none"
    gated_queries: bool = False
    """Whether a gate of every query lies beside it."""
    yarn: Settings = lambda metadata: {}
    """Settings of yarn that not all have."""
    router: str = ""
    """transformers' name of the router within a layer; empty for a dense family."""
    router_bias: str = ""
    """transformers' name of what is added to the router's scores where experts are chosen, and not where they are
    weighed; empty without it."""
    shared_expert: SharedExpert = "none"
    own_heads: bool = False
    """Whether ``settings`` says which of a head's values are rotated; otherwise all of them must be."""
    mixer: Callable[[GgufFile, Mapping[str, Any], str, str], Iterator[NamedTensor]] | None = None
    """The tensors of a layer of ``mixed_layers``, given the prefixes of its names in the file and in the checkpoint."""
    mixed_layers: str = ""
    """The layer type (``layer_types`` of the configuration) whose attention ``mixer`` stands for; empty: of all."""
    final_norm: str = "output_norm.weight"
    """Name in the file of the norm after the last layer."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the usual names in checkpoints, and what stands there in this family's."""
    changes: Callable[[Mapping[str, Any]], dict[str, Change]] = lambda config: {}
    """What undoes llama.cpp's storage, by the checkpoint's name of the tensor."""
    settings: Settings = lambda metadata: {}
    """Settings of ``config.json`` beyond those that all have."""


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "sliding_window": None,
    }


def _qwen_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        # The file may say otherwise than its architecture does.
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **_qwen_moe(metadata),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "qkv_bias": True,
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "clip_qkv": metadata.get("attention.clamp_kqv"),
    }


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "attention_multiplier": metadata.short_real("attention.scale", 1.0),
        "embedding_multiplier": metadata.short_real("embedding_scale", 1.0),
        "residual_multiplier": metadata.short_real("residual_scale", 1.0),
        "logits_scaling": metadata.short_real("logit_scale", 1.0),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    slides = [layer % 2 == 0 for layer in range(metadata.number("block_count"))]
    pattern = metadata.get("attention.sliding_window_pattern", 2)
    if pattern not in (2, slides):
        raise ModelError(
            f"The GGUF gives {shown(pattern)} for the layers with a sliding window, which must be every second of a "
            "gpt-oss model; use another file of this model."
        )
    return {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "attention_bias": True,
    }


def _glm_moe(metadata: Metadata) -> dict[str, Any]:
    head_size = metadata.number("attention.key_length")
    if metadata.get("expert_gating_func", 2) != 2:
        raise ModelError("The GGUF's router is not one of sigmoids, as every glm4moe model's is; use another file.")
    return {
        "num_hidden_layers": metadata.number("block_count") - metadata.number("nextn_predict_layers", 0),
        "attention_bias": True,
        "partial_rotary_factor": metadata.number("rope.dimension_count", head_size) / head_size,
        "n_routed_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "routed_scaling_factor": metadata.short_real("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
    }


def paired_changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What brings queries and keys from llama.cpp's order into transformers', by the name of a checkpoint's tensor."""
    size = config["head_dim"]
    found: dict[str, Change] = {}
    for short, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        change = Change(rows=_halves(heads, size))
        for layer in range(config["num_hidden_layers"]):
            for kind in ("weight", "bias"):
                found[f"model.layers.{layer}.self_attn.{short}_proj.{kind}"] = change
    return found


def _halves(heads: int, size: int) -> Order:
    """The places of rows whose pairs lie side by side, in transformers' order: the values of a pair are half a head of
    ``size`` apart."""
    pairs = np.arange(heads * size, dtype=np.int64).reshape(heads, size // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


_DENSE = {
    "llama": Architecture("llama", "LlamaForCausalLM", paired_rotary=True, changes=paired_changes),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases="qkv"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", head_norm="per-head"),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        head_norm="per-head",
        gated_queries=True,
        own_heads=True,
        mixer=gguf_delta_net.layer_shapes,
        mixed_layers="linear_attention",
        changes=gguf_delta_net.changes,
        settings=gguf_delta_net.settings,
    ),
}
"""GGUF architectures without experts. Mistral's files call themselves llama."""

_CORRECTION = "mlp.gate.e_score_correction_bias"
_DEEPSEEK = "deepseek2"

_QWEN35_MOE = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    head_norm="per-head",
    gated_queries=True,
    own_heads=True,
    mixer=gguf_delta_net.layer_shapes,
    mixed_layers="linear_attention",
    changes=gguf_delta_net.changes,
    router="mlp.gate.weight",
    shared_expert="gated",
    settings=gguf_delta_net.expert_settings,
)

_WITH_EXPERTS = {
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        paired_rotary=True,
        changes=paired_changes,
        router="block_sparse_moe.gate.weight",
        settings=_mixtral,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        biases="qkv",
        router="mlp.gate.weight",
        shared_expert="gated",
        settings=_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", head_norm="per-head", router="mlp.gate.weight", settings=_qwen_moe
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", head_norm="whole", router="mlp.gate.weight", settings=_olmoe),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        paired_rotary=True,
        changes=paired_changes,
        router="block_sparse_moe.router.layer.weight",
        settings=_granite_moe,
    ),
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        family="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        mixer=gguf_delta_net.next_layer_shapes,
        changes=gguf_delta_net.next_changes,
        settings=gguf_delta_net.next_settings,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        head_norm="per-head",
        mixer=gguf_short_convolution.layer_shapes,
        mixed_layers="conv",
        router="mlp.gate.weight",
        router_bias="mlp.expert_bias",
        final_norm="token_embd_norm.weight",
        names=gguf_short_convolution.NAMES,
        settings=gguf_short_convolution.settings,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        router="router.proj.weight",
        own_heads=True,
        mixer=gguf_gemma.layer_shapes,
        settings=gguf_gemma.settings,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        biases="qkv",
        head_norm="optional",
        router="mlp.gate.weight",
        router_bias=_CORRECTION,
        shared_expert="plain",
        own_heads=True,
        settings=_glm_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        biases="all",
        sinks=True,
        yarn=lambda metadata: {"truncate": False},
        router="mlp.router.weight",
        settings=_gpt_oss,
    ),
}
"""GGUF architectures with routed experts. Mixtral's files call themselves llama and count experts."""


def _latent(family: str, class_name: str, router_bias: str, settings: Settings) -> Architecture:
    return Architecture(
        family,
        class_name,
        yarn=gguf_latent.yarn,
        router="mlp.gate.weight",
        router_bias=router_bias,
        shared_expert="plain",
        own_heads=True,
        mixer=gguf_latent.attention_shapes,
        settings=settings,
    )


_LATENT: dict[gguf_latent.Kind, Architecture] = {
    "deepseek_v2": _latent("deepseek_v2", "DeepseekV2ForCausalLM", "", gguf_latent.softmax_settings),
    "deepseek_v3": _latent("deepseek_v3", "DeepseekV3ForCausalLM", _CORRECTION, gguf_latent.settings),
    "glm4_moe_lite": _latent("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _CORRECTION, gguf_latent.glm_settings),
}
"""Kinds of deepseek2 by their families."""

ARCHITECTURES: tuple[str, ...] = tuple(dict.fromkeys([*_WITH_EXPERTS, _DEEPSEEK, *_DENSE]))
"""Names of the architectures that run, as files say them."""


def architecture_of(gguf: GgufFile) -> Architecture:
    """Raises ModelError naming the architecture if it is not supported, or missing."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{gguf.path} does not say which architecture it is; download it again.")
    experts = Metadata(gguf).get("expert_count", 0)
    if experts and name == _DEEPSEEK:
        return _LATENT[gguf_latent.kind_of(gguf)]
    found = (_WITH_EXPERTS if experts else _DENSE).get(name)
    if found is None:
        kind = " with experts" if experts and name in _DENSE else ""
        if not experts and name in ARCHITECTURES:
            kind = " without experts"
        raise ModelError(
            f"{gguf.path} is of the architecture {shown(name)}{kind}, which is not supported; supported GGUF "
            f"architectures are {', '.join(ARCHITECTURES)}."
        )
    return found


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of the model. Raises ModelError if the file says something impossible, or asks
    for something that does not run."""
    architecture, metadata = architecture_of(gguf), Metadata(gguf)
    layers, hidden = metadata.number("block_count"), metadata.number("embedding_length")
    heads = metadata.number("attention.head_count")
    head_size = metadata.number("attention.key_length", hidden // max(1, heads))
    rotated = metadata.number("rope.dimension_count", head_size)
    partly = rotated != head_size or metadata.number("attention.value_length", head_size) != head_size
    if partly and not architecture.own_heads:
        raise ModelError(
            f"{gguf.path} rotates {rotated} of {head_size} values per head: a model of this kind does not run; use "
            "another model."
        )
    window, context = metadata.number("attention.sliding_window", 0), metadata.number("context_length")
    family, class_name = architecture.family, architecture.class_name
    if family == "llama" and 0 < window < context:
        family, class_name = "mistral", "MistralForCausalLM"
    own = architecture.settings(metadata)
    rope = own["rope_parameters"] if "rope_parameters" in own else _rope(gguf, metadata, head_size, architecture)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": family,
        "vocab_size": tensor_of(gguf, "token_embd.weight").rows,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_size,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.short_real("attention.layer_norm_rms_epsilon", 1e-5),
        # Other readers than transformers 5 know the older top-level name.
        **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **own,
    }
    if "num_key_value_heads" not in own:
        config["num_key_value_heads"] = metadata.number("attention.head_count_kv", heads)
    if "intermediate_size" not in config:
        config["intermediate_size"] = metadata.number("feed_forward_length", config.get("moe_intermediate_size"))
    if architecture.head_norm == "optional":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in gguf.tensors
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if family == "mistral":
        config["sliding_window"] = window
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(gguf.metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = gguf.metadata[f"tokenizer.ggml.{key}"]
    check_config(config, str(gguf.path))
    return config


def tensor_of(gguf: GgufFile, name: str) -> GgufTensor:
    """Raises ModelError if there is no such tensor."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path} is damaged: it has no tensor {name}; download it again.")
    return tensor


_ELSEWHERE = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Settings of scaled positions that must be 1 where a file holds them."""


def _rope(gguf: GgufFile, metadata: Metadata, head_size: int, architecture: Architecture) -> dict[str, Any]:
    theta = metadata.real("rope.freq_base", 10000.0)
    kind = metadata.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_rope(gguf, theta, head_size)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.real("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        for key in _ELSEWHERE:
            if metadata.real(f"rope.scaling.{key}", 1.0) != 1.0:
                raise ModelError(
                    f"{gguf.path} scales its positions with a {key}, which is not supported; use another model."
                )
        betas = {
            name: metadata.real(f"rope.scaling.yarn_{name}", 1.0)
            for name in ("beta_fast", "beta_slow")
            if metadata.has(f"rope.scaling.yarn_{name}")
        }
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": metadata.number("rope.scaling.original_context_length"),
            **betas,
            **architecture.yarn(metadata),
        }
    raise ModelError(
        f"{gguf.path} scales its positions by {shown(ascii(kind))}, which is not supported; use another model."
    )


def _llama3_rope(gguf: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds the divisor of each frequency; find the parameters that give them."""
    divisors = gguf.floats("rope_freqs.weight").reshape(-1).astype(np.float64)
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if divisors.shape != (head_size // 2,) or not np.allclose(
        llama3_divisors(parameters, head_size), divisors, rtol=1e-4
    ):
        raise ModelError(
            f"{gguf.path} scales its positions in a way that is not Llama 3's; use its safetensors folder."
        )
    return parameters


def llama3_divisors(parameters: Mapping[str, Any], head_size: int) -> NDArray[np.float64]:
    """By what each rotary frequency [head_size / 2] is divided under Llama 3's scaling."""
    frequency = parameters["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), dtype=np.float64)
