"""What is read from the disk, held against a cache that really replaces the least recently used expert."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.hybrid import bytes_from_disk, missing_chances, uses_per_token
from engine.planning.memory import ModelSizes

SLAB = 1000
MODEL = ModelSizes(4, 4, 16, 2, 8, 5000, 4 * 16 * SLAB, 10)
SKEWED = [[2**place for place in range(16)], [1] * 16, [0] * 16, [100, 50, *([1] * 14)]]


def replaced_least_recently(uses: list[list[float]], slots: int, tokens: int) -> float:
    """Experts per token that such a cache does not have, each expert drawn by itself."""
    drawn = np.random.default_rng(1).random((tokens, len(uses), len(uses[0]))) < np.array(uses)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = 0
    for index, token in enumerate(drawn):
        for layer, expert in zip(*(places.tolist() for places in token.nonzero()), strict=True):
            missed += (layer, expert) not in cache and 2 * index >= tokens
            cache[layer, expert] = None
            cache.move_to_end((layer, expert))
            if len(cache) > slots:
                cache.popitem(last=False)
    return missed / (tokens - tokens // 2)


@pytest.mark.parametrize("slots", [12, 32, 52])
@pytest.mark.parametrize("popularity", [(), SKEWED], ids=["even", "skewed"])
def test_reads_are_those_of_a_cache_of_the_least_recently_used(popularity: list[list[int]], slots: int) -> None:
    uses = uses_per_token(16, 2, 4, popularity)
    assert [sum(layer) for layer in uses] == pytest.approx([2] * 4, rel=0.2)
    predicted = bytes_from_disk(MODEL, slots * SLAB, 1, popularity) / SLAB
    assert predicted == pytest.approx(replaced_least_recently(uses, slots, 4000), rel=0.08)


def test_popular_experts_stay() -> None:
    assert bytes_from_disk(MODEL, 32 * SLAB, 1, SKEWED) < 0.8 * bytes_from_disk(MODEL, 32 * SLAB, 1)
    first, *_, last = missing_chances(uses_per_token(16, 2, 4, SKEWED), 32)[0]
    assert first > 0.5 > 0.01 > last


@given(slots=st.floats(0, 80), rows=st.integers(1, 600))
def test_more_memory_reads_less_and_more_tokens_more(slots: float, rows: int) -> None:
    room = round(slots * SLAB)
    found = bytes_from_disk(MODEL, room, rows)
    assert bytes_from_disk(MODEL, room + 3 * SLAB, rows) <= found <= bytes_from_disk(MODEL, room, rows + 1) + 1e-6
    assert found <= MODEL.expert_bytes
    one = bytes_from_disk(MODEL, room, 1)
    assert one == pytest.approx(max(0.0, 1 - slots / 64) * 8 * SLAB, abs=SLAB / 100)


def test_with_no_room_every_expert_in_use_is_read_and_with_room_for_all_none() -> None:
    assert bytes_from_disk(MODEL, 0, 1) == bytes_from_disk(MODEL, -1, 1) == 8 * SLAB
    assert bytes_from_disk(MODEL, MODEL.expert_bytes, 600) == 0
    assert bytes_from_disk(ModelSizes(4, 0, 0, 0, 8, 5000, 0, 10), 0, 1) == 0


def test_a_mapped_trunk_is_read_whole_or_takes_room() -> None:
    dense = ModelSizes(4, 0, 0, 0, 8, 5000, 0, 10, embedding_bytes=1000, trunk_is_mapped=True)
    assert [bytes_from_disk(dense, room, 1) for room in (-5, 0, 3999, 4000)] == [4000, 4000, 4000, 0]
    mapped = replace(MODEL, embedding_bytes=1000, trunk_is_mapped=True)
    assert bytes_from_disk(mapped, 4000 + 9 * SLAB, 1) == bytes_from_disk(MODEL, 9 * SLAB, 1)
    assert bytes_from_disk(mapped, 3999, 1) == 4000 + 8 * SLAB
