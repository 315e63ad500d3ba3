"""The language model in a checkpoint of a model that also sees pictures, as those of Gemma, Llama, Mistral and Qwen.

The checkpoint's ``config.json`` describes the language model in a section, and its tensors have a prefix. Here it gets
the configuration and the names of the family's language model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import damaged
from engine.models.architectures.families import FAMILIES
from engine.models.architectures.quantisation import QUANTISATION_KEYS
from engine.models.formats.safetensors_files import TensorEntry

LANGUAGE_FAMILIES = frozenset(name for name, family in FAMILIES.items() if family.whole)
"""Families of language models that are also parts of a whole."""


def _family_in(whole: Any, inner: Mapping[str, Any]) -> str | None:
    """The family of the language model ``inner`` of a ``whole``: as it says, if it is one of several."""
    names = [name for name, family in FAMILIES.items() if family.whole and family.whole == whole]
    return inner.get("model_type") if inner.get("model_type") in names else next(iter(names), None)


_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
_OTHERS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "embed_vision.", "audio_tower."),
        "embed_audio.",
        "multi_modal_projector.",
        "vit_large_projector.",
    )
)
"""Beginnings of the names of tensors of pictures and sounds."""


def language_only(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model in ``config``; ``config`` itself if it describes nothing else."""
    inner = config.get("text_config")
    family = _family_in(config.get("model_type"), inner) if isinstance(inner, Mapping) else None
    if family is None or not isinstance(inner, Mapping):
        return config
    inner_config = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    inner_config |= {**inner, "model_type": family}
    for key in QUANTISATION_KEYS:
        settings = config.get(key)
        if settings is not None:
            mapping = isinstance(settings, Mapping)
            inner_config[key] = {_renamed(name): value for name, value in settings.items()} if mapping else settings
    return inner_config


def language_tensors(
    headers: dict[str, dict[str, TensorEntry]], config: Mapping[str, Any]
) -> dict[str, dict[str, TensorEntry]]:
    """``headers`` (tensors by name, by file name) under the language model's names; as they are for other families than
    :func:`language_only` knows.

    Raises ModelError if two tensors are the same one of the language model."""
    if config.get("model_type") not in LANGUAGE_FAMILIES:
        return headers
    tensors: dict[str, dict[str, TensorEntry]] = {file: {} for file in headers}
    stored: dict[str, str] = {}
    for file, header in headers.items():
        for name, entry in header.items():
            renamed = language_name(name)
            if renamed is None:
                continue
            if renamed in stored:
                raise damaged(
                    f"{file}: tensor {name} holds the same weights of the language model as {stored[renamed]}"
                )
            stored[renamed] = name
            tensors[file][renamed] = entry
    return tensors


def language_name(name: str) -> str | None:
    """The name in the language model of a tensor ``name`` of the whole; None if it is of pictures or sounds."""
    return None if name.startswith(_OTHERS) else _renamed(name)


def _renamed(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
