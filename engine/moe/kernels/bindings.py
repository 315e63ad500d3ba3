"""The native kernels seen from Python: found beside this file, opened with ctypes, chosen by what the CPU has.

Everything here is optional: where the library was not built, :func:`choose` says why and the torch kernels answer.
Calls release the GIL, and take addresses, so that nothing is copied or built per call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ModelError
from engine.models.formats.number_formats import BLOCKS, GROUPED, block_size

Dtype = Literal["bfloat16", "float32"]
"""The dtype of a model's computations. ``float32`` keeps activations in float32 whatever the format of the weights."""

VERSION = 39
"""PLLM_VERSION of native/privatellm_kernels.h; a library of another version is not used."""

VARIABLE = "PRIVATELLM_KERNELS"
SETS = {"scalar": 0, "avx2": 1, "avx512f": 2, "avx512_bf16": 3, "neon": 4}
"""The instruction sets and their numbers in privatellm_kernels.h."""

FORMATS = {name: number for number, name in enumerate(("BF16", "F32", *BLOCKS, "F16", *GROUPED), start=1)}
"""All formats of weights that the kernels read, and their numbers in the library, which are their places in
native/formats.h."""

WEIGHT_DTYPES = {name: FORMATS[name] for name in ("BF16", "F32", "F16")}
"""Plain formats of weights (safetensors' names) that the kernels read, and their numbers in the library."""

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped": 4, "clamped_silu": 5, "xielu": 6}

_PREFERENCE = ("avx512_bf16", "avx512f", "avx2", "neon", "scalar")
_INSTALL = "install a C compiler (Debian: apt install gcc; macOS: xcode-select --install) and `pip install` again"
_NAME = "_native"


@dataclass(frozen=True)
class KernelChoice:
    """The chosen kernels and the reason.

    ``name`` is a key of SETS, or ``none`` (then torch's kernels are used). ``way_out`` is what a person can do about
    ``none``; it may be empty.
    """

    name: str
    cause: str
    way_out: str = ""

    @property
    def reason(self) -> str:
        """The cause, and the way out where there is one, in one clause."""
        return f"{self.cause}; {self.way_out}" if self.way_out else self.cause

    @property
    def native(self) -> bool:
        return self.name != "none"

    @property
    def number(self) -> int:
        """The set's number in the library; only for native ones."""
        return SETS[self.name]


class Matrix(ctypes.Structure):
    """``pllm_matrix``: rows of weights as they lie in memory. ``row_stride`` is in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("scale_dtype", ctypes.c_int32),
        ("skipped_rows", ctypes.c_int32),
    )


class CActivation(ctypes.Structure):
    """``pllm_activation``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class Expert(ctypes.Structure):
    """``pllm_expert``."""

    _fields_ = (
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("gate_bias", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
    )


class Layer(ctypes.Structure):
    """``pllm_layer``."""

    _fields_ = (
        ("experts", ctypes.POINTER(Expert)),
        ("count", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("ffn", ctypes.c_int64),
        ("activation", CActivation),
        ("set", ctypes.c_int32),
        ("gate_dtype", ctypes.c_int32),
        ("up_dtype", ctypes.c_int32),
        ("down_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("bias_stride", ctypes.c_int32),
    )


def path() -> Path | None:
    """Path of the built library, or None."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        candidate = folder / (_NAME + suffix)
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _opened() -> tuple[ctypes.CDLL | None, KernelChoice]:
    """The library, or why there is none."""
    library = path()
    if library is None:
        cause = "they were not built, because no C compiler was found when this was installed"
        return None, KernelChoice("none", cause, _INSTALL)
    try:
        native = ctypes.CDLL(str(library))
        version = int(native.pllm_version())
    except (OSError, AttributeError) as error:
        return None, KernelChoice("none", f"{library} cannot be opened ({error})", f"delete it, {_INSTALL}")
    if version != VERSION:
        cause = f"{library} is of another version of this program ({version}, not {VERSION})"
        return None, KernelChoice("none", cause, "`pip install` again")
    _declare(native)
    if tuple(_formats(native)) != tuple((name, *block_size(name)) for name in FORMATS):
        cause = f"{library} has other number formats than this program"
        return None, KernelChoice("none", cause, "`pip install` again")
    return native, KernelChoice("none", "")


def _declare(native: ctypes.CDLL) -> None:
    pointer, whole, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    number = ctypes.c_int
    native.pllm_available.argtypes, native.pllm_available.restype = [], ctypes.c_uint32
    native.pllm_pool_create.argtypes, native.pllm_pool_create.restype = [number, pointer], pointer
    native.pllm_pool_destroy.argtypes, native.pllm_pool_destroy.restype = [pointer], None
    native.pllm_pool_threads.argtypes, native.pllm_pool_threads.restype = [pointer], number
    native.pllm_linear.argtypes = [pointer, number, pointer, pointer, pointer, whole, whole, pointer, whole]
    native.pllm_linear.restype = number
    native.pllm_experts.argtypes = [
        pointer, pointer, pointer, pointer, pointer, whole, whole, whole, whole, pointer, pointer, pointer,
        pointer, whole,
    ]  # fmt: skip
    native.pllm_experts.restype = number
    native.pllm_weighted_sum.argtypes = [pointer, number, number, pointer, pointer, whole, whole, whole, pointer]
    native.pllm_weighted_sum.restype = None
    native.pllm_count_routes.argtypes = [pointer, whole, whole, pointer]
    native.pllm_count_routes.restype = number
    native.pllm_gate.argtypes, native.pllm_gate.restype = [number, pointer, pointer, pointer, whole], None
    native.pllm_exp_sum.argtypes = [number, pointer, ctypes.c_float, whole]
    native.pllm_exp_sum.restype = ctypes.c_float
    native.pllm_format.argtypes, native.pllm_format.restype = [number, pointer, pointer], ctypes.c_char_p
    native.pllm_unpack_row.argtypes, native.pllm_unpack_row.restype = [number, pointer, pointer, whole], None
    native.pllm_open_row.argtypes, native.pllm_open_row.restype = [pointer, whole, pointer], None
    native.pllm_read_seconds.argtypes = [pointer, pointer, size]
    native.pllm_read_seconds.restype = ctypes.c_double


def _formats(native: ctypes.CDLL) -> Iterator[tuple[str, int, int]]:
    """The library's number formats in the order of their numbers: name, numbers and bytes of a block."""
    numbers, nbytes = ctypes.c_int64(), ctypes.c_int64()
    for number in itertools.count(1):
        name = native.pllm_format(number, ctypes.byref(numbers), ctypes.byref(nbytes))
        if name is None:
            return
        yield name.decode("ascii"), numbers.value, nbytes.value


def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises ModelError, saying why, where it is missing."""
    native, missing = _opened()
    if native is None:
        raise ModelError(f"The native kernels cannot be used: {missing.reason}.")
    return native


def available() -> tuple[str, ...]:
    """The instruction sets that are compiled in and that this CPU has, best first; empty without the library."""
    native, _ = _opened()
    if native is None:
        return ()
    mask = int(native.pllm_available())
    return tuple(name for name in _PREFERENCE if mask >> SETS[name] & 1)


def choose(dtype: Dtype, environment: Mapping[str, str] | None = None) -> KernelChoice:
    """The kernels for a model that computes in ``dtype``, and the reason in a few words.

    ``avx512_bf16`` rounds activations to bfloat16 and is only for models that compute in it. PRIVATELLM_KERNELS names
    a set, or ``off``. Raises ModelError if it names one that this CPU or this build lacks.
    """
    wanted = (os.environ if environment is None else environment).get(VARIABLE, "").strip().lower()
    if wanted == "off":
        return KernelChoice("none", f"switched off by {VARIABLE}=off")
    if wanted and wanted not in SETS:
        raise ModelError(f"{VARIABLE}={wanted} is no set of kernels; use one of {', '.join(SETS)} or off.")
    native, missing = _opened()
    if native is None:
        if wanted:
            raise ModelError(f"{VARIABLE}={wanted} cannot be used: {missing.reason}.")
        return missing
    sets = available()
    if not wanted:
        best = next(name for name in sets if dtype == "bfloat16" or name != "avx512_bf16")
        return KernelChoice(best, f"the CPU has it; {VARIABLE} overrides")
    if wanted not in sets:
        raise ModelError(
            f"{VARIABLE}={wanted}, but this CPU lacks it (it has {', '.join(sets)}); unset it or choose another."
        )
    if wanted == "avx512_bf16" and dtype != "bfloat16":
        return KernelChoice("avx512f", f"{VARIABLE}={wanted}, which in {dtype} is avx512f: activations stay float32")
    return KernelChoice(wanted, f"{VARIABLE}={wanted}")
