"""Experts on an NVIDIA GPU, run by our own kernels (``cuda/experts.cu``) on the bytes in their slots.

Experts with few tokens run together: one product for gate and up, the family's gate, one product for down. For experts
with many tokens a kernel unpacks the matrices, and torch multiplies. torch alone needs dozens of steps for each packed
matrix, and starting a step takes longer than the step.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.models.formats.number_formats import BLOCKS, GROUPED, WIDTHS, fp8_side, is_grouped
from engine.moe import kernels
from engine.runtimes.torch.offload.devices import SlotLayout, SlotMatrix
from engine.runtimes.torch.offload.gates import Gate

AT_ONCE = 8
"""Number of tokens for which a matrix is decoded once."""
MOST_WEIGHTS = 400_000_000
"""Product of weights and tokens, beyond AT_ONCE tokens, from which an expert's matrices are unpacked and multiplied by
torch. That takes a dozen steps, in which the kernels finish small experts. Measured on an H100."""
MOST_EXPERTS = 64
"""Maximum experts in one launch; MOST_EXPERTS of ``experts.cu``."""
PIECE = 8
"""Numbers that a thread decodes at once. Rows consist of whole pieces."""
_ROWS, _WARPS, _WARP = 4, 4, 32
"""Rows of a warp, warps of a block, threads of a warp."""
_UNPACKING_THREADS = 256

_INPUTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
"""Names of a token's dtypes in the kernels."""
_WITH_TABLE = "GROUPED_NVFP4"
"""The format whose "biases" are one table for all rows."""
_PLAIN = ("F32", "BF16", "F16")
_ALIGNMENT = 4
"""Default alignment of weights' addresses, in bytes. Blocks have the largest power of two that divides their size."""
_KINDS = {"F32": 0, "BF16": 1, "F16": 2, "U8": 3}
"""Kinds of scales and biases in ``experts.cu``."""


_LONG = ("codes", "scales", "biases", "addend", "row_bytes")
_SHORT = ("rows", "columns", "group", "scales_row", "scale_kind", "addend_kind")


class _Experts(ctypes.Structure):
    _fields_ = (
        ("slot", ctypes.c_uint64 * MOST_EXPERTS),
        ("first", ctypes.c_int * MOST_EXPERTS),
        ("count", ctypes.c_int * MOST_EXPERTS),
    )


class _Matrix(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_longlong) for name in _LONG) + tuple((name, ctypes.c_int) for name in _SHORT)


@dataclass(frozen=True)
class Part:
    """A matrix in a slot as the kernels read it: offsets in bytes from the slot's beginning, -1 for missing parts.

    ``format``: name of its type in ``experts.cu``. ``addend``: what is added to its products.
    """

    format: str
    rows: int
    columns: int
    codes: int
    row_bytes: int
    scales: int = -1
    biases: int = -1
    group: int = 0
    scales_row: int = 0
    scale_kind: int = 0
    addend: int = -1
    addend_kind: int = 0

    def argument(self) -> _Matrix:
        """The part as an argument of a kernel."""
        found = _Matrix()
        for name in (*_LONG, *_SHORT):
            setattr(found, name, getattr(self, name))
        return found


@dataclass(frozen=True)
class ExpertParts:
    """An expert's matrices. ``gate`` contains gate and up if ``up`` is None, or the expert has no gate."""

    gate: Part
    up: Part | None
    down: Part
    arguments: Mapping[str, _Matrix] = field(compare=False)
    has_gate: bool = True

    @property
    def width(self) -> int:
        """Rows of gate and up together."""
        return self.gate.rows + (0 if self.up is None else self.up.rows)

    def gated(self, gate: Gate, both: torch.Tensor) -> torch.Tensor:
        """What the down projection reads of the products ``both`` [tokens, width] of gate and up, float32."""
        gate_out, up_out = both.chunk(2, dim=-1) if self.has_gate else (both, both)
        return gate(gate_out, up_out).float().contiguous()

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of an expert for which its matrices are not unpacked."""
        weights = self.width * self.gate.columns + self.down.rows * self.down.columns
        return AT_ONCE + MOST_WEIGHTS // weights


@dataclass(frozen=True)
class ExpertRows:
    """An expert at ``address`` of the device's memory, and its tokens ``start`` to ``stop``."""

    address: int
    start: int
    stop: int


def supports(dtype: torch.dtype) -> bool:
    """Whether there are kernels for tokens of ``dtype``."""
    return dtype in _INPUTS


def part_of(matrix: SlotMatrix) -> Part | None:
    """``matrix`` as the kernels read it; None if they cannot."""
    rows, columns = matrix.shape
    alignment = math.gcd(_ALIGNMENT, BLOCKS.get(matrix.format, (1, _ALIGNMENT))[1])
    if columns % PIECE or matrix.offset % alignment:
        return None
    if matrix.format in BLOCKS:
        return Part(f"Blocks<{matrix.format}>", rows, columns, matrix.offset, matrix.nbytes // rows)
    if matrix.format in _PLAIN:
        if matrix.stride[1] != 1 or matrix.stride[0] * WIDTHS[matrix.format] % 4:
            return None
        return Part(matrix.format, rows, columns, matrix.offset, matrix.stride[0] * WIDTHS[matrix.format])
    return _grouped(matrix) if is_grouped(matrix.format) else None


def _grouped(matrix: SlotMatrix) -> Part | None:
    rows, columns = matrix.shape
    scales, biases = matrix.groups[0], matrix.groups[1] if len(matrix.groups) > 1 else None
    per_row = scales.shape[1]
    fp8 = matrix.format == "BLOCK_FP8"
    group = fp8_side(matrix.shape, scales.shape) if fp8 else columns // per_row
    by_row = matrix.groups
    if matrix.format == _WITH_TABLE:
        if biases is None or biases.format != "F32" or biases.offset % _ALIGNMENT:
            return None
        by_row = matrix.groups[:1]
    elif biases is not None and biases.format != scales.format:
        return None
    if (
        group is None
        or (group % PIECE and not fp8)
        or scales.format not in _KINDS
        or any(each.stride != (per_row, 1) for each in by_row)
    ):
        return None
    numbers, nbytes = GROUPED[matrix.format]
    return Part(
        matrix.format,
        rows,
        columns,
        matrix.offset,
        matrix.stride[0] // numbers * nbytes,
        scales.offset,
        -1 if biases is None else biases.offset,
        group,
        per_row,
        _KINDS[scales.format],
    )


def parts_of(layout: SlotLayout) -> ExpertParts | None:
    """The expert of ``layout`` as the kernels read it; None if they cannot read one of its matrices or biases."""
    parts: dict[str, Part] = {}
    for name in ("gate_up", "gate", "up", "down"):
        matrix = layout.matrices.get(name)
        if matrix is not None:
            part = part_of(matrix)
            if part is None:
                return None
            parts[name] = part
    biases = {name: layout.matrices.get(f"{name}_bias") for name in ("gate", "up", "down")}
    if any(bias is not None and (bias.format not in _PLAIN or bias.stride != (1,)) for bias in biases.values()):
        return None
    both = parts.pop("gate_up", None)
    if both is not None and biases["gate"] is None:
        gate, up = both, None
    elif both is not None:
        if both.format == "BLOCK_FP8":
            return None
        gate, up = _split(both)
    elif "up" not in parts:
        gate, up = parts["gate"], None
    else:
        gate, up = parts["gate"], parts["up"]
        if gate.format != up.format or gate.columns != up.columns:
            return None
    down = parts["down"]
    gate, down = _with_bias(gate, biases["gate"]), _with_bias(down, biases["down"])
    up = None if up is None else _with_bias(up, biases["up"])
    arguments = {"gate": gate.argument(), "up": (up or gate).argument(), "down": down.argument()}
    return ExpertParts(gate, up, down, arguments, has_gate=both is not None or "up" in parts)


def _split(both: Part) -> tuple[Part, Part]:
    """Gate and up of a matrix that contains gate's rows and then up's."""
    rows = both.rows // 2
    width = {0: 4, 1: 2, 2: 2, 3: 1}[both.scale_kind]

    def moved(offset: int) -> int:
        return offset if offset < 0 else offset + rows * both.scales_row * width

    up = replace(
        both,
        rows=rows,
        codes=both.codes + rows * both.row_bytes,
        scales=moved(both.scales),
        biases=both.biases if both.format == _WITH_TABLE else moved(both.biases),
    )
    return replace(both, rows=rows), up


def _with_bias(part: Part, bias: SlotMatrix | None) -> Part:
    return part if bias is None else replace(part, addend=bias.offset, addend_kind=_KINDS[bias.format])


def _blocks(matrices: Sequence[Part]) -> int:
    """Number of thread blocks that compute all rows of any of ``matrices``."""
    return -(-max(part.rows for part in matrices) // (_ROWS * _WARPS))


class CudaExperts:
    """See the module. All work is started on a CUDA stream, given by its address, and none is waited for."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._parts: dict[int, tuple[SlotLayout, ExpertParts | None]] = {}

    def parts(self, layout: SlotLayout) -> ExpertParts | None:
        """The result of :func:`parts_of`, cached for each layout."""
        found = self._parts.get(id(layout))
        if found is None:
            found = self._parts[id(layout)] = (layout, parts_of(layout))
        return found[1]

    def prepare(self, layout: SlotLayout, dtype: torch.dtype) -> None:
        """Compile the kernels for experts of ``layout`` on tokens of the supported ``dtype``. Raises
        CompilingFailed."""
        for matrix in layout.matrices.values():
            part = part_of(matrix) if len(matrix.shape) == 2 else None
            if part is not None and part.format not in _PLAIN:
                self._launcher.prepare(f"unpack<{part.format}, {_INPUTS[dtype]}>")
        parts = self.parts(layout)
        if parts is None:
            return
        for tokens in (1, AT_ONCE):
            self._launcher.prepare(f"products<{parts.gate.format}, {_INPUTS[dtype]}, {tokens}>")
            self._launcher.prepare(f"products<{parts.down.format}, float, {tokens}>")
        self._launcher.prepare(f"routed<{parts.gate.format}, {_INPUTS[dtype]}>")
        self._launcher.prepare(f"routed<{parts.down.format}, float>")

    def runs(self, layout: SlotLayout, dtype: torch.dtype, tokens: int) -> bool:
        """Whether :meth:`run` takes experts of ``layout`` with ``tokens`` tokens each."""
        parts = self.parts(layout)
        return parts is not None and dtype in _INPUTS and tokens <= parts.most_tokens

    def run(
        self,
        experts: Sequence[ExpertRows],
        layout: SlotLayout,
        gate: Gate,
        rows: torch.Tensor,
        out: torch.Tensor,
        stream: int,
    ) -> None:
        """Start to run ``experts`` on their tokens of ``rows`` [tokens, hidden]; ``out`` [tokens, hidden], float32.

        torch's current stream must be ``stream``. Products use exact weights and are summed in float32, without
        rounding in between. Raises CompilingFailed.
        """
        parts = self.parts(layout)
        assert parts is not None
        start, stop = min(each.start for each in experts), max(each.stop for each in experts)
        width = parts.width
        both = torch.empty(stop - start, width, dtype=torch.float32, device=rows.device)
        several = [
            [replace(each, start=each.start - start, stop=each.stop - start) for each in experts[first:][:MOST_EXPERTS]]
            for first in range(0, len(experts), MOST_EXPERTS)
        ]
        matrices = (parts.gate,) if parts.up is None else (parts.gate, parts.up)
        second = parts.arguments["up"]
        for some in several:
            self._products(some, matrices, parts.arguments["gate"], second, rows[start:stop], both, stream)
        gated = parts.gated(gate, both)
        down = parts.arguments["down"]
        for some in several:
            self._products(some, (parts.down,), down, down, gated, out[start:stop], stream)

    def run_routes(
        self,
        slots: torch.Tensor,
        layout: SlotLayout,
        gate: Gate,
        rows: torch.Tensor,
        experts: torch.Tensor,
        stream: int,
    ) -> torch.Tensor:
        """Start to run ``rows`` [tokens, hidden] on their ``experts`` [tokens, k], int64 on the device. Returns float32
        [tokens * k, hidden].

        ``slots``: the addresses of all experts, int64. Everything else is as in :meth:`run`.
        """
        parts = self.parts(layout)
        assert parts is not None
        rows, experts = rows.contiguous(), experts.contiguous()
        routes, k = experts.numel(), experts.shape[1]
        both = torch.empty(routes, parts.width, dtype=torch.float32, device=rows.device)
        matrices = (parts.gate,) if parts.up is None else (parts.gate, parts.up)
        first, second, down = (parts.arguments[name] for name in ("gate", "up", "down"))
        self._routed(slots, experts, matrices, (first, second), rows, k, both, stream)
        gated = parts.gated(gate, both)
        out = torch.empty(routes, rows.shape[1], dtype=torch.float32, device=rows.device)
        self._routed(slots, experts, (parts.down,), (down, down), gated, 1, out, stream)
        return out

    def _routed(
        self,
        slots: torch.Tensor,
        experts: torch.Tensor,
        matrices: Sequence[Part],
        both: tuple[_Matrix, _Matrix],
        rows: torch.Tensor,
        share: int,
        out: torch.Tensor,
        stream: int,
    ) -> None:
        arguments: tuple[Any, ...] = (
            ctypes.c_void_p(slots.data_ptr()),
            ctypes.c_void_p(experts.data_ptr()),
            *both,
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int(share),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(out.shape[1]),
        )
        grid = (_blocks(matrices), experts.numel(), len(matrices))
        kernel = f"routed<{matrices[0].format}, {_INPUTS[rows.dtype]}>"
        self._launcher.launch(kernel, grid, _WARPS * _WARP, arguments, stream)

    def unpacked(self, matrix: SlotMatrix, slot: torch.Tensor, dtype: torch.dtype, stream: int) -> torch.Tensor | None:
        """The numbers of a packed ``matrix`` in ``slot``, in ``dtype``; None if the kernels cannot read it.

        They are equal to those of :mod:`engine.runtimes.torch.offload.torch_unpacking`.
        """
        part = part_of(matrix)
        if part is None or dtype not in _INPUTS:
            return None
        out = torch.empty(part.rows, part.columns, dtype=dtype, device=slot.device)
        pieces = part.rows * part.columns // PIECE
        arguments = (ctypes.c_void_p(slot.data_ptr()), part.argument(), ctypes.c_void_p(out.data_ptr()))
        grid = (-(-pieces // _UNPACKING_THREADS), 1, 1)
        self._launcher.launch(f"unpack<{part.format}, {_INPUTS[dtype]}>", grid, _UNPACKING_THREADS, arguments, stream)
        return out

    def _products(
        self,
        experts: Sequence[ExpertRows],
        matrices: Sequence[Part],
        first: _Matrix,
        second: _Matrix,
        rows: torch.Tensor,
        out: torch.Tensor,
        stream: int,
    ) -> None:
        some = _Experts()
        for place, expert in enumerate(experts):
            some.slot[place], some.first[place], some.count[place] = (
                expert.address,
                expert.start,
                expert.stop - expert.start,
            )
        arguments: tuple[Any, ...] = (
            some,
            first,
            second,
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(out.shape[1]),
        )
        grid = (_blocks(matrices), len(experts), len(matrices))
        tokens = 1 if all(expert.stop - expert.start == 1 for expert in experts) else AT_ONCE
        kernel = f"products<{matrices[0].format}, {_INPUTS[rows.dtype]}, {tokens}>"
        self._launcher.launch(kernel, grid, _WARPS * _WARP, arguments, stream)


# --- compiling and launching -----------------------------------------------------------------------------------------


SOURCE = Path(__file__).parent / "cuda" / "experts.cu"
GRIDS = Path(kernels.__file__).parent / "native" / "packed_grids.h"
"""Codebooks of number formats, which come before the source."""

Grid = tuple[int, int, int]


class Launcher(Protocol):
    """Interface that runs the kernels of ``experts.cu``."""

    def prepare(self, kernel: str) -> None:
        """Compile ``kernel``, an instance of one of the templates. Raises CompilingFailed."""
        ...

    def launch(self, kernel: str, grid: Grid, threads: int, arguments: Sequence[Any], stream: int) -> None:
        """Start ``kernel`` on a CUDA stream, with arguments of ctypes.

        Raises RuntimeError for CUDA's errors, as torch does, and CompilingFailed if it was not prepared and cannot be
        compiled.
        """
        ...


class CompilingFailed(Exception):
    """Raised if a kernel could not be compiled for this GPU."""


class CudaLauncher:
    """See :class:`Launcher`. Kernels are compiled for the device that is current when this is made.

    Raises CompilingFailed if torch has no compiler here, or is not NVIDIA's.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise CompilingFailed("torch was built for another maker's GPUs")
        try:
            # torch keeps these for its own kernels that are compiled at run time (torch.cuda._compile_kernel), which
            # asks for headers of a CUDA toolkit that few people have.
            from torch.cuda._utils import _check_cuda, _get_gpu_rtc_library, _get_gpu_runtime_library

            self._compiler, self._driver = _get_gpu_rtc_library(), _get_gpu_runtime_library()
        except (ImportError, OSError) as error:
            raise CompilingFailed(str(error)) from error
        self._check = _check_cuda
        major, minor = torch.cuda.get_device_capability()
        self._options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", "--fmad=false")
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def prepare(self, kernel: str) -> None:
        """See :class:`Launcher`."""
        if kernel in self._kernels:
            return
        name, binary = self._compiled(kernel)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), binary))
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, name))
        except RuntimeError as error:
            raise CompilingFailed(str(error)) from error
        self._kernels[kernel] = function

    def launch(self, kernel: str, grid: Grid, threads: int, arguments: Sequence[Any], stream: int) -> None:
        """See :class:`Launcher`."""
        self.prepare(kernel)
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        function, where = self._kernels[kernel], ctypes.c_void_p(stream)
        self._check(self._driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, where, values, None))

    def _compiled(self, kernel: str) -> tuple[bytes, bytes]:
        """The linker's name of ``kernel``, and its machine code."""
        compiler, program = self._compiler, ctypes.c_void_p()
        name = kernel.encode()
        options = [option.encode() for option in self._options]
        source = GRIDS.read_bytes() + SOURCE.read_bytes()
        self._checked(compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"", 0, None, None))
        try:
            self._checked(compiler.nvrtcAddNameExpression(program, name))
            status = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if status:
                raise CompilingFailed(self._log(program) or self._reason(status))
            lowered, size = ctypes.c_char_p(), ctypes.c_size_t()
            self._checked(compiler.nvrtcGetLoweredName(program, name, ctypes.byref(lowered)))
            self._checked(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            binary = ctypes.create_string_buffer(size.value)
            self._checked(compiler.nvrtcGetCUBIN(program, binary))
            return lowered.value or b"", binary.raw
        finally:
            compiler.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        """The first line of the compiler's log."""
        size = ctypes.c_size_t()
        self._checked(self._compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._checked(self._compiler.nvrtcGetProgramLog(program, log))
        return next(iter(log.value.decode(errors="replace").strip().splitlines()), "").rstrip(".")

    def _checked(self, status: int) -> None:
        if status:
            raise CompilingFailed(self._reason(status))

    def _reason(self, status: int) -> str:
        self._compiler.nvrtcGetErrorString.restype = ctypes.c_char_p
        said: bytes = self._compiler.nvrtcGetErrorString(status)
        return said.decode(errors="replace")
