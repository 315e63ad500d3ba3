"""Runs of bytes in files: what is left of some without others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.models.formats.byte_map import Run, merged, without

RUNS = st.lists(
    st.builds(lambda file, start, size: Run(file, start, start + size), st.integers(0, 2), st.integers(0, 30),
              st.integers(1, 12)), max_size=8
)  # fmt: skip


def bytes_of(run: Run) -> list[tuple[int, int]]:
    return [(run.file, place) for place in range(run.start, run.stop)]


@given(RUNS, RUNS)
def test_what_is_left_of_runs_is_every_byte_that_is_not_taken_in_their_order(runs: list[Run], taken: list[Run]) -> None:
    gone = {each for run in taken for each in bytes_of(run)}
    wanted = [each for run in runs for each in bytes_of(run) if each not in gone]
    left = without(runs, merged(taken))
    assert [each for run in left for each in bytes_of(run)] == wanted
    assert all(run.nbytes > 0 for run in left)
