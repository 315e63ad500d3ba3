"""``bench residency``: the paper's algorithms 1 and 2 on small matrices."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench import residency
from engine.bench.residency import (
    MATRICES,
    PACKINGS,
    WAITS_MS,
    Size,
    bench_residency,
    idle_ms,
    measure,
    samples_for,
    size_for,
    write_matrices,
)
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, Load
from tests.support.progress import quiet

pytestmark = pytest.mark.usefixtures("home")


SMALL = Size(2, 256)


def request(runtime: Any, rounds: int = 2) -> Bench:
    load = Load(id=1, model="none is loaded", runtime=runtime, cpu_threads=1)
    return Bench(id=1, kind="residency", load=load, rounds=rounds)


needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="no mlx here")


@needs_mlx
def test_a_table_of_waits_and_packings(home: Path):
    stages: list[str] = []
    result = bench_residency(
        request("mlx"), lambda stage, *rest: stages.append(stage), lambda: False, SMALL, waits_ms=(0, 1, 2)
    )
    assert result.columns == [
        "wait, ms", "idle, ms", "unstacked, ms", "by layer, ms", "idle, ms", "prestacked, ms", "samples",
    ]  # fmt: skip
    assert [(row[0], row[1], row[4], row[6]) for row in result.rows] == [(0, 0, 0, 2), (1, 2, 1, 2), (2, 4, 2, 2)]
    assert (result.data["layers"], result.data["n"], result.data["bytes"]) == (2, 256, 2 * 3 * 256 * 256 * 2)
    for packing in PACKINGS:
        assert [len(samples) for samples in result.data["seconds"][packing]] == [2, 2, 2]
        assert all(sample > 0 for samples in result.data["seconds"][packing] for sample in samples)
    assert "writing matrices" in stages and "by layer, waiting 2 ms" in stages
    assert "mlx" in result.data["runtime"]
    assert list((home / "data").iterdir()) == []


def test_where_nothing_is_wired_a_sentence_says_so(home: Path):
    result = bench_residency(request("native"), quiet, lambda: False, SMALL, waits_ms=(0, 1, 2))
    assert (result.rows, result.columns) == ([], [])
    assert "for Macs with the runtime mlx" in result.notes[0]
    assert result.data["kind"] == "residency"
    assert not home.exists()


@needs_mlx
def test_all_packings_multiply_by_the_same_matrices(tmp_path: Path):
    from engine.runtimes.mlx.packing import MlxMultiplier

    write_matrices(tmp_path, SMALL, quiet)
    rows = []
    for packing in PACKINGS:
        multiplier: Any = MlxMultiplier(tmp_path, packing, SMALL.layers, MATRICES, SMALL.n)
        multiplier.layer(0)
        multiplier.layer(1)
        rows.append(np.array(multiplier._row.tolist()))
        multiplier.close()
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])
    # safetensors' numpy reader has no bfloat16: the words are read by hand.
    data = (tmp_path / "stacked.safetensors").read_bytes()[-SMALL.nbytes :]
    words = np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16
    matrices = words.view(np.float32).reshape(SMALL.layers * MATRICES, SMALL.n, SMALL.n)
    expected = np.ones((1, SMALL.n), dtype=np.float32)
    for matrix in matrices:
        expected = expected @ matrix
    np.testing.assert_allclose(rows[0], expected, rtol=0.2, atol=0.2)
    assert 0.1 < np.abs(expected).mean() < 10.0


def test_an_array_of_one_layer_idles_for_the_waits_of_all():
    assert [idle_ms(packing, 8, 40) for packing in PACKINGS] == [320, 320, 8]
    assert residency.LAYERS == 40


class Slow:
    """Each layer takes as long as is said."""

    description = "slow"

    def __init__(self) -> None:
        self.now = 0.0
        self.layers: list[int] = []
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def layer(self, index: int) -> None:
        self.layers.append(index)
        self.now += 0.5

    def close(self) -> None: ...


def test_waiting_is_not_counted_and_every_sample_begins_anew():
    slow = Slow()
    found = measure(slow, Size(3, 256), "unstacked", 2, (0, 1), quiet, lambda: False, clock=lambda: slow.now)
    assert found == [[1.5, 1.5], [1.5, 1.5]]
    assert slow.layers == [0, 1, 2] * 6  # a warm-up and two samples for each wait
    assert slow.resets == 6


@needs_mlx
def test_it_can_be_stopped(home: Path):
    asked = iter(range(100))
    with pytest.raises(Cancelled):
        bench_residency(request("mlx"), quiet, lambda: next(asked) > 3, SMALL, waits_ms=(0, 1, 200))
    assert list((home / "data").iterdir()) == []


@needs_mlx
def test_a_disk_that_is_too_small_is_named():
    with pytest.raises(ModelError, match="This benchmark needs") as caught:
        bench_residency(request("mlx"), quiet, lambda: False, Size(10_000, 1 << 20))
    assert caught.value.kind == "disk"


def test_the_papers_waits_in_bounded_time():
    assert WAITS_MS == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    waiting = sum(wait * residency.LAYERS * samples_for(wait, residency.LAYERS, 5) / 1000.0 for wait in WAITS_MS)
    assert waiting < 300.0  # for each packing
    assert samples_for(0, 8, 5) == 5 and samples_for(2048, 40, 5) == 1


@given(st.integers(0, 10**12), st.integers(1, 60))
def test_the_matrices_fit_in_memory(memory: int, layers: int):
    size = size_for(memory, layers)
    assert 256 <= size.n <= 8192 and size.n % 256 == 0
    assert size.n == 256 or size.nbytes <= 0.1 * memory


def test_the_papers_size_where_there_is_room():
    assert size_for(10**12, 40) == Size(40, 8192)
