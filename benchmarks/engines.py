"""The engines that are compared, behind one small interface: prefill a prompt, then step W rows of tokens.

Each engine lives in a process of its own (``benchmarks.worker``), so that no library's threads, allocator or
instruction dispatch meets another's. Only the forward pass is timed: no sampling, no detokenising.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import IK, IK_REPACKED, OURS
from engine.ipc.messages import Load, Partitioning, RuntimeName

Logits = NDArray[np.float32]
ALL_LOGITS = "llama.cpp, all logits"
CONTEXT_LIMIT = 2048
MAX_ROWS = 16


class Engine(ABC):
    """A loaded model with one prompt in its cache. The order of calls is: prompt, then rows, then steps; or answers,
    then steps."""

    variants: ClassVar[tuple[str, ...]]
    """Ways to run the same loaded weights that are measured apart."""

    @abstractmethod
    def __init__(self, model: Path, threads: int) -> None:
        """Load ``model``, in the format that the engine reads, to run on so many threads."""

    @abstractmethod
    def version(self) -> str:
        """Name and version of the library, for the report."""

    def select(self, variant: str) -> None:
        """Run as ``variant`` from now on."""
        if variant not in self.variants:
            raise ValueError(f"{type(self).__name__} has no variant {variant!r}")

    @abstractmethod
    def prompt(self, tokens: Sequence[int]) -> Logits:
        """Forget everything, prefill ``tokens`` in one chunk; logits after the last one, [vocabulary]."""

    @abstractmethod
    def rows(self, count: int) -> None:
        """Continue from the prompt with ``count`` rows, as a beam search does. Drops what was stepped before."""

    def answers(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget everything, prefill a text of its own for each row. Raises NotImplementedError where rows of texts of
        their own do not share a pass."""
        raise NotImplementedError

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> Logits:
        """One decoding step, one token per row; logits [rows, vocabulary]."""


class PrivatellmEngine(Engine):
    """The product on this machine's CPU, loaded as a chat loads it: what runs is what runs by default."""

    variants = (OURS,)
    runtime: ClassVar[RuntimeName] = "auto"
    partitioning: ClassVar[Partitioning] = "cpu"

    def __init__(self, model: Path, threads: int) -> None:
        from engine.runtimes import runtime_named
        from engine.runtimes.choosing import choose_runtime

        request = Load(
            id=1, model=str(model), runtime=self.runtime, partitioning=self.partitioning, cpu_threads=threads
        )
        runtime = runtime_named(choose_runtime(request, model).name)
        self.model = runtime.load(model, request, lambda stage, done, total, unit: None)
        self._base = self.model.start()
        self._rows = [self._base]

    def version(self) -> str:
        import importlib.metadata

        facts = self.model.facts
        return (
            f"{self.variants[0]} {importlib.metadata.version('privatellm')} "
            f"(trunk {facts.trunk or facts.runtime}, experts {facts.executor})"
        )

    def prompt(self, tokens: Sequence[int]) -> Logits:
        self._base = self.model.start()
        logits = self._base.extend(tokens)
        assert logits is not None
        return logits

    def rows(self, count: int) -> None:
        self._rows = [self._base.fan_out(count)]

    def answers(self, prompts: Sequence[Sequence[int]]) -> None:
        self._rows = [self.model.start() for _ in prompts]
        for rows, prompt in zip(self._rows, prompts, strict=True):
            rows.extend(prompt, want_logits=False)

    def step(self, tokens: Sequence[int]) -> Logits:
        if len(self._rows) == 1:
            return self._rows[0].step(tokens)
        found: list[Logits] = []
        most = self.model.rows_together
        for start in range(0, len(tokens), most):
            rows = self._rows[start : start + most]
            found += self.model.step_together(
                [(row, [token]) for row, token in zip(rows, tokens[start:], strict=False)]
            )
        return np.concatenate(found)


class PrivatellmTorchEngine(PrivatellmEngine):
    """The same with transformers' trunk on torch: what runs where the native trunk does not know a family."""

    variants = ("privatellm-torch",)
    runtime = "torch"


class PrivatellmGpuEngine(PrivatellmEngine):
    """The same with the trunk and, as far as they fit, the experts on a GPU."""

    variants = ("privatellm-gpu",)
    runtime = "torch"
    partitioning = "hybrid"


class TransformersEngine(Engine):
    """transformers' own model class, eager experts and its default, the model's forward called directly."""

    variants = ("transformers", "transformers-eager")
    _implementations: ClassVar[dict[str, str]] = {"transformers-eager": "eager"}

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", local_files_only=True, use_safetensors=True
        ).eval()
        self._default = self._model.config._experts_implementation
        self._base: Any = None
        self._cache: Any = None

    def version(self) -> str:
        import transformers

        return f"transformers {transformers.__version__} (default experts: {self._default})"

    def select(self, variant: str) -> None:
        super().select(variant)
        self._model.set_experts_implementation(self._implementations.get(variant, self._default))

    def _forward(self, tokens: list[list[int]], cache: Any) -> Logits:
        import torch

        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(tokens), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        logits: Logits = output.logits[:, -1].float().numpy()
        return logits

    def prompt(self, tokens: Sequence[int]) -> Logits:
        import transformers

        self._base = transformers.DynamicCache(config=self._model.config)
        logits: Logits = self._forward([list(tokens)], self._base)[0]
        return logits

    def rows(self, count: int) -> None:
        self._cache = copy.deepcopy(self._base)
        self._cache.batch_repeat_interleave(count)

    def step(self, tokens: Sequence[int]) -> Logits:
        return self._forward([[token] for token in tokens], self._cache)


@functools.cache
def _quiet() -> Any:
    """A log for llama.cpp that keeps nothing. The library goes on calling it after the engine is gone."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


class LlamaCppEngine(Engine):
    """llama.cpp through its C interface: W rows are W sequences in one batch, sharing the prompt's cache.

    Of a prompt's tokens that need no logits it leaves out the last layer's experts. That is a small saving in a deep
    model and half of the work in one of two layers, so prefill is also measured with the logits of every token asked
    for: too much work by the head, where the other is too little. What a deep model would show lies between the two.
    """

    name: ClassVar[str] = "llama.cpp"
    """The library, as messages call it."""
    variants: ClassVar[tuple[str, ...]] = ("llama.cpp", ALL_LOGITS)
    repacks: ClassVar[bool] = True
    """Whether weights of some formats are copied into another order while they are loaded, as is its default."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        llama_cpp.llama_log_set(_quiet(), None)
        own = {"n_gpu_layers": 0, "use_extra_bufts": self.repacks}
        self._open(llama_cpp, model, threads, own, {"kv_unified": True, "no_perf": True})
        self._memory = llama_cpp.llama_get_memory(self._context)

    def _open(self, api: Any, model: Path, threads: int, of_model: dict[str, int], of_context: dict[str, int]) -> None:
        """Load ``model`` through ``api``, with the settings that this library alone has, and make a context for it.

        Raises ValueError if the library cannot.
        """
        self._api = api
        api.llama_backend_init()
        model_parameters = api.llama_model_default_params()
        for setting, value in of_model.items():
            setattr(model_parameters, setting, value)
        self._model = api.llama_model_load_from_file(os.fsencode(model), model_parameters)
        if not self._model:
            raise ValueError(f"{self.name} cannot load {model}")
        parameters = api.llama_context_default_params()
        parameters.n_ctx = CONTEXT_LIMIT
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = MAX_ROWS
        parameters.n_threads = parameters.n_threads_batch = threads
        for setting, value in of_context.items():
            setattr(parameters, setting, value)
        self._context = api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ValueError(f"{self.name} cannot make a context for {model}")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(512, 0, 1)
        self._length = 0
        self._positions: list[int] = []
        self._all_logits = False

    def version(self) -> str:
        return f"llama.cpp (llama-cpp-python {self._api.__version__})"

    def select(self, variant: str) -> None:
        super().select(variant)
        self._all_logits = variant == ALL_LOGITS

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> Logits:
        """Run (token, position, sequence, wanted) entries; logits of those wanted, [wanted, vocabulary]."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        indices = [index for index, entry in enumerate(entries) if entry[3]]
        return np.stack([self._logits(index) for index in indices])

    def _logits(self, index: int) -> Logits:
        """The logits of entry ``index`` of the last pass, [vocabulary]."""
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, index), (self._vocabulary,)).copy()

    def prompt(self, tokens: Sequence[int]) -> Logits:
        self._clear()
        return self._prompt(tokens)

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._memory, True)

    def answers(self, prompts: Sequence[Sequence[int]]) -> None:
        self._clear()
        for sequence, prompt in enumerate(prompts):
            self._prompt(prompt, sequence)
        self._positions = [len(prompt) for prompt in prompts]

    def _prompt(self, tokens: Sequence[int], sequence: int = 0) -> Logits:
        self._length = len(tokens)
        last = len(tokens) - 1
        entries = [(token, index, sequence, self._all_logits or index == last) for index, token in enumerate(tokens)]
        logits: Logits = self._decode(entries)[-1]
        return logits

    def rows(self, count: int) -> None:
        for sequence in range(MAX_ROWS):
            self._api.llama_memory_seq_rm(self._memory, sequence, self._length if sequence == 0 else 0, -1)
        for sequence in range(1, count):
            self._api.llama_memory_seq_cp(self._memory, 0, sequence, 0, self._length)
        self._positions = [self._length] * count

    def step(self, tokens: Sequence[int]) -> Logits:
        placed = enumerate(zip(tokens, self._positions, strict=True))
        entries = [(token, position, sequence, True) for sequence, (token, position) in placed]
        self._positions = [position + 1 for position in self._positions]
        return self._decode(entries)


class LlamaCppInPlaceEngine(LlamaCppEngine):
    """llama.cpp on packed weights as they lie in the file."""

    variants = ("llama.cpp, in place",)
    repacks = False


class IkLlamaCppEngine(LlamaCppEngine):
    """ik_llama.cpp, a fork of llama.cpp with kernels of its own, through its older interface."""

    name = "ik_llama.cpp"
    variants = (IK,)
    repacks = False

    def __init__(self, model: Path, threads: int) -> None:
        from ik_llama_cpp import _ctypes_api as api

        self._open(api, model, threads, {"repack_tensors": self.repacks}, {})

    def version(self) -> str:
        from importlib.metadata import version

        return f"ik_llama.cpp (ik-llama-cpp-python {version('ik-llama-cpp-python')})"

    def _clear(self) -> None:
        self._api.llama_kv_cache_clear(self._context)

    def rows(self, count: int) -> None:
        cache = self._api._lib
        for sequence in range(MAX_ROWS):
            first = self._length if sequence == 0 else 0
            cache.llama_kv_cache_seq_rm(ctypes.c_void_p(self._context), sequence, first, -1)
        for sequence in range(1, count):
            cache.llama_kv_cache_seq_cp(ctypes.c_void_p(self._context), 0, sequence, 0, self._length)
        self._positions = [self._length] * count


class IkLlamaCppRepackedEngine(IkLlamaCppEngine):
    """The same with weights repacked while they are loaded, where it has another order for their format."""

    variants = (IK_REPACKED,)
    repacks = True


class MlxEngine(Engine):
    """mlx-lm's own model class. On Linux mlx is a platform for checking results, not for speed: it multiplies experts
    in float32 only, so that there it reads twice the bytes."""

    variants = ("mlx-lm",)

    def __init__(self, model: Path, threads: int) -> None:
        import json

        import mlx.core as mx
        from mlx_lm.utils import load_model

        from engine.runtimes.mlx.configuration import translate_config

        # mlx is told no number of threads: on the CPU its operations run in one stream.
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._model, _ = load_model(model, lazy=True, model_config=translate_config(config))
        if sys.platform != "darwin":
            self._model.set_dtype(mx.float32)
        self._base: list[Any] = []
        self._cache: list[Any] = []

    def version(self) -> str:
        from importlib.metadata import version

        import mlx.core as mx

        words = "" if sys.platform == "darwin" else ", float32"
        return f"mlx-lm {version('mlx-lm')} (mlx {version('mlx')}, {mx.default_device()}{words})"

    def _forward(self, tokens: list[list[int]], cache: list[Any]) -> Logits:
        import mlx.core as mx

        logits = self._model(mx.array(tokens), cache=cache)[:, -1].astype(mx.float32)
        mx.eval(logits)
        found: Logits = np.array(logits)
        return found

    def prompt(self, tokens: Sequence[int]) -> Logits:
        from mlx_lm.models.cache import make_prompt_cache

        self._base = make_prompt_cache(self._model)
        logits: Logits = self._forward([list(tokens)], self._base)[0]
        return logits

    def rows(self, count: int) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = make_prompt_cache(self._model)
        for ours, prompt in zip(self._cache, self._base, strict=True):
            keys, values, length = prompt.state
            ours.state = mx.repeat(keys, count, axis=0), mx.repeat(values, count, axis=0), length

    def step(self, tokens: Sequence[int]) -> Logits:
        return self._forward([[token] for token in tokens], self._cache)


KINDS: dict[str, type[Engine]] = {
    "privatellm": PrivatellmEngine,
    "privatellm-torch": PrivatellmTorchEngine,
    "privatellm-gpu": PrivatellmGpuEngine,
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
    "llama.cpp, in place": LlamaCppInPlaceEngine,
    IK: IkLlamaCppEngine,
    IK_REPACKED: IkLlamaCppRepackedEngine,
    "mlx-lm": MlxEngine,
}

DEFAULT = ("privatellm", "privatellm-torch", "transformers", "llama.cpp", "llama.cpp, in place")
"""What is compared unless something else is asked for."""

PACKED = ("privatellm", "privatellm-gpu", "llama.cpp", "llama.cpp, in place", IK, IK_REPACKED)
"""What reads packed files."""
