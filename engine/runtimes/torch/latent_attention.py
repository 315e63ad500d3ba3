"""Latent attention whose keys and values are never made: queries and results are multiplied by what would make them.

GGUF files hold the projection of latents ready for it: for every head a matrix of the keys, transposed, and one of the
values. transformers' own forward pass stays. Its queries become as wide as a latent, all heads share the latents as
keys and as values, and the results become values in front of the output projection. A step then reads each cached
latent once, where the library's own way makes keys and values of all heads from all of them, at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_KEYS, _VALUES = "k_b_proj", "v_b_proj"


class PerHead(nn.Module):  # type: ignore[misc]
    """A matrix for every head, [heads, out, in]; ``x`` [..., heads, in] becomes [..., heads, out]."""

    def __init__(self, heads: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty(heads, rows, columns, dtype=dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, rows, columns = self.weight.shape
        by_head = x.reshape(-1, heads, columns).transpose(0, 1)
        out = torch.bmm(by_head, self.weight.transpose(1, 2)).transpose(0, 1)
        return out.reshape(*x.shape[:-1], rows)


def expect_split_latents(model: nn.Module, names: Iterable[str]) -> None:
    """Make room for the two tensors in every attention of the skeleton ``model`` for which ``names``, those of the
    stored tensors, have them."""
    split = {name.removesuffix(f".{_KEYS}.weight") for name in names if name.endswith(f".{_KEYS}.weight")}
    for name in split:
        attention: Any = model.get_submodule(name)
        dtype = attention.kv_b_proj.weight.dtype
        heads, latents = attention.num_heads, attention.kv_lora_rank
        del attention.kv_b_proj
        setattr(attention, _KEYS, PerHead(heads, latents, attention.qk_nope_head_dim, dtype))
        setattr(attention, _VALUES, PerHead(heads, attention.v_head_dim, latents, dtype))


def attend_to_latents(model: nn.Module) -> None:
    """Let the attentions of ``model``, whose weights are there, compute with latents if they were stored split."""
    for attention in model.modules():
        if hasattr(attention, _KEYS):
            _Absorbed(attention)


class _Absorbed:
    """Puts itself between ``attention``'s forward pass and its projections."""

    def __init__(self, attention: Any) -> None:
        self._keys, self._values = attention.k_b_proj, attention.v_b_proj
        self._heads = attention.num_heads
        self._plain, self._rotated = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self._latents = attention.kv_lora_rank
        last = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        last.register_forward_hook(self._widen)
        attention.o_proj.register_forward_pre_hook(self._to_values)
        attention.expand_kv = self._shared
        # By these sizes the library cuts queries in two.
        attention.qk_head_dim = self._latents + self._rotated
        attention.qk_nope_head_dim = self._latents

    def _widen(self, module: nn.Module, inputs: Any, queries: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, heads * (plain + rotated)] to [rows, tokens, heads * (latents + rotated)]."""
        plain, rotated = queries.unflatten(-1, (self._heads, -1)).split([self._plain, self._rotated], dim=-1)
        return torch.cat((self._keys(plain), rotated), dim=-1).flatten(-2)

    def _shared(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys for all heads, [rows, heads, tokens, latents + rotated], without a copy for each. They are the
        values, too: torch's fast attention takes values as wide as keys, and what follows the latents is cut off."""
        keys = torch.cat((latents, rotated), dim=-1).expand(-1, self._heads, -1, -1)
        return keys, keys

    def _to_values(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = inputs[0].unflatten(-1, (self._heads, -1))[..., : self._latents]
        return (self._values(found).flatten(-2), *inputs[1:])
