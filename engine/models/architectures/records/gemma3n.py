"""Gemma 3n (E2B, E4B) without pictures and sounds: layers update four residual streams by running on the first, have
embeddings of their own and narrow matrices beside attention, and let few gates of the first networks count."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.config_values import whole_number
from engine.models.architectures.gguf_metadata import Metadata, NamedTensor, tensor_of
from engine.models.architectures.gguf_parts import sliding_layers
from engine.models.architectures.layer_rules import (
    full_every,
    named_kinds,
    named_windows,
    rope_by_kind,
    shared_keys,
)
from engine.models.architectures.record import AltupSizes, Config, DecoderRecord, Family, GgufRecord
from engine.models.formats.gguf_file import GgufFile

_KIND = full_every("", 5)
_SPARSE = 10
"""Layers of which few gates count, where settings do not say it."""
_LAST_WITH_KEYS = 20
"""Layers with keys of their own, which llama.cpp takes for granted."""


def _renamed(config: Config) -> dict[str, Any]:
    layers, width = whole_number(config, "num_hidden_layers", default=35), config.get("intermediate_size")
    settings: dict[str, Any] = {}
    if config.get("layer_types") is None:
        settings["layer_types"] = [_KIND(config, layer) for layer in range(layers)]
    if isinstance(width, list) and len(set(width)) == 1:
        settings["intermediate_size"] = width[0]
    return settings


def _sparsity(config: Config, layer: int) -> float:
    """Raises ModelError if ``activation_sparsity_pattern`` has no share of this layer."""
    shares, layers = config.get("activation_sparsity_pattern"), whole_number(config, "num_hidden_layers")
    if shares is None:
        return 0.95 if layer < _SPARSE < layers else 0.0
    share: Any = shares[layer] if isinstance(shares, list) and layer < len(shares) else None
    if type(share) not in (int, float) or not 0 <= share < 1:
        raise damaged(
            f"config.json gives {shown(shares)} for activation_sparsity_pattern, which must be a share below 1 for "
            "each layer"
        )
    return float(share)


def _altup(config: Config) -> AltupSizes:
    return AltupSizes(
        whole_number(config, "altup_num_inputs"),
        whole_number(config, "laurel_rank"),
        bool(config.get("altup_correct_scale", True)),
    )


# --- GGUF files -------------------------------------------------------------------------------------------------------


def _settings(metadata: Metadata) -> dict[str, Any]:
    """The part of ``config.json`` that is of this kind. Raises ModelError for a number that is impossible."""
    gguf, layers = metadata.file, metadata.number("block_count")
    scales = metadata.get("activation_sparsity_scale")
    pattern = None
    if scales is not None:
        if not isinstance(scales, list) or len(scales) < layers or not all(type(one) is float for one in scales):
            raise ModelError(
                f"{gguf.path} is damaged: its activation_sparsity_scale is {shown(scales)}, not a number for each of "
                f"{layers} layers; download it again."
            )
        pattern = [float(str(np.float32(NormalDist().cdf(scale)))) for scale in scales[:layers]]
    shared = metadata.number("attention.shared_kv_layers", max(0, layers - _LAST_WITH_KEYS))
    return {
        "layer_types": sliding_layers(metadata, 5),
        "sliding_window": metadata.number("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": metadata.number("embedding_length_per_layer_input", 256),
        "vocab_size_per_layer_input": tensor_of(gguf, "token_embd.weight").rows,
        "altup_num_inputs": metadata.number("altup.num_inputs", 4),
        "altup_active_idx": metadata.number("altup.active_idx", 0),
        "altup_correct_scale": True,
        "laurel_rank": tensor_of(gguf, "blk.0.laurel_l.weight").rows,
        "activation_sparsity_pattern": pattern,
        "final_logit_softcapping": metadata.short_real("final_logit_softcapping", 30.0),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base", 1_000_000.0)},
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base_swa", 10_000.0)},
        },
    }


def _tensors(gguf: GgufFile, config: Config) -> Any:
    """What layers update the residual streams by, and the matrices of all streams but the first, which are one tensor
    in the file."""
    hidden, sizes = config["hidden_size"], _altup(config)
    stored = (sizes.count - 1, hidden, hidden)
    for source, name in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
        for stream in range(sizes.count - 1):
            yield NamedTensor(
                f"{source}.weight",
                f"model.{name}.{stream}.weight",
                (hidden, hidden),
                stored,
                stream * hidden,
                hidden,
            )
    for layer in range(config["num_hidden_layers"]):
        for source, name, shape in (
            ("altup_correct_coef", "altup.correction_coefs.weight", (sizes.count, sizes.count)),
            ("altup_predict_coef", "altup.prediction_coefs.weight", (sizes.count**2, sizes.count)),
            ("altup_correct_scale", "altup.correct_output_scale", (hidden,)),
            ("altup_router", "altup.modality_router.weight", (sizes.count, hidden)),
            ("altup_router_norm", "altup.router_norm.weight", (hidden,)),
            ("laurel_l", "laurel.linear_left.weight", (sizes.rank, hidden)),
            ("laurel_r", "laurel.linear_right.weight", (hidden, sizes.rank)),
            ("laurel_post_norm", "laurel.post_laurel_norm.weight", (hidden,)),
        ):
            yield NamedTensor.whole(f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{name}", shape)


FAMILIES = (
    Family(
        "gemma3n_text",
        whole="gemma3n",
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
        },
        renamed=_renamed,
        decoder=DecoderRecord(
            norms="around",
            own_input="hidden_size_per_layer_input",
            altup=_altup,
            sparsity=_sparsity,
            layer_kind=_KIND,
            head_kinds=named_kinds,
            kind_rope=rope_by_kind(
                {"rope_type": "default", "rope_theta": 1_000_000.0},
                {"rope_type": "default", "rope_theta": 10_000.0},
                {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
            ),
            keys_of=shared_keys,
            windows=named_windows,
            head_norm="per-head",
            value_norm=True,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            embedding_scale=lambda config: whole_number(config, "hidden_size") ** 0.5,
            score_scale=lambda config, width: 1.0,
            logits_cap="final_logit_softcapping",
            activation_setting="hidden_activation",
        ),
        gguf=GgufRecord("gemma3n", "Gemma3nForCausalLM", settings=_settings, further=_tensors),
        tokenizer_class="GemmaTokenizer",
    ),
)
