"""The experts of a layer as the native kernels take them: tables of addresses, built once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.files import Experts, ExpertWeights, StoredTensor
from engine.models.number_formats import is_packed
from engine.moe.kernels.bindings import (
    ACTIVATIONS,
    FORMATS,
    WEIGHT_DTYPES,
    CActivation,
    Expert,
    KernelChoice,
    Layer,
    Matrix,
    load,
)
from engine.moe.kernels.pool import Pool

_MEANING = {-1: "this CPU lacks the instruction set", -2: "out of memory", -3: "an argument is out of range"}


@dataclass(frozen=True)
class Gate:
    """What goes into the down projection: a key of ACTIVATIONS; ``clamped`` is gpt-oss's, with alpha and limit."""

    kind: str
    alpha: float = 0.0
    limit: float = 0.0


def matrix(stored: StoredTensor) -> Matrix:
    """``stored`` [rows, columns] as the kernels take it, in place. The caller keeps ``stored`` alive.

    Raises ModelError if the kernels do not read its format, or the values of a row do not lie side by side.
    """
    words = stored.words
    unsupported_reason = unreadable(stored)
    if unsupported_reason is not None or words.ndim != 2:
        raise ModelError(f"The native kernels cannot read these weights: {unsupported_reason or 'they are no matrix'}.")
    columns = stored.shape[1]
    return Matrix(
        data=words.ctypes.data,
        rows=words.shape[0],
        columns=columns,
        row_stride=columns if is_packed(stored.dtype) else words.strides[0] // words.itemsize,
        dtype=FORMATS[stored.dtype],
    )


def unreadable(stored: StoredTensor) -> str | None:
    """Why the kernels cannot read ``stored`` where it lies, or None."""
    words = stored.words
    if stored.dtype not in FORMATS:
        return f"they are stored as {stored.dtype}, which has no kernel"
    if is_packed(stored.dtype):
        return None if words.flags.c_contiguous else "their blocks do not follow one another"
    if words.shape[-1] > 1 and words.strides[-1] != words.itemsize:
        return "the values of a row do not lie side by side"
    if words.ndim == 2 and words.shape[0] > 1 and words.strides[0] % words.itemsize:
        return "the rows are not a whole number of values apart"
    if not words.flags.aligned:
        return "they do not begin at a whole number of values"
    return None


def unsupported_reason(weights: ExpertWeights) -> str | None:
    """Why the kernels cannot run an expert with these weights, or None."""
    tensors = [weights.gate, weights.up, weights.down, weights.gate_bias, weights.up_bias, weights.down_bias]
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present:
        reason = unreadable(tensor)
        if reason is not None:
            return reason
    matrices, biases = present[:3], present[3:]
    if is_packed(weights.gate.dtype):
        if not all(is_packed(tensor.dtype) for tensor in matrices):
            return "some of its matrices are packed and others are not"
    elif len({tensor.dtype for tensor in matrices}) > 1:
        return "its matrices are of different dtypes"
    if any(is_packed(bias.dtype) for bias in biases) or len({bias.dtype for bias in biases}) > 1:
        return "its biases are packed or of different dtypes"
    return None


class LayerExperts:
    """The experts of one layer, ready to be called. The weights stay where they are and are kept alive.

    ``choice`` names the instruction set. Raises ModelError if the weights cannot be read in place.
    """

    def __init__(self, weights: Mapping[int, ExpertWeights], count: int, gate: Gate, choice: KernelChoice) -> None:
        """``weights`` by expert number below ``count``; a route to one that is absent is refused."""
        if not weights:
            raise ModelError("A layer needs at least one expert.")
        self._native = load()
        self._weights = dict(weights)
        first = next(iter(self._weights.values()))
        ffn, hidden = first.gate.shape
        table = (Expert * count)()
        for number, expert in self._weights.items():
            reason = unsupported_reason(expert)
            if reason is not None:
                raise ModelError(f"The native kernels cannot run expert {number}: {reason}.")
            shapes = (expert.gate.shape, expert.up.shape, expert.down.shape)
            alike = _alike(expert.gate, first.gate) and _bias_dtype(expert) == _bias_dtype(first)
            if shapes != ((ffn, hidden), (ffn, hidden), (hidden, ffn)) or not alike:
                raise ModelError(f"Expert {number} has matrices of {shapes}, unlike the first; the file is damaged.")
            table[number] = _expert(expert)
        self._table = table
        self.count, self.hidden, self.ffn = count, int(hidden), int(ffn)
        self.held = len(self._weights)
        self._layer = Layer(
            experts=table,
            count=count,
            hidden=hidden,
            ffn=ffn,
            activation=CActivation(kind=ACTIVATIONS[gate.kind], alpha=gate.alpha, limit=gate.limit),
            set=choice.number,
            dtype=FORMATS[first.gate.dtype],
            bias_dtype=WEIGHT_DTYPES[_bias_dtype(first)],
        )
        self.address = ctypes.addressof(self._layer)

    def run(
        self,
        pool: Pool,
        hidden: int,
        indices: int,
        weights: int,
        tokens: int,
        k: int,
        sum_to: int | None,
        outputs_to: int | None = None,
        counts_to: int | None = None,
        scale_input: bool = False,
        extra: int | None = None,
        extra_count: int = 0,
    ) -> None:
        """All arguments but the sizes are addresses of contiguous arrays.

        ``hidden`` float32 [tokens, hidden]; ``indices`` int32 [tokens, k], -1 for a route that another device runs;
        ``weights`` float32 [tokens, k]; ``sum_to`` float32 [tokens, hidden], the weighted sum in the order of k;
        ``outputs_to`` float32 [tokens * k, hidden], un-weighted (0 for -1); ``counts_to`` int64 [count], added to.
        ``extra`` int32 [extra_count]: experts that are run on the first token if no route needs them, for nothing.
        A route's result does not depend on the other tokens, to the bit, as long as its expert has at most 16 routes
        in the call, or more than 16; between the two the order of additions differs.
        Raises ModelError if an index names no expert that is here, or memory runs out.
        """
        code = self._native.pllm_experts(
            pool.handle, self.address, hidden, indices, weights, tokens, k, scale_input, sum_to, outputs_to, counts_to,
            extra, extra_count,
        )  # fmt: skip
        if code:
            raise ModelError(f"The experts could not be run: {_MEANING[code]}.", "memory" if code == -2 else "model")


def layer_experts(
    experts: Experts, layer: int, gate: Gate, choice: KernelChoice, held: Sequence[int] | None = None
) -> LayerExperts:
    """The experts of ``layer`` of a model: all, or those of ``held``."""
    numbers = range(experts.count) if held is None else held
    return LayerExperts({number: experts.expert(layer, number) for number in numbers}, experts.count, gate, choice)


def linear(
    pool: Pool, choice: KernelChoice, weight: StoredTensor, bias: StoredTensor | None, rows: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``rows`` [tokens, columns] (rows may be strided) times ``weight`` [out, columns] transposed, plus ``bias``."""
    described = matrix(weight)
    if rows.ndim != 2 or rows.shape[1] != described.columns or (rows.size and rows.strides[1] != 4):
        raise ModelError(f"The rows are {rows.shape}, but the weights are {weight.shape}.")
    out = np.empty((rows.shape[0], described.rows), dtype=np.float32)
    code = load().pllm_linear(
        pool.handle,
        choice.number,
        ctypes.addressof(described),
        None if bias is None else bias.words.ctypes.data,
        rows.ctypes.data,
        rows.strides[0] // 4,
        rows.shape[0],
        out.ctypes.data,
        out.shape[1],
    )
    if code:
        raise ModelError(f"The matrix could not be multiplied: {_MEANING[code]}.")
    return out


def _alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether the same kernels multiply by both: any two packed formats, or the same plain one."""
    return one.dtype == other.dtype or (is_packed(one.dtype) and is_packed(other.dtype))


def _bias_dtype(weights: ExpertWeights) -> str:
    return "F32" if weights.gate_bias is None else weights.gate_bias.dtype


def _expert(weights: ExpertWeights) -> Expert:
    def address(tensor: StoredTensor | None) -> int | None:
        if tensor is None:
            return None
        # A bias is read value by value from its start.
        return int(tensor.words.ctypes.data)

    return Expert(
        gate=matrix(weights.gate),
        up=matrix(weights.up),
        down=matrix(weights.down),
        gate_bias=address(weights.gate_bias),
        up_bias=address(weights.up_bias),
        down_bias=address(weights.down_bias),
    )
