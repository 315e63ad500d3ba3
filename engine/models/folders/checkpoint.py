"""An open folder of weights as published, safetensors or GGUF files, and experts as views of them."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, damaged, shown
from engine.models.architectures.composite import language_tensors
from engine.models.architectures.families import (
    ExpertLayers,
    as_shaped,
    expert_shape,
    is_table,
    layer_count,
    layer_of,
    match_tensor,
    part_shape,
    part_views,
    stored_shape,
    unused_tensors,
)
from engine.models.architectures.gguf_architectures import architecture_of
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.architectures.mlx_layout import as_transformers
from engine.models.architectures.quantisation import method_of, refuse_names, refused, schemes
from engine.models.architectures.record import PARTS, ExpertTensor, Family, Part
from engine.models.folders.grouped_weights import REPACKED, Headers, gathered, grouped_places
from engine.models.folders.model_folder import BANK_MANIFEST, INDEX
from engine.models.folders.old_bank import slab_headers
from engine.models.folders.shard_files import ShardPart
from engine.models.formats.byte_map import ExpertPlace, FileSpan, MatrixPlace
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.mapped_file import MappedFile, OwnMemory, aligned
from engine.models.formats.model_files import Change, ExpertWeights, Repacked, StoredTensor
from engine.models.formats.number_formats import is_grouped, is_packed, stored_bytes, words_dtype
from engine.models.formats.repacking import Repacking, ScaleTable, WidenedPowers
from engine.models.formats.safetensors_files import TensorEntry, read_header

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

OPENING = "opening the model"
"""Stage of the progress reports while a model's files are opened."""
SINGLE = "model.safetensors"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
EXPERT_DTYPES = ("BF16", "F16", "F32")
"""Plain number formats of experts that some runtime reads."""
TRUNK_DTYPES = (*EXPERT_DTYPES, "F64", "I64", "I32", "U8", "BOOL")
"""Plain number formats of trunk tensors that some runtime reads."""

_WORTH_SAYING = 50_000_000
"""Bytes of repacked weights from which on the person is told of them."""

_REPACKING_THREADS = 8
"""Threads that repack weights at most, each of which holds parts of a tensor."""

_SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.safetensors")
_INDEX_LIMIT = 200_000_000


class Checkpoint:
    """See :class:`engine.models.formats.model_files.ModelFiles`."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        family: Family,
        shard: ShardPart | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Opens and checks every file, telling ``progress`` before each. Raises ModelError naming the file and what is
        wrong with it."""
        self._folder = folder
        self._config = config
        self._shard = shard
        self.family = family
        headers, self.paired_rotary, self.changes = _read_headers(folder, config, family, progress)
        self._files = {name: MappedFile(folder / name) for name in headers if name != REPACKED}
        if nbytes := _repacked_bytes(headers):
            self._files[REPACKED] = OwnMemory(REPACKED, nbytes)
        self._made: set[Repacking | ScaleTable | WidenedPowers] = set()
        self._trunk: dict[str, tuple[str, TensorEntry]] = {}
        shape = expert_shape(config, family)
        method = method_of(config) if schemes(config) else None
        collected = _Collected(family, shape, layer_count(config, family), unused_tensors(config, family), method)
        for file_name, header in headers.items():
            for name, entry in header.items():
                if collected.is_trunk(file_name, name, entry):
                    _check_trunk_dtype(file_name, name, entry)
                    self._trunk[name] = (file_name, entry)
        self._experts: PlainExperts | None = None
        if shape is not None and shape.layers:
            self._experts = PlainExperts(collected.finish(folder), shape, self._files, shard)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def is_gguf(self) -> bool:
        """Whether its weights are in GGUF files, not in safetensors."""
        return any(path.suffix.casefold() == ".gguf" for path in self.files)

    @property
    def trunk_bytes(self) -> int:
        if self._shard is not None and not self._shard.has_trunk:
            return 0
        return sum(entry.nbytes for name, (_, entry) in self._trunk.items() if not is_table(self.family, name))

    @property
    def trunk_entries(self) -> Mapping[str, tuple[str, TensorEntry]]:
        """The trunk's tensors and the tables by name: their file, and where they lie in it."""
        return self._trunk

    def trunk(self) -> Iterator[tuple[str, StoredTensor]]:
        return self._tensors(tables=False)

    def tables(self) -> Iterator[tuple[str, StoredTensor]]:
        return self._tensors(tables=True)

    def _tensors(self, tables: bool) -> Iterator[tuple[str, StoredTensor]]:
        if self._shard is not None:
            self._shard.require_trunk()
        for name, (file_name, entry) in self._trunk.items():
            if is_table(self.family, name) != tables:
                continue
            words, *parts = (
                aligned(self._files[file].tensor(part.dtype, part.shape, part.start).words)
                for file, part in ((file_name, entry), *entry.groups)
            )
            groups = [StoredTensor(part.dtype, words) for (_, part), words in zip(entry.groups, parts, strict=True)]
            yield name, StoredTensor(entry.dtype, words, *groups)

    @property
    def experts(self) -> PlainExperts | None:
        return self._experts

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        return tuple(mapped for name, mapped in self._files.items() if name != REPACKED)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with tensors, in order."""
        return tuple(mapped.path for mapped in self.mapped_files)

    @property
    def repacks(self) -> bool:
        """See :attr:`engine.models.formats.model_files.ModelFiles.repacks`."""
        return REPACKED in self._files

    @property
    def repacked(self) -> Repacked:
        """See :attr:`engine.models.formats.model_files.ModelFiles.repacked`."""
        spent = (entry for made in self._made if isinstance(made, Repacking) for _, entry in made.spent)
        return Repacked(sum(made.nbytes for made in self._made), sum(entry.nbytes for entry in spent))

    def spent(self) -> list[tuple[str, TensorEntry]]:
        """The tensors of files that are read by :meth:`repack` only, each with its file's name."""
        entries = self._entries(None, trunk=True)
        return [source for entry in entries if isinstance(entry.made, Repacking) for source in entry.made.spent]

    def _entries(self, held: Mapping[int, Sequence[int]] | None, trunk: bool) -> list[TensorEntry]:
        """The tensors of the experts ``held`` by layer, of all that are here if None, and perhaps of the trunk."""
        entries = [entry for _, entry in self._trunk.values()] if trunk else []
        if self._experts is not None:
            here = {layer: self._experts.held(layer) for layer in self._experts.layers}
            entries += self._experts.entries(here if held is None else held)
        return entries

    def repack(
        self, progress: ProgressCallback, held: Mapping[int, Sequence[int]] | None = None, trunk: bool = True
    ) -> list[str]:
        """See :meth:`engine.models.formats.model_files.ModelFiles.repack`."""
        entries = self._entries(held, trunk)
        wanted = [entry.made for entry in entries if entry.made is not None and entry.made not in self._made]
        if not wanted:
            return []
        # Takes a while to import, and few models need it.
        from concurrent.futures import ThreadPoolExecutor

        total, done = sum(made.nbytes for made in wanted), 0
        pool = ThreadPoolExecutor(min(_REPACKING_THREADS, os.cpu_count() or 1))
        try:
            for nbytes in pool.map(lambda made: made.run(self._files, self._files[REPACKED]), wanted):
                done += nbytes
                progress("repacking the weights", done, total, "bytes")
        finally:
            pool.shutdown(cancel_futures=True)
        self._made.update(wanted)
        return _said_of(wanted, self._config)

    def check_unchanged(self) -> None:
        """Raises ModelError if a file was changed since it was opened."""
        for mapped in self._files.values():
            mapped.check_unchanged()


def _repacked_bytes(headers: Headers) -> int:
    """Bytes of the memory of what is repacked."""
    entries = ((file, entry) for file, header in headers.items() for entry in header.values())
    parts = (part for file, entry in entries for part in ((file, entry), *entry.groups))
    return max((entry.stop for file, entry in parts if file == REPACKED), default=0)


def _said_of(made: Sequence[Repacking | ScaleTable | WidenedPowers], config: Mapping[str, Any]) -> list[str]:
    """Lines for the person about what was ``made``."""
    lines, weights = [], [each for each in made if isinstance(each, Repacking)]
    nbytes = sum(each.nbytes for each in weights)
    if nbytes >= _WORTH_SAYING:
        what = "weights" if any(each.codes is not None for each in weights) else "scales and biases"
        text = f"Loading made {nbytes / 1e9:.1f} GB of {what} in memory, which {method_of(config)} stores otherwise."
        lines.append(text)
    if any(scheme.rounds_inputs for scheme in schemes(config)):
        lines.append("The model's settings round inputs (activations) as well, which is not done here.")
    return lines


def _check_trunk_dtype(file_name: str, name: str, entry: TensorEntry) -> None:
    if entry.dtype not in TRUNK_DTYPES and not is_packed(entry.dtype):
        raise ModelError(
            f"{file_name}: tensor {name} is stored as {entry.dtype}, which cannot be run; "
            f"use a checkpoint in {', '.join(EXPERT_DTYPES)}."
        )


class _Source:
    """The checkpoint tensor that holds a part of an expert."""

    __slots__ = ("entry", "file_name", "tensor")

    def __init__(self, tensor: ExpertTensor, file_name: str, entry: TensorEntry) -> None:
        self.tensor = tensor
        self.file_name = file_name
        self.entry = entry

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files with its weights, scales and biases."""
        return (self.file_name, *(file_name for file_name, _ in self.entry.groups))


_Key = tuple[int, int | None, Part]
_Sources = dict[_Key, _Source]
"""Sources by (layer, expert or None for all of them, first part)."""


class PlainExperts:
    """The routed experts of a plain checkpoint. See :class:`engine.models.formats.model_files.Experts`."""

    def __init__(
        self, sources: _Sources, shape: ExpertLayers, files: Mapping[str, MappedFile], shard: ShardPart | None = None
    ) -> None:
        self._sources = sources
        self._shard = shard
        self.shape = shape
        self._files = files
        self._by_name = {mapped.path.name: mapped for mapped in files.values()}
        per_layer: dict[int, list[tuple[int | None, Part]]] = {}
        for layer, expert, part in sources:
            per_layer.setdefault(layer, []).append((expert, part))
        self._tensors = {
            layer: tuple(sorted((part for expert, part in keys if expert in (None, 0)), key=PARTS.index))
            for layer, keys in per_layer.items()
        }
        self._matrices: dict[tuple[ExpertTensor, tuple[Any, ...], int], dict[str, MatrixPlace]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        return self.shape.layers

    @property
    def count(self) -> int:
        return self.shape.count

    @cached_property
    def dtype(self) -> str:
        """The number format of most of their bytes."""
        nbytes: Counter[str] = Counter()
        for source in self._sources.values():
            nbytes[source.entry.dtype] += source.entry.nbytes
        return max(nbytes, key=lambda dtype: nbytes[dtype], default="F32")

    @property
    def nbytes(self) -> int:
        if self._shard is None:
            return sum(source.entry.nbytes for source in self._sources.values())
        # All experts of a layer are of one size.
        return sum(self.place(layer, 0).nbytes * len(self._shard.held(layer)) for layer in self.layers)

    @cached_property
    def formats(self) -> frozenset[str]:
        """The number formats of all matrices and biases."""
        return frozenset(source.entry.dtype for source in self._sources.values())

    @property
    def packed(self) -> bool:
        """Whether any of them is stored in a packed format."""
        return any(map(is_packed, self.formats))

    @property
    def strided(self) -> bool:
        """Whether experts are stored transposed or interleaved, so that their matrices are strided views."""
        return any(source.tensor.strided for source in self._sources.values())

    def held(self, layer: int) -> Sequence[int]:
        return range(self.count) if self._shard is None else self._shard.held(layer)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        place = self.place(layer, expert)
        if self._shard is not None and expert not in self._shard.held(layer):
            raise IndexError(f"expert {expert} of layer {layer} is not in this shard")
        parts: dict[str, StoredTensor] = {}
        for name, matrix in place.matrices.items():
            stored = self._stored(place, matrix)
            # Both form one matrix only if they are views of the file rather than copies.
            if name != "gate_up" or stored.words.ctypes.data == place.spans[matrix.span].address + matrix.offset:
                parts[name] = stored
        return ExpertWeights.of(parts)

    def _stored(self, place: ExpertPlace, matrix: MatrixPlace) -> StoredTensor:
        span = place.spans[matrix.span]
        file = self._by_name[span.file.path.name]
        stored = file.strided(matrix.format, matrix.shape, matrix.stride, span.start + matrix.offset)
        groups = [self._stored(place, part) for part in (matrix.scales, matrix.biases) if part is not None]
        return StoredTensor(stored.dtype, stored.words, *groups)

    def place(self, layer: int, expert: int) -> ExpertPlace:
        """One span per tensor. In every tensor an expert's bytes are contiguous, even if its matrices are not."""
        if layer not in self._tensors or not 0 <= expert < self.count:
            raise IndexError(f"no expert {expert} in layer {layer}")
        spans: list[FileSpan] = []
        matrices: dict[str, MatrixPlace] = {}
        for first in self._tensors[layer]:
            whole = self._sources.get((layer, None, first))
            source = whole or self._sources[layer, expert, first]
            entry = source.entry
            matrices |= self._matrices_in(source.tensor, entry, len(spans))
            for file_name, part in ((source.file_name, entry), *entry.groups):
                size = (part.stop - part.start) // (1 if whole is None else self.count)
                start = part.start if whole is None else part.start + expert * (part.step or size)
                spans.append(FileSpan(self._files[file_name], start, start + size))
        return ExpertPlace(tuple(spans), matrices)

    def _matrices_in(self, tensor: ExpertTensor, entry: TensorEntry, span: int) -> dict[str, MatrixPlace]:
        """The matrices of one expert within its span, which is the expert's part of ``tensor``, and within those after
        it, with scales and biases."""
        formats = (entry.dtype, *((part.dtype, part.shape) for _, part in entry.groups))
        key = (tensor, formats, span)
        if key not in self._matrices:
            separate = replace(tensor, stacking="separate")
            if is_grouped(entry.dtype):
                self._matrices[key] = grouped_places(separate, entry, span, self.shape)
            else:
                places = _packed_places if is_packed(entry.dtype) else _plain_places
                self._matrices[key] = places(separate, entry.dtype, span, self.shape)
        return self._matrices[key]

    def entries(self, held: Mapping[int, Sequence[int]]) -> list[TensorEntry]:
        """The tensors of the experts ``held`` by layer; those of all experts of a layer are among them."""
        return [
            source.entry
            for (layer, expert, _), source in self._sources.items()
            if (expert is None and held.get(layer)) or expert in held.get(layer, ())
        ]

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        """The files that hold experts."""
        names = dict.fromkeys(name for source in self._sources.values() for name in source.file_names)
        return tuple(self._files[name] for name in names if name != REPACKED)

    def check_unchanged(self, layer: int | None = None) -> None:
        files = self.mapped_files if layer is None else self._layer_files[layer]
        for mapped in files:
            mapped.check_unchanged()

    @cached_property
    def _layer_files(self) -> dict[int, tuple[MappedFile, ...]]:
        names: dict[int, dict[str, None]] = {layer: {} for layer in self.layers}
        for (layer, _, _), source in self._sources.items():
            names[layer] |= dict.fromkeys(source.file_names)
        return {layer: tuple(self._files[name] for name in found if name != REPACKED) for layer, found in names.items()}


def _plain_places(tensor: ExpertTensor, dtype: str, span: int, shape: ExpertLayers) -> dict[str, MatrixPlace]:
    # Views of one repeated word, as only their offsets and strides are needed.
    single = np.zeros(1, words_dtype(dtype))
    whole = stored_shape(tensor, shape)
    strides = [single.itemsize * math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    block = np.lib.stride_tricks.as_strided(single, whole, strides, writeable=False)
    views: list[tuple[str, NDArray[Any]]] = list(part_views(tensor, block, 0, shape))
    if tensor.parts == ("gate", "up") and not tensor.strided:
        views.append(("gate_up", block))
    return {
        name: MatrixPlace(
            dtype,
            span,
            int(words.ctypes.data - single.ctypes.data),
            int(words.nbytes),
            words.shape,
            tuple(step // single.itemsize for step in words.strides),
        )
        for name, words in views
    }


def _packed_places(tensor: ExpertTensor, dtype: str, span: int, shape: ExpertLayers) -> dict[str, MatrixPlace]:
    """The parts lie one after the other, as packed tensors are never strided."""
    places: dict[str, MatrixPlace] = {}
    offset = 0
    for part in tensor.parts:
        rows, columns = part_shape(part, shape)
        nbytes = stored_bytes(dtype, (rows, columns))
        places[part] = MatrixPlace(dtype, span, offset, nbytes, (rows, columns), (columns, 1))
        offset += nbytes
    if tensor.parts == ("gate", "up"):
        rows, columns = stored_shape(tensor, shape)
        places["gate_up"] = MatrixPlace(dtype, span, 0, offset, (rows, columns), (columns, 1))
    return places


class _Collected:
    """Sorts a checkpoint's tensors into trunk and experts, and checks that all experts are present."""

    def __init__(
        self, family: Family, shape: ExpertLayers | None, layers: int, unused: tuple[str, ...], method: str | None
    ) -> None:
        """``unused``: beginnings of the names of tensors that are not used. ``method``: how a tool other than mlx-lm
        quantised the weights, None if none did."""
        self._family = family
        self._shape = shape
        self._layers = layers
        self._unused = unused
        self._method = method
        self._sources: _Sources = {}
        self._kinds: dict[tuple[int, Part], dict[str, str]] = {}
        """Storage kinds (a plain format, or ``packed``) of each part of a layer, with the first tensor of that kind."""

    def is_trunk(self, file_name: str, name: str, entry: TensorEntry) -> bool:
        """Whether the tensor belongs to the trunk; an expert's is noted. Raises ModelError if it cannot be right."""
        if name.startswith(self._unused):
            return False
        layer = layer_of(self._family, name)
        if layer is not None and layer >= self._layers:
            if self._family.extra_layers:
                return False
            raise ModelError(
                f"{file_name} has the tensor {name}, but config.json gives the model {self._layers} layers; "
                "the files do not belong together: fetch the model again."
            )
        match = match_tensor(self._family, name)
        if match is None:
            # Rotary frequencies are computed; old versions of transformers stored them.
            return not name.endswith("rotary_emb.inv_freq")
        self._note(match.tensor, (match.layer, match.expert, match.tensor.parts[0]), file_name, name, entry)
        return False

    def _note(self, tensor: ExpertTensor, key: _Key, file_name: str, name: str, entry: TensorEntry) -> None:
        shape, (layer, expert, _) = self._shape, key
        if shape is None:
            raise ModelError(
                f"{file_name} has the tensor {name}, but config.json describes a model without experts; the files do "
                "not belong together: fetch the model again."
            )
        if layer not in shape.layers or (expert is not None and expert >= shape.count):
            raise ModelError(
                f"{file_name} has the tensor {name}, but config.json asks for {shape.count} experts in the layers "
                f"{_ranges(shape.layers)}; the files do not belong together: fetch the model again."
            )
        tensor = as_shaped(self._family, tensor, shape, entry.shape)
        wanted = stored_shape(tensor, shape)
        if entry.shape != wanted and self._method is not None and entry.dtype in ("I32", "U8"):
            raise self._stored_otherwise(self._method)
        if entry.shape != wanted:
            raise ModelError(
                f"{file_name}: tensor {name} has shape {list(entry.shape)}, but config.json asks for {list(wanted)}; "
                "the files do not belong together: fetch the model again."
            )
        if entry.dtype not in EXPERT_DTYPES and not is_packed(entry.dtype):
            raise ModelError(
                f"{file_name}: tensor {name} is stored as {entry.dtype}, which cannot be run; "
                f"use a checkpoint in {', '.join(EXPERT_DTYPES)}."
            )
        if key in self._sources:
            raise ModelError(f"{file_name}: tensor {name} holds weights that another tensor holds too.")
        self._sources[key] = _Source(tensor, file_name, entry)
        kind = "packed" if is_packed(entry.dtype) else entry.dtype
        self._kinds.setdefault((layer, tensor.parts[0]), {}).setdefault(kind, name)

    def _stored_otherwise(self, method: str) -> ModelError:
        return refused(f"{method} as it stores experts of the family {self._family.model_type}")

    def finish(self, folder: Path) -> _Sources:
        """The collected sources. Raises ModelError for a missing tensor, or a layer whose experts are stored in several
        plain types. Formats may differ by matrix and by layer, and packed ones by expert too."""
        assert self._shape is not None
        for kinds in self._kinds.values():
            if len(kinds) > 1:
                (first, name), (second, other) = list(kinds.items())[:2]
                raise ModelError(
                    f"{folder}: the experts of a layer have several types: {name} is {first} and {other} is {second}; "
                    "use another copy of this model."
                )
        per_layer = Counter(layer for layer, _, _ in self._sources)
        for layer in self._shape.layers:
            layout = max(self._family.layouts, key=lambda layout: self._present(layout, layer))
            missing = self._missing(layout, layer)
            if missing is not None and self._method is not None and not self._family.separate_experts:
                raise self._stored_otherwise(self._method)
            if missing is not None:
                raise damaged(f"{folder}: tensor {missing} is missing")
            if per_layer[layer] != self._present(layout, layer):
                raise damaged(f"{folder}: layer {layer} has its experts more than once")
        return self._sources

    def _missing(self, layout: tuple[ExpertTensor, ...], layer: int) -> str | None:
        """Name of the first tensor of ``layer`` that ``layout`` wants and that is not there."""
        return next((name for name, there in self._wanted(layout, layer) if not there), None)

    def _present(self, layout: tuple[ExpertTensor, ...], layer: int) -> int:
        return sum(there for _, there in self._wanted(layout, layer))

    def _wanted(self, layout: tuple[ExpertTensor, ...], layer: int) -> Iterator[tuple[str, bool]]:
        assert self._shape is not None
        for tensor in layout:
            experts = range(self._shape.count) if tensor.stacking == "separate" else (None,)
            for expert in experts:
                source = self._sources.get((layer, expert, tensor.parts[0]))
                there = source is not None and source.tensor == tensor
                yield tensor.template.format(layer=layer, expert=expert), there


# --- which files --------------------------------------------------------------------------------------------------


def _read_headers(
    folder: Path, config: Mapping[str, Any], family: Family, progress: ProgressCallback | None
) -> tuple[dict[str, dict[str, TensorEntry]], bool, dict[str, Change]]:
    """The headers of the folder's files of weights, by file name, and what :attr:`Checkpoint.paired_rotary` and
    :attr:`Checkpoint.changes` say of them. No tensor is in two files."""
    if (folder / BANK_MANIFEST).is_file():
        return slab_headers(folder, config, family), False, {}
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is None or any(folder.glob("*.safetensors")):
        headers = language_tensors(safetensors_headers(folder, progress), config)
        headers, changes = as_transformers(gathered(headers, config), config)
        refuse_names((name for header in headers.values() for name in header), config)
        return headers, False, changes
    with GgufFile(gguf) as opened:
        architecture = architecture_of(opened)
        _, record = architecture
        return entries_of(opened, architecture, config), record.paired_rotary, record.changes(config)


def safetensors_headers(folder: Path, progress: ProgressCallback | None = None) -> dict[str, dict[str, TensorEntry]]:
    index = folder / INDEX
    if index.is_file():
        return _indexed_headers(folder, index, progress)
    if (folder / SINGLE).is_file():
        return {SINGLE: read_header(folder / SINGLE)}
    present = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    shards = [name for name in present if _SHARD.fullmatch(name)]
    if shards:
        raise damaged(f"{folder} has {shards[0]} but no {INDEX}")
    if len(present) == 1:
        return {present[0]: read_header(folder / present[0])}
    if present:
        raise damaged(f"{folder} has several safetensors files but no {INDEX}")
    raise ModelError(_why_no_weights(folder))


def _indexed_headers(folder: Path, index: Path, progress: ProgressCallback | None) -> dict[str, dict[str, TensorEntry]]:
    weight_map = _read_index(index)
    headers: dict[str, dict[str, TensorEntry]] = {}
    owner: dict[str, str] = {}
    names = sorted(set(weight_map.values()))
    for number, file_name in enumerate(names):
        if progress is not None:
            progress(OPENING, number, len(names), "")
        path = folder / file_name
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise ModelError(f"{INDEX} names the file {shown(file_name)}, which is no safetensors file of this folder.")
        if not path.is_file():
            raise damaged(f"{path} is missing, though {INDEX} names it")
        headers[file_name] = read_header(path)
        for name in headers[file_name]:
            if name in owner:
                raise damaged(f"Tensor {name} is both in {owner[name]} and in {file_name}")
            owner[name] = file_name
    for name, file_name in weight_map.items():
        if owner.get(name) != file_name:
            raise damaged(f"Tensor {name} is not in {file_name}, though {INDEX} says so")
    return headers


def _read_index(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > _INDEX_LIMIT:
            raise damaged(f"{index} is damaged: it is over {_INDEX_LIMIT} bytes")
        table = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"{index} is damaged: it is not JSON") from error
    except OSError as error:
        raise ModelError(f"{index} cannot be read ({error.strerror or error}); check the file.") from error
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) and name.isprintable() for item in weight_map.items() for name in item)
    ):
        raise damaged(f"{index} is damaged: it has no weight_map of tensors to files")
    return weight_map


def _why_no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickled = [name for name in names if name.lower().endswith(PICKLED_SUFFIXES)]
    if pickled:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when they are read and are never "
            "opened; convert the model to safetensors or use a repository that has them."
        )
    return f"{folder} has no safetensors files; fetch the model again."


def _ranges(layers: tuple[int, ...]) -> str:
    """``0-3, 5`` for (0, 1, 2, 3, 5)."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(str(end) for end in part) for part in parts)
