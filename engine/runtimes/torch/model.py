"""A loaded model of the torch runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from engine.errors import ModelError
from engine.ipc.messages import ModelFacts
from engine.models.formats.model_files import ModelFiles
from engine.moe.executor import Executor
from engine.moe.popularity import Popularity
from engine.moe.timing import Part, Phase, Recorder
from engine.pictures.shown import PicturePass
from engine.runtimes.common.model import LocalModel, LocalRows
from engine.runtimes.protocol import Fill, Logits, RowArray, RowPart, TokenRows
from engine.runtimes.torch.cache import AnyCache, KeyValueCache, contents_of, empty_cache, fill_cache
from engine.runtimes.torch.experts_module import RoutedExperts, ScaledInputBlock
from engine.runtimes.torch.gpu_memory_plan import SharedRoom
from engine.runtimes.torch.offload.devices import DeviceLost
from engine.runtimes.torch.offload.torch_tensors import kernels_for
from engine.runtimes.torch.packed_modules import numbers_kept_packed
from engine.runtimes.torch.picture_inputs import picture_inputs
from engine.runtimes.torch.steps_together import attention_of_texts, can_step_together

ROWS_TOGETHER = 16
"""Maximum rows of several texts in one step."""


class TorchTokenRows(LocalRows):
    """Rows of tokens in a cache of transformers. ``shared``: leading positions that all rows have in common, which
    reordering never touches."""

    _model: TorchModel

    def __init__(self, model: TorchModel, cache: AnyCache, rows: int = 1, shared: int = 0) -> None:
        super().__init__(model)
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

    def _pass(
        self,
        phase: Phase,
        tokens: list[list[int]],
        want_logits: bool,
        as_steps: bool = False,
        pictures: PicturePass | None = None,
    ) -> Logits | None:
        return self._model.run(phase, tokens, self._cache, want_logits, pictures)

    @property
    def plain_cache(self) -> KeyValueCache | None:
        """The cache, if a step of the rows needs nothing else."""
        return self._cache if isinstance(self._cache, KeyValueCache) and not self._pictures else None

    def _cut(self, length: int) -> None:
        """This costs nothing, and the buffers stay."""
        self._cache.position.length = length
        self._shared = min(self._shared, length)

    def _copied(self, rows: int) -> TorchTokenRows:
        """The prompt is copied once per row and never again."""
        with torch.inference_mode():
            cache = self._model.with_room(lambda: self._cache.rows_copied(rows))
            return TorchTokenRows(self._model, cache, rows, shared=self.length)

    def _contents(self, checkpoint: TokenRows | None) -> Sequence[RowArray]:
        assert checkpoint is None
        return contents_of(self._cache)

    def _move(self, parents: Sequence[int], changed: Sequence[int]) -> int:
        device = self._model.device
        with torch.inference_mode():
            return self._cache.move(
                torch.tensor(changed, device=device),
                torch.tensor([parents[row] for row in changed], device=device),
                self._shared,
            )


Done = TypeVar("Done")


class TorchModel(LocalModel):
    """A model whose trunk transformers runs.

    Torch keeps a trunk that is not packed in its own memory, so that passes read the files of the experts only.
    """

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
        packed = bool(numbers_kept_packed(module))
        mapped = files.mapped_files if packed else getattr(files.experts, "mapped_files", ())
        super().__init__(facts, recorder, mapped, files.repacked)
        self._module = module
        self._config = config
        self._convolves = any(isinstance(each, torch.nn.Conv1d) for each in module.modules())
        self._hooks = TimingHooks(layer_parts(decoder_layers(module)), recorder, device)
        self.device = device
        self.executor = executor
        self._shared = shared
        self._logits = logits
        self._steps_together = can_step_together(config, empty_cache(config))
        module.get_output_embeddings().register_forward_pre_hook(compact_input)

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
        self.check_files()
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
        super().close()
        self._hooks.match()
        self._module = None
        if self.executor is not None:
            self.executor.backend.close()
        self.executor = self._shared = None

    @property
    def takes_pictures(self) -> bool:
        return self._logits

    def run(
        self,
        phase: Phase,
        tokens: list[list[int]],
        cache: AnyCache,
        want_logits: bool,
        pictures: PicturePass | None = None,
    ) -> Logits | None:
        """See :meth:`engine.runtimes.common.model.LocalRows._pass`; ``cache`` is that of the rows."""
        with self.one_pass(phase, tokens):
            self._hooks.match()
            check = self.between_layers if phase == "prefill" else None
            layers = decoder_layers(self._module)
            with checked(layers, check), experts_of_last(layers, int(want_logits) if phase == "prefill" else None):
                start = cache.position.length
                positions = torch.arange(start, start + len(tokens[0]), device=self.device).expand(len(tokens), -1)
                logits = self.with_room(lambda: self._forward(tokens, cache, positions, want_logits, pictures))
        cache.commit(len(tokens[0]))
        return logits

    @property
    def rows_together(self) -> int:
        return ROWS_TOGETHER if self._steps_together else 1

    def step_together(self, steps: Sequence[tuple[TokenRows, Sequence[int]]]) -> Sequence[Logits]:
        caches: list[KeyValueCache] = []
        for rows, tokens in steps:
            assert isinstance(rows, TorchTokenRows)
            if len(tokens) != rows.rows:
                raise ValueError(f"{len(tokens)} tokens for {rows.rows} rows")
            if rows.plain_cache is not None:
                caches.append(rows.plain_cache)
        if not self._steps_together or len(caches) < len(steps):
            return super().step_together(steps)
        counts = [len(tokens) for _, tokens in steps]
        column = [[token] for _, tokens in steps for token in tokens]
        starts = [[cache.position.length] for cache, count in zip(caches, counts, strict=True) for _ in range(count)]
        with self.one_pass("decode", column):
            self._hooks.match()
            with attention_of_texts(base_of(self._module).config, caches, counts) as cache:
                logits = self.with_room(
                    lambda: self._forward(column, cache, torch.tensor(starts, device=self.device), True, None)
                )
        for each in caches:
            each.commit(1)
        assert logits is not None
        return np.split(logits, np.cumsum(counts)[:-1])

    def with_room(self, work: Callable[[], Done]) -> Done:
        """The result of ``work``. If the GPU's memory runs out, the experts there make room and it runs again."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                if self._shared is None or not self._shared.backend.make_room():
                    raise

    def _forward(
        self,
        tokens: list[list[int]],
        cache: Cache,
        positions: torch.Tensor,
        want_logits: bool,
        pictures: PicturePass | None,
    ) -> Logits | None:
        with torch.inference_mode(), kernels_for(len(tokens) * len(tokens[0]), self._convolves):
            inputs: dict[str, Any] = {
                "input_ids": torch.tensor(tokens, device=self.device),
                "position_ids": positions,
                "past_key_values": cache,
                "use_cache": True,
            }
            if pictures is not None and self.pictures is not None:
                inputs |= picture_inputs(base_of(self._module), inputs, pictures, self.pictures.sight)
            if not (want_logits and self._logits):
                # The head is left out: for a large vocabulary it costs as much as several layers.
                base_of(self._module)(**inputs)
                return np.empty((len(tokens), 0), np.float32) if want_logits else None
            logits = self._module(**inputs, logits_to_keep=1).logits[:, -1]
            array: Logits = logits.float().cpu().numpy()
            return array


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
    count = module.config.num_hidden_layers
    lists = (child for child in base_of(module).children() if isinstance(child, nn.ModuleList) and len(child) == count)
    found = next(lists, None)
    if found is None:
        raise ModelError(f"The layers of a {module.config.model_type} model were not found, so that it cannot be run.")
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
