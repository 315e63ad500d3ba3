"""The hybrid backend: one machine's GPU and CPU share the experts of every layer.

Per layer: the routes come to the host; the policy says for each active expert whether it runs on the GPU where it lies,
on the GPU after its weights were copied there, or on the CPU. Copies and the GPU's experts are begun first and run by
themselves while the CPU does its part; then the CPU's results follow, and all are weighted and added in the order of
the routes on the trunk's device. So neither the policy nor what the cache holds changes a sum by more than GPU and CPU
differ in rounding.

Where all experts of a layer are on the GPU, there is nothing to decide: few tokens find theirs there, without the host,
which is a step ahead meanwhile. Their routes are counted once the step is over.

In a ring the trunk is on the CPU, as on machines without a GPU: its bits must be the same on all of them. Rows go to
the device only for the experts that it runs, and their results come back to the host, where they travel from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.moe.timing import Recorder
from engine.planning.calibration import Calibration
from engine.planning.policy import FEW_TOKENS, ActiveExpert, Policy
from engine.runtimes.torch.offload.device_cache import DeviceCache
from engine.runtimes.torch.offload.device_check import DeviceCheck
from engine.runtimes.torch.offload.device_side import (
    DeviceSide,
    HostShare,
    LayerStep,
    SortedRoutes,
    host_share,
    sort_routes,
)
from engine.runtimes.torch.offload.devices import DeviceLost, ExpertDevice, LayerWork, OutOfDeviceMemory, said_slower
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.slab_cache import Key, SlabCache
from engine.runtimes.torch.offload.tensor_backend import TensorBackend, weighted_sum
from engine.system.free_memory import RESERVE_BYTES, memory

FEW_ROUTES = 64
"""Maximum routes that are run one by one on the GPU. With more of them, grouping by expert is faster."""
TWICE_BYTES = 1 << 28
"""Maximum bytes of experts that running routes one by one may read more than once: some tenths of a millisecond."""
WORTH_EVERY = 4
"""Sampling interval of the check whether the cache pays, in layers. The check costs as much as a decision."""


@dataclass(frozen=True)
class _Pending:
    """A layer whose device may still be working."""

    step: LayerStep
    started: float
    ended: float
    cpu: tuple[float, float] | None
    work: LayerWork | None
    without_s: float | None


@dataclass(frozen=True)
class _RoutedThere:
    """A layer whose routes the GPU looked up by itself. ``experts`` [tokens, k] are on the device."""

    layer: int
    experts: torch.Tensor
    work: LayerWork


@dataclass(frozen=True)
class _WholeLayer:
    """Facts about a layer that hold until the cache changes.

    ``there``: see :meth:`engine.runtimes.torch.offload.devices.ExpertDevice.whole_layer`; None if some of its experts
    are not there.
    """

    changes: int
    there: Any


@dataclass(frozen=True)
class _CpuPart:
    """The part of a layer that the CPU ran, and its beginning and end."""

    share: HostShare
    results: torch.Tensor
    seconds: tuple[float, float]


class HybridBackend(TensorBackend):
    """See the module, and :class:`engine.moe.backend.ExpertBackend`. One thread at a time.

    ``cpu`` runs the CPU's part. ``on_device``: the trunk is where the device is. Until :meth:`open_cache` nothing is
    kept on the device. ``recorder`` gets counts and notices.
    """

    wait_part = "wait"

    def __init__(
        self,
        host: HostExperts,
        device: ExpertDevice,
        cpu: TensorBackend,
        gates: Mapping[int, FamilyGate],
        policy: Policy,
        calibration: Calibration,
        dtype: torch.dtype,
        recorder: Recorder,
        experts_per_token: int = 1,
        on_device: bool = True,
    ) -> None:
        experts = host.experts
        super().__init__(experts, dtype)
        self._host = host
        self._device = device
        self._cpu = cpu
        self._policy = policy
        self._calibration = calibration
        self._on_device = on_device
        self._recorder = recorder
        self._layers = experts.layers
        self._count = experts.count
        self._memory = DeviceCache(host, device, policy, recorder.notice, experts_per_token)
        self._cache = self._memory.slabs
        self._side = DeviceSide(host, device, gates, self._memory, policy.cache, recorder)
        self._gates = gates
        self._pending: _Pending | None = None
        self._routed_there: list[_RoutedThere] = []
        self._whole: dict[int, _WholeLayer] = {}
        self._worth = CacheWorth()
        # Baselines are measured as they are.
        self._judged = policy.cache.kind in ("lru", "lfru") and policy.name != "lru-offload"
        self._uses_cache = True
        self._lost = False
        self._trusted = True
        self._steps = 0
        recorder.share(self)

    @property
    def description(self) -> str:
        if self._lost or not self._trusted:
            what = "the GPU is lost" if self._lost else "the GPU's results differ"
            return f"hybrid ({what}; CPU: {self._cpu.description})"
        there = f"{self._memory.share:.0%} of the experts on {self._device.name}"
        return f"hybrid ({self._policy.name}; {there}; CPU: {self._cpu.description})"

    @property
    def gpu_expert_bytes(self) -> int:
        """Bytes of device memory that keeps experts between steps."""
        return self._memory.nbytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory for weights that are being copied."""
        return len(self._memory.staging) * self._host.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory of one expert."""
        return self._host.slot_bytes

    @property
    def cache(self) -> SlabCache:
        """The contents of the device, read-only."""
        return self._cache

    def resident(self) -> list[list[int]]:
        return [self._cache.resident(layer) if self._uses_cache else [] for layer in self._layers]

    # --- the device's memory --------------------------------------------------------------------------------------

    def lock_pages(self, progress: ProgressCallback, most: int | None = None) -> list[str]:
        """Lock the host's pages that hold experts. Returns a line for the person if that is refused.

        ``most``: bytes of memory that may be taken; None: all that is free.
        """
        available = None if most is None else min(most, memory().free)
        return self._host.lock(self._device.lock_pages, self._device.unlock_pages, progress, available)

    def prepare_device(self) -> list[str]:
        """Prepare the device for these experts. Returns a line for the person if they are slower than possible."""
        slower = self._device.prepare([self._host.layout(layer) for layer in self._layers], self.dtype)
        return [] if slower is None else [said_slower(self._device.name, slower)]

    def open_cache(
        self, nbytes: int, order: Sequence[Key], reserve: int, progress: ProgressCallback = lambda *_: None
    ) -> list[str]:
        """See :meth:`engine.runtimes.torch.offload.device_cache.DeviceCache.open`."""
        return self._memory.open(nbytes, order, reserve, progress)

    def resident_experts(self) -> dict[int, list[int]]:
        """The experts that are on the device now, by layer."""
        return {layer: self._cache.resident(layer) for layer in self._layers}

    def check_results(self, progress: ProgressCallback) -> list[str]:
        """See :class:`engine.runtimes.torch.offload.device_check.DeviceCheck`.

        A device whose results differ from the CPU's gets no more experts. Returns a line for the person if anything was
        wrong. Raises ModelError if the device is lost.
        """
        check = DeviceCheck(self._host, self._device, self._cpu, self._gates, self._cache, self.dtype)
        try:
            trusted, lines = check.run(self._whole_layer, progress)
            if not trusted:
                self._trusted = False
                self._memory.switch_off()
                self._memory.close()
                self._host.close()
        except DeviceLost as error:
            raise ModelError(f"{self._device.name} stopped working ({error}); load the model again.") from error
        return lines

    def resize(self, nbytes: int) -> int:
        """Give the cache ``nbytes`` of device memory while the model is loaded. Returns its actual bytes.

        A cache that was switched off gets another chance. Raises DeviceLost, ModelError if the device's results are not
        trusted.
        """
        if self._lost:
            raise DeviceLost("all experts run on the CPU")
        if not self._trusted:
            raise ModelError(
                f"{self._device.name} gets no experts, because its results differ from the CPU's; load the model again "
                "to give it another try."
            )
        self.settle()
        self._uses_cache, self._worth = True, CacheWorth(self._worth.window)
        return self._memory.resize(nbytes)

    def memory_for_trunk(self) -> int | None:
        """Bytes of device memory available to the trunk's work, including the experts', which make room for it; None if
        the trunk is not on the device."""
        if self._lost or not self._holds_trunk:
            return None
        return max(0, self._device.memory()[0] + self.gpu_expert_bytes - RESERVE_BYTES)

    def make_room(self) -> bool:
        """Return half of the experts' memory, because the device's memory ran out. Returns whether there was any."""
        return not self._lost and self._memory.shrink(-(-self._cache.capacity // 2))

    def close(self) -> None:
        """Return all memory. The executor cannot be used afterwards."""
        self._recorder.share(None)
        if not self._lost:
            self._memory.close()
        self._host.close()

    # --- running --------------------------------------------------------------------------------------------------

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype in which results are weighted, the same as on the CPU alone: torch rounds an expert's result, the
        kernels do not."""
        return self._cpu.result_dtype

    def run(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool = False,
    ) -> torch.Tensor:
        """See :class:`engine.moe.backend.ExpertBackend`. The sum is made in float32 and rounded once.

        Raises ModelError if the device is lost and the trunk with it, torch.OutOfMemoryError if there is no room on it.
        """
        if not scale_input:
            return self._run(layer, hidden, indices, weights)
        tokens, k = indices.shape
        routed = self._run(layer, _scaled(hidden, weights), indices.reshape(-1, 1), None)
        return routed.view(tokens, k, -1).sum(dim=1, dtype=torch.float32).to(hidden.dtype)

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`: the sum of the CPU."""
        return self._cpu.combined(routed, tokens, weights)

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`. If the device fails, the CPU runs
        its experts."""
        if input_weights is not None:
            return self.outputs(layer, _scaled(hidden, input_weights), indices.reshape(-1, 1))
        self._count_tokens(layer, hidden)
        routes = sort_routes(indices, self._count)
        if self._trusted and not self._lost and routes.segments:
            try:
                return self._from_host(layer, routes, hidden)
            except DeviceLost as error:
                self._lose(error)
            except OutOfDeviceMemory:
                self.make_room()
        self._count_routes(layer, routes)
        return self._cpu.outputs(layer, hidden, indices)

    def wait(self, result: torch.Tensor | None = None) -> None:
        """See :class:`engine.moe.backend.ExpertBackend`."""
        if not self._lost:
            try:
                self._device.synchronize()
            except DeviceLost as error:
                self._lose(error)

    @property
    def _holds_trunk(self) -> bool:
        return self._on_device and self._device.holds_trunk

    def _run(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if not hidden.shape[0]:
            return torch.zeros_like(hidden)
        self._count_tokens(layer, hidden)
        if self._trusted and not self._lost:
            try:
                return self._weighted(self._on_trunk(layer, hidden, indices), hidden, weights)
            except DeviceLost as error:
                self._lose(error)
            except OutOfDeviceMemory as error:  # whoever runs the trunk may make room and try again
                raise torch.OutOfMemoryError(str(error)) from error
        indices = indices.cpu()
        self._count_routes(layer, sort_routes(indices, self._count))
        routed = self._cpu.outputs(layer, hidden.cpu(), indices).to(hidden.device)
        return self._weighted(routed, hidden, weights)

    def _weighted(self, routed: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """The weighted sum [tokens, hidden] of ``routed`` [routes, hidden], added in the order of each token's
        routes."""
        return weighted_sum(routed, hidden.shape[0], weights, self.result_dtype).to(hidden.dtype)

    # --- a layer --------------------------------------------------------------------------------------------------

    def _on_trunk(self, layer: int, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The result of each route's expert, float32 [tokens * k, hidden], all on the trunk's device."""
        device, movement = self._device, self._recorder.movement
        self._begin_layer(layer)
        whole = self._whole_layer(layer) if self._few(layer, indices.numel()) else None
        if whole is not None:
            return self._run_there(layer, whole, hidden, indices)
        started = device.now()
        # Few hidden states come to the host together with the routes: one wait instead of two.
        few = hidden.shape[0] <= FEW_TOKENS
        fetched = device.download(indices, hidden) if few else device.download(indices)
        movement.activation_bytes += fetched[1].nbytes if few else 0
        on_host = fetched[1] if few else None
        # The trunk has waited for what the device did in the layer before.
        self.settle()
        step = self._decide(layer, sort_routes(fetched[0], self._count), few)
        with self._abandoned_on_error(step):
            out, back = None, None
            if self._side.begin_copies(step, self._uses_cache):
                # The token of each route, and its place among the results, in one transfer.
                routes = step.routes
                places = device.upload(torch.stack((routes.order // routes.k, routes.back)))
                out, back = self._side.begin_experts(step, hidden.index_select(0, places[0])), places[1]
            cpu = self._run_cpu(step, hidden, on_host)
            work = device.end() if out is not None else None
            step.rows = None
            if out is None or back is None:  # all of it on the CPU, and so all tokens: in the order of the routes
                assert cpu is not None
                movement.activation_bytes += cpu.results.nbytes
                routed = device.upload(cpu.results)
            else:
                if cpu is not None:
                    results = cpu.results.index_select(0, cpu.share.rows)
                    movement.activation_bytes += results.nbytes
                    out.index_copy_(0, device.upload(cpu.share.places), device.upload(results))
                routed = out.index_select(0, back)
            self._finish(step, started, cpu, work)
        return routed

    def _few(self, layer: int, routes: int) -> bool:
        twice = max(0, routes - self._count) * self._host.layout(layer).size
        return routes <= FEW_ROUTES and twice <= TWICE_BYTES

    def _whole_layer(self, layer: int) -> Any:
        """The device's argument for running any expert of ``layer``; None if they are not all there, or it cannot."""
        if not self._uses_cache or self._side.arriving(layer):
            return None
        remembered = self._whole.get(layer)
        if remembered is None or remembered.changes != self._cache.changes:
            slots = self._cache.whole_layer(layer)
            there = None
            if slots is not None:
                there = self._device.whole_layer(slots, self._host.layout(layer), self.dtype)
            remembered = self._whole[layer] = _WholeLayer(self._cache.changes, there)
        return remembered.there

    def _run_there(self, layer: int, whole: Any, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        routed, work = self._device.run_routes(whole, self._host.layout(layer), self._gates[layer], hidden, indices)
        self._routed_there.append(_RoutedThere(layer, indices, work))
        if self._recorder.enabled:  # which looks at the counts after every layer
            self._count_routed_there()
        return routed

    def _count_routed_there(self) -> None:
        """Count the routes that only the device knows so far, and their time. Waits for the device."""
        done, self._routed_there = self._routed_there, []
        movement = self._recorder.movement
        for finished, experts in zip(done, self._on_host([finished.experts for finished in done]), strict=True):
            routes = sort_routes(experts, self._count)
            self._count_routes(finished.layer, routes)
            self._cache.touch(finished.layer, routes.segments)
            movement.hits += len(routes.segments)
            begun, ended = finished.work.interval()
            movement.gpu_s += ended - begun
            movement.total_s += ended - begun

    def _on_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of small tensors on the host, in one transfer if they are of one kind."""
        if len({tensor.shape for tensor in tensors}) == 1:
            return list(self._device.download(torch.stack(tensors))[0])
        return self._device.download(*tensors)

    def _from_host(self, layer: int, routes: SortedRoutes, hidden: torch.Tensor) -> torch.Tensor:
        """The result of each route's expert for ``hidden`` on the host, to the host. Rows of routes with -1 are
        zero."""
        device, movement = self._device, self._recorder.movement
        self._begin_layer(layer)
        self.settle()
        started = device.now()
        step = self._decide(layer, routes, hidden.shape[0] <= FEW_TOKENS)
        with self._abandoned_on_error(step):
            out = None
            if self._side.begin_copies(step, self._uses_cache):
                rows = hidden.index_select(0, routes.order // routes.k)
                movement.activation_bytes += rows.nbytes
                out = self._side.begin_experts(step, device.upload(rows))
            cpu = self._run_cpu(step, hidden, hidden)
            work = device.end() if out is not None else None
            if out is None:
                assert cpu is not None
                routed = cpu.results
            else:
                (outputs,) = device.download(out)
                movement.activation_bytes += outputs.nbytes
                if cpu is not None:
                    outputs[cpu.share.places] = cpu.results.index_select(0, cpu.share.rows)
                routed = torch.zeros(routes.tokens * routes.k, hidden.shape[1])
                routed[routes.order] = outputs
            step.rows = None
            self._finish(step, started, cpu, work)
        return routed

    def _count_tokens(self, layer: int, hidden: torch.Tensor) -> None:
        if layer == self._layers[0]:
            self._recorder.movement.tokens += hidden.shape[0]

    def _begin_layer(self, layer: int) -> None:
        if layer == self._layers[0]:
            self._steps += 1
            self._count_routed_there()
            self._memory.watch()
            self._side.next_step()

    def _run_cpu(self, step: LayerStep, hidden: torch.Tensor, on_host: torch.Tensor | None) -> _CpuPart | None:
        """Run the CPU's experts while the device runs its own. ``on_host``: the hidden states, if they are already
        there."""
        if not step.cpu:
            return None
        share = host_share(step.routes, step.cpu, self._count, whole=on_host is not None)
        rows = self._fetch(hidden, share.tokens) if on_host is None else on_host
        started = self._device.now()
        results = self._cpu.outputs(step.layer, rows, share.indices)
        return _CpuPart(share, results, (started, self._device.now()))

    def _finish(self, step: LayerStep, started: float, cpu: _CpuPart | None, work: LayerWork | None) -> None:
        if self._uses_cache:
            self._side.learn(step)
        spans = None if cpu is None else cpu.seconds
        self._pending = _Pending(step, started, self._device.now(), spans, work, self._without(step))

    @contextlib.contextmanager
    def _abandoned_on_error(self, step: LayerStep) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon(step)
            raise

    def _abandon(self, step: LayerStep) -> None:
        """Clean up after a step that ended half-way: copies in progress count as missing."""
        self._side.forget(step.layer, step.tickets)
        with contextlib.suppress(DeviceLost):
            self._device.synchronize()

    def _fetch(self, hidden: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        assert tokens is not None
        (rows,) = self._device.download(hidden.index_select(0, self._device.upload(tokens)))
        self._recorder.movement.activation_bytes += rows.nbytes
        return rows

    def _decide(self, layer: int, routes: SortedRoutes, few: bool) -> LayerStep:
        self._count_routes(layer, routes)
        uses, cache = self._uses_cache, self._cache
        active = tuple(
            ActiveExpert(expert, stop - start, uses and cache.slot_of(layer, expert) is not None)
            for expert, (start, stop) in routes.segments.items()
        )
        cache.touch(layer, routes.segments)
        decision = self._policy.decide(layer, active, self._calibration)
        cpu = {each.expert for each, place in zip(active, decision.places, strict=True) if place == "amove"}
        hits = sum(each.resident for each in active)
        self._recorder.movement.hits += hits
        self._recorder.movement.misses += len(active) - hits
        return LayerStep(layer, routes, active, decision, cpu, few)

    def _count_routes(self, layer: int, routes: SortedRoutes) -> None:
        for expert, (start, stop) in routes.segments.items():
            self.popularity.add(layer, expert, stop - start)

    def _lose(self, error: DeviceLost) -> None:
        """Go on without the device. Raises ModelError if the trunk was on it."""
        self._lost = True
        self._pending = None
        self._routed_there = []
        self._uses_cache = False
        if self._holds_trunk:
            raise ModelError(
                f"{self._device.name} stopped working ({error}), and the model's trunk is on it; load the model again, "
                "or with partitioning cpu.",
                kind="model",
            ) from error
        self._recorder.notice(f"{self._device.name} stopped working ({error}): all experts run on the CPU from now on.")

    # --- what it cost ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Add the time of the last layer. Waits for the device if it is still working."""
        with contextlib.suppress(DeviceLost):  # said by what needs the device next
            self._count_routed_there()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            gpu = pending.work.interval() if pending.work is not None else None
            self._add(pending, gpu)
        except DeviceLost:
            pass  # said by what needs the device next

    def _add(self, pending: _Pending, gpu: tuple[float, float] | None) -> None:
        movement, cpu = self._recorder.movement, pending.cpu
        ended = max(pending.ended, gpu[1]) if gpu is not None else pending.ended
        cpu_s = cpu[1] - cpu[0] if cpu is not None else 0.0
        gpu_s = gpu[1] - gpu[0] if gpu is not None else 0.0
        movement.cpu_s += cpu_s
        movement.gpu_s += gpu_s
        if cpu is not None and gpu is not None:
            movement.both_s += max(0.0, min(cpu[1], gpu[1]) - max(cpu[0], gpu[0]))
        movement.total_s += ended - pending.started
        self._policy = self._policy.observe(pending.step.layer, pending.step.decision, cpu_s, gpu_s)
        if pending.without_s is not None:
            self._judge(ended - pending.started, pending.without_s)

    def _without(self, step: LayerStep) -> float | None:
        """The predicted time of the layer without a cache; None if it is not asked for."""
        if not self._judged or not self._worth.asks or not self._cache.capacity:
            return None
        if (self._steps + self._layers.index(step.layer)) % WORTH_EVERY:
            return None
        nothing_there = [replace(each, resident=False) for each in step.active]
        decision = self._policy.decide(step.layer, nothing_there, self._calibration)
        return max(decision.cpu_s, decision.gpu_s)

    def _judge(self, measured_s: float, without_s: float) -> None:
        verdict = self._worth.add(measured_s, without_s)
        if verdict == "try-without":
            self._uses_cache = False
        elif verdict == "keep":
            self._uses_cache = True
        elif verdict == "off":
            self._memory.switch_off()
            self._recorder.notice(
                f"The cache of experts on {self._device.name} is switched off: layers took "
                f"{self._worth.with_cache / self._worth.without_cache:.2f} times as long with it as without."
            )


def _scaled(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One row per route [tokens * k, hidden]: its token's row multiplied by its weight."""
    scaled = (hidden[:, None, :] * weights[:, :, None]).to(hidden.dtype)
    return scaled.reshape(weights.numel(), -1)


# --- whether the expert cache earns its keep -------------------------------------------------------------------------


WINDOW = 128
"""Number of layers measured before a decision."""

Verdict = Literal["try-without", "keep", "off"]


@dataclass
class CacheWorth:
    """Decides whether the cache is worth keeping.

    If a window of layers takes longer with the cache than predicted without it, a window without the cache is measured,
    and the better of the two is used from then on. Both are compared with the predicted time of the same layers without
    a cache, so that their numbers of tokens do not matter.
    """

    window: int = WINDOW
    state: Literal["watching", "trying", "decided"] = "watching"
    with_cache: float = 0.0
    """Measured time with the cache in the last whole window, relative to the predicted time without it."""
    without_cache: float = 0.0
    """Measured time without the cache, relative to the predicted time."""
    _measured: float = 0.0
    _expected: float = 0.0
    _count: int = 0

    @property
    def asks(self) -> bool:
        """Whether :meth:`add` still has an effect."""
        return self.state != "decided"

    def add(self, measured_s: float, without_s: float) -> Verdict | None:
        """Record a layer that took ``measured_s`` and is predicted to take ``without_s`` without a cache."""
        self._measured += measured_s
        self._expected += without_s
        self._count += 1
        if self._count < self.window:
            return None
        ratio = self._measured / self._expected if self._expected > 0 else 0.0
        self._measured = self._expected = 0.0
        self._count = 0
        if self.state == "watching":
            self.with_cache = ratio
            if ratio <= 1.0:
                return None
            self.state = "trying"
            return "try-without"
        if self.state == "trying":
            self.without_cache = ratio
            self.state = "decided"
            return "off" if ratio < self.with_cache else "keep"
        return None
