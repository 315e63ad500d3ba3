"""The bank: a prepared model folder, in which one (expert, layer) is one contiguous, 64-byte-aligned slab.

The folder contains ``bank.json`` (the manifest, written last), ``experts/layer-NNNNN.slabs`` (one file per layer that
has experts), ``trunk.safetensors`` (every other tensor under its name in the checkpoint), and copies of the
configuration and tokenizer files. There is one file per layer, so that finished layers survive an interrupted
preparation, and no mapping is larger than a layer.

In a slab gate, up and down lie one after the other, [out, in], then the biases if the family has any; each part begins
64-byte aligned except ``up``, which follows ``gate`` without a gap so that both are one matrix [2*ffn, hidden].
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelError, shown
from engine.models.architectures.families import ExpertLayers, expert_shape, layer_count, part_shape
from engine.models.architectures.record import Family, Part
from engine.models.folders.shard_files import ShardPart
from engine.models.formats.byte_map import ExpertPlace, FileSpan, MatrixPlace
from engine.models.formats.mapped_file import MappedFile, aligned
from engine.models.formats.model_files import Change, Experts, ExpertWeights, StoredTensor
from engine.models.formats.number_formats import WIDTHS
from engine.models.formats.safetensors_files import ALIGNMENT, TensorEntry, read_header

MANIFEST = "bank.json"
TRUNK = "trunk.safetensors"
EXPERTS_FOLDER = "experts"
JOURNAL = "journal.jsonl"
"""File that records which parts of a preparation are finished."""
FORMAT = 1

_MANIFEST_LIMIT = 200_000_000
_CHUNK = 8 * 1024 * 1024


class PartPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an expert in its slab. ``offset`` is in bytes from the slab's beginning."""

    name: Part
    shape: tuple[int, ...]
    offset: int


class SlabLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of every slab of a bank. ``size`` in bytes is a multiple of the alignment."""

    dtype: str
    size: int
    parts: tuple[PartPlace, ...]


class LayerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of one layer, expert e's slab at ``e * size``; ``checksums`` are the slabs' CRC-32."""

    layer: int
    checksums: tuple[int, ...]


class TrunkFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    checksum: int
    """CRC-32 of the whole file."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``bank.json``. ``source`` identifies the checkpoint the bank was made from."""

    format: int
    family: str
    activation: str
    source: str
    trunk: TrunkFile
    experts: int
    slab: SlabLayout | None
    layers: tuple[LayerFile, ...]


def layer_path(folder: Path, layer: int) -> Path:
    """The file with the experts of ``layer``."""
    return folder / EXPERTS_FOLDER / f"layer-{layer:05}.slabs"


def slab_layout(dtype: str, shape: ExpertLayers, has_bias: bool) -> SlabLayout:
    """The layout of the parts of an expert."""
    names: tuple[Part, ...] = ("gate", "up", "down")
    if has_bias:
        names += ("gate_bias", "up_bias", "down_bias")
    places = []
    position = 0
    for name in names:
        if name != "up":
            position += -position % ALIGNMENT
        part = part_shape(name, shape)
        places.append(PartPlace(name, part, position))
        position += math.prod(part) * WIDTHS[dtype]
    return SlabLayout(dtype, position + -position % ALIGNMENT, tuple(places))


class BankExperts:
    """The routed experts of a bank. See :class:`engine.models.formats.model_files.Experts`."""

    def __init__(
        self, files: dict[int, MappedFile], layout: SlabLayout, count: int, shard: ShardPart | None = None
    ) -> None:
        self._files = files
        self._shard = shard
        self.layout = layout
        self._count = count
        parts: dict[str, MatrixPlace] = {
            place.name: _in_slab(layout.dtype, place.shape, place.offset) for place in layout.parts
        }
        rows, columns = parts["gate"].shape
        self._matrices = {"gate_up": _in_slab(layout.dtype, (2 * rows, columns), parts["gate"].offset), **parts}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._files)

    @property
    def count(self) -> int:
        return self._count

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        width = WIDTHS[self.dtype]
        expert = sum(math.prod(place.shape) * width for place in self.layout.parts)
        return expert * (self._count * len(self._files) if self._shard is None else self._shard.count)

    def held(self, layer: int) -> Sequence[int]:
        return range(self.count) if self._shard is None else self._shard.held(layer)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        start = self.place(layer, expert).spans[0].start
        if self._shard is not None and expert not in self._shard.held(layer):
            raise IndexError(f"expert {expert} of layer {layer} is not in this shard")
        file = self._files[layer]
        return ExpertWeights(
            **{
                name: file.tensor(matrix.format, matrix.shape, start + matrix.offset)
                for name, matrix in self._matrices.items()
            }
        )

    def place(self, layer: int, expert: int) -> ExpertPlace:
        """One span, the expert's slab."""
        if layer not in self._files or not 0 <= expert < self._count:
            raise IndexError(f"no expert {expert} in layer {layer}")
        start = expert * self.layout.size
        return ExpertPlace((FileSpan(self._files[layer], start, start + self.layout.size),), self._matrices)

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        """The files that hold experts."""
        return tuple(self._files.values())

    def check_unchanged(self, layer: int | None = None) -> None:
        for mapped in self._files.values() if layer is None else (self._files[layer],):
            mapped.check_unchanged()


def _in_slab(dtype: str, shape: tuple[int, ...], offset: int) -> MatrixPlace:
    """Parts of a slab are contiguous."""
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return MatrixPlace(dtype, 0, offset, math.prod(shape) * WIDTHS[dtype], shape, stride)


class Bank:
    """A prepared folder, opened. See :class:`engine.models.formats.model_files.ModelFiles`."""

    def __init__(self, folder: Path, config: dict[str, Any], family: Family, shard: ShardPart | None = None) -> None:
        """Check the manifest and the files' sizes, but not their contents, which :func:`verify` does.

        Raises ModelError naming the file and what is wrong with it.
        """
        self._folder = folder
        self._config = config
        self._shard = shard
        self.paired_rotary = False
        self.changes: dict[str, Change] = {}
        self.manifest = read_manifest(folder)
        layer_count(config, family)
        self._trunk_entries: dict[str, TensorEntry] = read_header(folder / TRUNK)
        self._trunk_file = MappedFile(folder / TRUNK)
        self._experts = _open_experts(folder, self.manifest, expert_shape(config, family), shard)
        if self.manifest.family != family.model_type:
            raise ModelError(
                f"{folder / MANIFEST} is of a {self.manifest.family} model and config.json of a {family.model_type} "
                "model; prepare the model again."
            )

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def prepared(self) -> bool:
        return True

    @property
    def trunk_bytes(self) -> int:
        if self._shard is not None and not self._shard.has_trunk:
            return 0
        return sum(entry.nbytes for entry in self._trunk_entries.values())

    @property
    def trunk_entries(self) -> dict[str, tuple[str, TensorEntry]]:
        """The trunk's tensors by name: their file, and their place in it."""
        return {name: (TRUNK, entry) for name, entry in self._trunk_entries.items()}

    def trunk(self) -> Iterator[tuple[str, StoredTensor]]:
        if self._shard is not None:
            self._shard.require_trunk()
        for name, entry in self._trunk_entries.items():
            stored = self._trunk_file.tensor(entry.dtype, entry.shape, entry.start)
            yield name, StoredTensor(stored.dtype, aligned(stored.words))

    @property
    def experts(self) -> Experts | None:
        return self._experts

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        return (self._trunk_file, *(self._experts.mapped_files if self._experts is not None else ()))


def _open_experts(
    folder: Path, manifest: Manifest, shape: ExpertLayers | None, shard: ShardPart | None
) -> BankExperts | None:
    if shape is None:
        return None
    slab = manifest.slab
    has_bias = slab is not None and any(place.name == "down_bias" for place in slab.parts)
    if (
        slab is None
        or slab != slab_layout(slab.dtype, shape, has_bias)
        or manifest.experts != shape.count
        or tuple(file.layer for file in manifest.layers) != shape.layers
    ):
        raise ModelError(f"{folder / MANIFEST} does not fit the model's config.json; prepare the model again.")
    files = {}
    for layer in shape.layers:
        path = layer_path(folder, layer)
        if not path.is_file():
            raise ModelError(f"{path} is missing; fetch or prepare the model again.")
        files[layer] = MappedFile(path)
        if files[layer].size != shape.count * slab.size:
            raise ModelError(
                f"{path} is damaged: it has {files[layer].size} bytes and should have {shape.count * slab.size}; "
                "fetch or prepare the model again."
            )
    return BankExperts(files, slab, shape.count, shard)


def read_manifest(folder: Path) -> Manifest:
    """``bank.json`` of ``folder``. Raises ModelError if it is missing, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ModelError(f"{path} is damaged: it is over {_MANIFEST_LIMIT} bytes; prepare the model again.")
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise ModelError(f"{path} is of format {shown(version)}, not {FORMAT}; prepare the model again.")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({shown(str(error), 200)}); prepare the model again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); prepare the model again.") from error
    if manifest.slab is not None and manifest.slab.dtype not in WIDTHS:
        raise ModelError(f"{path} is damaged: it knows no type {shown(manifest.slab.dtype)}; prepare the model again.")
    return manifest


# --- checking the contents ----------------------------------------------------------------------------------------


def verify(folder: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read a prepared folder and compare every slab and the trunk with the manifest's checksums.

    ``on_bytes`` is called with the number of bytes read since the last call. Raises ModelError naming the file, layer
    and expert that differ.
    """
    manifest = read_manifest(folder)
    report = on_bytes or (lambda count: None)
    verify_trunk(folder / TRUNK, manifest.trunk, report)
    if manifest.slab is not None:
        for file in manifest.layers:
            verify_layer(layer_path(folder, file.layer), file, manifest.slab.size, report)


def verify_trunk(path: Path, trunk: TrunkFile, report: Callable[[int], None]) -> None:
    """Raises ModelError if the file differs from what ``trunk`` says."""
    _check_size(path, trunk.size)
    if next(checksums(path, trunk.size, report), None) != trunk.checksum:
        raise ModelError(f"{path} is damaged: its checksum is wrong; prepare the model again.")


def verify_layer(path: Path, file: LayerFile, slab_size: int, report: Callable[[int], None]) -> None:
    """Raises ModelError naming the first expert whose slab differs from what ``file`` says."""
    _check_size(path, slab_size * len(file.checksums))
    for expert, (found, wanted) in enumerate(zip(checksums(path, slab_size, report), file.checksums, strict=True)):
        if found != wanted:
            raise ModelError(
                f"{path} is damaged: the checksum of expert {expert} of layer {file.layer} is wrong; "
                "prepare the model again."
            )


def checksums(path: Path, block: int, report: Callable[[int], None]) -> Iterator[int]:
    """CRC-32 of each ``block`` bytes of a file, read in small pieces. Raises ModelError if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(block, _CHUNK)))
            for _ in range(os.fstat(file.fileno()).st_size // block):
                checksum, left = 0, block
                while left:
                    count = file.readinto(buffer[: min(left, len(buffer))])
                    if not count:
                        raise ModelError(f"{path} became shorter while it was read; prepare the model again.")
                    checksum = zlib.crc32(buffer[:count], checksum)
                    left -= count
                    report(count)
                yield checksum
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); prepare the model again.") from error


def _check_size(path: Path, wanted: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); prepare the model again.") from error
    if size != wanted:
        raise ModelError(f"{path} is damaged: it has {size} bytes and should have {wanted}; prepare the model again.")
