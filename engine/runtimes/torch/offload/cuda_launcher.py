"""Compiling ``cuda/experts.cu`` for this machine's GPU, by the compiler that torch brings along, and launching it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

SOURCE = Path(__file__).parent / "cuda" / "experts.cu"

Grid = tuple[int, int, int]


class Launcher(Protocol):
    """What runs the kernels of ``experts.cu``."""

    def prepare(self, kernel: str) -> None:
        """Make ``kernel``, an instance of one of the templates, ready. Raises CompilingFailed."""
        ...

    def launch(self, kernel: str, grid: Grid, threads: int, arguments: Sequence[Any], stream: int) -> None:
        """Begin to run ``kernel`` on a CUDA stream, with arguments of ctypes. Raises RuntimeError as torch does for
        CUDA's errors, CompilingFailed if it was not prepared and cannot be."""
        ...


class CompilingFailed(Exception):
    """A kernel could not be made for this GPU."""


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
        self._checked(compiler.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"", 0, None, None))
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
        """What the compiler says, its first line."""
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
