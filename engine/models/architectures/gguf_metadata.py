"""The numbers that the metadata of a GGUF file gives of its model, checked as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ModelError, shown
from engine.models.architectures.config_values import LARGEST, MOST_LAYERS, positive, whole
from engine.models.formats.gguf_file import GgufFile, GgufTensor

Shape = tuple[int, ...]

_LARGEST = {"block_count": MOST_LAYERS}
"""Largest values of numbers whose limit differs from the general one."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the checkpoint: rows ``first`` to ``first + rows`` of the file's tensor ``source``, all of them if
    ``rows`` is None. ``shape`` is the checkpoint's, ``stored`` that of the whole tensor in the file. ``whole_numbers``:
    it holds some of four bytes (I32), not weights."""

    source: str
    name: str
    shape: Shape
    stored: Shape
    first: int = 0
    rows: int | None = None
    whole_numbers: bool = False

    @classmethod
    def whole(cls, source: str, name: str, shape: Shape, whole_numbers: bool = False) -> NamedTensor:
        """A tensor that has the same shape in the file and in the checkpoint."""
        return cls(source, name, shape, shape, whole_numbers=whole_numbers)


def tensor_of(gguf: GgufFile, name: str) -> GgufTensor:
    """Raises ModelError if there is no such tensor."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path} is damaged: it has no tensor {name}; download it again.")
    return tensor


def projections(
    gguf: GgufFile, merged: str, parts: Iterable[tuple[str, str, int]], columns: Shape
) -> Iterator[NamedTensor]:
    """(name in the file, name in the checkpoint, rows) of ``parts`` projection of the same input; some files hold them
    one below the other in the tensor ``merged``."""
    parts = tuple(parts)
    rows_of_all, first = sum(rows for _, _, rows in parts), 0
    for source, name, rows in parts:
        if merged in gguf.tensors:
            yield NamedTensor(merged, name, (rows, *columns), (rows_of_all, *columns), first, rows)
        else:
            yield NamedTensor.whole(source, name, (rows, *columns))
        first += rows


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

    def number(self, key: str, default: int | None = None, largest: int = LARGEST) -> int:
        """Raises ModelError if it is missing without a default, or impossible."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        wanted = whole(1, _LARGEST.get(key, largest))(value)
        if wanted is not None and not value == default == 0:
            raise self._impossible(key, value, wanted)
        return int(value)

    def each_layer(self, key: str) -> list[int]:
        """A number for each layer. Raises ModelError if there is no such list."""
        layers, numbers = self.number("block_count"), self.get(key)
        if not isinstance(numbers, list) or len(numbers) < layers or not all(type(count) is int for count in numbers):
            raise ModelError(
                f"The GGUF gives {shown(numbers)} for {key}, which must be a number for each of {layers} layers; "
                "download it again."
            )
        return numbers[:layers]

    def head_width(self) -> int:
        """Numbers of a head. Raises ModelError if the file says something impossible of heads."""
        if self.has("attention.key_length"):
            return self.number("attention.key_length")
        hidden = self.number("embedding_length")
        return hidden // self.number("attention.head_count", largest=hidden)

    def rotated(self, default: int | None = None) -> int:
        """Numbers of a head that are rotated; 0 where the file says so. Raises ModelError as :meth:`number` does."""
        return 0 if self.get("rope.dimension_count") == 0 else self.number("rope.dimension_count", default)

    def real(self, key: str, default: float) -> float:
        """Raises ModelError if it is not a positive number, nor 0 where that is the default."""
        value = self.get(key, default)
        wanted = positive(value)
        if wanted is not None and not value == default == 0:
            raise self._impossible(key, value, wanted)
        return float(value)

    def _impossible(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(
            f"{self._gguf.path} is damaged: its {key} is {shown(value)}, not {wanted}; download it again."
        )

    def short_real(self, key: str, default: float) -> float:
        """The number of :meth:`real` with the fewest digits that is the same in float32, as files store it: 1e-6, not
        9.99999997e-07."""
        return float(str(np.float32(self.real(key, default))))
