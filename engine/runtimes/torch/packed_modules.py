"""Modules that compute with packed weights in place, instead of torch's modules with unpacked copies.

A packed trunk then takes no more memory than its file, and reads a quarter of the bytes. The native kernels multiply.
They round their inputs to eight bits, so a model that computes in float32 keeps unpacked copies.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.models.architectures.families import completed
from engine.models.architectures.ngrams import ngram_hashes
from engine.models.formats.lookup_table import LookupTable, lookup_tables, misplaced, misshapen
from engine.models.formats.model_files import Change, ModelFiles, StoredTensor
from engine.models.formats.number_formats import is_packed
from engine.moe.kernels.bindings import FORMATS, KernelChoice, choose, load
from engine.moe.kernels.layers import matrix, product_error
from engine.moe.kernels.pool import shared_pool
from engine.runtimes.torch.offload.torch_tensors import unpacked, view


class PackedLinear(nn.Module):  # type: ignore[misc]
    """Replaces a linear layer: ``x`` [..., in] times the packed ``stored`` [out, in] transposed, plus ``bias``.

    ``change`` is undone on inputs and outputs, because reordering the weights would tear blocks apart.
    """

    def __init__(
        self, stored: StoredTensor, bias: nn.Parameter | None, change: Change | None, choice: KernelChoice
    ) -> None:
        super().__init__()
        self.stored = stored
        self.out_features, self.in_features = stored.shape
        _register(self, stored)
        self.register_parameter("bias", bias)
        self._choice = choice
        self._matrix = matrix(stored)
        self._native = load()
        columns = None if change is None else change.columns
        self._columns = None if columns is None else torch.from_numpy(np.argsort(columns))
        self._rows = None if change is None or change.rows is None else torch.from_numpy(change.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.float32)
        rows = (rows if self._columns is None else rows.index_select(1, self._columns)).contiguous()
        out = torch.empty(rows.shape[0], self.out_features)
        if rows.shape[0]:
            code = self._native.pllm_linear(
                shared_pool(torch.get_num_threads()).handle,
                self._choice.number,
                ctypes.addressof(self._matrix),
                None,
                rows.data_ptr(),
                self.in_features,
                rows.shape[0],
                out.data_ptr(),
                self.out_features,
            )
            if code:
                raise product_error(code)
        if self._rows is not None:
            out = out.index_select(1, self._rows)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):  # type: ignore[misc]
    """Replaces an embedding: the wanted rows of the packed ``stored`` [vocabulary, hidden], in ``dtype``, times
    ``scale``."""

    def __init__(self, stored: StoredTensor, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.stored = stored
        self.num_embeddings, self.embedding_dim = stored.shape
        _register(self, stored)
        self._dtype = dtype
        self._scale = None if scale is None else torch.tensor(scale).to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        wanted = Change(rows=ids.reshape(-1).cpu().numpy()).in_rows(self.stored)
        rows = unpacked(wanted, self._dtype).view(*ids.shape, self.embedding_dim)
        return rows if self._scale is None else rows * self._scale


def _register(module: nn.Module, stored: StoredTensor) -> None:
    """Register the arrays of ``stored`` as buffers, so that they are counted as the model's memory."""
    module.register_buffer("blocks", torch.from_numpy(stored.words))
    for name, part in (("scales", stored.scales), ("biases", stored.biases)):
        if part is not None:
            module.register_buffer(name, view(part))


def kernels_for(device: torch.device, dtype: torch.dtype) -> KernelChoice | None:
    """The kernels for packed matrices of a trunk on ``device`` that computes in ``dtype``; None if the trunk is
    unpacked."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    choice = choose("bfloat16")
    return choice if choice.native else None


def packed_module(
    old: nn.Module, stored: StoredTensor, change: Change | None, choice: KernelChoice, dtype: torch.dtype
) -> nn.Module | None:
    """The module that replaces ``old``, whose weight is ``stored``; None if there is none for its kind."""
    if not is_packed(stored.dtype) or stored.dtype not in FORMATS:
        return None
    if type(old) is nn.Linear:
        # The bias is filled by its own name, before or after this.
        return PackedLinear(stored, old.bias, change, choice)
    # gemma4's embedding is one of its own class.
    scale = getattr(old, "scalar_embed_scale", None)
    # Rows of FP8 share their scales, so that single ones cannot be taken.
    if change is None and stored.dtype != "BLOCK_FP8" and (type(old) is nn.Embedding or scale is not None):
        return PackedEmbedding(stored, dtype, scale)
    return None


class MappedEmbedding(nn.Module):  # type: ignore[misc]
    """Replaces an embedding by the rows of ``table``, which are read where they lie, in ``dtype``."""

    weight = torch.empty(0)
    """What tells transformers where rows are looked up: on the CPU."""

    def __init__(self, table: LookupTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self._dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table.rows_of(ids.reshape(-1).numpy())
        found = unpacked(rows, self._dtype) if is_packed(rows.dtype) else view(rows).to(self._dtype)
        return found.view(*ids.shape, self.table.shape[1])


def map_tables(model: nn.Module, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> set[str]:
    """Replace the embeddings of the skeleton ``model`` that are tables of ``files``, and compute the numbers of their
    hashes that the files leave out. Returns the names of these. Raises ModelError."""
    for name, table in lookup_tables(files).items():
        try:
            old: Any = model.get_submodule(name)
        except AttributeError as error:
            raise misplaced(name) from error
        wanted = (old.num_embeddings, old.embedding_dim)
        if table.shape != wanted:
            raise misshapen(name, table.shape, wanted)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, MappedEmbedding(table, dtype))
    return _fill_hashes(model, files, device)


def _fill_hashes(model: nn.Module, files: ModelFiles, device: torch.device) -> set[str]:
    config, stored = completed(files.config), {name for name, _ in files.trunk()}
    places = sorted(set(config.get("ple_layer_ids") or ()))
    filled = set()
    for place, own in zip(places, ngram_hashes(config) if places else (), strict=True):
        prefix = f"model.layers.{place - 1}.ple.ple_embedding"
        for name, numbers in (
            ("layer_multipliers", own.multipliers),
            ("ngram_heads_vocab_sizes", own.sizes),
            ("ngram_heads_offsets", own.offsets),
        ):
            if f"{prefix}.{name}" not in stored:
                model.get_submodule(prefix)._buffers[name] = torch.tensor(numbers, device=device)
                filled.add(f"{prefix}.{name}")
    return filled


def numbers_kept_packed(model: Any) -> int:
    """Number of weights of ``model`` that are read where they lie, each tensor counted once."""
    sizes = {
        module.blocks.data_ptr(): module.stored.shape
        for module in model.modules()
        if isinstance(module, PackedLinear | PackedEmbedding)
    }
    tables = [module.table for module in model.modules() if isinstance(module, MappedEmbedding)]
    return sum(rows * columns for rows, columns in (*sizes.values(), *(table.shape for table in tables)))
