"""The experts of a layer as the native kernels take them: tables of addresses, built once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.formats.model_files import Experts, ExpertWeights, StoredTensor
from engine.models.formats.number_formats import GROUPED, fp8_side, is_grouped, is_packed
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
    """The function before the down projection, a key of ACTIVATIONS, with the numbers that pllm_activation has."""

    kind: str
    alpha: float = 0.0
    limit: float = 0.0
    beta: float = 0.0
    epsilon: float = 0.0

    @property
    def native(self) -> CActivation:
        """The gate as the kernels take it."""
        return CActivation(ACTIVATIONS[self.kind], self.alpha, self.limit, self.beta, self.epsilon)


def matrix(stored: StoredTensor) -> Matrix:
    """``stored`` [rows, columns] as the kernels take it, in place. The caller keeps ``stored`` alive.

    Raises ModelError if the kernels do not read its format, or the values of a row do not lie side by side.
    """
    words = stored.words
    unsupported_reason = unreadable(stored)
    if unsupported_reason is not None or words.ndim != 2:
        raise ModelError(f"The native kernels cannot read these weights: {unsupported_reason or 'they are no matrix'}.")
    columns = stored.shape[1]
    if is_grouped(stored.dtype):
        return _grouped_matrix(stored)
    return Matrix(
        data=words.ctypes.data,
        rows=words.shape[0],
        columns=columns,
        row_stride=columns if is_packed(stored.dtype) else words.strides[0] // words.itemsize,
        dtype=FORMATS[stored.dtype],
    )


def _side(stored: StoredTensor) -> int | None:
    return None if stored.scales is None else fp8_side(stored.shape, stored.scales.shape)


def _grouped_matrix(stored: StoredTensor) -> Matrix:
    scales, biases = stored.scales, stored.biases
    assert scales is not None
    rows, columns = stored.shape
    numbers, nbytes = GROUPED[stored.dtype]
    return Matrix(
        data=stored.words.ctypes.data,
        rows=rows,
        columns=columns,
        row_stride=stored.words.strides[0] // nbytes * numbers,
        dtype=FORMATS[stored.dtype],
        group=_side(stored) or 0 if stored.dtype == "BLOCK_FP8" else columns // scales.words.shape[1],
        scales=scales.words.ctypes.data,
        biases=None if biases is None else biases.words.ctypes.data,
        scale_dtype=WEIGHT_DTYPES.get(scales.dtype, 0),
    )


def _grouped_unreadable(stored: StoredTensor) -> str | None:
    """Why the kernels cannot read a matrix's codes, scales and biases where they lie; None if they can."""
    rows, columns = stored.shape
    if stored.dtype == "BLOCK_FP8":
        scales = stored.scales
        right = scales is not None and scales.dtype in WEIGHT_DTYPES and _side(stored) is not None
        right = right and scales is not None and scales.words.flags.c_contiguous and stored.words.flags.c_contiguous
        return None if right else "their scales do not lie like their blocks"
    _, nbytes = GROUPED[stored.dtype]
    step = stored.words.strides[0] if rows > 1 else stored.words.shape[1]
    groups = [part for part in (stored.scales, stored.biases) if part is not None]
    if stored.dtype == "GROUPED_NVFP4":
        table = None if stored.biases is None else stored.biases.words
        if table is None or table.shape != (1, 256) or not table.flags.c_contiguous or not table.flags.aligned:
            return "their scales have no meaning"
        groups = groups[:1]
    right = len(groups) == (1 if stored.dtype in ("OCP_MXFP4", "GROUPED_NVFP4") else 2) and step % nbytes == 0
    right = right and step >= stored.words.shape[1] and stored.words.strides[1] == 1
    for part in groups:
        words, apart = part.words, step * (part.words.shape[-1] or 1)
        right = right and words.shape[0] == rows and words.shape[1] > 0 and columns % words.shape[1] == 0
        right = right and words.strides[1] == words.itemsize and apart % stored.words.shape[1] == 0
        right = right and (rows == 1 or words.strides[0] * stored.words.shape[1] == apart * words.itemsize)
    return None if right else "their scales do not lie like their rows"


def unreadable(stored: StoredTensor) -> str | None:
    """Why the kernels cannot read ``stored`` where it lies, or None."""
    words = stored.words
    if stored.dtype not in FORMATS:
        return f"they are stored as {stored.dtype}, which has no kernel"
    if is_grouped(stored.dtype):
        return _grouped_unreadable(stored) if words.ndim == 2 else "they are no matrix"
    if is_packed(stored.dtype):
        return None if words.flags.c_contiguous else "their blocks do not follow one another"
    if words.ndim and words.shape[-1] > 1 and words.strides[-1] != words.itemsize:
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
    biases = present[3:]
    # Biases of gate and up are read value by value, with one distance for both.
    for tensor in present:
        if tensor is weights.gate_bias or tensor is weights.up_bias:
            continue
        reason = unreadable(tensor)
        if reason is not None:
            return reason
    if any(is_packed(bias.dtype) for bias in biases) or len({bias.dtype for bias in biases}) > 1:
        return "its biases are packed or of different dtypes"
    return _unreadable_biases(weights.gate_bias, weights.up_bias)


def _unreadable_biases(gate: StoredTensor | None, up: StoredTensor | None) -> str | None:
    """Why the kernels cannot read the biases of gate and up where they lie, or None."""
    if gate is None or up is None:
        return None
    if gate.dtype not in WEIGHT_DTYPES:
        return f"they are stored as {gate.dtype}, which has no kernel"
    apart = gate.words.strides[0]
    right = up.words.strides[0] == apart and apart > 0 and apart % gate.words.itemsize == 0
    right = right and gate.words.flags.aligned and up.words.flags.aligned
    return None if right else "their biases do not lie at whole distances"


def kernel_kind(number_format: str) -> str:
    """A key that is equal for number formats whose kernels take the same input."""
    if number_format in ("BLOCK_FP8", "GROUPED_NVFP4"):
        return number_format
    if is_grouped(number_format):
        return "grouped"
    return "packed" if is_packed(number_format) else number_format


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
            alike = _kinds_of(expert) == _kinds_of(first) and _biases_of(expert) == _biases_of(first)
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
            activation=gate.native,
            set=choice.number,
            gate_dtype=FORMATS[first.gate.dtype],
            up_dtype=FORMATS[first.up.dtype],
            down_dtype=FORMATS[first.down.dtype],
            bias_dtype=WEIGHT_DTYPES[_biases_of(first)[0]],
            bias_stride=_biases_of(first)[1],
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
        *,
        scale_input: bool = False,
        extra: int | None = None,
        extra_count: int = 0,
        reads: bool = False,
    ) -> None:
        """All arguments but the sizes are addresses of contiguous arrays.

        ``hidden`` float32 [tokens, hidden]; ``indices`` int32 [tokens, k], -1 for a route that another device runs;
        ``weights`` float32 [tokens, k]; ``sum_to`` float32 [tokens, hidden], the weighted sum in the order of k;
        ``outputs_to`` float32 [tokens * k, hidden], un-weighted (0 for -1); ``counts_to`` int64 [count], added to.
        ``extra`` int32 [extra_count]: experts that are run on the first token if no route needs them, for nothing.
        A route's result does not depend on the other tokens, to the bit, if they are read (``reads``), or as long as
        its expert has few routes in the call, or many; between the two the order of additions differs. Few are up to
        16. Tokens that are read are never few.
        Raises ModelError if an index names no expert that is here, or memory runs out.
        """
        code = self._native.pllm_experts(
            pool.handle, self.address, hidden, indices, weights, tokens, k, scale_input, reads, sum_to, outputs_to,
            counts_to, extra, extra_count,
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
        raise product_error(code)
    return out


def product_error(code: int) -> ModelError:
    """The error of a product of the kernels; ``code`` is negative."""
    return ModelError(f"The matrix could not be multiplied: {_MEANING[code]}.", "memory" if code == -2 else "model")


def _kinds_of(weights: ExpertWeights) -> tuple[str, ...]:
    """The kinds of gate, up and down: they may differ within an expert, but not from expert to expert of a layer."""
    return tuple(kernel_kind(matrix.dtype) for matrix in (weights.gate, weights.up, weights.down))


def _biases_of(weights: ExpertWeights) -> tuple[str, int]:
    """The number format of the biases, and how many values those of gate and up are apart."""
    gate = weights.gate_bias
    return ("F32", 1) if gate is None else (gate.dtype, gate.words.strides[0] // gate.words.itemsize)


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
