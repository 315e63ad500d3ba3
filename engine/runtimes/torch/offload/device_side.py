"""The device's part of a layer: starting copies and experts, and falling back to the CPU if one of them fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from engine.moe.timing import Recorder
from engine.planning.policy import ActiveExpert, CacheRule, Decision
from engine.runtimes.torch.offload.device_cache import DeviceCache
from engine.runtimes.torch.offload.devices import (
    CopyFailed,
    ExpertDevice,
    OutOfDeviceMemory,
    ResidentExpert,
    Slot,
    Ticket,
)
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.slab_cache import Key

FAILED_COPIES_TOLD = 5
"""Maximum failed copies that are reported one by one. More would fill the screen."""


@dataclass
class LayerStep:
    """One layer of one step: the decision, and what really runs where."""

    layer: int
    routes: SortedRoutes
    active: tuple[ActiveExpert, ...]
    decision: Decision
    cpu: set[int]
    """Experts that the CPU runs, including those that the GPU could not run."""
    few: bool
    tickets: dict[int, tuple[Slot, Ticket]] = field(default_factory=dict)
    """Copies that were started, in order."""
    waiting: deque[int] = field(default_factory=deque)
    """Experts to copy once a staging slot is free."""
    rows: torch.Tensor | None = None
    """Input of the device's experts, kept until the trunk waits for them, so that its memory is not reused."""

    @property
    def needed(self) -> dict[int, tuple[int, int]]:
        """The active experts."""
        return self.routes.segments

    def placed(self, place: str) -> list[ActiveExpert]:
        return [each for each, there in zip(self.active, self.decision.places, strict=True) if there == place]


class DeviceSide:
    """See the module. Every method may raise DeviceLost."""

    def __init__(
        self,
        host: HostExperts,
        device: ExpertDevice,
        gates: Mapping[int, FamilyGate],
        memory: DeviceCache,
        rule: CacheRule,
        recorder: Recorder,
    ) -> None:
        self._host = host
        self._device = device
        self._gates = gates
        self._memory = memory
        self._cache = memory.slabs
        self._rule = rule
        self._recorder = recorder
        self._layers = len(host.experts.layers)
        self._failed_copies = 0
        self._arriving: dict[Key, tuple[Slot, Ticket]] = {}
        """Experts that are being copied while nothing waits for them."""
        self._idle_layers = 0
        self._learned = True

    def arriving(self, layer: int) -> bool:
        """Whether an expert of ``layer`` may still be arriving."""
        return any(key[0] == layer for key in self._arriving)

    def begin_copies(self, step: LayerStep, uses_cache: bool) -> bool:
        """Start the copies that need not wait. Returns whether the device has anything to do."""
        moved = sorted(step.placed("pmove"), key=lambda active: -active.tokens)
        self._idle_layers = 0 if moved else self._idle_layers + 1
        if not moved and not step.placed("gpu"):
            return False
        self._device.begin()
        staged: list[ActiveExpert] = []
        for active in moved:
            slot = None
            if uses_cache:
                slot = self._cache.admit(step.layer, active.expert, step.needed, evict=step.few)
            if slot is None:
                staged.append(active)
            else:
                self._copy(step, active.expert, slot)
        step.cpu.update(active.expert for active in staged if not self._memory.staging)
        step.waiting.extend(active.expert for active in staged if self._memory.staging)
        for slot in self._memory.staging:
            self._copy_next(step, slot)
        return True

    def begin_experts(self, step: LayerStep, rows: torch.Tensor) -> torch.Tensor:
        """Start all experts of the device, resident ones first.

        ``rows`` [n, hidden] are on the device, in the order of the sorted routes. Returns the buffer of their results
        [n, hidden].
        """
        step.rows = rows
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        for expert, slot, ticket in self._not_begun_together(step, out):
            self._run_expert(step, expert, slot, ticket, out)
        staging = set(self._memory.staging)
        begun = deque(step.tickets)
        while begun:
            expert = begun.popleft()
            slot, ticket = step.tickets[expert]
            if self._run_expert(step, expert, slot, ticket, out):
                self._recorder.movement.moved += 1
            # A staging slot takes the next expert once the one in it has begun.
            if slot in staging and (following := self._copy_next(step, slot)) is not None:
                begun.append(following)
        if self._rule.copies_whole_layer:
            self._copy_inactive(step)
        return out

    def _not_begun_together(self, step: LayerStep, out: torch.Tensor) -> list[tuple[int, Slot, Ticket | None]]:
        """Start the resident experts together. Returns the experts that must be run one by one."""
        others: list[tuple[int, Slot, Ticket | None]] = []
        resident: list[tuple[int, Slot, Ticket | None]] = []
        for each in step.placed("gpu"):
            slot = self._cache.slot_of(step.layer, each.expert)
            assert slot is not None
            ticket = self._arrived((step.layer, each.expert), slot)
            (resident if ticket is None else others).append((each.expert, slot, ticket))
        if len(resident) < 2:
            return [*resident, *others]
        assert step.rows is not None
        together = [ResidentExpert(slot, *step.routes.segments[expert]) for expert, slot, _ in resident]
        try:
            self._device.run(together, self._host.layout(step.layer), self._gates[step.layer], step.rows, out)
        except OutOfDeviceMemory:
            # One by one they need less, and each of them may be left to the CPU.
            return [*resident, *others]
        return others

    def forget(self, layer: int, experts: Collection[int]) -> None:
        """Record that the experts being copied did not arrive."""
        for expert in experts:
            self._cache.drop(layer, expert)

    # --- learning while the link is idle --------------------------------------------------------------------------

    def next_step(self) -> None:
        """Allow one expert to be learned in the next step."""
        self._learned = False

    def learn(self, step: LayerStep) -> None:
        """Copy the hottest expert that the CPU had to run in place of one that is used half as often.

        This happens while the link is idle, at most once a step. Without it, a cache whose copies never pay within a
        layer would stay as it was seeded. Only the expert's next run waits for the copy.
        """
        if self._learned or not self._rule.learns or not step.few or self._idle_layers < self._layers:
            return
        missed = [each.expert for each in step.active if not each.resident and each.expert in step.cpu]
        expert = self._cache.hottest(step.layer, missed)
        slot = None if expert is None else self._cache.admit(step.layer, expert, step.needed, clearly=True)
        if expert is None or slot is None:
            return
        self._learned = True
        pieces = self._host.pieces(step.layer, expert)
        try:
            self._arriving[step.layer, expert] = (slot, self._device.copy(slot, pieces))
        except CopyFailed as error:
            self._fall_back(step, expert, error)
            return
        self._recorder.movement.weight_bytes += sum(piece.tensor.nbytes for piece in pieces)
        self._recorder.movement.learned += 1

    def _arrived(self, key: Key, slot: Slot) -> Ticket | None:
        """The copy for which the expert's first run must wait; None if it has arrived."""
        found = self._arriving.pop(key, None)
        return found[1] if found is not None and found[0] == slot else None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _copy_next(self, step: LayerStep, slot: Slot) -> int | None:
        """Start to copy the next waiting expert into the staging slot ``slot``. Returns the expert."""
        while step.waiting:
            expert = step.waiting.popleft()
            if self._copy(step, expert, slot):
                return expert
        return None

    def _copy(self, step: LayerStep, expert: int, slot: Slot) -> bool:
        self._arriving.pop((step.layer, expert), None)
        pieces = self._host.pieces(step.layer, expert)
        try:
            step.tickets[expert] = (slot, self._device.copy(slot, pieces))
        except CopyFailed as error:
            self._fall_back(step, expert, error)
            return False
        self._recorder.movement.weight_bytes += sum(piece.tensor.nbytes for piece in pieces)
        return True

    def _copy_inactive(self, step: LayerStep) -> None:
        """Copy the further experts that a system for streaming whole layers copies."""
        staging = self._memory.staging
        tickets = dict(step.tickets)
        held = self._host.experts.held(step.layer)
        for place, expert in enumerate(sorted(set(held) - set(step.needed))):
            if staging:
                self._copy(step, expert, staging[place % len(staging)])
        step.tickets = tickets

    def _run_expert(self, step: LayerStep, expert: int, slot: Slot, ticket: Ticket | None, out: torch.Tensor) -> bool:
        alone = [ResidentExpert(slot, *step.routes.segments[expert])]
        gate = self._gates[step.layer]
        assert step.rows is not None
        try:
            self._device.run(alone, self._host.layout(step.layer), gate, step.rows, out, ticket)
        except CopyFailed as error:
            self._fall_back(step, expert, error)
            return False
        except OutOfDeviceMemory:
            step.cpu.add(expert)
            if ticket is not None and slot not in self._memory.staging:
                self._cache.drop(step.layer, expert)
            self._memory.shrink(max(1, self._cache.capacity // 8), step.layer, step.needed)
            return False
        return True

    def _fall_back(self, step: LayerStep, expert: int, error: CopyFailed) -> None:
        """Run the expert on the CPU in this step, and mark its slot as empty."""
        self._cache.drop(step.layer, expert)
        if expert in step.needed:
            step.cpu.add(expert)
        self._failed_copies += 1
        if self._failed_copies <= FAILED_COPIES_TOLD:
            last = "; more of these are not told" if self._failed_copies == FAILED_COPIES_TOLD else ""
            self._recorder.notice(
                f"Copying expert {expert} of layer {step.layer} to {self._device.name} failed ({error}), so it runs "
                f"on the CPU this time{last}."
            )


# --- routes sorted by expert -----------------------------------------------------------------------------------------


FEW_ROUTES = 96
"""Maximum routes that are sorted in Python; more are sorted by torch. Python is faster for few."""


@dataclass(frozen=True)
class SortedRoutes:
    """The routes that run here, sorted by expert.

    ``order`` [n]: the n routes, counted token by token. ``back`` [routes]: the position of each route in ``order``, -1
    if another device runs it. ``segments``: beginning and end of each active expert's routes in ``order``, ascending.
    """

    tokens: int
    k: int
    """Routes per token."""
    indices: torch.Tensor
    """[tokens, k] on the host, -1 if another device runs the route."""
    order: torch.Tensor
    back: torch.Tensor
    segments: dict[int, tuple[int, int]]
    numbers: tuple[list[int], list[int]] | None
    """Indices and order as Python numbers, if there are few."""


def sort_routes(indices: torch.Tensor, experts: int) -> SortedRoutes:
    """Sort ``indices`` [tokens, k], which are on the host. Routes to the same expert keep their order, and -1 is left
    out."""
    tokens, k = indices.shape
    sizes: dict[int, int] = {}
    numbers = None
    if tokens * k > FEW_ROUTES:
        flat = indices.reshape(-1).long()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        back = torch.full_like(flat, -1)
        back[order] = torch.arange(len(order))
        counts = flat[flat >= 0].bincount(minlength=experts).tolist()
        sizes = {expert: count for expert, count in enumerate(counts) if count}
    else:
        chosen: list[int] = indices.reshape(-1).tolist()
        ordered = sorted((route for route in range(tokens * k) if chosen[route] >= 0), key=chosen.__getitem__)
        places = [-1] * len(chosen)
        for place, route in enumerate(ordered):
            places[route] = place
            sizes[chosen[route]] = sizes.get(chosen[route], 0) + 1
        order, back = torch.tensor(ordered, dtype=torch.int64), torch.tensor(places)
        numbers = (chosen, ordered)
    segments: dict[int, tuple[int, int]] = {}
    position = 0
    for expert, size in sizes.items():
        segments[expert] = (position, position + size)
        position += size
    return SortedRoutes(tokens, k, indices, order, back, segments, numbers)


@dataclass(frozen=True)
class HostShare:
    """The routes that the CPU runs, in the form for
    :class:`engine.runtimes.torch.offload.tensor_backend.TensorBackend`."""

    tokens: torch.Tensor | None
    """The tokens that are needed, ascending; None: all."""
    indices: torch.Tensor
    """[needed tokens, k], -1 where another device runs the route."""
    rows: torch.Tensor
    """Indices of the CPU's results among [needed tokens * k], in the order of ``places``."""
    places: torch.Tensor
    """Indices of those results among the sorted routes."""


def host_share(routes: SortedRoutes, experts: set[int], count: int, whole: bool) -> HostShare:
    """The share of ``experts`` (at least one) of ``count``. ``whole``: include all tokens, needed or not."""
    if routes.numbers is not None and whole:
        chosen, ordered = routes.numbers
        mine = [place for expert in sorted(experts) for place in range(*routes.segments[expert])]
        masked = torch.tensor([expert if expert in experts else -1 for expert in chosen], dtype=torch.int32)
        rows = torch.tensor([ordered[place] for place in mine])
        return HostShare(None, masked.view(routes.tokens, routes.k), rows, torch.tensor(mine))
    wanted = torch.zeros(count, dtype=torch.bool)
    wanted[sorted(experts)] = True
    masked = torch.where((routes.indices >= 0) & wanted[routes.indices.long().clamp(min=0)], routes.indices, -1)
    places = torch.cat([torch.arange(*routes.segments[expert]) for expert in sorted(experts)])
    rows = routes.order[places]
    if whole:
        return HostShare(None, masked, rows, places)
    tokens = (masked >= 0).any(dim=1).nonzero()[:, 0]
    local = torch.full((routes.tokens,), -1, dtype=torch.int64)
    local[tokens] = torch.arange(tokens.shape[0])
    rows = local[rows // routes.k] * routes.k + rows % routes.k
    return HostShare(tokens, masked.index_select(0, tokens), rows, places)
