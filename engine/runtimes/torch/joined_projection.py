"""The projection in front of a delta-net that GGUF files of Qwen3-Next hold in two tensors, and checkpoints in one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_FIRST = ".in_proj_qkvz.qkv.weight"


class JoinedProjection(nn.Module):  # type: ignore[misc]
    """``qkv`` and ``z`` of the same input, their outputs in the order ``places``. Each may be packed in a format of its
    own."""

    def __init__(self, qkv: nn.Module, z: nn.Module, places: torch.Tensor) -> None:
        super().__init__()
        self.qkv = qkv
        self.z = z
        self._places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat((self.qkv(x), self.z(x)), dim=-1)
        return out.index_select(-1, self._places.to(out.device))


def expect_two_projections(model: nn.Module, names: Iterable[str]) -> None:
    """Make room for both tensors in every delta-net of the skeleton ``model`` for which ``names``, those of the stored
    tensors, have them."""
    for name in [name.removesuffix(_FIRST) for name in names if name.endswith(_FIRST)]:
        net: Any = model.get_submodule(name)
        old = net.in_proj_qkvz
        options = {"bias": False, "dtype": old.weight.dtype, "device": "meta"}
        first, second = 2 * net.key_dim + net.value_dim, net.value_dim
        qkv = nn.Linear(old.in_features, first, **options).requires_grad_(False)
        z = nn.Linear(old.in_features, second, **options).requires_grad_(False)
        net.in_proj_qkvz = JoinedProjection(qkv, z, _by_key_head(net))


def _by_key_head(net: Any) -> torch.Tensor:
    """Places in queries, keys, values and gates, each of all heads, of what the library expects: those of the first key
    head, then those of the second, and so on."""
    with torch.device("cpu"):
        ends = torch.tensor([net.key_dim, net.key_dim, net.value_dim, net.value_dim]).cumsum(0)
        parts = torch.arange(int(ends[-1])).tensor_split(ends[:-1])
        return torch.cat([part.view(net.num_k_heads, -1) for part in parts], dim=1).reshape(-1)
