"""Reading the prepared folders of versions before ordinary safetensors: experts in slabs, described by ``bank.json``.

``experts/layer-NNNNN.slabs`` holds one slab for each expert of a layer: gate, up and down, [out, in], then the biases
if the family has any; each part begins 64-byte aligned but ``up``, which follows ``gate`` without a gap.
``trunk.safetensors`` holds all other tensors. Such a folder may be all that a person has of a model, so it still runs;
:func:`engine.models.folders.prepare.prepare` rewrites it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelError, shown
from engine.models.architectures.families import (
    ExpertLayers,
    expert_shape,
    part_shape,
    prepared_layout,
    stored_shape,
)
from engine.models.architectures.record import PARTS, Family, Part
from engine.models.folders.model_folder import BANK_MANIFEST
from engine.models.formats.number_formats import WIDTHS
from engine.models.formats.safetensors_files import ALIGNMENT, TensorEntry, read_header

TRUNK = "trunk.safetensors"
_FORMAT = 1
_MANIFEST_LIMIT = 200_000_000


class _PartPlace(msgspec.Struct, frozen=True):
    """A part of an expert in its slab. ``offset`` is in bytes from the slab's beginning."""

    name: Part
    shape: tuple[int, ...]
    offset: int


class _SlabLayout(msgspec.Struct, frozen=True):
    """The layout of every slab, of ``size`` bytes."""

    dtype: str
    size: int
    parts: tuple[_PartPlace, ...]


class _Manifest(msgspec.Struct, frozen=True):
    """What reading needs of ``bank.json``."""

    format: int
    family: str
    experts: int
    slab: _SlabLayout | None


def slab_headers(folder: Path, config: Mapping[str, Any], family: Family) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of a folder with ``bank.json``, by file name, as in the layout of prepared folders of today.

    Raises ModelError naming the file and what is wrong with it.
    """
    manifest = _read_manifest(folder)
    shape = expert_shape(config, family)
    if manifest.family != family.model_type:
        raise ModelError(
            f"{folder / BANK_MANIFEST} is of a {manifest.family} model and config.json of a {family.model_type} "
            "model; prepare the model again."
        )
    slab = manifest.slab
    has_bias = slab is not None and len(slab.parts) > 3
    if slab is None or shape is None or slab != _slab_layout(slab.dtype, shape, has_bias):
        raise ModelError(f"{folder / BANK_MANIFEST} does not fit the model's config.json; prepare the model again.")
    headers = {TRUNK: read_header(folder / TRUNK)}
    for layer in shape.layers:
        name = f"experts/layer-{layer:05}.slabs"
        _check_file(folder / name, shape.count * slab.size)
        headers[name] = _slab_tensors(slab, shape, family, layer, has_bias)
    return headers


def _slab_tensors(
    slab: _SlabLayout, shape: ExpertLayers, family: Family, layer: int, has_bias: bool
) -> dict[str, TensorEntry]:
    offsets = {place.name: place.offset for place in slab.parts}
    tensors = {}
    for tensor in prepared_layout(family, has_bias):
        whole = stored_shape(tensor, shape)
        start = offsets[tensor.parts[0]]
        stop = start + math.prod(whole) * WIDTHS[slab.dtype]
        tensors[tensor.template.format(layer=layer)] = TensorEntry(slab.dtype, whole, start, stop, step=slab.size)
    return tensors


def _slab_layout(dtype: str, shape: ExpertLayers, has_bias: bool) -> _SlabLayout:
    places = []
    position = 0
    for name in PARTS if has_bias else PARTS[:3]:
        if name != "up":
            position += -position % ALIGNMENT
        part = part_shape(name, shape)
        places.append(_PartPlace(name, part, position))
        position += math.prod(part) * WIDTHS[dtype]
    return _SlabLayout(dtype, position + -position % ALIGNMENT, tuple(places))


def _check_file(path: Path, size: int) -> None:
    if not path.is_file():
        raise ModelError(f"{path} is missing; fetch or prepare the model again.")
    found = path.stat().st_size
    if found != size:
        raise ModelError(
            f"{path} is damaged: it has {found} bytes and should have {size}; fetch or prepare the model again."
        )


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / BANK_MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ModelError(f"{path} is damaged: it is over {_MANIFEST_LIMIT} bytes; prepare the model again.")
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != _FORMAT:
            raise ModelError(f"{path} is of format {shown(version)}, not {_FORMAT}; prepare the model again.")
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({shown(str(error), 200)}); prepare the model again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); prepare the model again.") from error
    if manifest.slab is not None and manifest.slab.dtype not in WIDTHS:
        raise ModelError(f"{path} is damaged: it knows no type {shown(manifest.slab.dtype)}; prepare the model again.")
    return manifest
