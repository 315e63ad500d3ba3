"""A profile's arithmetic: bytes, operations and rates of the parts of a forward pass."""

from __future__ import annotations

import pytest

from benchmarks.measuring import ReadBytes
from benchmarks.profile_step import profile, profile_table

READS = ReadBytes(attention=1000, router=10, expert=600, head=5000, layers=2, experts=8, per_token=2)
NOTHING = {"exchange": 0.0, "wait": 0.0, "other": 0.0}


def test_parts_are_given_what_they_read_and_compute() -> None:
    parts = {"attention": 1e-6, "router": 1e-7, "experts": 2e-6, "outside": 1e-6, **NOTHING}
    passes = [{"parts": parts, "distinct": 3.0, "routes": 8}, {"parts": parts, "distinct": 5.0, "routes": 8}]
    found = {part.part: part for part in profile(passes, READS, tokens=2, wanted=2)}
    assert set(found) == {"attention", "router", "experts", "outside"}
    assert found["attention"].nbytes == 2000 and found["attention"].operations == 4000
    assert found["experts"].nbytes == 2 * 4 * 600 and found["experts"].operations == 8 * 600
    assert found["outside"].nbytes == 5000 and found["outside"].operations == 10000
    assert found["experts"].seconds == pytest.approx(2e-6)


def test_packed_weights_cost_the_operations_of_wide_ones() -> None:
    """And a dense model's feed-forward network is among what else its layers do."""
    parts = {"attention": 1e-6, "router": 0.0, "experts": 0.0, "outside": 1e-6, **NOTHING, "other": 2e-6}
    passes = [{"parts": parts, "distinct": 0.0, "routes": 0}]
    packed = ReadBytes(attention=300, router=0, expert=0, head=1500, layers=2, experts=1, per_token=1, dense=700)
    wide = ReadBytes(attention=1000, router=0, expert=0, head=5000, layers=2, experts=1, per_token=1, dense=2000)
    found = {part.part: part for part in profile(passes, packed, tokens=3, wanted=1, widened=wide)}
    assert set(found) == {"attention", "other", "outside"}
    assert found["other"].nbytes == 1400 and found["other"].operations == 3 * 4000
    assert found["attention"].nbytes == 600 and found["attention"].operations == 3 * 2000
    assert found["outside"].nbytes == 1500 and found["outside"].operations == 5000


def test_of_a_prompt_the_head_runs_one_row() -> None:
    parts = {"attention": 1e-6, "router": 1e-7, "experts": 2e-6, "outside": 1e-6, **NOTHING}
    passes = [{"parts": parts, "distinct": 8.0, "routes": 256}]
    found = {part.part: part for part in profile(passes, READS, tokens=64, wanted=1)}
    assert found["outside"].operations == 5000
    assert found["attention"].operations == 64 * 2000


def test_the_table_sums_up_and_says_what_the_memory_allows() -> None:
    parts = {"attention": 2e-6, "router": 1e-6, "experts": 4e-6, "outside": 2e-6, **NOTHING, "other": 1e-6}
    text = profile_table(profile([{"parts": parts, "distinct": 2.0, "routes": 4}], READS, 1, 1), rate=1e9)
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()
            if line.startswith("| ")}  # fmt: skip
    assert rows["attention"][3:5] == ["1.0", "100%"]
    assert rows["other in layers"][2:] == ["–", "–", "–", "–"]
    assert rows["whole"][1] == "100%"
    assert "would take 0.01 ms" in text
