"""The facts of a model's files that plans need, read once, as a settings screen plans after every change."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.calibration.calibration_file import shape_of
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.architectures.families import check_supported, expert_shape
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_in_library, sizes_of
from engine.models.folders.weight_layout import WeightLayout, is_library, layout_of
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import ModelFiles
from engine.moe.kernels.bindings import VARIABLE
from engine.moe.popularity import ProfileModel, model_of
from engine.planning.calibration import ExpertShape
from engine.planning.memory import ModelSizes
from engine.runtimes.choosing import mlx_by_default
from engine.runtimes.native.runtime import check_native, unsupported_reason

REMEMBERED = 8
"""Maximum models and choices whose facts are kept. The files are not kept open."""

_PATTERNS = ("*.json", "*.safetensors", "*.gguf", "experts/*.slabs")
"""Names of the files that make a model; slabs are of models that an earlier version prepared."""

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Headers:
    """Facts about the model in ``folder``, from its files' headers.

    ``shape`` and ``profile`` are None for a dense model. ``not_native`` says why the native trunk does not run it, if
    it does not. ``largest`` is the largest file with experts, or of a dense model.
    """

    folder: Path
    sizes: ModelSizes
    shape: ExpertShape | None
    profile: ProfileModel | None
    not_native: str | None
    largest: Path | None
    refused: ModelError | None = None
    """The error with which the native trunk refuses the model; None if it runs it."""


_headers: OrderedDict[_Key, Headers] = OrderedDict()
_lock = threading.Lock()


def read_headers(folder: Path, load: Load) -> Headers:
    """Raises ModelError as opening the model does. From any thread."""
    kernels = os.environ.get(VARIABLE)
    choices = (load.runtime, load.dtype, load.partitioning, load.cpu_threads, load.context_limit, kernels)
    key = (folder, *choices, *weight_stamps(folder))
    with _lock:
        if key in _headers:
            _headers.move_to_end(key)
            return _headers[key]
    headers = _in_library(folder, load) or _headers_of(folder, load)
    with _lock:
        _headers[key] = headers
        while len(_headers) > REMEMBERED:
            _headers.popitem(last=False)
    return headers


def _headers_of(folder: Path, load: Load) -> Headers:
    files = open_model(folder, as_whole=True)
    experts = files.experts
    return Headers(
        folder=folder,
        sizes=sizes_of(files, load.dtype),
        shape=None if experts is None else shape_of(experts),
        profile=None if experts is None else model_of(experts),
        not_native=unsupported_reason(files.config, files, load, in_ring=load.partitioning == "ring"),
        largest=_largest(files.mapped_files if experts is None else getattr(experts, "mapped_files", ())),
        refused=_refused(files, load),
    )


def _refused(files: ModelFiles, load: Load) -> ModelError | None:
    try:
        check_native(files, load, in_ring=load.partitioning == "ring")
    except ModelError as error:
        return error
    return None


def _in_library(folder: Path, load: Load) -> Headers | None:
    """Facts about a folder that mlx-lm wrote, which only the runtime mlx reads; None for other folders or runtimes."""
    mlx = load.runtime == "mlx" or (load.runtime == "auto" and mlx_by_default())
    if not mlx or not is_library(folder):
        return None
    layout = layout_of(folder)
    shape = expert_shape(layout.config, check_supported(layout.config))
    sizes = sizes_in_library(layout, load.dtype)
    sound = shape is not None and layout.experts
    files = {number: nbytes for number, (_, nbytes) in enumerate(layout.files)}
    return Headers(
        folder=folder,
        sizes=sizes,
        shape=ExpertShape(sizes.hidden, sizes.ffn, _expert_dtype(layout), layout.expert_bytes) if sound else None,
        profile=ProfileModel(layout.layers, layout.count, sizes.expert_bytes) if sound else None,
        not_native="mlx-lm wrote the weights",
        largest=folder / layout.files[max(files, key=lambda number: files[number])][0] if sound else None,
    )


def _expert_dtype(layout: WeightLayout) -> str:
    """``BF16`` or ``F32``; ``Q4`` for 4-bit weights."""
    settings = layout.config.get("quantization") or layout.config.get("quantization_config")
    if isinstance(settings, dict):
        bits = settings.get("bits")
        return f"Q{bits}" if isinstance(bits, int) and 0 < bits < 100 else "Q4"
    trunk = next(iter(layout.trunk), ())
    return next((entry.dtype for name, _, entry in trunk if name.endswith("norm.weight")), "BF16")


def _largest(mapped: Sequence[FileMapping]) -> Path | None:
    return max(mapped, key=lambda file: file.size).path if mapped else None


def weight_stamps(folder: Path) -> tuple[object, ...]:
    """Names, sizes and times of the files of a model: others when one of them was changed."""
    stamps: list[object] = []
    for path in sorted(path for pattern in _PATTERNS for path in folder.glob(pattern)):
        try:
            about = path.stat()
        except OSError:
            continue
        stamps += [path.name, about.st_size, about.st_mtime_ns]
    return tuple(stamps)
