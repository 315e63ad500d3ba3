"""The numbers that the metadata of a GGUF file gives of its model, checked as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.models.config_values import LARGEST
from engine.models.families import MOST_LAYERS
from engine.models.gguf_file import GgufFile
from engine.models.wording import shown

Shapes = Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...]]]
"""(name in the file, name in the checkpoint, shape in the file, shape in the checkpoint) of tensors."""

_LARGEST = {"block_count": MOST_LAYERS}
"""Largest values of numbers whose limit differs from the general one."""


class Metadata:
    """The numbers of a file's own architecture, checked as they are read."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf

    @property
    def file(self) -> GgufFile:
        return self._gguf

    def get(self, key: str, default: Any = None) -> Any:
        return self._gguf.metadata.get(f"{self._gguf.metadata['general.architecture']}.{key}", default)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def number(self, key: str, default: int | None = None) -> int:
        """Raises ModelError if it is missing without a default, or impossible."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        most = _LARGEST.get(key, LARGEST)
        if type(value) is not int or not (0 < value <= most or value == default == 0):
            raise ModelError(
                f"{self._gguf.path} is damaged: its {key} is {shown(value)}, not a whole number from 1 to {most}; "
                "download it again."
            )
        return value

    def real(self, key: str, default: float) -> float:
        """Raises ModelError if it is not a positive number."""
        if not self.has(key):
            return default
        value = self.get(key)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(
                f"{self._gguf.path} is damaged: its {key} is {shown(value)}, not a positive number; download it again."
            )
        return float(value)

    def short_real(self, key: str, default: float) -> float:
        """As :meth:`real`: the number of fewest digits that is the same in float32, as files store it, so 1e-6 and not
        9.99999997e-07."""
        return float(str(np.float32(self.real(key, default))))
