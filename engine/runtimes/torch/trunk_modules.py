"""Norms of transformers' trunks as single operations of torch, for GPUs.

transformers writes a root-mean-square norm as seven operations. The host needs longer to start each of them than a GPU
needs to run it, and norms are a third of a layer's operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class FusedNorm(nn.Module):  # type: ignore[misc]
    """A root-mean-square norm of the last dimension of [..., width], times ``weight`` [width].

    It rounds once, where transformers rounds twice.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Replace the norms of ``model`` that equal :class:`FusedNorm`. Returns their number.

    Names are not trusted: each norm is run beside its replacement, on numbers of every size.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    replaced = 0
    for name, norm in found:
        fused = _fused(norm)
        if fused is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced


def _fused(norm: Any) -> FusedNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    fused = FusedNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, len(weight), generator=generator) * torch.tensor([[1e-4], [0.1], [1.0], [30.0], [1e3]])
    probe = numbers.to(weight.device, weight.dtype)
    with torch.inference_mode():
        try:
            wanted = norm(probe)
        except (RuntimeError, TypeError, ValueError):  # a norm of another kind, with further arguments
            return None
        same = wanted.shape == probe.shape and wanted.dtype == probe.dtype
        # Two roundings in place of one are a step apart.
        step = 4 * torch.finfo(weight.dtype).eps
        return fused if same and torch.allclose(fused(probe), wanted, rtol=step, atol=step) else None


# --- projections of the same input that files have in two tensors ----------------------------------------------------


_QUERIES, _GATES, _CHOOSING = ".in_proj_qkvz.qkv.weight", ".input_linear.gate.weight", ".index_qk_proj.q.weight"


class JoinedProjection(nn.Module):  # type: ignore[misc]
    """Two projections of the same input by their names, ``rows`` each, in place of the one projection ``old``. Their
    outputs are one after the other or in the order ``places``. Each may be packed in a format of its own."""

    def __init__(self, old: nn.Linear, rows: dict[str, int], places: torch.Tensor | None = None) -> None:
        super().__init__()
        for name, count in rows.items():
            part = nn.Linear(old.in_features, count, bias=False, dtype=old.weight.dtype, device="meta")
            self.add_module(name, part.requires_grad_(False))
        self._places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat([part(x) for part in self.children()], dim=-1)
        return out if self._places is None else out.index_select(-1, self._places.to(out.device))


def expect_two_projections(model: nn.Module, names: Iterable[str]) -> None:
    """Make room for both tensors in every delta-net (Qwen3-Next), network (Granite 4) and indexer (Qwen3.8-Flash-Next)
    of the skeleton ``model`` that has them in ``names``, the stored tensors' names."""
    for name in names:
        if name.endswith(_QUERIES):
            net: Any = model.get_submodule(name.removesuffix(_QUERIES))
            rows = {"qkv": 2 * net.key_dim + net.value_dim, "z": net.value_dim}
            net.in_proj_qkvz = JoinedProjection(net.in_proj_qkvz, rows, _by_key_head(net))
        elif name.endswith(_GATES):
            network: Any = model.get_submodule(name.removesuffix(_GATES))
            half = network.input_linear.out_features // 2
            network.input_linear = JoinedProjection(network.input_linear, {"gate": half, "up": half})
        elif name.endswith(_CHOOSING):
            indexer: Any = model.get_submodule(name.removesuffix(_CHOOSING))
            rows = {"q": indexer.index_n_heads * indexer.index_head_dim, "k": indexer.index_head_dim}
            indexer.index_qk_proj = JoinedProjection(indexer.index_qk_proj, rows)


def _by_key_head(net: Any) -> torch.Tensor:
    """Indices into queries, keys, values and gates of all heads that give the library's order: first those of the first
    key head, then those of the second, and so on."""
    with torch.device("cpu"):
        ends = torch.tensor([net.key_dim, net.key_dim, net.value_dim, net.value_dim]).cumsum(0)
        parts = torch.arange(int(ends[-1])).tensor_split(ends[:-1])
        return torch.cat([part.view(net.num_k_heads, -1) for part in parts], dim=1).reshape(-1)


# --- convolutions that files have in three tensors -------------------------------------------------------------------


_PIECE = re.compile(r"\.([qkv])_conv1d\.weight$")


def piece_name(stored_name: str) -> str:
    """The name in a model with :class:`ConvolutionPieces` of a tensor, which has one of its own in checkpoints."""
    return _PIECE.sub(r".conv1d.\1.weight", stored_name)


class ConvolutionPieces(nn.Module):  # type: ignore[misc]
    """The convolutions of a delta-net's queries, keys and values (Kimi-Linear), [channels, 1, taps] each, while they
    are loaded. transformers has one of all of them, ``whole``."""

    def __init__(self, whole: nn.Conv1d) -> None:
        super().__init__()
        for name, part in zip("qkv", whole.weight.chunk(3), strict=True):
            piece = nn.Module()
            piece.weight = nn.Parameter(part, requires_grad=False)
            self.add_module(name, piece)


def expect_three_convolutions(model: nn.Module, names: Iterable[str]) -> None:
    """Make room for the three tensors in every delta-net of the skeleton ``model`` that has them in ``names``, the
    stored tensors' names."""
    for net in {piece_name(name).rpartition(".conv1d.")[0] for name in names if _PIECE.search(name)}:
        module: Any = model.get_submodule(net)
        module.conv1d = ConvolutionPieces(module.conv1d)


def join_convolutions(model: nn.Module) -> None:
    """Replace all :class:`ConvolutionPieces` of ``model``, which are loaded, by what they are pieces of."""
    for net in [net for net in model.modules() if isinstance(getattr(net, "conv1d", None), ConvolutionPieces)]:
        whole = nn.Module()
        whole.weight = nn.Parameter(torch.cat([piece.weight for piece in net.conv1d.children()]), requires_grad=False)
        whole.bias = None
        net.conv1d = whole


# --- latent attention ------------------------------------------------------------------------------------------------


_KEYS, _VALUES = "k_b_proj", "v_b_proj"


class PerHead(nn.Module):  # type: ignore[misc]
    """A matrix for every head, [heads, out, in], which maps ``x`` [..., heads, in] to [..., heads, out]."""

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
    """Make room for the two tensors in every attention of the skeleton ``model`` that has them in ``names``, the stored
    tensors' names."""
    split = {name.removesuffix(f".{_KEYS}.weight") for name in names if name.endswith(f".{_KEYS}.weight")}
    for name in split:
        attention: Any = model.get_submodule(name)
        dtype = attention.kv_b_proj.weight.dtype
        heads, latents = attention.num_heads, attention.kv_lora_rank
        del attention.kv_b_proj
        setattr(attention, _KEYS, PerHead(heads, latents, attention.qk_nope_head_dim, dtype))
        setattr(attention, _VALUES, PerHead(heads, attention.v_head_dim, latents, dtype))


def attend_to_latents(model: nn.Module) -> None:
    """Let the attentions of ``model`` compute with latents if their weights, which are loaded, were stored split."""
    for attention in model.modules():
        if hasattr(attention, _KEYS):
            _Absorbed(attention)


class _Absorbed:
    """Stands between ``attention``'s forward pass and its projections."""

    def __init__(self, attention: Any) -> None:
        self._keys, self._values = attention.k_b_proj, attention.v_b_proj
        self._heads = attention.num_heads
        self._plain, self._rotated = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self._latents = attention.kv_lora_rank
        last = attention.q_proj if getattr(attention, "q_lora_rank", None) is None else attention.q_b_proj
        last.register_forward_hook(self._widen)
        attention.o_proj.register_forward_pre_hook(self._to_values)
        attention.expand_kv = self._shared
        # By these sizes the library cuts queries in two.
        attention.qk_head_dim = self._latents + self._rotated
        attention.qk_nope_head_dim = self._latents

    def _widen(self, module: nn.Module, inputs: Any, queries: torch.Tensor) -> torch.Tensor:
        """Queries [rows, tokens, heads * (plain + rotated)] as [rows, tokens, heads * (latents + rotated)]."""
        plain, rotated = queries.unflatten(-1, (self._heads, -1)).split([self._plain, self._rotated], dim=-1)
        return torch.cat((self._keys(plain), rotated), dim=-1).flatten(-2)

    def _shared(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys for all heads, [rows, heads, tokens, latents + rotated], without a copy for each head.

        They are the values, too: torch's fast attention takes values as wide as keys, and what follows the latents is
        cut off.
        """
        keys = torch.cat((latents, rotated), dim=-1).expand(-1, self._heads, -1, -1)
        return keys, keys

    def _to_values(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = inputs[0].unflatten(-1, (self._heads, -1))[..., : self._latents]
        return (self._values(found).flatten(-2), *inputs[1:])
