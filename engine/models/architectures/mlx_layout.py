"""What checkpoints, above all those of mlx-lm, have otherwise than transformers: names, axes, norms.

Here their tensors get transformers' names and shapes, and those of GGUF files where transformers has no equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.architectures.families import FAMILIES
from engine.models.architectures.record import Family
from engine.models.formats.model_files import Change
from engine.models.formats.safetensors_files import TensorEntry

Headers = dict[str, dict[str, TensorEntry]]
"""Tensors by name, by file name."""

_TAPS = ("conv1d.weight", ".conv.conv.weight")
"""Ends of the names of convolutions: [channels, 1, taps] in transformers, [channels, taps, 1] in mlx-lm. With one
channel for each filter the bytes are the same."""
_OFFSET_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight")
"""Ends of the names of norms that multiply by one more than the weight, in families with delta-nets. mlx-lm adds the
one to the weight."""


def as_transformers(headers: Headers, config: Mapping[str, Any]) -> tuple[Headers, dict[str, Change]]:
    """``headers`` as transformers names and shapes the tensors, and by name the changes that turn stored values into
    its own (norms minus one). Little differs for a checkpoint that mlx-lm did not write."""
    family = FAMILIES.get(str(config.get("model_type")))
    renamed: Headers = {}
    turned = False
    for file, header in headers.items():
        renamed[file] = {}
        for stored, entry in header.items():
            name = _renamed(stored, family)
            turned = turned or _has_one_added(stored, family)
            if name.endswith(_TAPS) and len(entry.shape) == 3 and entry.shape[1] > 1 and entry.shape[2] == 1:
                channels, taps, _ = entry.shape
                renamed[file][name] = replace(entry, shape=(channels, 1, taps))
                turned = True
            else:
                renamed[file][name] = entry
    if not turned or family is None or not family.decoder.offset_norms:
        return renamed, {}
    less_one = Change(subtracted=1.0)
    names = (name for header in renamed.values() for name in header)
    return renamed, {name: less_one for name in names if is_offset_norm(name)}


def _has_one_added(stored: str, family: Family | None) -> bool:
    """Whether a tensor's name, which is mlx-lm's, says that one was added to the weights of norms."""
    if family is None or family.mlx is None or not family.mlx.adds_one:
        return False
    return any(theirs in stored for theirs, _ in family.mlx.stored_names)


def is_offset_norm(name: str) -> bool:
    """Whether ``name`` is, in a family to whose norms mlx-lm adds one, of a norm that multiplies by one more than its
    weight."""
    return name == "model.norm.weight" or name.endswith(_OFFSET_NORMS)


def _renamed(name: str, family: Family | None) -> str:
    starts = () if family is None else family.stored_starts
    start = next((each for each in starts if name.startswith(each[0])), None)
    if start is not None:
        name = start[1] + name.removeprefix(start[0])
    for part, instead in () if family is None else family.stored_names:
        name = name.replace(part, instead)
    for part, instead in () if family is None or family.mlx is None else family.mlx.stored_names:
        if part in name:
            return name.replace(part, instead)
    return name
