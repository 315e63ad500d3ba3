"""llama.cpp as an oracle, newer than llama-cpp-python, from a package that holds it compiled (llama-cpp-py-sync)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engines import LlamaCppEngine, Logits

_BINDINGS: Any = pytest.importorskip("llama_cpp_py_sync._cffi_bindings", reason="llama-cpp-py-sync is not installed")
try:
    _LIBRARY: Any = _BINDINGS.get_lib()
except RuntimeError:
    pytest.skip("llama-cpp-py-sync wants a newer glibc (2.38)", allow_module_level=True)
_FFI: Any = _BINDINGS.get_ffi()
_QUIET: Any = _FFI.callback("ggml_log_callback", lambda level, text, data: None)
"""A log that keeps nothing. The library goes on calling it after an engine is gone."""


class PrebuiltLlamaCpp(LlamaCppEngine):
    """llama.cpp through cffi, on weights as they lie in the file. Raises ValueError if it cannot load the file."""

    variants = ("llama.cpp, in place",)
    repacks = False

    def __init__(self, model: Path, threads: int) -> None:
        _LIBRARY.llama_log_set(_QUIET, _FFI.NULL)
        own = {"n_gpu_layers": 0, "use_extra_bufts": self.repacks}
        self._open(_LIBRARY, model, threads, own, {"kv_unified": True, "no_perf": True})
        self._memory = _LIBRARY.llama_get_memory(self._context)

    def _logits(self, index: int) -> Logits:
        values = _LIBRARY.llama_get_logits_ith(self._context, index)
        return np.frombuffer(_FFI.buffer(values, 4 * self._vocabulary), np.float32).copy()


class PrebuiltTokenizer:
    """The vocabulary of a GGUF file, which may have no tensors."""

    def __init__(self, file: Path) -> None:
        _LIBRARY.llama_log_set(_QUIET, _FFI.NULL)
        parameters = _LIBRARY.llama_model_default_params()
        parameters.vocab_only = True
        self._model = _LIBRARY.llama_model_load_from_file(bytes(file), parameters)
        assert self._model, f"llama.cpp cannot load {file}"
        self._vocabulary = _LIBRARY.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, in which no special token is looked for."""
        data = text.encode()
        ids = _FFI.new("llama_token[]", len(data) + 1)
        count = _LIBRARY.llama_tokenize(self._vocabulary, data, len(data), ids, len(data) + 1, False, False)
        assert count >= 0
        return list(ids[0:count])
