"""``bench exchange`` on this machine: every transport, two and three processes."""

from __future__ import annotations

from functools import partial

import pytest

from engine.bench.exchange import SIZES, Measured, as_result, bench_exchange, measure_nodes, percentiles
from engine.cluster.transport.registry import available_exchanges
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, Load
from tests.support.engine_forks import forked_module


def a_request(nodes: list[int], rounds: int = 1) -> Bench:
    return Bench(id=7, kind="exchange", load=Load(id=7, model=""), rounds=rounds, nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [[2], pytest.param([2, 3], marks=pytest.mark.soak)], ids=str)
def test_a_row_for_every_number_of_nodes_and_transport(wanted: list[int]) -> None:
    stages: list[str] = []
    start = partial(forked_module, libraries=True)
    result = bench_exchange(a_request(wanted), lambda stage, *_: stages.append(stage), lambda: False, start)
    # mx.distributed wants ports that are free now, and may find them taken: that is told, and no fault.
    missing = [one["problems"] for one in result.data["measured"]]
    assert all(set(problems) <= {"mlx"} for problems in missing)
    assert [(row[0], row[1]) for row in result.rows] == [
        (nodes, name)
        for nodes, problems in zip(wanted, missing, strict=True)
        for name in available_exchanges()
        if name not in problems
    ]
    assert stages == ["measuring exchanges"] * len(wanted)
    for measured in result.data["measured"]:
        for by_size in measured["seconds"].values():
            for size in SIZES:
                figures = by_size[str(size)]
                assert 0 < figures["p10"] <= figures["median"] <= figures["p90"]
    assert len([note for note in result.notes if "wanted for 12 KiB" in note]) == 3


def test_a_table_of_several_numbers_of_nodes() -> None:
    by_size = {size: [1e-4, 2e-4, 3e-4] for size in SIZES}
    measured = [Measured(nodes, {"tls": by_size, "socket": by_size}, {"tls": 0.01, "socket": 0.5}) for nodes in (2, 3)]
    measured[1].problems["mlx"] = "no port"
    result = as_result(a_request([2, 3]), measured)
    assert [row[:3] for row in result.rows] == [
        [nodes, *kind] for nodes in (2, 3) for kind in (("tls", "encrypted"), ("socket", "plain"))
    ]
    assert result.rows[0][3:] == ["200 (100–300)"] * len(SIZES) + ["1 %"]
    assert "mlx between 3: no port" in result.notes


def test_bytes_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.bench.exchange.contribution", lambda rank, size: b"something else")
    with pytest.raises(ModelError, match="got other bytes through the exchange “tls”"):
        measure_nodes(2, 1, ["tls"], lambda: False, forked_module)


def test_it_can_be_stopped() -> None:
    with pytest.raises(Cancelled):
        measure_nodes(2, 1, ["tls"], lambda: True, forked_module)


@pytest.mark.parametrize("nodes", [[], [1], [2, 9]])
def test_numbers_of_nodes_that_mean_nothing(nodes: list[int]) -> None:
    with pytest.raises(ModelError, match="2 to 8 processes"):
        bench_exchange(a_request(nodes), lambda *_: None, lambda: False)


def test_percentiles() -> None:
    assert percentiles([float(value) for value in range(101)]) == (10.0, 50.0, 90.0)
    with pytest.raises(ValueError, match="no exchange"):
        percentiles([])
