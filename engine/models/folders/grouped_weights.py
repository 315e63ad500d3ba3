"""Weights whose codes, scales and biases are tensors of their own, gathered into one tensor of a grouped number format.

mlx-lm saves a quantised ``x.weight`` as uint32 words with ``x.scales`` and ``x.biases``. gpt-oss is published with
``x_blocks`` and ``x_scales``, and models in FP8 with ``x`` and ``x_scale_inv`` or ``x_scale``, DeepSeek V4 with
``x.weight`` and ``x.scale``, also of its experts in MXFP4. What vLLM's tools write
has zero points instead of biases (:data:`_FORMS`), so that biases, and codes that lie otherwise, are computed when the
model is loaded (:mod:`engine.models.formats.repacking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelError, damaged
from engine.models.architectures.families import ExpertLayers, part_shape
from engine.models.architectures.quantisation import Groups, groups_of, has_fp8, schemes
from engine.models.architectures.record import ExpertTensor
from engine.models.architectures.schemes import INTEGERS, NVFP4, NVFP4_OF_MODELOPT, PACKED, Scheme
from engine.models.formats.byte_map import MatrixPlace
from engine.models.formats.number_formats import (
    BLOCK_SIDE,
    NVFP4_GROUP,
    SMALLEST_GROUP,
    WIDTHS,
    fp8_side,
    scales_shape,
    stored_bytes,
)
from engine.models.formats.repacking import POWERS, Repacking, ScaleTable, WidenedPowers
from engine.models.formats.safetensors_files import ALIGNMENT, TensorEntry

_SCALES = ("BF16", "F16", "F32")
REPACKED = "repacked weights"
"""The name, in place of a file's, of the memory of what is computed when the model is loaded."""

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
    memory, found_schemes = _Memory(), schemes(config)
    for file, header in headers.items():
        headers_found.setdefault(file, {})
        for name, entry in header.items():
            affine = _with_zeros(headers, where, file, name, found_schemes, taken, memory)
            if affine is not None:
                owner, renamed, grouped = affine
                if renamed != name and renamed in where:
                    raise damaged(f"{file}: tensor {renamed} is there twice, quantised and not")
                headers_found.setdefault(owner, {})[renamed] = grouped
                continue
            stored = (
                _mlx(headers, where, file, name, entry, config, taken, memory)
                or _published(headers, where, file, name, taken)
                or _fp4(headers, where, file, name, config, taken)
                or _fp8(headers, where, file, name, config, taken, memory)
            )
            headers_found[file][name] = entry if stored is None else stored
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
    memory: _Memory,
) -> TensorEntry | None:
    module = name.removesuffix(".weight")
    groups = groups_of(config, module) if entry.dtype == "U32" and module != name else None
    if groups is None:
        return None
    parts: list[tuple[str, TensorEntry]] = []
    for part in ("scales", "biases") if groups.mode == "affine" else ("scales",):
        own = f"{module}.{part}"
        if own not in where:
            raise damaged(f"{file}: tensor {name} is quantised, but {own} is missing")
        parts.append((where[own], headers[where[own]][own]))
        taken.add(own)
    if groups.mode == "nvfp4":
        return _nvfp4(file, name, entry, parts[0], None, "mlx", memory)
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


def _fp4(
    headers: Headers, where: Mapping[str, str], file: str, name: str, config: Mapping[str, Any], taken: set[str]
) -> TensorEntry | None:
    """The place of experts of DeepSeek V4, which are MXFP4 beside FP8."""
    entry, own = headers[file][name], name.removesuffix(".weight") + ".scale"
    if entry.dtype not in ("I8", "U8") or own == name + ".scale" or own not in where or not has_fp8(config):
        return None
    taken.add(own)
    scales = headers[where[own]][own]
    if scales.dtype == "F8_E8M0":
        scales = replace(scales, dtype="U8")
    shape = (*entry.shape[:-1], entry.shape[-1] * 2) if len(entry.shape) > 1 else ()
    return _checked(file, name, entry, shape, Groups(4, SMALLEST_GROUP, "mxfp4"), [(where[own], scales)])


def _fp8(
    headers: Headers,
    where: Mapping[str, str],
    file: str,
    name: str,
    config: Mapping[str, Any],
    taken: set[str],
    memory: _Memory,
) -> TensorEntry | None:
    names = (name + "_scale", name.removesuffix(".weight") + ".scale", name + "_scale_inv")
    entry, own = headers[file][name], next((each for each in names if each in where), names[-1])
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
    if not fits or scales.dtype not in (*_SCALES, POWERS):
        raise damaged(
            f"{file}: tensor {name} of shape {list(shape)} does not fit to its scales "
            f"({scales.dtype} {list(scales.shape)}): they are those neither of blocks of {BLOCK_SIDE} by {BLOCK_SIDE} "
            "nor of rows nor of the whole"
        )
    if scales.dtype == POWERS:
        place = memory.place("BF16", scales.shape)
        made = WidenedPowers(name, place, (where[own], scales))
        return TensorEntry("BLOCK_FP8", shape, entry.start, entry.stop, ((REPACKED, place),), made=made)
    return TensorEntry("BLOCK_FP8", shape, entry.start, entry.stop, ((where[own], scales),))


@dataclass(frozen=True)
class _Form:
    """How a ``kind`` of scheme stores the weight of a module: the format of its codes and the ends of its tensors'
    names. ``by_columns``: codes, scales and zero points have the rows of the weight as their last axis. ``factor``: end
    of the name of the scale of all of NVFP4's scales."""

    kind: str
    dtype: str
    codes: str
    scales: str
    zeros: str
    order: str
    by_columns: bool = False
    factor: str = ""


_FORMS = (
    _Form(PACKED, "I32", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    _Form(INTEGERS, "I8", ".weight", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    _Form("GPTQ", "I32", ".qweight", ".scales", ".qzeros", ".g_idx", by_columns=True),
    _Form("AWQ", "I32", ".qweight", ".scales", ".qzeros", ".g_idx", by_columns=True),
    _Form(NVFP4, "U8", ".weight_packed", ".weight_scale", "", "", factor=".weight_global_scale"),
    _Form(NVFP4_OF_MODELOPT, "U8", ".weight", ".weight_scale", "", "", factor=".weight_scale_2"),
)
_BESIDE = (
    ".weight_shape", ".input_scale", ".input_zero_point", ".input_global_scale", ".k_scale", ".v_scale"
)  # fmt: skip
"""Ends of the names of a quantised module's tensors that are not needed: sizes, and scales of inputs, keys and
values."""

_KERNEL_GROUPS = (128, 64, SMALLEST_GROUP)
"""Numbers of the groups that are read; larger ones become several of these, with the same scale."""


class _Memory:
    """Places in the memory of what is repacked, one after the other."""

    def __init__(self) -> None:
        self._stop = 0

    def place(self, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
        start = self._stop + -self._stop % ALIGNMENT
        self._stop = start + math.prod(shape) * WIDTHS[dtype]
        return TensorEntry(dtype, shape, start, self._stop)


def _with_zeros(
    headers: Headers,
    where: Mapping[str, str],
    file: str,
    name: str,
    schemes_here: Sequence[Scheme],
    taken: set[str],
    memory: _Memory,
) -> tuple[str, str, TensorEntry] | None:
    """The file, the name and the place of a weight with zero points whose codes are the tensor ``name``; None if it is
    no such tensor."""
    entry = headers[file][name]
    fitting = (form for form in _FORMS if name.endswith(form.codes) and entry.dtype == form.dtype)
    form = next((form for form in fitting if any(scheme.kind == form.kind for scheme in schemes_here)), None)
    if form is None:
        return None
    module = name.removesuffix(form.codes)
    parts = {"codes": (file, entry)}
    needed = ("scales", "factor", "zeros") if form.by_columns else ("scales", "factor")
    for part in ("scales", "zeros", "order", "factor"):
        own = module + getattr(form, part)
        if own == module:
            continue
        if own in where:
            parts[part] = (where[own], headers[where[own]][own])
            taken.add(own)
        elif part in needed:
            raise damaged(f"{file}: tensor {name} is quantised, but {own} is missing")
    taken.update(module + ending for ending in _BESIDE)
    if form.factor:
        place = _nvfp4(file, name, entry, parts["scales"], parts["factor"], form.kind, memory)
        return file, module + ".weight", place
    of_kind = [scheme for scheme in schemes_here if scheme.kind == form.kind]
    scheme = next((scheme for scheme in of_kind if _fits(form, scheme, parts)), None)
    if scheme is None:
        others = ", ".join(f"{part} {one.dtype} {list(one.shape)}" for part, (_, one) in parts.items() if one != entry)
        sizes = " or ".join(f"{each.bits} bits in groups of {each.group or -1}" for each in of_kind)
        raise damaged(f"{file}: tensor {name} of shape {list(entry.shape)} in {sizes} does not fit to its {others}")
    made = _repacking(file, name, form, scheme, parts, memory)
    codes, scales = made.codes or entry, (REPACKED, made.scales) if made.scales is not None else parts["scales"]
    beside = (scales, (REPACKED, made.biases))
    place = TensorEntry(f"AFFINE{scheme.bits}", made.shape, codes.start, codes.stop, beside, made=made)
    return (file if made.codes is None else REPACKED), module + ".weight", place


def _nvfp4(
    file: str,
    name: str,
    entry: TensorEntry,
    scales: tuple[str, TensorEntry],
    factor: tuple[str, TensorEntry] | None,
    kind: str,
    memory: _Memory,
) -> TensorEntry:
    """The place of an NVFP4 weight with a ``factor`` for all its scales, which compressed-tensors divides by."""
    of_scales, shape = scales[1], entry.shape
    if len(shape) > 1 and min(shape) > 0:
        shape = (*shape[:-1], shape[-1] * WIDTHS[entry.dtype] * 2)
    fits = len(shape) > 1 and min(shape) > 0 and shape[-1] % SMALLEST_GROUP == 0 and (factor is None or len(shape) == 2)
    fits = fits and of_scales.shape == (*shape[:-1], shape[-1] // NVFP4_GROUP) and of_scales.dtype in ("F8_E4M3", "U8")
    if not fits or (factor is not None and (factor[1].dtype != "F32" or math.prod(factor[1].shape) != 1)):
        beside = "" if factor is None else f" and {factor[1].dtype} {list(factor[1].shape)}"
        raise damaged(
            f"{file}: tensor {name} of shape {list(entry.shape)} in groups of {NVFP4_GROUP} does not fit to its scales "
            f"({of_scales.dtype} {list(of_scales.shape)}{beside})"
        )
    table = memory.place("F32", (*shape[:-2], 1, 256))
    groups = ((scales[0], replace(of_scales, dtype="U8")), (REPACKED, table))
    made = ScaleTable(name, table, factor, divides=kind == NVFP4)
    return TensorEntry("GROUPED_NVFP4", shape, entry.start, entry.stop, groups, made=made)


def _shape(form: _Form, bits: int, codes: TensorEntry) -> tuple[int, int]:
    """Rows and columns of the weight with these ``codes``, of which words of 32 bits hold several."""
    first, last = codes.shape
    packed = 32 // bits
    sizes = {PACKED: (first, last * packed), INTEGERS: (first, last), "GPTQ": (last, first * packed)}
    return sizes.get(form.kind, (last * packed, first))


def _fits(form: _Form, scheme: Scheme, parts: Mapping[str, tuple[str, TensorEntry]]) -> bool:
    codes, scales = parts["codes"][1], parts["scales"][1]
    if len(codes.shape) != 2 or min(codes.shape) == 0 or scales.dtype not in _SCALES or len(scales.shape) > 2:
        return False
    rows, columns = _shape(form, scheme.bits, codes)
    groups = _group_count(form, scales)
    shapes: tuple[tuple[int, ...], ...] = ((groups, rows),) if form.by_columns else ((rows, groups),)
    if not form.by_columns and groups == 1:
        shapes += ((rows,), (1, 1), (1,), ())
    right = scales.shape in shapes and groups > 0 and columns % groups == 0
    right = right and (groups == 1 if scheme.group is None else columns == groups * scheme.group)
    if "zeros" in parts:
        zeros, words = parts["zeros"][1], rows * scheme.bits / 32
        packed = (groups, words) if form.by_columns else (math.ceil(words), groups)
        signed = not form.by_columns and zeros.dtype == "I8" and zeros.shape == scales.shape
        right = right and (signed or (form.kind != INTEGERS and zeros.dtype == "I32" and zeros.shape == packed))
    if "order" in parts:
        order = parts["order"][1]
        right = right and order.dtype == "I32" and order.shape == (columns,)
    return right


def _group_count(form: _Form, scales: TensorEntry) -> int:
    """Groups of a row."""
    if form.by_columns:
        return scales.shape[0] if len(scales.shape) == 2 else 0
    return scales.shape[1] if len(scales.shape) == 2 else 1


def _repacking(
    file: str,
    name: str,
    form: _Form,
    scheme: Scheme,
    parts: Mapping[str, tuple[str, TensorEntry]],
    memory: _Memory,
) -> Repacking:
    scales = parts["scales"][1]
    rows, columns = _shape(form, scheme.bits, parts["codes"][1])
    group = columns // _group_count(form, scales)
    size = next((size for size in _KERNEL_GROUPS if group % size == 0), None)
    if size is None:
        raise ModelError(
            f"{file}: tensor {name} has groups of {group} numbers, which are not whole groups of {SMALLEST_GROUP} and "
            "do not run here; take another copy of the model."
        )
    with_zeros, per_group = "zeros" in parts, (rows, columns // size)
    dtype = "F32" if with_zeros else scales.dtype  # of which a scale times a power of two needs no more digits
    in_place = scales.shape == per_group and not form.by_columns and not with_zeros
    return Repacking(
        name=name,
        kind=form.kind,
        bits=scheme.bits,
        added_to_zeros=scheme.added_to_zeros,
        shape=(rows, columns),
        sources=parts,
        codes=None if form.kind == PACKED else memory.place("U8", (rows, columns * scheme.bits // 8)),
        scales=None if in_place else memory.place(dtype, per_group),
        biases=memory.place(dtype, per_group),
    )


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
        if entry.dtype == "GROUPED_NVFP4":
            others[1] = _rows_place("F32", span + 2, 0, 1, 256, 1)
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
