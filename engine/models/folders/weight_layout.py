"""The layout of a model folder's weights, byte by byte: the trunk and each expert.

It covers every form of folder: checkpoints with the names of transformers, GGUF files, and what mlx-lm wrote or what is
quantised, in which an expert is one row of each of several stacked tensors. Only headers are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import ModelError, damaged
from engine.models.architectures.composite import language_name
from engine.models.architectures.families import check_supported, expert_shape, unused_tensors
from engine.models.architectures.gguf_tensors import unread_entries
from engine.models.folders.checkpoint import Checkpoint
from engine.models.folders.model_folder import BANK_MANIFEST, INDEX, JOURNAL, SHARD_MANIFEST
from engine.models.folders.opening import open_model, read_config
from engine.models.formats.byte_map import Run, Runs, merged
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.safetensors_files import TensorEntry, read_header

PIECE_BYTES = 64 * 1024 * 1024
"""Approximate size in bytes of the pieces in which the trunk is sent; they are cut between tensors."""

_LIBRARY_MARKS = (
    ".switch_mlp.", ".switch_glu.", ".experts.gate_proj.weight", ".embed_q.weight", ".ffn.experts.0.w1.weight"
)  # fmt: skip
"""Parts of names that only checkpoints written by mlx-lm have."""
_MOST_STACKED = 64
"""Maximum tensors of one layer that hold all its experts: matrices, their scales and biases."""
_LIBRARY_EXPERT = re.compile(r".*?\.(?:layers|blocks)\.(\d+)\.(?:.*?\.)?(?:switch_mlp|experts)\.(?:(\d+)\.)?.+")


TrunkTensor = tuple[str, int, TensorEntry]
"""Name, file number and entry of a trunk tensor."""


@dataclass(frozen=True)
class WeightLayout:
    """The layout of a model folder. ``files`` are names relative to ``folder`` with their sizes. ``headers[i]`` is the
    number of bytes of file i before its first tensor."""

    folder: Path
    config: dict[str, Any]
    files: tuple[tuple[str, int], ...]
    headers: tuple[int, ...]
    layers: tuple[int, ...]
    count: int
    """Experts per layer; 0 for a dense model."""
    experts: Mapping[tuple[int, int], Runs]
    trunk: tuple[tuple[TrunkTensor, ...], ...]
    """Tensors of the trunk, in pieces."""
    opened: Checkpoint | None
    """None for what mlx-lm wrote or what is quantised."""

    @property
    def trunk_bytes(self) -> int:
        return sum(entry.nbytes for piece in self.trunk for _, _, entry in piece)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert as stored: the mean over all layers, rounded up, because their formats may differ."""
        nbytes = sum(run.nbytes for runs in self.experts.values() for run in runs)
        return -(-nbytes // max(1, len(self.experts)))

    @cached_property
    def settings(self) -> tuple[Path, ...]:
        """The small files beside the weights: configuration, tokenizer, chat template, licence."""
        from engine.models.folders.prepare import is_setting

        ours = {SHARD_MANIFEST, JOURNAL}
        wanted = (path for path in sorted(self.folder.iterdir()) if path.name not in ours)
        return tuple(path for path in wanted if is_setting(path) or path.name in (BANK_MANIFEST, INDEX))

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint that is equal for folders whose files have the same names, sizes and headers, and therefore the
        same layout."""
        digest = hashlib.blake2b(digest_size=16)
        for (name, size), header in zip(self.files, self.headers, strict=True):
            digest.update(f"{name}\0{size}\n".encode())
            if header:
                with (self.folder / name).open("rb") as file:
                    digest.update(file.read(header))
        return digest.hexdigest()


def in_library_layout(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors was written by mlx-lm, experts already stacked."""
    return any(mark in name for name in names for mark in _LIBRARY_MARKS)


def is_library(folder: Path) -> bool:
    """Whether ``folder`` is in mlx-lm's layout, or quantised. Raises ModelError if it is no model."""
    return _library_entries(folder, read_config(folder)) is not None


def layout_of(folder: Path) -> WeightLayout:
    """Raises ModelError if ``folder`` is no model, is damaged, or is of a family that is not supported."""
    config = read_config(folder)
    entries = _library_entries(folder, config)
    return _opened_layout(open_model(folder)) if entries is None else _library_layout(folder, config, entries)


def runs_of(piece: Iterable[TrunkTensor]) -> Runs:
    """The bytes of a piece of the trunk."""
    return merged(Run(file, entry.start, entry.stop) for _, file, entry in piece)


def quantisation_words(config: Mapping[str, Any], dtype: str) -> str:
    """A description of the weights' format; ``dtype`` is safetensors' name of an expert's or the trunk's type."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict):
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(dtype, dtype)
    method = settings.get("quant_method") or settings.get("mode")
    bits, group = settings.get("bits"), settings.get("group_size")
    parts = [str(method)] if isinstance(method, str) and method != "affine" else []
    parts += [f"{bits}-bit"] if isinstance(bits, int) else []
    parts += [f"in groups of {group}"] if isinstance(group, int) else []
    return " ".join(parts) or "quantised"


# --- one form each ------------------------------------------------------------------------------------------------


def _opened_layout(opened: Checkpoint) -> WeightLayout:
    files = {str(mapped.path.relative_to(opened.folder)): mapped.size for mapped in opened.mapped_files}
    numbers = {Path(name).name: number for number, name in enumerate(files)}
    experts = opened.experts
    runs: dict[tuple[int, int], Runs] = {}
    if experts is not None:
        for layer in experts.layers:
            for expert in range(experts.count):
                runs[layer, expert] = experts.place(layer, expert).runs(numbers)
    trunk = dict(opened.trunk_entries)
    if opened.is_gguf:
        with GgufFile(opened.files[0]) as gguf:
            trunk |= {name: (file, entry) for name, file, entry in unread_entries(gguf)}
            headers = gguf.data_starts
    else:
        headers = tuple(_header_bytes(opened.folder / name) for name in files)
    return WeightLayout(
        folder=opened.folder,
        config=opened.config,
        files=tuple(files.items()),
        headers=headers,
        layers=experts.layers if experts is not None else (),
        count=experts.count if experts is not None else 0,
        experts=runs,
        trunk=_pieces([(name, numbers[Path(file).name], entry) for name, (file, entry) in trunk.items()]),
        opened=opened,
    )


def _library_entries(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, TensorEntry]] | None:
    """The tensors by file of a folder in mlx-lm's layout or quantised; None for any other."""
    # AutoGPTQ called its only file otherwise.
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not config.get("quantization") and not config.get("quantization_config"):
        # One header tells: mlx-lm renames the experts of all layers or of none.
        names = (name for path in paths for name in read_header(path))
        if not in_library_layout(names):
            return None
    return {path.name: read_header(path) for path in paths}


def _library_layout(
    folder: Path, config: dict[str, Any], entries: Mapping[str, Mapping[str, TensorEntry]]
) -> WeightLayout:
    family = check_supported(config)
    shape = expert_shape(config, family)
    layers, count = (shape.layers, shape.count) if shape is not None else ((), 0)
    unused = unused_tensors(config, family)
    with_experts = frozenset(layers)
    stacked: Counter[int] = Counter()
    trunk: list[TrunkTensor] = []
    spans: dict[tuple[int, int], list[Run]] = {}
    for number, (file_name, tensors) in enumerate(entries.items()):
        for name, entry in tensors.items():
            if language_name(name) is None:
                continue
            match = _LIBRARY_EXPERT.fullmatch(name)
            ahead = name.startswith(unused)
            if match is None or ahead or int(match[1]) not in with_experts:
                trunk.append((name, number, entry))
                continue
            layer = int(match[1])
            if match[2] is not None:
                spans.setdefault((layer, int(match[2])), []).append(Run(number, entry.start, entry.stop))
                continue
            if not entry.shape or entry.shape[0] != count:
                raise ModelError(
                    f"{file_name}: tensor {name} has shape {list(entry.shape)}, but config.json asks for {count} "
                    "experts; the files do not belong together: fetch the model again."
                )
            stacked[layer] += 1
            if stacked[layer] > _MOST_STACKED:
                raise damaged(f"{file_name}: layer {layer} has over {_MOST_STACKED} tensors of experts")
            size = entry.nbytes // count
            for expert in range(count):
                start = entry.start + expert * size
                spans.setdefault((layer, expert), []).append(Run(number, start, start + size))
    there = len(spans) == len(layers) * count and all(expert < count for _, expert in spans)
    if not there:
        raise damaged(f"{folder} has not the experts that config.json asks for")
    return WeightLayout(
        folder=folder,
        config=config,
        files=tuple((name, (folder / name).stat().st_size) for name in entries),
        headers=tuple(_header_bytes(folder / name) for name in entries),
        layers=layers,
        count=count,
        experts={key: merged(runs) for key, runs in sorted(spans.items())},
        trunk=_pieces(trunk),
        opened=None,
    )


def _pieces(tensors: list[TrunkTensor]) -> tuple[tuple[TrunkTensor, ...], ...]:
    pieces: list[list[TrunkTensor]] = []
    size = 0
    for tensor in sorted(tensors, key=lambda each: (each[1], each[2].start, each[0])):
        if not pieces or size >= PIECE_BYTES or pieces[-1][-1][1] != tensor[1]:
            pieces.append([])
            size = 0
        pieces[-1].append(tensor)
        size += tensor[2].nbytes
    return tuple(map(tuple, pieces))


def _header_bytes(path: Path) -> int:
    """Number of bytes of a file before its first tensor; 0 for slabs of an earlier version."""
    if path.suffix != ".safetensors":
        return 0
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def settings_fingerprint(paths: Iterable[Path]) -> str:
    """The fingerprint of files' names and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\n".encode() + data)
    return digest.hexdigest()


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """The fingerprint of a configuration, without entries that tools add about themselves."""
    kept = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()
