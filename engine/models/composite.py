"""Checkpoints of models that also see pictures, of which the language model runs: Qwen 3.5 and 3.6.

Their ``config.json`` describes the language model in a section, and its tensors have a prefix. Here they get the
configuration and the names of the family's language model alone. mlx-lm stores some tensors of it otherwise: norms with
one added, and convolutions with the axes exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.files import Change
from engine.models.quantisation import QUANTISATION_KEYS
from engine.models.safetensors_files import TensorEntry

LANGUAGE_FAMILIES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""The family of the language model, by that of the whole."""

_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
_OTHERS = ("vision_tower.", "model.visual.", "visual.")
"""Beginnings of the names of tensors of pictures."""

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight")


def language_only(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model in ``config``; ``config`` itself if it describes nothing else."""
    family, inner = LANGUAGE_FAMILIES.get(str(config.get("model_type"))), config.get("text_config")
    if family is None or not isinstance(inner, Mapping):
        return config
    found = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    found |= {**inner, "model_type": family}
    for key in QUANTISATION_KEYS:
        settings = config.get(key)
        if settings is not None:
            mapping = isinstance(settings, Mapping)
            found[key] = {_renamed(name): value for name, value in settings.items()} if mapping else settings
    return found


def language_tensors(
    headers: dict[str, dict[str, TensorEntry]], config: Mapping[str, Any]
) -> tuple[dict[str, dict[str, TensorEntry]], dict[str, Change]]:
    """``headers`` (tensors by name, by file name) under the language model's names, and what makes stored tensors the
    checkpoint's; both as they are for other families than :func:`language_only` knows.

    Raises ModelError if two tensors are the same one of the language model."""
    if config.get("model_type") not in LANGUAGE_FAMILIES.values():
        return headers, {}
    kept: dict[str, dict[str, TensorEntry]] = {file: {} for file in headers}
    stored: dict[str, str] = {}
    for file, header in headers.items():
        for name, entry in header.items():
            if name.startswith(_OTHERS):
                continue
            renamed = _renamed(name)
            if renamed in stored:
                raise ModelError(
                    f"{file}: tensor {name} holds the same weights of the language model as {stored[renamed]}; "
                    "fetch the model again."
                )
            stored[renamed] = name
            kept[file][renamed] = entry
    exchanged = {
        name
        for header in kept.values()
        for name, entry in header.items()
        if name.endswith(".conv1d.weight") and len(entry.shape) == 3 and entry.shape[1] > 1 and entry.shape[2] == 1
    }
    if not exchanged:
        return kept, {}
    # With one channel for each filter the bytes are the same in both orders.
    for header in kept.values():
        for name in exchanged & header.keys():
            channels, size, _ = header[name].shape
            header[name] = replace(header[name], shape=(channels, 1, size))
    less_one = Change(subtracted=1.0)
    names = (name for header in kept.values() for name in header)
    return kept, {name: less_one for name in names if name == "model.norm.weight" or name.endswith(_NORMS)}


def _renamed(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
