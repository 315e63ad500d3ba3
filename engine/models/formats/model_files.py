"""Interface between the model files and the runtimes: memory-mapped tensors, and routed experts in one shape.

:mod:`engine.models.folders.checkpoint` opens folders. Neither torch nor mlx is needed: a tensor is raw words in a numpy
array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.formats.byte_map import ExpertPlace, FileMapping
from engine.models.formats.number_formats import BLOCK_SIDE, fp8_side, numbers_shape

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

Order = NDArray[np.int64]
"""Places in the order in which they are taken."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    ``dtype`` is a name of :mod:`engine.models.formats.number_formats` (``BF16``, ``F32``, ``Q4_K``, ...). ``words`` of
    a plain format has the tensor's shape and may be strided; its numpy dtype is the unsigned integer of the same width
    (so BF16 is uint16). Of a packed format it holds the bytes of the blocks, row by row; of a grouped one those of the
    codes, with ``scales`` [..., rows, groups] (of ``BLOCK_FP8`` [row blocks, column blocks], [rows, 1] or [1, 1]) and,
    if the format has them, ``biases``. It is a copy-on-write view of a file mapping: reading it costs file-backed pages
    only.
    """

    dtype: str
    words: NDArray[Any]
    scales: StoredTensor | None = None
    biases: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """In numbers, whatever the format."""
        return numbers_shape(self.dtype, self.words.shape)

    @property
    def nbytes(self) -> int:
        return int(self.words.nbytes) + sum(part.nbytes for part in (self.scales, self.biases) if part is not None)


@dataclass(frozen=True, eq=False)
class Change:
    """What makes a stored tensor the checkpoint's: its rows and columns are taken in these orders, then ``subtracted``
    is taken away, or the logarithm of the values times ``log_of`` is taken, which is then 1 or -1."""

    rows: Order | None = None
    columns: Order | None = None
    subtracted: float = 0.0
    log_of: int = 0

    def in_rows(self, tensor: StoredTensor) -> StoredTensor:
        """``tensor`` with its rows in order, a copy, whatever its format."""
        return tensor if self.rows is None else _in_rows(tensor, self.rows)


def _in_rows(tensor: StoredTensor, rows: Order) -> StoredTensor:
    if tensor.dtype == "BLOCK_FP8":
        assert tensor.scales is not None
        side = fp8_side(tensor.shape, tensor.scales.shape)
        if side == 0:
            return StoredTensor(tensor.dtype, tensor.words[rows], tensor.scales)
        if side == 1:
            return StoredTensor(tensor.dtype, tensor.words[rows], _in_rows(tensor.scales, rows))
        return StoredTensor(tensor.dtype, tensor.words[rows], _in_rows(tensor.scales, _blocks_of(rows)))
    scales = None if tensor.scales is None else _in_rows(tensor.scales, rows)
    biases = tensor.biases
    if biases is not None and tensor.dtype != "GROUPED_NVFP4":  # whose table is that of all rows
        biases = _in_rows(biases, rows)
    return StoredTensor(tensor.dtype, tensor.words[rows], scales, biases)


def _blocks_of(rows: Order) -> Order:
    """The blocks of rows that share scales, in the order that ``rows`` brings them into. Raises ModelError if rows of
    several blocks would have to share scales."""
    blocks: Order = rows // BLOCK_SIDE
    first: Order = blocks[::BLOCK_SIDE]
    if (np.repeat(first, BLOCK_SIDE)[: len(blocks)] != blocks).any():
        raise ModelError(
            f"Rows of a matrix in FP8 would have to be reordered within blocks of {BLOCK_SIDE}, which share scales; "
            "take the model in bfloat16 or a GGUF file of it."
        )
    return first


@dataclass(frozen=True)
class ExpertWeights:
    """One routed expert, in one shape whatever the family: gate, up [ffn, hidden]; down [hidden, ffn]; biases or None.

    ``y = down @ (activation(gate @ x + gate_bias) * (up @ x + up_bias)) + down_bias``. The family defines
    ``activation`` and the product exactly (gpt-oss clamps). ``gate_up`` is a view of gate and up together
    [2*ffn, hidden], or None if they are not one matrix in the file. Of an expert without a gate ``up`` is ``gate``, its
    only matrix before ``down``.
    """

    gate: StoredTensor
    up: StoredTensor
    down: StoredTensor
    gate_up: StoredTensor | None = None
    gate_bias: StoredTensor | None = None
    up_bias: StoredTensor | None = None
    down_bias: StoredTensor | None = None

    @classmethod
    def of(cls, parts: Mapping[str, StoredTensor]) -> ExpertWeights:
        """The expert with ``parts`` by name, of which one without a gate has no ``up``."""
        return cls(**({"up": parts["gate"]} | dict(parts)))

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Gate, up and down, and the biases that there are, each once."""
        up = None if self.up is self.gate else self.up
        parts = (self.gate, up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return tuple(part for part in parts if part is not None)


class Experts(Protocol):
    """All routed experts of a model."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have routed experts, ascending."""
        ...

    @property
    def count(self) -> int:
        """Experts per layer."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all routed experts."""
        ...

    def held(self, layer: int) -> Sequence[int]:
        """The experts of ``layer`` that are here, ascending: all of them, except in a shard."""
        ...

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Raises IndexError for an expert that is not held."""
        ...

    def place(self, layer: int, expert: int) -> ExpertPlace:
        """The place of the expert in the mapped files. Raises IndexError for an expert that the model lacks."""
        ...

    def check_unchanged(self, layer: int | None = None) -> None:
        """Raises ModelError if a file was changed or shortened since it was opened. ``layer``: only the files of that
        layer are checked, if they are separate."""
        ...


def one_of_each(experts: Experts) -> Iterator[tuple[int, int]]:
    """Layer and number of the first present expert of every layer that has one. It stands for its layer, as the experts
    of a layer are alike."""
    return ((layer, held[0]) for layer in experts.layers if (held := experts.held(layer)))


def first_held(experts: Experts) -> tuple[int, int] | None:
    """Layer and number of the first present expert; None if there is none."""
    return next(one_of_each(experts), None)


def first_place(experts: Experts) -> ExpertPlace:
    """The place of the first present expert."""
    return experts.place(*(first_held(experts) or (experts.layers[0], 0)))


def width_of(experts: Experts) -> int:
    """Numbers that an expert reads of a token: a hidden state, or a latent."""
    return first_place(experts).matrices["gate"].shape[1]


def whole_bytes(experts: Experts) -> int:
    """Bytes of all routed experts of the model, also of those that a shard lacks; those of a layer are alike."""
    return experts.count * sum(experts.place(layer, 0).weight_bytes for layer in experts.layers)


def whole_weights(experts: Experts) -> int:
    """Number of the weights in :func:`whole_bytes`, whatever their number formats."""
    return experts.count * sum(experts.place(layer, 0).weights for layer in experts.layers)


class Repacked(NamedTuple):
    """Bytes of what is not read where it is stored: of the memory in which it was computed, and of the files' tensors
    that no pass reads any more."""

    computed: int = 0
    spent: int = 0


class ModelFiles(Protocol):
    """A model folder, opened."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``; ``config["model_type"]`` is the family's name in transformers."""
        ...

    @property
    def paired_rotary(self) -> bool:
        """Whether the rows of queries and keys that a rotation turns together lie side by side, as in GGUF files of
        llama's kind, instead of half a head apart."""
        ...

    @property
    def changes(self) -> Mapping[str, Change]:
        """What makes tensors of the trunk the checkpoint's, by name; those that are stored as they are are not here."""
        ...

    @property
    def trunk_bytes(self) -> int: ...

    def trunk(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor that is no table and not of a routed expert, under the name it has in the Hugging Face
        checkpoint."""
        ...

    def tables(self) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors of which a token needs few rows (:attr:`engine.models.architectures.record.Family.tables`)."""
        ...

    @property
    def experts(self) -> Experts | None:
        """None for a dense model."""
        ...

    @property
    def repacks(self) -> bool:
        """Whether anything is not read where it is stored, but computed by :meth:`repack`."""
        ...

    @property
    def repacked(self) -> Repacked:
        """What :meth:`repack` has computed so far."""
        ...

    def repack(
        self, progress: ProgressCallback, held: Mapping[int, Sequence[int]] | None = None, trunk: bool = True
    ) -> list[str]:
        """Compute what the runtimes do not read where it is stored; until then it is zeros. ``held``: the wanted
        experts by layer, None for all that are here; ``trunk``: whether the trunk is wanted.

        Returns lines for the person about what was done. Raises ModelError if a tensor cannot be used after all.
        """
        ...

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        """All files with tensors, including the trunk's."""
        ...
