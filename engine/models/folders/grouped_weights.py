"""Weights whose codes, scales and biases are tensors of their own, gathered into one tensor of a grouped number format.

mlx-lm saves a quantised ``x.weight`` as uint32 words with ``x.scales`` and ``x.biases``. gpt-oss is published with
``x_blocks`` and ``x_scales``, and models in FP8 with ``x`` and ``x_scale_inv`` or ``x_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError, damaged
from engine.models.architectures.families import ExpertLayers, part_shape
from engine.models.architectures.quantisation import Groups, groups_of, has_fp8
from engine.models.architectures.record import ExpertTensor
from engine.models.formats.byte_map import MatrixPlace
from engine.models.formats.number_formats import BLOCK_SIDE, WIDTHS, fp8_side, scales_shape, stored_bytes
from engine.models.formats.safetensors_files import TensorEntry

_SCALES = ("BF16", "F16", "F32")

Headers = dict[str, dict[str, TensorEntry]]
"""Tensors by name, by file name."""


def gathered(headers: Headers, config: Mapping[str, Any]) -> Headers:
    """``headers`` with one tensor in place of each that is stored as codes, scales and biases. Those of no known form
    stay as they are.

    Raises ModelError naming a tensor whose parts are missing or do not fit together.
    """
    where = {name: file for file, header in headers.items() for name in header}
    taken: set[str] = set()
    headers_found: Headers = {}
    for file, header in headers.items():
        headers_found[file] = {}
        for name, entry in header.items():
            grouped = (
                _mlx(headers, where, file, name, entry, config, taken)
                or _published(headers, where, file, name, taken)
                or _fp8(headers, where, file, name, config, taken)
            )
            headers_found[file][name] = entry if grouped is None else grouped
    return {
        file: {name: entry for name, entry in header.items() if name not in taken}
        for file, header in headers_found.items()
    }


def _mlx(
    headers: Headers,
    where: Mapping[str, str],
    file: str,
    name: str,
    entry: TensorEntry,
    config: Mapping[str, Any],
    taken: set[str],
) -> TensorEntry | None:
    module = name.removesuffix(".weight")
    groups = groups_of(config, module) if entry.dtype == "U32" and module != name else None
    if groups is None:
        return None
    parts: list[tuple[str, TensorEntry]] = []
    for part in ("scales",) if groups.mode == "mxfp4" else ("scales", "biases"):
        own = f"{module}.{part}"
        if own not in where:
            raise damaged(f"{file}: tensor {name} is quantised, but {own} is missing")
        parts.append((where[own], headers[where[own]][own]))
        taken.add(own)
    shape = (*entry.shape[:-1], entry.shape[-1] * 32 // groups.bits) if entry.shape else ()
    return _checked(file, name, entry, shape, groups, parts)


def _published(headers: Headers, where: Mapping[str, str], file: str, name: str, taken: set[str]) -> TensorEntry | None:
    entry, own = headers[file][name], name.removesuffix("_blocks") + "_scales"
    if not name.endswith("_blocks") or entry.dtype != "U8":
        return None
    if own not in where:
        raise damaged(f"{file}: tensor {name} is quantised, but {own} is missing")
    taken.add(own)
    shape = (*entry.shape[:-2], entry.shape[-2] * 32) if len(entry.shape) > 2 and entry.shape[-1] == 16 else ()
    return _checked(file, name, entry, shape, Groups(4, 32, "mxfp4"), [(where[own], headers[where[own]][own])])


def _fp8(
    headers: Headers, where: Mapping[str, str], file: str, name: str, config: Mapping[str, Any], taken: set[str]
) -> TensorEntry | None:
    entry, own = headers[file][name], name + ("_scale" if name + "_scale" in where else "_scale_inv")
    if entry.dtype != "F8_E4M3" or not has_fp8(config):
        return None
    if own not in where:
        raise damaged(f"{file}: tensor {name} is quantised, but {own} is missing")
    taken.add(own)
    scales = headers[where[own]][own]
    if scales.shape in ((), (1,)):  # of the whole matrix
        scales = replace(scales, shape=(1, 1))
    elif len(scales.shape) == 1:  # of rows
        scales = replace(scales, shape=(*scales.shape, 1))
    shape = entry.shape
    whole = len(shape) == 2 or (len(shape) > 2 and shape[-2] % BLOCK_SIDE == 0)
    fits = whole and min(shape) > 0 and fp8_side(shape, scales.shape) is not None
    if not fits or scales.dtype not in _SCALES:
        raise damaged(
            f"{file}: tensor {name} of shape {list(shape)} does not fit to its scales "
            f"({scales.dtype} {list(scales.shape)}): they are those neither of blocks of {BLOCK_SIDE} by {BLOCK_SIDE} "
            "nor of rows nor of the whole"
        )
    return TensorEntry("BLOCK_FP8", shape, entry.start, entry.stop, ((where[own], scales),))


def _checked(
    file: str,
    name: str,
    entry: TensorEntry,
    shape: tuple[int, ...],
    groups: Groups,
    parts: list[tuple[str, TensorEntry]],
) -> TensorEntry:
    number_format = "OCP_MXFP4" if groups.mode == "mxfp4" else f"AFFINE{groups.bits}"
    wanted = (*shape[:-1], shape[-1] // groups.size) if shape else ()
    fits = len(shape) > 1 and not shape[-1] % groups.size and min(shape) > 0
    fits = fits and stored_bytes(number_format, shape) == entry.stop - entry.start
    scales = ("U8",) if groups.mode == "mxfp4" else _SCALES
    dtypes = {part.dtype for _, part in parts}
    if not fits or len(dtypes) > 1 or any(part.shape != wanted or part.dtype not in scales for _, part in parts):
        described = ", ".join(f"{part.dtype} {list(part.shape)}" for _, part in parts)
        raise damaged(
            f"{file}: tensor {name} of shape {list(entry.shape)} in groups of {groups.size} does not fit to its scales "
            f"({described})"
        )
    return TensorEntry(number_format, shape, entry.start, entry.stop, tuple(parts))


def grouped_places(tensor: ExpertTensor, entry: TensorEntry, span: int, shape: ExpertLayers) -> dict[str, MatrixPlace]:
    """The matrices of one expert, with codes in ``span``, and scales and biases in the spans after it. The parts of
    ``tensor`` lie one below the other or alternate by row. Raises ModelError if a block has rows of two parts."""
    if entry.dtype == "BLOCK_FP8":
        return _block_places(tensor, entry, span, shape)
    places: dict[str, MatrixPlace] = {}
    for number, part in enumerate(tensor.parts):
        rows, columns = part_shape(part, shape)
        step = len(tensor.parts) if tensor.interleaved else 1
        first = number if tensor.interleaved else number * rows
        codes, *others = (
            _rows_place(name, span + index, first, rows, width, step)
            for index, (name, width) in enumerate(
                [(entry.dtype, columns), *((stored.dtype, stored.shape[-1]) for _, stored in entry.groups)]
            )
        )
        places[part] = MatrixPlace(
            codes.format, codes.span, codes.offset, codes.nbytes, codes.shape, codes.stride, *others
        )
    return places


def _block_places(tensor: ExpertTensor, entry: TensorEntry, span: int, shape: ExpertLayers) -> dict[str, MatrixPlace]:
    places: dict[str, MatrixPlace] = {}
    for number, part in enumerate(tensor.parts):
        rows, columns = part_shape(part, shape)
        first = number * rows
        ((_, scales),) = entry.groups
        side = fp8_side(entry.shape, scales.shape)
        if side != BLOCK_SIDE:
            if len(tensor.parts) > 1 or tensor.transposed:
                raise ModelError(
                    "Experts that share a tensor, or are stored by columns, have FP8 scales for rows or whole "
                    "matrices, which are not read; take another copy of the model."
                )
            own = _rows_place(scales.dtype, span + 1, 0, scales.shape[0], 1, 1)
            places[part] = MatrixPlace(entry.dtype, span, 0, rows * columns, (rows, columns), (columns, 1), own)
            continue
        if tensor.interleaved or tensor.transposed or first % BLOCK_SIDE:
            raise ModelError(
                f"Experts of {rows} rows that share a tensor do not begin with a block of {BLOCK_SIDE} rows; take "
                "another copy of the model."
            )
        blocks = scales_shape((rows, columns))
        places[part] = MatrixPlace(
            entry.dtype, span, first * columns, rows * columns, (rows, columns), (columns, 1),
            _rows_place(scales.dtype, span + 1, first // BLOCK_SIDE, blocks[0], blocks[1], 1),
        )  # fmt: skip
    return places


def _rows_place(number_format: str, span: int, first: int, rows: int, columns: int, step: int) -> MatrixPlace:
    width = WIDTHS[number_format] * columns if number_format in WIDTHS else stored_bytes(number_format, (columns,))
    return MatrixPlace(number_format, span, first * width, rows * width, (rows, columns), (step * columns, 1))
