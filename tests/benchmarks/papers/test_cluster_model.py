"""Equation (1) against tables 1, 5 and 6 and figure 8 of the paper of private LLMs on Apple Silicon."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.papers.cluster_model import (
    DBRX,
    ClusterHardware,
    cluster_bound,
    realised_placement,
    replicated_halves,
)
from benchmarks.papers.cluster_rows import cluster_rows
from benchmarks.papers.findings import Row
from engine.planning.cluster_load import expected_experts

UNEQUAL = {
    ("table 6, 6 nodes", "load, s"),
    ("figure 8", "2 nodes with RoCEv2, tokens/s"),
    ("section 5.5", "cost of Infiniband"),
}


def test_all_rows_but_three_are_equal_in_every_printed_digit() -> None:
    rows = [row for row in cluster_rows().rows if row.printed is not None and row.ours is not None]
    assert {(row.where, row.what) for row in rows if not row.equal} == UNEQUAL
    assert sum(row.where.startswith("table 6") for row in rows) == 30
    assert all(row.tag == "exact" and not row.fitted_on for row in rows)
    assert all(abs(row.deviation or 0.0) < 0.05 for row in rows if not row.equal)


def test_the_page_is_current(not_on_the_page: Callable[[Sequence[Row]], list[str]]) -> None:
    assert not_on_the_page(cluster_rows().rows) == []


def test_footnote_b_with_the_output_projections_own_size() -> None:
    """As printed, with D_ffn squared, no row of table 6 would hold."""
    assert DBRX.attention_bytes == (8192 * 6144 + 6144 * 6144) * 40 * 2
    as_printed = (8192 * 6144 + 10752**2) * 40 * 2
    more_s = (as_printed - DBRX.attention_bytes) / ClusterHardware().memory_bytes_per_s
    assert round(1 / (0.103 + more_s), 1) == 9.0


def test_halves_are_copied_in_turn() -> None:
    assert replicated_halves(3).holders[0] == ((0, 2),) * 8 + ((1,),) * 8
    assert replicated_halves(4).holders[0] == ((0, 2),) * 8 + ((1, 3),) * 8
    assert expected_experts(replicated_halves(6), 4) == pytest.approx(1.077, abs=0.001)
    assert expected_experts(replicated_halves(8), 4) == pytest.approx(1.0)


@pytest.mark.parametrize(("nodes", "less"), [(2, 0.0), (3, 0.13), (4, 0.26)])
def test_our_placement_executes_fewer_experts(nodes: int, less: float) -> None:
    theirs = expected_experts(replicated_halves(nodes), 4)
    ours = expected_experts(realised_placement(nodes), 4)
    assert 1 - ours / theirs == pytest.approx(less, abs=0.01)


def test_too_few_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 nodes of 7 slots cannot hold 16"):
        realised_placement(2, slots=7)


def test_computing_counts_where_it_is_slower_than_reading() -> None:
    slow = ClusterHardware(operations_per_s=1e11)
    bound = cluster_bound(DBRX, slow, 2.0)
    assert bound.compute_s > bound.load_s
    assert bound.time_s == bound.compute_s + bound.latency_s + bound.transfer_s
