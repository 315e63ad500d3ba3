"""The device memory for experts: taken at load, returned when others need it, and taken again later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.planning.policy import Policy
from engine.planning.units import byte_size
from engine.runtimes.torch.offload.devices import CopyFailed, DeviceLost, ExpertDevice, OutOfDeviceMemory, Slot
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.slab_cache import Key, SlabCache

STAGING_SLOTS = 2
"""Number of slots for moved experts that the cache does not keep: one is copied while the other computes."""

GROUP_BYTES = 64 * 2**20
"""Approximate bytes of an allocation that small slabs share."""

GROW_EVERY = 64
"""Steps after which a cache that had to shrink takes memory back that others have freed."""


class DeviceCache:
    """The slots of a device and their contents. Until :meth:`open` there are none.

    ``slabs`` maps experts to slots. ``staging``: slots for moved experts that are not kept. ``notice`` gets a line when
    memory is taken away. Every method may raise DeviceLost.
    """

    def __init__(
        self,
        host: HostExperts,
        device: ExpertDevice,
        policy: Policy,
        notice: Callable[[str], None],
        experts_per_token: int = 1,
    ) -> None:
        experts = host.experts
        self.slabs = SlabCache(policy.cache, experts.layers, experts.count, experts_per_token)
        self.staging: list[Slot] = []
        self._host = host
        self._device = device
        self._rule = policy.cache
        self._staged = 0 if policy.name == "layers" else STAGING_SLOTS
        self._all = sum(len(experts.held(layer)) for layer in experts.layers)
        self._notice = notice
        self._order: tuple[Key, ...] = ()
        self._reserve = 0
        self._wanted = 0
        self._said = 0
        self._steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that keeps experts between steps."""
        return self.slabs.capacity * self._host.slot_bytes

    @property
    def share(self) -> float:
        """Share of this machine's experts for which there is room."""
        return self.slabs.capacity / max(1, self._all)

    def open(self, nbytes: int, order: Sequence[Key], reserve: int, progress: ProgressCallback) -> list[str]:
        """Take ``nbytes`` for experts, and copy there the first of ``order`` that fit. Slots for moved experts come on
        top.

        While the model runs, the cache shrinks to keep at least ``reserve`` bytes free for everything else. Returns a
        line for the person if less memory was available, or fewer experts were copied. Raises ModelError if the device
        is lost.
        """
        self._reserve = reserve
        held = {layer: frozenset(self._host.experts.held(layer)) for layer in self._host.experts.layers}
        self._order = tuple((layer, expert) for layer, expert in order if expert in held[layer])
        self._wanted = self._slots_in(nbytes)
        try:
            self.staging = self._take(self._staged)
            self.slabs.add(self._take(self._wanted))
            failed = self._fill(progress)
        except DeviceLost as error:
            raise ModelError(
                f"{self._device.name} stopped working while experts were copied to it ({error}); "
                "load the model again, or with partitioning cpu.",
                kind="memory",
            ) from error
        self._said = self.slabs.capacity
        size = self._host.slot_bytes
        found, asked = len(self.staging) + self.slabs.capacity, self._staged + self._wanted
        lines = [failed] if failed is not None else []
        if found < asked:
            lines.append(
                f"Another program holds GPU memory: {byte_size(found * size)} instead of {byte_size(asked * size)} "
                "could be had for experts."
            )
        return lines

    def resize(self, nbytes: int) -> int:
        """Change the cache to ``nbytes``. Returns its actual bytes.

        The hottest experts stay, as far as there is room. New room is filled with the most popular of the others.
        """
        self._wanted = self._slots_in(nbytes)
        if self._wanted < self.slabs.capacity:
            self._device.release(self.slabs.shrink(self.slabs.capacity - self._wanted))
        # Groups are given back as a whole: what is missing now is taken again.
        self.slabs.add(self._take(self._wanted - self.slabs.capacity))
        self._tell(self._fill(lambda *_: None))
        self._said = self.slabs.capacity
        if self.slabs.capacity < self._wanted:
            wanted = byte_size(self._wanted * self._host.slot_bytes)
            self._notice(f"Only {byte_size(self.nbytes)} of GPU memory instead of {wanted} could be had for experts.")
        return self.nbytes

    def close(self) -> None:
        """Return all memory."""
        with contextlib.suppress(DeviceLost):
            self._device.synchronize()
            self._device.release([*self.slabs.shrink(self.slabs.capacity), *self.staging])
        self.staging = []

    def watch(self) -> None:
        """Once per step: return memory that others need, and take it again when it is free."""
        self._steps += 1
        due = self._steps % GROW_EVERY == 0
        if self._wanted == 0 or (self.slabs.capacity == 0 and not due):
            return
        free, _ = self._device.memory()
        size = self._host.slot_bytes
        missing = self._wanted - self.slabs.capacity
        if free < self._reserve:
            self.shrink(-(-(self._reserve - free) // size))
        elif missing > 0 and due:
            # Half of what is over stays free: others may be about to take it.
            self._grow(min(missing, (free - self._reserve) // 2 // size))

    def shrink(self, slots: int, layer: int = -1, needed: Collection[int] = ()) -> bool:
        """Return ``slots`` slots, but none with an expert ``needed`` in ``layer``. Returns whether there were any."""
        given = self.slabs.shrink(slots, layer, needed)
        if not given:
            return False
        self._device.release(given)
        # Every line tells of a cache of half the size, so there are few of them.
        if self.slabs.capacity < self._said:
            self._said = self.slabs.capacity // 2
            self._notice(
                f"GPU memory is short: the cache of experts shrank to {byte_size(self.nbytes)}; "
                "answers stay the same, but take longer."
            )
        return True

    def switch_off(self) -> None:
        """Return the memory that keeps experts, for good."""
        self._wanted = 0
        self._device.release(self.slabs.shrink(self.slabs.capacity))

    def _slots_in(self, nbytes: int) -> int:
        if self._rule.kind == "none":
            return 0
        return max(0, min(nbytes // self._host.slot_bytes, self._all))

    def _take(self, count: int) -> list[Slot]:
        """Up to ``count`` slots, as many as fit on the device."""
        size = self._host.slot_bytes
        group = max(1, GROUP_BYTES // size)
        slots: list[Slot] = []
        while len(slots) < count:
            try:
                slots += self._device.allocate(size, min(group, count - len(slots)))
            except OutOfDeviceMemory:
                if group == 1:
                    break
                group = 1
        return slots

    def _grow(self, slots: int) -> None:
        self.slabs.add(self._take(slots))
        if not self._rule.admits_moved:
            self._tell(self._fill(lambda *_: None))

    def _tell(self, line: str | None) -> None:
        if line is not None:
            self._notice(line)

    def _fill(self, progress: ProgressCallback) -> str | None:
        """Copy the first experts in order that fit. Returns a line for the person if some were not copied."""
        filled = self.slabs.seed(self._order)
        size = self._host.slot_bytes
        failures: list[CopyFailed] = []
        for done, (key, slot) in enumerate(filled):
            try:
                self._device.copy(slot, self._host.pieces(*key))
            except CopyFailed as error:
                self.slabs.drop(*key)
                failures.append(error)
            progress("copying experts to the GPU", (done + 1) * size, len(filled) * size, "bytes")
        self._device.synchronize()
        if not failures:
            return None
        return (
            f"Copying {len(failures)} of {len(filled)} experts to {self._device.name} failed ({failures[0]}); they run "
            "on the CPU until they are copied again."
        )
