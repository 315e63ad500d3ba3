"""Loading weights from a model folder into an mlx-lm model, layer by layer, without two copies of all of them.

Folders that :mod:`engine.models` opens (Hugging Face checkpoints, prepared or not) give experts one by one, in
one shape for all families. Folders written by mlx-lm, quantised or not (and MXFP4 as gpt-oss is published), are read by
mlx-lm's own loader.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.composite import language_name
from engine.models.architectures.mlx_layout import is_offset_norm
from engine.models.architectures.quantisation import Groups
from engine.models.architectures.record import MlxRecord
from engine.models.formats.model_files import Experts, ExpertWeights, ModelFiles, StoredTensor
from engine.models.formats.number_formats import BLOCKS, MLX_BITS
from engine.models.formats.safetensors_files import TensorEntry, read_header
from engine.runtimes.mlx.gguf_blocks import QuantisedArrays, laid_out, unpacked
from engine.runtimes.mlx.gguf_files import in_gguf
from engine.runtimes.mlx.gguf_trunk import name_in_mlx, trunk_arrays
from engine.runtimes.protocol import Config

Array = Any

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
_PROJECTIONS = ("gate", "up", "down")
_DBRX_PROJECTIONS = {"gate_proj": "w1", "up_proj": "v1", "down_proj": "w2"}


@dataclass(frozen=True)
class Assembled:
    """An mlx-lm model without its routed experts, and those: ``experts[layer]`` is a ``SwitchGLU``, evaluated."""

    model: Any
    layers: list[Any]
    """The backbone's own list of decoder layers."""
    experts: dict[int, Any]
    count: int
    """Number of routed experts per layer, including those of other nodes."""
    moe_layers: tuple[int, ...]
    """All layers that have routed experts, held here or not."""


def decoder_layers(model: Any, family: MlxRecord) -> list[Any]:
    """The backbone's own list of decoder layers (mutable)."""
    backbone = model[family.backbone]
    layers: list[Any] = backbone["layers"] if "layers" in backbone else backbone["blocks"]
    return layers


def entries_for_library(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of the language model in the files that mlx-lm's loader would read. Raises ModelError if one of the
    files is damaged."""
    entries: dict[str, TensorEntry] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        entries |= {name: entry for name, entry in read_header(path).items() if language_name(name) is not None}
    return entries


def from_files(
    files: ModelFiles,
    held: Experts | None,
    config: Config,
    family: MlxRecord,
    dtype: Any,
    progress: ProgressCallback,
    with_trunk: bool = True,
) -> Assembled:
    """Builds the model of ``files`` in ``dtype`` (None: as stored), with the experts that ``held`` holds.

    ``config`` is translated for mlx-lm. A GGUF file's packed matrices become quantised modules; it needs a ``dtype``.
    Without a trunk only the experts can be used. Raises ModelError if a tensor is missing, not expected, or of the
    wrong shape.
    """
    model = _build(config, family)
    layers = decoder_layers(model, family)
    experts = _take_experts(layers, family)
    total = files.trunk_bytes + (held.nbytes if held else 0)
    done = 0

    def read(tensor: StoredTensor) -> Array:
        nonlocal done
        array = to_array(tensor, dtype)
        done += tensor.nbytes
        return array

    if with_trunk:
        if in_gguf(files.folder):
            trunk = _from_gguf(model, files, config, family, dtype, progress)
            done = files.trunk_bytes
        else:
            trunk = {}
            modules = set() if family.renames else {name for name, _ in model.named_modules()}
            named = functools.partial(name_in_mlx, family=family, modules=modules)
            for name, tensor in files.trunk():
                trunk[named(name)] = read(tensor)
                progress("loading weights", done, total, "bytes")
            trunk = _keep_precision(model, trunk, files, named)
        if family.adds_one:
            trunk |= {name: array + 1.0 for name, array in trunk.items() if is_offset_norm(name)}
        _assign(model, trunk, files.folder)
        trunk.clear()
        # Evaluated now, so that no unconverted copy stays in memory while the experts are read.
        mx.eval(model.parameters())
    expected = held.layers if held else ()
    if tuple(expected) != tuple(experts):
        raise ModelError(
            f"{files.folder} has routed experts in layers {list(expected)}, "
            f"the configuration asks for {list(experts)}: fetch the model again"
        )
    for layer, module in list(experts.items()):
        assert held is not None
        if held.held(layer):
            stack_experts(module, [held.expert(layer, e) for e in held.held(layer)], read, dtype)
        else:
            del experts[layer]
        progress("loading weights", done, total, "bytes")
    return Assembled(model, layers, experts, held.count if held else 0, tuple(expected))


def from_library(
    folder: Path,
    config: Config,
    family: MlxRecord,
    dtype: Any,
    progress: ProgressCallback,
    held: Mapping[int, Sequence[int]] | None = None,
    with_trunk: bool = True,
) -> Assembled:
    """Loads a folder written by mlx-lm with mlx-lm's own loader, and evaluates it layer by layer.

    ``config`` is translated for mlx-lm. ``dtype`` is for what is not quantised (None: as stored). ``held[layer]`` are
    the experts to keep, ascending (None: all). Without a trunk only the experts can be used.
    """
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(
            folder, lazy=True, strict=True, model_config=config, get_model_classes=lambda config: _classes(family)
        )
    except (ValueError, RuntimeError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"mlx-lm cannot load {folder}: {_first_line(error)}") from error
    if dtype is not None:
        keep = getattr(model, "cast_predicate", lambda name: True)
        parameters = tree_flatten(model.parameters())
        model.load_weights([(name, _cast(array, dtype) if keep(name) else array) for name, array in parameters])
        del parameters
    layers = decoder_layers(model, family)
    experts = _take_experts(layers, family)
    count = next((int(module.gate_proj.num_experts) for module in experts.values()), 0)
    moe_layers = tuple(experts)
    for index, layer in enumerate(layers):
        if index in experts and held is not None:
            if held[index]:
                keep_experts(experts[index], held[index])
            else:
                del experts[index]
        trunk = layer.parameters() if with_trunk else []
        mx.eval(trunk, experts[index].parameters() if index in experts else [])
        progress("loading weights", index + 1, len(layers), "layers")
    if with_trunk:
        mx.eval(model.parameters())
    return Assembled(model, layers, experts, count, moe_layers)


def keep_experts(module: Any, held: Sequence[int]) -> None:
    """Leaves only the experts ``held`` in a ``SwitchGLU``, in that order, lazily."""
    chosen = mx.array(list(held), dtype=mx.int32)
    for part in _PROJECTIONS:
        linear = module[f"{part}_proj"]
        for name in ("weight", "bias", "scales", "biases", "global_scale"):
            if linear.get(name) is not None:
                linear[name] = linear[name][chosen]


def to_array(tensor: StoredTensor, dtype: Any = None) -> Array:
    """``tensor`` as an mlx array of its own type, or converted to ``dtype`` if it is floating point. A packed one is
    unpacked to it.

    Raises ModelError for a type that mlx has no use for here.
    """
    if dtype is not None and tensor.dtype in BLOCKS:
        return unpacked(tensor, dtype)
    stored = _DTYPES.get(tensor.dtype)
    if stored is None:
        raise ModelError(f"the mlx runtime cannot use weights of type {tensor.dtype}")
    array = mx.array(np.asarray(tensor.words, order="C")).view(stored)
    return array if dtype is None else array.astype(dtype)


def stack_experts(
    module: Any, experts: Iterable[ExpertWeights], read: Callable[[StoredTensor], Array], dtype: Any = None
) -> None:
    """Fills a ``SwitchGLU`` with one layer's experts, one of its matrices at a time. ``read`` makes an array of a plain
    tensor; scales and biases of packed ones get the type ``dtype``.

    Raises ModelError if a matrix has another shape than the configuration says.
    """
    experts = list(experts)
    for part in _PROJECTIONS:
        linear = getattr(module, f"{part}_proj")
        for kind, name in (("weight", part), ("bias", f"{part}_bias")):
            tensors = [getattr(expert, name) for expert in experts]
            if kind not in linear:
                if any(tensor is not None for tensor in tensors):
                    raise ModelError(f"the experts have {name}es and the configuration says they have none")
                continue
            expected = tuple(linear[kind].shape)
            for index, tensor in enumerate(tensors):
                if tensor is None or tensor.shape != expected[1:]:
                    shape = None if tensor is None else tensor.shape
                    raise ModelError(f"{name} of expert {index} has the shape {shape} instead of {expected[1:]}")
            stacked = quantised_stack(tensors, dtype) if kind == "weight" else None
            if stacked is None:
                linear[kind] = mx.stack([read(tensor) for tensor in tensors])
                mx.eval(linear[kind])
            else:
                _quantise(module, {f"{part}_proj": stacked.groups})
                module[f"{part}_proj"].update(stacked.named)
                linear = module[f"{part}_proj"]


def quantised_stack(tensors: Sequence[StoredTensor], dtype: Any) -> QuantisedArrays | None:
    """The matrices of a layer's experts for mlx's kernels, evaluated; None unless all are in one format that they
    take."""
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in MLX_BITS:
        return None
    each = [found for tensor in tensors if (found := laid_out(tensor, dtype)) is not None]
    biases = [one.biases for one in each if one.biases is not None]
    weight, scales = mx.stack([one.weight for one in each]), mx.stack([one.scales for one in each])
    stacked = QuantisedArrays(weight, scales, mx.stack(biases) if biases else None, each[0].groups)
    mx.eval(stacked.named)
    return stacked


def _from_gguf(
    model: Any, files: ModelFiles, config: Config, family: MlxRecord, dtype: Any, progress: ProgressCallback
) -> dict[str, Array]:
    """The arrays of the trunk, and quantised modules in ``model`` for those that are."""
    keep = getattr(model, "cast_predicate", lambda name: True)
    done = 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("loading weights", done, files.trunk_bytes, "bytes")

    modules = {name: hasattr(module, "to_quantized") for name, module in model.named_modules()}
    arrays, quantised = trunk_arrays(
        files, config, family, modules, lambda name: dtype if keep(name) else mx.float32, read
    )
    _quantise(model, quantised)
    return arrays


def _quantise(model: Any, modules: Mapping[str, Groups]) -> None:
    """Replaces the ``modules`` of ``model`` by quantised ones, whose weights are yet to come."""
    settings = {
        name: {"group_size": groups.size, "bits": groups.bits, "mode": groups.mode} for name, groups in modules.items()
    }
    nn.quantize(model, class_predicate=lambda name, module: settings.get(name, False))


def _classes(family: MlxRecord) -> tuple[Any, Any]:
    """The class of the model, which also takes tensors named as in a composite checkpoint, and that of its
    arguments."""
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    defined, arguments = (getattr(module, name) for name in family.classes)

    class LanguageModel(defined):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Mapping[str, Array]) -> dict[str, Array]:
            kept = {name: array for stored, array in weights.items() if (name := language_name(stored)) is not None}
            found: dict[str, Array] = super().sanitize(kept) if hasattr(defined, "sanitize") else kept
            return _as_delta_nets(found)

    return LanguageModel, arguments


_CONVOLUTIONS = (".conv1d.weight", "_conv.conv.weight")
"""Ends of the names of convolutions: of all parts of a delta-net, and of one of them (Kimi-Linear)."""


def _as_delta_nets(weights: dict[str, Array]) -> dict[str, Array]:
    """``weights`` as mlx-lm's delta-nets have them, where they are as in transformers: convolutions with the axes
    exchanged, and one added to norms. mlx-lm does so only where it finds experts by name."""
    apart = {name for name, array in weights.items() if name.endswith(_CONVOLUTIONS) and array.shape[-1] != 1}
    changed = {name: weights[name].moveaxis(2, 1) for name in apart}
    if any(name.endswith(_CONVOLUTIONS[0]) for name in apart):
        changed |= {name: array + 1.0 for name, array in weights.items() if is_offset_norm(name)}
    return weights | changed


def _build(config: Config, family: MlxRecord) -> Any:
    model_class, arguments = _classes(family)
    try:
        model = model_class(arguments.from_dict(config))
    except (TypeError, ValueError, KeyError, AssertionError, ZeroDivisionError) as error:
        raise ModelError(
            f"mlx-lm cannot build this {config['model_type']} model from its configuration: {_first_line(error)}"
        ) from error
    model.eval()
    return model


def _take_experts(layers: list[Any], family: MlxRecord) -> dict[int, Any]:
    """Takes the modules that hold routed experts out of their blocks, as ``SwitchGLU``s by layer."""
    experts: dict[int, Any] = {}
    if not family.route:
        return experts
    for index, layer in enumerate(layers):
        block = layer.get(family.block, {})
        if family.experts in block:
            taken = block.pop(family.experts)
            experts[index] = stack_modules(taken) if isinstance(taken, list) else taken
    return experts


def stack_modules(experts: list[Any]) -> Any:
    """dbrx's list of experts as one ``SwitchGLU``: plain or quantised, lazily stacked."""
    ffn, hidden = _logical_shape(experts[0].w1)
    stacked = SwitchGLU(hidden, ffn, len(experts))
    for target, source in _DBRX_PROJECTIONS.items():
        linears = [expert[source] for expert in experts]
        first = linears[0]
        if isinstance(first, nn.QuantizedLinear):
            linear = QuantizedSwitchLinear(
                32, 8, 1, bias=False, group_size=first.group_size, bits=first.bits, mode=first.mode
            )
        else:
            linear = stacked[target]
        for name in ("weight", "scales", "biases"):
            if first.get(name) is not None:
                linear[name] = mx.stack([each[name] for each in linears])
        stacked[target] = linear
    return stacked


def _logical_shape(linear: Any) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return int(rows), int(columns * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else columns)


def _keep_precision(
    model: Any, trunk: dict[str, Array], files: ModelFiles, named: Callable[[str], str]
) -> dict[str, Array]:
    """``trunk`` with what the family keeps in its stored type (deepseek's router bias) read again as stored.
    ``named(stored name)``: a tensor's name in mlx-lm."""
    keep = getattr(model, "cast_predicate", None)
    if keep is None:
        return trunk
    exact = {named(name): to_array(tensor) for name, tensor in files.trunk() if not keep(named(name))}
    return trunk | exact


def _assign(model: Any, trunk: dict[str, Array], folder: Path) -> None:
    try:
        weights = model.sanitize(trunk)
    except ValueError as error:
        raise ModelError(
            f"the weights in {folder} do not fit the configuration: {_first_line(error)}: fetch the model again"
        ) from error
    expected = {name: array.shape for name, array in tree_flatten(model.parameters())}
    if "lm_head.weight" not in expected and any(name.endswith("embed_tokens.weight") for name in weights):
        for part in ("weight", "scales", "biases"):
            weights.pop(f"lm_head.{part}", None)  # a tied head that was stored all the same
    problems = [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is not expected" for name in weights if name not in expected]
    problems += [
        f"{name} has the shape {tuple(weights[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelError(f"the weights in {folder} do not fit the configuration: {problems[0]}{more}")
    model.load_weights(list(weights.items()), strict=True)


def _cast(array: Array, dtype: Any) -> Array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
