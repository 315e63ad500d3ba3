"""llama.cpp as an oracle, newer than llama-cpp-python, from a package that holds it compiled (llama-cpp-py-sync)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.engines import LlamaCppEngine, Logits
from engine.pictures.picture import Picture

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


def tower_rows(model: Path, tower: Path, picture: Picture) -> NDArray[np.float32]:
    """The rows [tokens, hidden] that llama.cpp makes of ``picture`` with the file ``tower`` beside ``model``."""
    vision: Any = _BINDINGS.get_mtmd_lib()
    _LIBRARY.llama_log_set(_QUIET, _FFI.NULL)
    vision.mtmd_log_set(_QUIET, _FFI.NULL)
    loaded = _LIBRARY.llama_model_load_from_file(bytes(model), _LIBRARY.llama_model_default_params())
    parameters = vision.mtmd_context_params_default()
    parameters.use_gpu, parameters.warmup, parameters.image_min_tokens = False, False, 1
    context = vision.mtmd_init_from_file(bytes(tower), loaded, parameters)
    assert loaded and context, f"llama.cpp cannot load {model} and {tower}"
    text, marker = _FFI.new("struct mtmd_input_text *"), vision.mtmd_default_marker()
    text.text, text.text_len = marker, len(_FFI.string(marker))
    colours = _FFI.from_buffer("unsigned char[]", picture.rgb)
    bitmap = vision.mtmd_bitmap_init(picture.width, picture.height, colours)
    chunks = vision.mtmd_input_chunks_init()
    assert not vision.mtmd_tokenize(context, chunks, text, _FFI.new("mtmd_bitmap *[1]", [bitmap]), 1)
    count = vision.mtmd_input_chunks_size(chunks)
    seen = [vision.mtmd_input_chunks_get(chunks, place) for place in range(count)]
    (chunk,) = [each for each in seen if vision.mtmd_input_chunk_get_tokens_image(each)]
    assert not vision.mtmd_encode_chunk(context, chunk)
    tokens, width = vision.mtmd_input_chunk_get_n_tokens(chunk), _LIBRARY.llama_model_n_embd_inp(loaded)
    values = _FFI.buffer(vision.mtmd_get_output_embd(context), 4 * tokens * width)
    return np.frombuffer(values, np.float32).reshape(tokens, width).copy()
