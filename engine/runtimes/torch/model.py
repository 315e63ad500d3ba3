"""A loaded model of the torch runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import ModelFiles
from engine.moe.executor import Executor
from engine.moe.kernels.file_guard import FileGuard
from engine.moe.popularity import Popularity
from engine.moe.timing import Part, Phase, Recorder
from engine.runtimes.protocol import Fill, LoadedModel, Logits, RowContents, RowPart, TokenRows
from engine.runtimes.torch.cache import AnyCache, contents_of, empty_cache, fill_cache
from engine.runtimes.torch.experts_module import RoutedExperts, ScaledInputBlock
from engine.runtimes.torch.gpu_memory_plan import SharedRoom
from engine.runtimes.torch.offload.devices import DeviceLost
from engine.runtimes.torch.offload.torch_tensors import kernels_for
from engine.runtimes.torch.packed_modules import numbers_kept_packed


class TorchPasses(Protocol):
    """The part of a model that its rows use."""

    device: torch.device

    @property
    def facts(self) -> ModelFacts: ...

    def run(self, phase: Phase, tokens: list[list[int]], cache: AnyCache, want_logits: bool) -> Logits | None: ...

    def with_room(self, work: Callable[[], Done]) -> Done:
        """The result of ``work``. If it runs out of memory, experts make room and it runs again."""
        ...


class TorchTokenRows(TokenRows):
    """Rows of tokens in a cache of transformers. ``shared``: leading positions that all rows have in common, which
    reordering never touches."""

    def __init__(self, model: TorchPasses, cache: AnyCache, rows: int = 1, shared: int = 0) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._shared = shared

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def length(self) -> int:
        return self._cache.position.length

    @property
    def can_truncate(self) -> bool:
        return self._cache.can_truncate

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        """Prefill ``tokens``. Returns the logits after the last one, [vocabulary], float32."""
        if self._rows != 1:
            raise ValueError(f"extend works on one row, not on {self._rows}")
        if not tokens:
            raise ValueError("extend needs at least one token")
        logits = self._model.run("prefill", [list(tokens)], self._cache, want_logits)
        return None if logits is None else logits[0]

    def step(self, tokens: Sequence[int]) -> Logits:
        """Decode one token per row; logits [rows, vocabulary], float32."""
        if len(tokens) != self._rows:
            raise ValueError(f"{len(tokens)} tokens for {self._rows} rows")
        logits = self._model.run("decode", [[token] for token in tokens], self._cache, True)
        assert logits is not None
        return logits

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens. This costs nothing, and the buffers stay."""
        if self._rows != 1:
            raise ValueError(f"truncate works on one row, not on {self._rows}")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        if length == self.length:
            return
        if not self.can_truncate:
            raise ModelError(f"The {self._model.facts.family} family keeps a state that cannot be cut back.")
        self._cache.position.length = length
        self._shared = min(self._shared, length)

    def fan_out(self, rows: int) -> TorchTokenRows:
        """``rows`` copies of this row. The prompt is copied once per row and never again."""
        if self._rows != 1:
            raise ValueError(f"fan_out works on one row, not on {self._rows}")
        if rows < 1:
            raise ValueError(f"{rows} rows cannot be made")
        with torch.inference_mode():
            cache = self._model.with_room(lambda: self._cache.rows_copied(rows))
            return TorchTokenRows(self._model, cache, rows, shared=self.length)

    def contents(self, checkpoint: TokenRows | None = None) -> RowContents | None:
        """The contents of the only row, which has at least one token."""
        assert checkpoint is None
        return contents_of(self._cache)

    def reorder(self, parents: Sequence[int]) -> int:
        """Make row i a copy of row ``parents[i]``. Returns the bytes moved (0 if every row keeps its place)."""
        if len(parents) != self._rows or not all(0 <= parent < self._rows for parent in parents):
            raise ValueError(f"{list(parents)} are not parents of {self._rows} rows")
        changed = [row for row, parent in enumerate(parents) if row != parent]
        if not changed:
            return 0
        device = self._model.device
        with torch.inference_mode():
            return self._cache.move(
                torch.tensor(changed, device=device),
                torch.tensor([parents[row] for row in changed], device=device),
                self._shared,
            )


Done = TypeVar("Done")


class TorchModel(LoadedModel):
    """A model whose trunk transformers runs. One thread at a time."""

    def __init__(
        self,
        module: Any,
        config: Any,
        facts: ModelFacts,
        recorder: Recorder,
        device: torch.device,
        files: ModelFiles,
        executor: Executor[torch.Tensor] | None,
        shared: SharedRoom | None = None,
        logits: bool = True,
    ) -> None:
        """``logits``: see :class:`engine.runtimes.protocol.RingPlace`."""
        self._module = module
        self._config = config
        self._facts = facts
        self._recorder = recorder
        self._files: ModelFiles | None = files
        self._in_place = files.mapped_files if numbers_kept_packed(module) else ()
        self._guard = FileGuard(self.mapped_files)
        self._convolves = any(isinstance(each, torch.nn.Conv1d) for each in module.modules())
        self._hooks = TimingHooks(layer_parts(decoder_layers(module)), recorder, device)
        self.device = device
        self.executor = executor
        self._shared = shared
        self._logits = logits
        self.between_layers = None
        module.get_output_embeddings().register_forward_pre_hook(compact_input)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def mapped_files(self) -> tuple[FileMapping, ...]:
        """Mapped files of the experts, and of a packed trunk. Torch keeps any other trunk in its own memory."""
        if self._files is None:
            return ()
        return self._in_place or getattr(self._files.experts, "mapped_files", ())

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    @property
    def experts_on_gpu(self) -> Mapping[int, Collection[int]]:
        return {} if self._shared is None else self._shared.backend.resident_experts()

    @property
    def popularity(self) -> Popularity | None:
        return None if self.executor is None else self.executor.popularity

    def resize_experts(self, nbytes: int | None) -> ModelFacts:
        if self._shared is None or self._module is None:
            raise ModelError(
                f"The experts of {self._facts.name} are not shared with a GPU; load it with partitioning hybrid.",
                kind="bad-input",
            )
        found = self._shared.resize(nbytes)
        description = self._facts.executor if self.executor is None else self.executor.description
        self._facts = msgspec.structs.replace(self._facts, gpu_expert_bytes=found, executor=description)
        return self._facts

    def memory_for_rows(self) -> int | None:
        if self._shared is None:
            return None
        with suppress(DeviceLost):
            return self._shared.backend.memory_for_trunk()
        return None

    def start(self) -> TorchTokenRows:
        """An empty cache of one row. Raises ModelError if the model's files were changed since it was loaded."""
        if self._files is None:
            raise ModelError(f"The model {self._facts.name} is closed; load it again.", kind="internal")
        self._check_files()
        return TorchTokenRows(self, empty_cache(self._config))

    @property
    def keeps_contents(self) -> bool:
        return True

    def restored(
        self, length: int, begun: int, parts: Sequence[RowPart], fill: Fill
    ) -> tuple[TorchTokenRows, TokenRows | None]:
        if begun:
            raise ValueError("rows of torch have no checkpoints")
        cache = empty_cache(self._config)
        fill_cache(cache, length, parts, fill, self.device)
        return TorchTokenRows(self, cache), None

    def close(self) -> None:
        """Drop the weights and the mappings of the files. The model cannot run afterwards."""
        self._recorder.enabled = False
        self._hooks.match()
        self._module = None
        self._guard.close()
        self._files = None
        if self.executor is not None:
            self.executor.backend.close()
        self.executor = self._shared = None

    def run(self, phase: Phase, tokens: list[list[int]], cache: AnyCache, want_logits: bool) -> Logits | None:
        """Run one forward pass over ``tokens`` [rows][positions] after the contents of ``cache``.

        Returns the logits after the last position, float32 [rows, vocabulary] ([rows, 0] at a place in a ring that does
        not need them), or None. A pass that raises leaves the cache unchanged. Raises ModelError if the experts' files
        were changed; results computed from them are discarded.
        """
        if self._module is None:
            raise ModelError(f"The model {self._facts.name} is closed; load it again.", kind="internal")
        self._check_ids(tokens)
        if phase == "prefill":
            self._check_files()
        self._hooks.match()
        measured = self._recorder.enabled
        count = len(tokens[0])
        if measured:
            self._recorder.begin_step(phase, len(tokens) * count if phase == "prefill" else 1)
        check = self.between_layers if phase == "prefill" else None
        layers = decoder_layers(self._module)
        try:
            with checked(layers, check), experts_of_last(layers, int(want_logits) if phase == "prefill" else None):
                logits = self.with_room(lambda: self._forward(tokens, cache, want_logits))
        finally:
            if measured:
                self._recorder.end_step()
        self._check_files()
        cache.commit(count)
        return logits

    def _check_files(self) -> None:
        """Raises ModelError if a mapped file was changed since it was mapped, or could not be read."""
        if self._files is None:
            return
        for mapped in self._in_place:
            mapped.check_unchanged()
        if self._files.experts is not None and not self._in_place:
            self._files.experts.check_unchanged()
        self._guard.check()

    def with_room(self, work: Callable[[], Done]) -> Done:
        """The result of ``work``. If the GPU's memory runs out, the experts there make room and it runs again."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                if self._shared is None or not self._shared.backend.make_room():
                    raise

    def _forward(self, tokens: list[list[int]], cache: AnyCache, want_logits: bool) -> Logits | None:
        start = cache.position.length
        with torch.inference_mode(), kernels_for(len(tokens) * len(tokens[0]), self._convolves):
            inputs = {
                "input_ids": torch.tensor(tokens, device=self.device),
                "position_ids": torch.arange(start, start + len(tokens[0]), device=self.device)[None],
                "past_key_values": cache,
                "use_cache": True,
            }
            if not (want_logits and self._logits):
                # The head is left out: for a large vocabulary it costs as much as several layers.
                base_of(self._module)(**inputs)
                return np.empty((len(tokens), 0), np.float32) if want_logits else None
            logits = self._module(**inputs, logits_to_keep=1).logits[:, -1]
            array: Logits = logits.float().cpu().numpy()
            return array

    def _check_ids(self, tokens: list[list[int]]) -> None:
        vocabulary = self._facts.vocabulary
        for row in tokens:
            if min(row) < 0 or max(row) >= vocabulary:
                wrong = next(token for token in row if not 0 <= token < vocabulary)
                raise ModelError(
                    f"Token id {wrong} is outside the model's vocabulary of {vocabulary}.", kind="bad-input"
                )


def compact_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies the last position of a prompt, [rows, 1, hidden], which still has the strides of the whole prompt.

    With those strides, and weights without gradients, torch's matmul would choose a batched product that first copies
    the whole head.
    """
    return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])


@contextmanager
def checked(layers: nn.ModuleList, check: Callable[[], None] | None) -> Iterator[None]:
    """Call ``check`` before each layer; what it raises passes through the forward pass."""
    hooks = [layer.register_forward_pre_hook(lambda *_: check()) for layer in layers] if check is not None else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def experts_of_last(layers: nn.ModuleList, positions: int | None) -> Iterator[None]:
    """Limits the last layer's experts to the last ``positions`` of a prompt (None: all).

    For the other positions nothing after that layer's keys and values is used.
    """
    if positions is None:
        yield
        return
    modules = [module for module in layers[-1].modules() if isinstance(module, RoutedExperts | ScaledInputBlock)]
    for module in modules:
        module.last = positions
    try:
        yield
    finally:
        for module in modules:
            module.last = None


def base_of(module: Any) -> Any:
    """The model without its head. llama4's text model states another prefix than the attribute it uses."""
    return module.model if module.base_model is module else module.base_model


def decoder_layers(module: Any) -> nn.ModuleList:
    """The decoder layers of a model of transformers, whatever name the family gives them."""
    base = base_of(module)
    layers = getattr(base, "layers", None)
    found: nn.ModuleList = base.blocks if layers is None else layers
    return found


# --- hooks that measure a layer --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerParts:
    """The measured modules of one decoder layer."""

    layer: nn.Module
    attention: nn.Module | None
    router: nn.Module | None


def layer_parts(layers: nn.ModuleList) -> list[LayerParts]:
    """The measured modules of each decoder layer. A router is a module of that name in a layer with routed experts."""
    parts = []
    for layer in layers:
        modules = list(layer.modules())
        has_experts = any(isinstance(module, RoutedExperts | ScaledInputBlock) for module in modules)
        parts.append(
            LayerParts(
                layer=layer,
                attention=_first(modules, lambda name: name.endswith("Attention")),
                router=_first(modules, lambda name: name.endswith("Router")) if has_experts else None,
            )
        )
    return parts


def _first(modules: list[nn.Module], fits: Callable[[str], bool]) -> nn.Module | None:
    return next((module for module in modules if fits(type(module).__name__)), None)


@dataclass
class TimingHooks:
    """Measures the layers of ``parts`` into ``recorder``. :meth:`match` follows ``recorder.enabled``."""

    parts: list[LayerParts]
    recorder: Recorder
    device: torch.device
    handles: list[RemovableHandle] = field(default_factory=list)

    def match(self) -> None:
        """Install or remove the hooks, so that they exist exactly while the recorder is enabled."""
        if self.recorder.enabled and not self.handles:
            for index, parts in enumerate(self.parts):
                self._install(index, parts)
        elif self.handles and not self.recorder.enabled:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()

    def _install(self, index: int, parts: LayerParts) -> None:
        if parts.attention is not None:
            self._measure(parts.attention, index, "attention")
        if parts.router is not None:
            self._measure(parts.router, index, "router")
        recorder = self.recorder
        start = inside = 0.0

        def before(module: nn.Module, inputs: Any) -> None:
            nonlocal start, inside
            inside = recorder.measured(index)
            start = self._now()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            total = self._now() - start
            recorder.add(index, "other", max(0.0, total - (recorder.measured(index) - inside)))

        self.handles.append(parts.layer.register_forward_pre_hook(before))
        self.handles.append(parts.layer.register_forward_hook(after))

    def _measure(self, module: nn.Module, index: int, part: Part) -> None:
        start = 0.0

        def before(module: nn.Module, inputs: Any) -> None:
            nonlocal start
            start = self._now()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self.recorder.add(index, part, self._now() - start)

        self.handles.append(module.register_forward_pre_hook(before))
        self.handles.append(module.register_forward_hook(after))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.recorder.clock()
