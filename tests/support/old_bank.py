"""Writing a prepared folder as versions before ordinary safetensors did: slabs of experts, and ``bank.json``."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.folders.opening import open_model
from engine.models.formats.number_formats import WIDTHS
from engine.models.formats.safetensors_files import encode_header

PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def write_old_bank(plain: Path, folder: Path) -> Path:
    """Write the model in ``plain`` into ``folder``, which is new."""
    files = open_model(plain)
    experts = files.experts
    assert experts is not None
    (folder / "experts").mkdir(parents=True)
    for path in plain.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    trunk = sorted(files.trunk(), key=lambda item: -WIDTHS[item[1].dtype])
    header = encode_header(((name, tensor.dtype, tensor.shape) for name, tensor in trunk), {"format": "pt"})
    whole = header + b"".join(tensor.words.tobytes() for _, tensor in trunk)
    (folder / "trunk.safetensors").write_bytes(whole)
    slab: dict[str, Any] = {}
    layers = []
    for layer in experts.layers:
        checksums = []
        with (folder / "experts" / f"layer-{layer:05}.slabs").open("wb") as file:
            for expert in range(experts.count):
                slab, data = _slab(experts.expert(layer, expert), experts.dtype)
                file.write(data)
                checksums.append(zlib.crc32(data))
        layers.append({"layer": layer, "checksums": checksums})
    manifest = {
        "format": 1, "family": files.family.model_type, "activation": files.family.activation, "source": "0",
        "trunk": {"size": len(whole), "checksum": zlib.crc32(whole)}, "experts": experts.count, "slab": slab,
        "layers": layers,
    }  # fmt: skip
    (folder / "bank.json").write_text(json.dumps(manifest))
    return folder


def _slab(weights: Any, dtype: str) -> tuple[dict[str, Any], bytes]:
    """The layout of a slab, and its bytes."""
    data, places = b"", []
    for name in PARTS:
        tensor = getattr(weights, name)
        if tensor is None:
            continue
        if name != "up":
            data += bytes(-len(data) % 64)
        places.append({"name": name, "shape": tensor.shape, "offset": len(data)})
        data += np.ascontiguousarray(tensor.words).tobytes()
    data += bytes(-len(data) % 64)
    return {"dtype": dtype, "size": len(data), "parts": places}, data
