"""What a model's folder says of pictures: the configuration, and the files with the tower's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.folders.checkpoint import EXPERT_DTYPES, safetensors_headers
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.formats.safetensors_files import TensorEntry
from engine.pictures.sight import TOWERS, Sight, sight_of


def read_sight(folder: Path) -> Sight | None:
    """How the model in ``folder`` sees; None if it sees no pictures, or its files lack the tower or have it quantised.

    Only headers are read. Raises ModelError if a file is damaged.
    """
    config = read_object(folder / "config.json", SMALL_FILE)
    sight = sight_of(config, _processor(folder))
    if sight is None:
        return None
    tensors = tower_tensors(folder, sight)
    return sight if tensors and all(entry.dtype in EXPERT_DTYPES for _, entry in tensors.values()) else None


def _processor(folder: Path) -> Mapping[str, Any]:
    """The settings of the image processor; empty if there are none."""
    settings = read_object(folder / "preprocessor_config.json", SMALL_FILE)
    if settings:
        return settings
    inner = read_object(folder / "processor_config.json", SMALL_FILE).get("image_processor")
    return inner if isinstance(inner, Mapping) else {}


def tower_tensors(folder: Path, sight: Sight) -> dict[str, tuple[Path, TensorEntry]]:
    """The file and the place of each tensor of the tower, by its name in transformers' module; empty without
    safetensors files. Raises ModelError if a header is damaged."""
    if not any(folder.glob("*.safetensors")):
        return {}
    found = {}
    for file, header in safetensors_headers(folder).items():
        for name, entry in header.items():
            for prefix, instead in TOWERS[sight.family].prefixes:
                if name.startswith(prefix):
                    found[instead + name.removeprefix(prefix)] = (folder / file, entry)
                    break
    return found


def tower_bytes(folder: Path, sight: Sight) -> int:
    """Bytes of memory that the tower takes in float32."""
    return sum(4 * math.prod(entry.shape) for _, entry in tower_tensors(folder, sight).values())
