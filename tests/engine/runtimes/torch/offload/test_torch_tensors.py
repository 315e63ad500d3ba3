"""Numbers of rows that experts are given."""

from __future__ import annotations

from engine.runtimes.torch.offload.torch_tensors import padded_rows


def test_few_numbers_of_rows_and_never_many_more() -> None:
    padded = [padded_rows(rows) for rows in range(1, 513)]
    assert padded[:16] == list(range(1, 17))
    assert all(rows <= more <= max(rows + 7, rows * 9 / 8) for rows, more in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert len(set(padded)) < 60
