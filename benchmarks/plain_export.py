"""Writes a prepared Mixtral-shaped model back as a plain Hugging Face folder, for the engines that read only that."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.models.folders.opening import open_model
from engine.models.formats.model_files import ModelFiles, StoredTensor


def _tensors(files: ModelFiles) -> Iterator[tuple[str, StoredTensor]]:
    yield from files.trunk()
    if files.experts is None:
        return
    for layer in files.experts.layers:
        for index in range(files.experts.count):
            expert = files.experts.expert(layer, index)
            name = f"model.layers.{layer}.block_sparse_moe.experts.{index}"
            yield f"{name}.w1.weight", expert.gate
            yield f"{name}.w2.weight", expert.down
            yield f"{name}.w3.weight", expert.up


def write_plain(prepared: Path, destination: Path) -> Path:
    """Write the Mixtral-shaped model in ``prepared`` to ``destination``, unless that is there and newer.

    Memory: one tensor. Raises ValueError if the model is of another family.
    """
    config = destination / "config.json"
    newest = max(path.stat().st_mtime for path in prepared.iterdir())
    if config.is_file() and config.stat().st_mtime > newest:
        return destination
    files = open_model(prepared)
    if files.config["model_type"] != "mixtral":
        raise ValueError(f"{prepared} is {files.config['model_type']}, not mixtral")
    destination.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in _tensors(files):
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        offset = span[1]
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (destination / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, tensor in _tensors(files):
            file.write(tensor.words.tobytes())
    # Last: the file that says that the folder is whole.
    config.write_text(json.dumps(files.config, indent=2), encoding="utf-8")
    return destination
