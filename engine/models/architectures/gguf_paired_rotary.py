"""Queries and keys in llama.cpp's order, in which the two values that a rotation turns together lie side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.formats.model_files import Change, Order


def paired_changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """What brings queries and keys from llama.cpp's order into transformers', by the name of a checkpoint's tensor."""
    size = config["head_dim"]
    changes: dict[str, Change] = {}
    for short, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        change = Change(rows=_halves(heads, size))
        for layer in range(config["num_hidden_layers"]):
            for kind in ("weight", "bias"):
                changes[f"model.layers.{layer}.self_attn.{short}_proj.{kind}"] = change
    return changes


def _halves(heads: int, size: int) -> Order:
    """The places of rows whose pairs lie side by side, in transformers' order: the values of a pair are half a head of
    ``size`` apart."""
    pairs = np.arange(heads * size, dtype=np.int64).reshape(heads, size // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
