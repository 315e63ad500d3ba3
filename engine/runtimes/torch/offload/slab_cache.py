"""Which experts are in a device's slots, and which one makes room. This is bookkeeping only; nothing is copied here.

Recency and frequency are one number per expert. With C uses, each counting half as much after HALF_LIFE_STEPS steps, at
the time t of the last one, an expert is worth ``t / half-life + log2(C)``. All worths fade alike, so their order
changes only by use (LRFU; Lee et al., 2001). For plain LRU the worth is the time of the last use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from engine.planning.policy import CLEARLY, CacheRule
from engine.runtimes.torch.offload.devices import Slot

Key = tuple[int, int]
"""(layer, expert)."""

HALF_LIFE_STEPS = 64
"""Steps after which a use counts half. A step is one use of the cache in every layer."""


class SlabCache:
    """See the module. ``layers``: decoder layers with routed experts.

    The slots are one pool or, with a rule of scope ``layer``, equally large pools for the layers. ``per_token``: number
    of a layer's ``experts`` per token.
    """

    def __init__(self, rule: CacheRule, layers: Sequence[int], experts: int, per_token: int = 1) -> None:
        self.rule = rule
        self._layers = tuple(layers)
        self._experts = experts
        self._slots: dict[Slot, int] = {}
        self._free: dict[int, list[Slot]] = {pool: [] for pool in self._pools()}
        self._where: dict[Key, Slot] = {}
        self._holds: dict[Slot, Key] = {}
        self._worth: dict[Key, float] = {}
        self._heaps: dict[int, list[tuple[float, Key]]] = {pool: [] for pool in self._pools()}
        self._half_life = float(HALF_LIFE_STEPS * max(1, len(self._layers)))
        self._now = 0
        self.changes = 0
        """Number of changes to the contents of slots."""
        # What an expert of average use is worth after long use; never used without frequencies.
        average = max(1, per_token) / max(1, experts) * HALF_LIFE_STEPS / math.log(2.0)
        self._seed_worth = math.log2(average) if rule.kind == "lfru" else -1.0

    # --- what is there --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of slots, full and free."""
        return len(self._slots)

    def __len__(self) -> int:
        """Number of experts in slots."""
        return len(self._where)

    def slot_of(self, layer: int, expert: int) -> Slot | None:
        return self._where.get((layer, expert))

    def whole_layer(self, layer: int) -> list[Slot] | None:
        """The slots of all experts of ``layer``, in their order; None if one of them is missing."""
        slots = [self._where.get((layer, expert)) for expert in range(self._experts)]
        found = [slot for slot in slots if slot is not None]
        return found if len(found) == len(slots) else None

    def resident(self, layer: int) -> list[int]:
        """The resident experts of ``layer``, ascending."""
        return [expert for expert in range(self._experts) if (layer, expert) in self._where]

    # --- use ------------------------------------------------------------------------------------------------------

    def touch(self, layer: int, experts: Iterable[int]) -> None:
        """Record a use of ``experts`` of ``layer``, resident or not."""
        self._now += 1
        for expert in experts:
            key = (layer, expert)
            self._worth[key] = worth = self._used(key)
            if key in self._where:
                self._push(worth, key)

    def hottest(self, layer: int, experts: Iterable[int]) -> int | None:
        """The most valuable of ``experts`` of ``layer``."""
        return max(experts, key=lambda expert: self._value((layer, expert)), default=None)

    def admit(
        self, layer: int, expert: int, needed: Collection[int], evict: bool = True, clearly: bool = False
    ) -> Slot | None:
        """The slot for copying ``expert`` of ``layer``, which counts as resident from now on; None: it is not to be
        kept.

        The slot's former expert is forgotten. It makes room only if the rule admits moved experts, ``evict`` is true,
        it is worth less (by CLEARLY with ``clearly``), and it is not ``needed`` in this layer now.
        """
        key = (layer, expert)
        if key in self._where:
            raise ValueError(f"expert {expert} of layer {layer} is there already")
        if not self.rule.admits_moved:
            return None
        pool = self._pool(layer)
        if self._free[pool]:
            return self._put(key, self._free[pool].pop())
        if not evict:
            return None
        victim = self._coldest(pool, lambda held: held[0] == layer and held[1] in needed)
        if victim is None:
            return None
        if self.rule.kind == "lfru" and self._value(victim) + (CLEARLY if clearly else 0.0) > self._value(key):
            self._push(self._value(victim), victim)
            return None
        slot = self._where.pop(victim)
        return self._put(key, slot)

    def drop(self, layer: int, expert: int) -> None:
        """Record that the expert is missing because its copy failed. Its slot is free."""
        slot = self._where.pop((layer, expert), None)
        if slot is not None:
            self.changes += 1
            del self._holds[slot]
            self._free[self._slots[slot]].append(slot)

    # --- size -----------------------------------------------------------------------------------------------------

    def add(self, slots: Iterable[Slot]) -> None:
        """Add free ``slots``. With a pool per layer, they go to the smallest pools."""
        sizes = dict.fromkeys(self._pools(), 0)
        for pool in self._slots.values():
            sizes[pool] += 1
        for slot in slots:
            pool = min(sizes, key=lambda pool: (sizes[pool], pool))
            sizes[pool] += 1
            self._slots[slot] = pool
            self._free[pool].append(slot)

    def seed(self, order: Sequence[Key]) -> list[tuple[Key, Slot]]:
        """Fill the free slots with the first experts of ``order`` that fit. Returns which expert to copy where.

        They get the worth of an expert with average use after long use. Otherwise one prompt, which uses all experts of
        all layers once, would evict them and lose what popularity told. A rule of kind ``layers`` takes whole layers
        from ``order``, from the last one down.
        """
        if self.rule.kind == "none":
            return []
        if self.rule.kind == "layers":
            order = self._whole_layers(set(order))
        filled = []
        for rank, key in enumerate(order):
            free = self._free[self._pool(key[0])]
            if key in self._where or not free:
                continue
            # The less popular the sooner to go.
            self._worth.setdefault(key, self._seed_worth - rank * 1e-9)
            filled.append((key, self._put(key, free.pop())))
        return filled

    def _whole_layers(self, known: Collection[Key]) -> list[Key]:
        """The experts ``known`` in the last layers, as many whole layers as there are slots for."""
        chosen: list[Key] = []
        for layer in reversed(self._layers):
            row = [(layer, expert) for expert in range(self._experts) if (layer, expert) in known]
            if len(chosen) + len(row) > len(self._slots):
                break
            chosen = row + chosen
        return chosen

    def shrink(self, slots: int, layer: int = -1, needed: Collection[int] = ()) -> list[Slot]:
        """Give up at least ``slots`` slots, if there are as many, in whole groups, those with the coldest experts
        first.

        Groups with one of the experts ``needed`` in ``layer`` stay. Returns the slots to be released.
        """
        groups: dict[int, list[Slot]] = {}
        for slot in self._slots:
            groups.setdefault(slot.group, []).append(slot)
        stay = {self._where[layer, expert].group for expert in needed if (layer, expert) in self._where}
        given: list[Slot] = []
        self.changes += 1
        for group in sorted((group for group in groups if group not in stay), key=lambda g: self._heat(groups[g])):
            if len(given) >= slots:
                break
            given += groups[group]
        for slot in given:
            key = self._holds.pop(slot, None)
            if key is not None:
                del self._where[key]
            else:
                self._free[self._slots[slot]].remove(slot)
            del self._slots[slot]
        return given

    # --- inside ---------------------------------------------------------------------------------------------------

    def _pools(self) -> range:
        return range(len(self._layers) if self._per_layer else 1)

    @property
    def _per_layer(self) -> bool:
        # Whole layers are one pool: which layer gets a slot is no question of fairness.
        return self.rule.scope == "layer" and self.rule.kind != "layers"

    def _pool(self, layer: int) -> int:
        return self._layers.index(layer) if self._per_layer else 0

    def _used(self, key: Key) -> float:
        """The worth of ``key`` after a use now."""
        if self.rule.kind != "lfru":
            return float(self._now)
        now = self._now / self._half_life
        before = self._worth.get(key)
        return now + math.log2(1.0 + 2.0 ** (before - now)) if before is not None else now

    def _value(self, key: Key) -> float:
        return self._worth.get(key, -math.inf)

    def _heat(self, slots: Sequence[Slot]) -> tuple[float, int]:
        hottest = max(self._value(self._holds[slot]) if slot in self._holds else -math.inf for slot in slots)
        return hottest, slots[0].group

    def _put(self, key: Key, slot: Slot) -> Slot:
        self.changes += 1
        self._where[key] = slot
        self._holds[slot] = key
        self._push(self._value(key), key)
        return slot

    def _push(self, worth: float, key: Key) -> None:
        pool = self._pool(key[0])
        heap = self._heaps[pool]
        heapq.heappush(heap, (worth, key))
        if len(heap) > 64 + 8 * len(self._where):
            there = [key for key in self._where if self._pool(key[0]) == pool]
            self._heaps[pool] = [(self._value(key), key) for key in there]
            heapq.heapify(self._heaps[pool])

    def _coldest(self, pool: int, stays: Callable[[Key], bool]) -> Key | None:
        """The least valuable expert of ``pool`` that need not stay. It is removed from the heap."""
        heap = self._heaps[pool]
        passed: list[tuple[float, Key]] = []
        coldest = None
        while heap and coldest is None:
            worth, key = heapq.heappop(heap)
            if key not in self._where or worth != self._value(key):
                continue
            if stays(key):
                passed.append((worth, key))
            else:
                coldest = key
        for entry in passed:
            heapq.heappush(heap, entry)
        return coldest
