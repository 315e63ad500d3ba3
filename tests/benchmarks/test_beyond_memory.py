"""What the benchmark of files larger than the memory says of its rounds, and what it takes for cached."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.beyond_memory import cached_share, row_of


def test_a_row_has_medians_and_the_range_of_the_rounds_own_ratios() -> None:
    seen = {"tokens_per_s": 2.0, "bytes_per_token": 3e6, "rate": 1e8, "plain_rate": 2e8}
    rounds = [{"announced": 2.0, **seen}, {"announced": 4.0, **seen}, {"announced": 1.0, **seen, "tokens_per_s": 1.5}]
    cells = row_of("a model", 3 * 10**9, 2 * 10**9, rounds)
    assert cells == ["a model", "3.00", "2.00", "2.00", "2.00", "1.00 (0.50–1.50)", "3", "200", "0.50 (0.50–0.50)"]


def test_what_was_just_written_is_cached(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(50_000))
    assert cached_share(file) == 1.0
