"""The architectures whose GGUF files run, and the ``config.json`` that a file's metadata stands for."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError, shown
from engine.models.architectures.config_values import check_config
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.gguf_metadata import Metadata, tensor_of
from engine.models.architectures.gguf_parts import llama3_parameters
from engine.models.architectures.record import Family, GgufRecord
from engine.models.formats.gguf_file import GgufFile

_BY_NAME: dict[str, list[tuple[Family, GgufRecord]]] = {}
for _family in FAMILIES.values():
    if _family.gguf is not None:
        for _name in (_family.gguf.name, *_family.gguf.also):
            _BY_NAME.setdefault(_name, []).append((_family, _family.gguf))

ARCHITECTURES: tuple[str, ...] = tuple(_BY_NAME)
"""Names of the architectures that run, as files say them."""


def architecture_of(gguf: GgufFile) -> tuple[Family, GgufRecord]:
    """The family of the file's model, and how llama.cpp stores it.

    Raises ModelError naming the architecture if it is not supported, or missing.
    """
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{gguf.path} does not say which architecture it is; download it again.")
    metadata = Metadata(gguf)
    experts = bool(metadata.get("expert_count", 0))
    alike = [(family, record) for family, record in _BY_NAME.get(name, ()) if family.has_models(experts)]
    # Those that claim some files of their name come first.
    for family, record in sorted(alike, key=lambda each: each[1].when is None):
        if record.when is None or record.when(metadata):
            return family, record
    kind = "" if name not in _BY_NAME else " with experts" if experts else " without experts"
    raise ModelError(
        f"{gguf.path} is of the architecture {shown(name)}{kind}, which is not supported; supported GGUF "
        f"architectures are {', '.join(ARCHITECTURES)}."
    )


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of the model. Raises ModelError if the file says something impossible, or asks
    for something that does not run."""
    (family, record), metadata = architecture_of(gguf), Metadata(gguf)
    layers = metadata.number("block_count")
    head_size = metadata.head_width()
    rotated = metadata.rotated(head_size)
    partly = rotated != head_size or metadata.number("attention.value_length", head_size) != head_size
    if partly and not record.own_heads:
        raise ModelError(
            f"{gguf.path} rotates {rotated} of {head_size} values per head: a model of this kind does not run; use "
            "another model."
        )
    own = record.settings(metadata)
    heads = own.get("num_attention_heads") or metadata.number("attention.head_count")
    rope = own["rope_parameters"] if "rope_parameters" in own else _rope(gguf, metadata, head_size, record)
    if record.sliding_rope is not None and "layer_types" in own:
        rope = {"full_attention": rope, "sliding_attention": record.sliding_rope(metadata)}
    config: dict[str, Any] = {
        "architectures": [record.class_name],
        "model_type": family.model_type,
        "vocab_size": tensor_of(gguf, "token_embd.weight").rows,
        "hidden_size": metadata.number("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_size,
        "max_position_embeddings": metadata.number("context_length"),
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
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    for key in ("bos_token_id", "eos_token_id"):
        if key not in own and isinstance(gguf.metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = gguf.metadata[f"tokenizer.ggml.{key}"]
    check_config(config, str(gguf.path))
    return config


_ELSEWHERE = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Settings of scaled positions that must be 1 where a file holds them."""


def _rope(gguf: GgufFile, metadata: Metadata, head_size: int, record: GgufRecord) -> dict[str, Any]:
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
            **record.yarn(metadata),
        }
    raise ModelError(
        f"{gguf.path} scales its positions by {shown(ascii(kind))}, which is not supported; use another model."
    )


def _llama3_rope(gguf: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds the divisor of each frequency; find the parameters that give them."""
    for high in (4.0, 1.0):  # Llama 4 has no frequencies between long and short ones
        parameters = llama3_parameters(gguf, theta, head_size, 8192, high)
        if parameters is not None:
            return parameters
    raise ModelError(f"{gguf.path} scales its positions in a way that is not Llama 3's; use its safetensors folder.")
