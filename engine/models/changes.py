"""How tensors of GGUF files differ from a checkpoint of transformers, so that a runtime can undo it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.files import StoredTensor

Order = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Change:
    """What makes a stored tensor the checkpoint's: its rows and columns are taken in these orders, then ``subtracted``
    is taken away, or the logarithm of the negative is taken."""

    rows: Order | None = None
    columns: Order | None = None
    subtracted: float = 0.0
    log_of_negative: bool = False

    def in_rows(self, tensor: StoredTensor) -> StoredTensor:
        """``tensor`` with its rows in order, a copy, whatever its format."""
        return tensor if self.rows is None else StoredTensor(tensor.dtype, tensor.words[self.rows])


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
