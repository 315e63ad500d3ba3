"""What undoes llama.cpp's order of queries and keys, for runtimes that expect transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.files import Change, Order


def paired_changes(config: Mapping[str, Any]) -> dict[str, Change]:
    """Of queries and keys stored in llama.cpp's order, by the checkpoint's name of the tensor."""
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
