"""How much may be wired, locked and touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning import residency as deciding

GB = 10**9


@pytest.mark.parametrize(
    ("share", "key_values", "memory", "recommended", "limit"),
    [
        (20 * GB, 2 * GB, 64 * GB, 48 * GB, 22 * GB),  # all of it fits
        (100 * GB, 10 * GB, 128 * GB, 96 * GB, 96 * GB),  # the GPU's working set
        (100 * GB, 10 * GB, 128 * GB, None, 96 * GB),  # a quarter stays free
        (15 * GB, 1 * GB, 16 * GB, 12 * GB, 8 * GB),  # eight gigabytes stay free
        (15 * GB, 1 * GB, 8 * GB, 6 * GB, 0),
    ],
)
def test_what_may_be_wired(share: int, key_values: int, memory: int, recommended: int | None, limit: int):
    found = deciding.wiring(share, key_values, memory, recommended)
    assert found == deciding.Wiring(limit, share + key_values - limit)


@given(st.integers(0, 10**12), st.integers(0, 10**11), st.integers(0, 10**12), st.none() | st.integers(0, 10**12))
def test_wiring_never_takes_the_reserve(share: int, key_values: int, memory: int, recommended: int | None):
    found = deciding.wiring(share, key_values, memory, recommended)
    assert 0 <= found.limit <= share + key_values
    assert found.limit == 0 or memory - found.limit >= max(8 * GB, memory // 4)
    assert recommended is None or found.limit <= recommended
    assert found.limit + found.short == share + key_values


@given(st.lists(st.integers(1, 1000)), st.integers(0, 10**5))
def test_no_more_is_touched_than_fits(sizes: list[int], available: int):
    count = deciding.touchable(sizes, available)
    assert sum(sizes[:count]) <= deciding.LOCKED_SHARE * available
    assert count == len(sizes) or sum(sizes[: count + 1]) > deciding.LOCKED_SHARE * available


def test_how_often_weights_are_touched():
    assert deciding.standby_period(0.01, wired=True, own_memory=True) is None
    assert deciding.standby_period(0.01, wired=False, own_memory=True) == deciding.UNWIRED_AFTER_S
    assert deciding.standby_period(1.0, wired=False, own_memory=True) == 20.0  # five per cent of the time
    assert deciding.standby_period(0.01, wired=False, own_memory=False) == deciding.EVICTED_AFTER_S
    assert deciding.pause_after(0.1, 0.5) == pytest.approx(0.1)
    assert deciding.pause_after(0.1, 0.05) == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("wanted", "allowed", "available", "locked"),
    [(10, None, 100, 10), (90, None, 100, 80), (90, 5, 100, 5), (10, 0, 100, 0), (10, None, 0, 0)],
)
def test_how_much_is_locked(wanted: int, allowed: int | None, available: int, locked: int):
    assert deciding.lockable(wanted, allowed, available) == locked
