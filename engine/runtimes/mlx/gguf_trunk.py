"""The trunk of a GGUF file under mlx-lm's names, matrices that its kernels take laid out for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from engine.models.architectures.quantisation import Groups
from engine.models.architectures.record import MlxRecord
from engine.models.folders.sizes import is_plain_in_mlx
from engine.models.formats.model_files import Change, ModelFiles, Order, StoredTensor
from engine.models.formats.number_formats import BLOCKS
from engine.runtimes.mlx.gguf_blocks import changed_values, laid_out, unpacked
from engine.runtimes.protocol import Config

Array = Any

_IN_TWO = (("in_proj_qkvz", "qkv", "z"), ("input_linear", "gate", "up"))
"""Projections that files have in two tensors and mlx-lm has in one: of a delta-net, and of Granite 4's network."""


def trunk_arrays(
    files: ModelFiles,
    config: Config,
    family: MlxRecord,
    modules: Mapping[str, bool],
    dtype_of: Callable[[str], Any],
    read: Callable[[int], None],
) -> tuple[dict[str, Array], dict[str, Groups]]:
    """The arrays by name, as transformers names and shapes them where mlx-lm renames them itself, and the modules that
    are quantised.

    ``modules``: the model's, and whether they can be. ``dtype_of(name)``: the type of a tensor's plain numbers.
    ``read`` is told the bytes of each tensor.
    """
    arrays: dict[str, Array] = {}
    quantised: dict[str, Groups] = {}
    for stored_name, name, tensor, change in _whole_tensors(files, config, family, modules):
        module = name.removesuffix(".weight")
        may_stay = module != name and modules.get(module, False) and not is_plain_in_mlx(stored_name, tensor.dtype)
        matrix = laid_out(tensor, dtype_of(name), change) if may_stay else None
        if matrix is None:
            arrays[name] = plain_array(tensor, dtype_of(name), change)
        else:
            mx.eval(matrix.named)
            quantised[module] = matrix.groups
            arrays |= {f"{module}.{part}": array for part, array in matrix.named.items()}
        read(tensor.nbytes)
    return arrays, quantised


def plain_array(tensor: StoredTensor, dtype: Any, change: Change | None = None) -> Array:
    """``tensor`` as plain numbers of ``dtype`` after ``change``."""
    if tensor.dtype in BLOCKS:
        return unpacked(tensor, dtype, change)
    kind = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}[tensor.dtype]
    ordered = tensor if change is None else change.in_rows(tensor)
    array = mx.array(np.asarray(ordered.words, order="C")).view(kind)
    if change is not None and (change.columns is not None or change.subtracted or change.log_of):
        array = mx.array(changed_values(np.array(array.astype(mx.float32)), change))
    return array.astype(dtype)


def _whole_tensors(
    files: ModelFiles, config: Config, family: MlxRecord, modules: Mapping[str, bool]
) -> Iterator[tuple[str, str, StoredTensor, Change | None]]:
    """Name as stored, name in mlx-lm, tensor and change of all tensors, those in two pieces put together."""
    first: dict[str, StoredTensor] = {}
    for stored_name, tensor in files.trunk():
        name = name_in_mlx(stored_name, family, modules)
        module = name.removesuffix(".weight").rpartition(".")[0]
        parts = next((parts for whole, *parts in _IN_TWO if module.endswith(f".{whole}")), [])
        if not parts:
            yield stored_name, name, tensor, files.changes.get(stored_name)
        elif module not in first:
            first[module] = tensor
        else:
            second = name.endswith(f".{parts[1]}.weight")
            pieces = (first.pop(module), tensor) if second else (tensor, first.pop(module))
            change = Change(rows=_by_key_head(config)) if parts[0] == "qkv" else None
            yield f"{module}.weight", f"{module}.weight", _joined(pieces), change


def name_in_mlx(stored_name: str, family: MlxRecord, modules: Collection[str]) -> str:
    """The name in mlx-lm, whose ``modules`` these are, of a tensor. A family may have two."""
    for theirs, ours in family.stored_names:
        name = stored_name.replace(ours, theirs)
        if name != stored_name and name.rpartition(".")[0] in modules:
            return name
    return stored_name


def _joined(pieces: tuple[StoredTensor, StoredTensor]) -> StoredTensor:
    """The rows of both, packed only if they are in one format."""
    if pieces[0].dtype != pieces[1].dtype:
        pieces = (_as_floats(pieces[0]), _as_floats(pieces[1]))
    return StoredTensor(pieces[0].dtype, np.concatenate([piece.words for piece in pieces]))


def _as_floats(tensor: StoredTensor) -> StoredTensor:
    return StoredTensor("F32", np.array(plain_array(tensor, mx.float32)).view(np.uint32))


def _by_key_head(config: Config) -> Order:
    """The places of queries, keys, values and gates of all heads in mlx-lm's order: first those of the first key head,
    then those of the second, and so on."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    parts = np.split(np.arange(2 * keys + 2 * values, dtype=np.int64), np.cumsum([keys, keys, values]))
    return np.concatenate([part.reshape(config["linear_num_key_heads"], -1) for part in parts], axis=1).reshape(-1)
