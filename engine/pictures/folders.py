"""What a model's folder says of pictures: the configuration, and the files with the tower's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.architectures.gguf_tower import Axes, added_to, heads_of, moved_axes, tower_entries
from engine.models.folders.checkpoint import EXPERT_DTYPES, safetensors_headers
from engine.models.folders.model_folder import TOWER
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.formats.number_formats import is_packed
from engine.models.formats.safetensors_files import TensorEntry
from engine.pictures.sight import TOWERS, Sight, sight_of


@dataclass(frozen=True)
class TowerTensor:
    """The places of a tensor of a tower in a file. Several ``entries`` are its parts, side by side in its third
    dimension. ``axes``: what brings it into the module's order.
    """

    path: Path
    entries: tuple[TensorEntry, ...]
    axes: Axes | None = None
    added: float = 0.0
    """What is added to the file's numbers."""

    @property
    def dtype(self) -> str:
        return self.entries[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.entries[0].shape
        if self.axes is not None:
            return self.axes[2]
        return first if len(self.entries) == 1 else (*first[:2], len(self.entries), *first[2:])

    @property
    def is_readable(self) -> bool:
        """Whether the numbers are plain, or of a GGUF file."""
        return self.dtype in EXPERT_DTYPES or is_packed(self.dtype)


def read_sight(folder: Path) -> Sight | None:
    """How the model in ``folder`` sees; None if it sees no pictures, or its files lack the tower or have it quantised.

    Only headers are read. Raises ModelError if a file is damaged.
    """
    home = tower_folder(folder)
    sight = sight_of(read_object(home / "config.json", SMALL_FILE), _processor(home))
    if sight is None:
        return None
    tensors = tower_tensors(folder, sight)
    return sight if tensors and all(tensor.is_readable for tensor in tensors.values()) else None


def tower_folder(folder: Path) -> Path:
    """The folder with the tower of the model in ``folder``, and with the configuration of the whole model."""
    apart = folder / TOWER
    return apart if (apart / "config.json").exists() else folder


def _processor(folder: Path) -> Mapping[str, Any]:
    """The settings of the image processor; empty if there are none."""
    settings = read_object(folder / "preprocessor_config.json", SMALL_FILE)
    if settings:
        return settings
    inner = read_object(folder / "processor_config.json", SMALL_FILE).get("image_processor")
    return inner if isinstance(inner, Mapping) else {}


def tower_tensors(folder: Path, sight: Sight) -> dict[str, TowerTensor]:
    """The places of the tensors of the tower of the model in ``folder``, by their names in transformers' module; empty
    without a tower. Raises ModelError if a header is damaged."""
    home = tower_folder(folder)
    if home != folder:
        path = next(home.glob("*.gguf"))
        with GgufFile(path) as gguf:
            heads = heads_of(gguf)
            return {
                name: TowerTensor(
                    path,
                    entries,
                    moved_axes(name, entries[0].shape, heads) if len(entries) == 1 else None,
                    added_to(name),
                )
                for name, entries in tower_entries(gguf).items()
            }
    if not any(folder.glob("*.safetensors")):
        return {}
    tensors = {}
    for file, header in safetensors_headers(folder).items():
        for name, entry in header.items():
            for prefix, instead in TOWERS[sight.family].prefixes:
                if name.startswith(prefix):
                    tensors[instead + name.removeprefix(prefix)] = TowerTensor(folder / file, (entry,))
                    break
    return tensors


def tower_bytes(folder: Path, sight: Sight) -> int:
    """Bytes of memory that the tower takes in float32."""
    return sum(4 * math.prod(tensor.shape) for tensor in tower_tensors(folder, sight).values())
