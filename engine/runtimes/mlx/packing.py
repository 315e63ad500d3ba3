"""The matrices of ``bench residency`` as mlx arrays: one each, one per layer, or all of them in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

Array = Any


class MlxMultiplier:
    """See :class:`engine.bench.residency.Multiplier`; Metal where there is one."""

    def __init__(
        self,
        folder: Path,
        packing: Literal["unstacked", "by layer", "prestacked"],
        layers: int,
        matrices: int,
        n: int,
    ) -> None:
        self._matrices = matrices
        self._single: dict[tuple[int, int], Array] = {}
        self._by_layer: list[Array] = []
        self._stacked: Array | None = None
        if packing == "prestacked":
            self._stacked = _weight(folder / "stacked.safetensors")
            mx.eval(self._stacked)
        elif packing == "by layer":
            for layer in range(layers):
                parts = [_weight(folder / f"{layer}-{number}.safetensors") for number in range(matrices)]
                self._by_layer.append(mx.stack(parts))
                mx.eval(self._by_layer[-1])
        else:
            for layer in range(layers):
                for number in range(matrices):
                    self._single[layer, number] = _weight(folder / f"{layer}-{number}.safetensors")
            mx.eval(list(self._single.values()))
        self._first = mx.ones((1, n), dtype=mx.bfloat16)
        self._row = self._first

    @property
    def description(self) -> str:
        return f"mlx on the {'GPU' if mx.default_device() == mx.gpu else 'CPU'}"

    def reset(self) -> None:
        self._row = self._first

    def layer(self, index: int) -> None:
        row = self._row
        for number in range(self._matrices):
            row = mx.matmul(row, self._weight_of(index, number))
        mx.eval(row)
        self._row = row

    def _weight_of(self, layer: int, number: int) -> Array:
        if self._stacked is not None:
            return self._stacked[layer, number]
        return self._by_layer[layer][number] if self._by_layer else self._single[layer, number]

    def close(self) -> None:
        self._single.clear()
        self._by_layer.clear()
        self._stacked = None
        mx.clear_cache()


def _weight(path: Path) -> Array:
    """The only tensor of a file, not read yet."""
    tensors: Any = mx.load(str(path))
    return tensors["weight"]
