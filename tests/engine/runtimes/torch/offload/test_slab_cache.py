"""The cache's bookkeeping against a plain model of it, and each kind of rule."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.ipc.messages import ExpertPolicy
from engine.planning.policy import CacheRule, policy_named
from engine.runtimes.torch.offload.devices import Slot
from engine.runtimes.torch.offload.slab_cache import HALF_LIFE_STEPS, Key, SlabCache
from tests.support.random_examples import examples

LAYERS = (2, 3, 7)
EXPERTS = 5
ALL = [(layer, expert) for expert in range(EXPERTS) for layer in LAYERS]


def slots_of(count: int, per_group: int = 1, first: int = 0) -> list[Slot]:
    return [Slot(index, index // per_group) for index in range(first, first + count)]


class CacheMachine(RuleBasedStateMachine):
    """Everything the cache does is done to a list of (worth, key) as well, searched from end to end."""

    @initialize(
        name=st.sampled_from(get_args(ExpertPolicy)),
        count=st.integers(0, 14),
        group=st.integers(1, 3),
        seed=st.booleans(),
    )
    def start(self, name: ExpertPolicy, count: int, group: int, seed: bool) -> None:
        self.rule = policy_named(name).cache
        self.cache = SlabCache(self.rule, LAYERS, EXPERTS)
        self.group = group
        self.free_numbers = count
        self.owned = slots_of(count, group)
        self.next_number = -(-count // group) * group
        self.cache.add(self.owned)
        self.now = 0
        self.worth: dict[Key, float] = {}
        self.there: dict[Key, Slot] = {}
        if seed:
            for rank, (key, slot) in enumerate(self.cache.seed(ALL)):
                assert slot not in self.there.values()
                self.there[key] = slot
                if self.rule.kind == "lfru":
                    base = math.log2(HALF_LIFE_STEPS / EXPERTS / math.log(2))
                    self.worth[key] = base - ALL.index(key) * 1e-9
                else:
                    self.worth[key] = -1.0 - (rank if self.rule.kind == "layers" else ALL.index(key)) * 1e-9

    def pool(self, layer: int) -> int:
        return layer if self.rule.scope == "layer" and self.rule.kind != "layers" else -1

    @rule(layer=st.sampled_from(LAYERS), chosen=st.sets(st.integers(0, EXPERTS - 1), min_size=1), few=st.booleans())
    def step(self, layer: int, chosen: set[int], few: bool) -> None:
        """One layer of one step: everything that is missing is asked to be admitted."""
        self.now += 1
        needed = sorted(chosen)
        self.cache.touch(layer, needed)
        half_life = HALF_LIFE_STEPS * len(LAYERS)
        for expert in needed:
            key = (layer, expert)
            if self.rule.kind == "lfru":
                now, before = self.now / half_life, self.worth.get(key)
                self.worth[key] = now if before is None else now + math.log2(1 + 2 ** (before - now))
            else:
                self.worth[key] = float(self.now)
        for expert in needed:
            if (layer, expert) not in self.there:
                self.admit(layer, expert, needed, few)

    def admit(self, layer: int, expert: int, needed: list[int], few: bool) -> None:
        key = (layer, expert)
        before = dict(self.there)
        slot = self.cache.admit(layer, expert, needed, evict=few)
        if slot is None:
            candidates = [
                held
                for held in before
                if self.pool(held[0]) == self.pool(layer) and not (held[0] == layer and held[1] in needed)
            ]
            cheaper = [held for held in candidates if self.worth[held] <= self.worth[key]]
            refused = not self.rule.admits_moved or not few or not candidates
            assert refused or (self.rule.kind == "lfru" and not cheaper) or not candidates
            return
        assert self.rule.admits_moved
        gone = [held for held, where in before.items() if where == slot]
        if gone:
            (victim,) = gone
            assert few
            assert not (victim[0] == layer and victim[1] in needed)
            peers = [
                held
                for held in before
                if self.pool(held[0]) == self.pool(layer) and not (held[0] == layer and held[1] in needed)
            ]
            assert self.worth[victim] == min(self.worth[held] for held in peers)
            del self.there[victim]
        self.there[key] = slot

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        self.cache.drop(*key)
        del self.there[key]

    @rule(count=st.integers(1, 6))
    def grow(self, count: int) -> None:
        slots = slots_of(count, self.group, self.next_number)
        self.next_number += -(-count // self.group) * self.group
        self.cache.add(slots)
        self.owned += slots

    @rule(count=st.integers(0, 8), layer=st.sampled_from(LAYERS), needed=st.sets(st.integers(0, EXPERTS - 1)))
    def shrink(self, count: int, layer: int, needed: set[int]) -> None:
        stay = {slot.group for key, slot in self.there.items() if key[0] == layer and key[1] in needed}
        possible = [slot for slot in self.owned if slot.group not in stay]
        given = self.cache.shrink(count, layer, needed)
        assert len(set(given)) == len(given)
        assert set(given) <= set(possible)
        assert len(given) >= min(count, len(possible))
        groups = {slot.group for slot in given}
        assert {slot for slot in self.owned if slot.group in groups} == set(given), "groups go as a whole"
        if given:
            heat = {group: self.heat(group) for group in {slot.group for slot in possible}}
            kept = [heat[group] for group in heat if group not in groups]
            assert not kept or max(heat[group] for group in groups) <= min(kept)
        self.owned = [slot for slot in self.owned if slot not in given]
        self.there = {key: slot for key, slot in self.there.items() if slot not in given}

    def heat(self, group: int) -> float:
        return max((self.worth[key] for key, slot in self.there.items() if slot.group == group), default=-math.inf)

    @invariant()
    def the_same_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.capacity == len(self.owned)
        assert len(self.cache) == len(self.there)
        assert len(set(self.there.values())) == len(self.there), "a slot holds one expert"
        assert set(self.there.values()) <= set(self.owned)
        for layer in LAYERS:
            assert self.cache.resident(layer) == [e for e in range(EXPERTS) if (layer, e) in self.there]
        for key, slot in self.there.items():
            assert self.cache.slot_of(*key) == slot


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(12), stateful_step_count=40, deadline=None)


def test_layers_are_whole_and_the_last_ones() -> None:
    cache = SlabCache(CacheRule("layers", admits_moved=False, scope="layer"), LAYERS, EXPERTS)
    cache.add(slots_of(2 * EXPERTS + 3))
    filled = [key for key, _ in cache.seed(ALL)]
    assert sorted(filled) == [(layer, expert) for layer in (3, 7) for expert in range(EXPERTS)]
    assert cache.resident(2) == []
    assert cache.admit(2, 0, [0]) is None


def test_a_pool_per_layer_is_fair() -> None:
    cache = SlabCache(CacheRule("lru", admits_moved=True, scope="layer"), LAYERS, EXPERTS)
    cache.add(slots_of(7))
    for layer in LAYERS:
        cache.touch(layer, range(EXPERTS))
        for expert in range(EXPERTS):
            cache.admit(layer, expert, [expert])
    assert [len(cache.resident(layer)) for layer in LAYERS] == [3, 2, 2]
    assert cache.resident(3) == [3, 4], "the last ones asked for"


def test_least_recently_used_goes_first() -> None:
    cache = SlabCache(CacheRule("lru", admits_moved=True, scope="global"), LAYERS, EXPERTS)
    cache.add(slots_of(2))
    for expert in (0, 1):
        cache.touch(2, [expert])
        assert cache.admit(2, expert, [expert]) is not None
    cache.touch(2, [0])
    cache.touch(2, [4])
    assert cache.admit(2, 4, [4]) is not None
    assert cache.resident(2) == [0, 4]


def test_frequency_outweighs_one_recent_use() -> None:
    cache = SlabCache(CacheRule("lfru", admits_moved=True, scope="global"), LAYERS, EXPERTS)
    cache.add(slots_of(1))
    for _ in range(3):
        cache.touch(2, [0])
    assert cache.admit(2, 0, [0]) is not None
    cache.touch(3, [1])
    assert cache.admit(3, 1, [1]) is None
    for _ in range(4):
        cache.touch(3, [1])
    assert cache.admit(3, 1, [1]) is not None
    assert cache.slot_of(2, 0) is None


def test_what_the_layer_needs_stays() -> None:
    cache = SlabCache(CacheRule("lru", admits_moved=True, scope="global"), LAYERS, EXPERTS)
    cache.add(slots_of(2))
    cache.touch(2, [0, 1, 2])
    assert [cache.admit(2, expert, [0, 1, 2]) is not None for expert in (0, 1, 2)] == [True, True, False]
    assert cache.shrink(2, 2, [0, 1, 2]) == []
    assert len(cache.shrink(1, 2, [1])) == 1
    assert cache.resident(2) == [1]


def test_an_expert_is_not_admitted_twice() -> None:
    cache = SlabCache(CacheRule("lru", admits_moved=True, scope="global"), LAYERS, EXPERTS)
    cache.add(slots_of(2))
    cache.admit(2, 0, [0])
    with pytest.raises(ValueError, match="is there already"):
        cache.admit(2, 0, [0])
