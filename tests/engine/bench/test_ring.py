"""``bench ring``: its table and figures, with tiny models and real processes; what it is made of."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from engine.bench import ring
from engine.bench.local_ring import bound, cores_here, shared_out
from engine.bench.ring import COLUMNS, bench_ring, ring_of_one
from engine.bench.synthetic_moe import MoeShape, write_moe
from engine.calibration import memory_rate, synthetic_experts
from engine.calibration.synthetic_experts import experts_at_once
from engine.cluster.membership.measuring_node import central_seconds, layer_seconds
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, BenchResult, Load
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.moe.kernels.bindings import choose
from engine.planning.calibration import ExpertShape
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel
from tests.support.engine_forks import forked
from tests.support.progress import quiet
from tests.support.tiny_models import write_tiny_model

needs_kernels = pytest.mark.skipif(not choose("bfloat16").native, reason="the native kernels cannot run here")

LITTLE_MEMORY = 64 << 20
"""Bytes that seem to be free, so that the buffers with which the rate of memory is measured are small."""

AT_ONCE_S = 0.01
"""Time of each round in which experts of several processes are measured, in seconds."""

SMALL = MoeShape(layers=2, hidden=64, ffn=96, experts=4, experts_per_token=2, heads=4, key_value_heads=2, vocabulary=64)


def load_native(folder: Path) -> LoadedModel:
    return runtime_named("native").load(folder, Load(id=1, model=folder.name, cpu_threads=1), quiet)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the benchmark makes its temporary folders, which must be empty afterwards."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(ring, "STEPS", 4)
    monkeypatch.setattr(synthetic_experts, "AT_ONCE_S", AT_ONCE_S)
    monkeypatch.setattr(memory_rate, "available_bytes", lambda: LITTLE_MEMORY)
    before = set(psutil.Process().children(recursive=True))
    yield made
    assert not list(made.glob("privatellm-*"))
    assert set(psutil.Process().children(recursive=True)) <= before


def check(result: BenchResult, models: list[str], nodes: list[int]) -> None:
    methods = [("one node", 1), ("one, in parts", 1), ("naive", nodes[0]), ("P-L_B", nodes[0])]
    methods += [("P-L_R-D", nodes[0]), ("P-L_R-D, TLS", nodes[0]), *(("P-L_R-D", count) for count in nodes[1:])]
    assert result.columns == list(COLUMNS)
    assert [row[:3] for row in result.rows] == [[model, *method] for model in models for method in methods]
    for row in result.data["rows"]:
        assert row["total_s"] > 0 and row["low_s"] <= row["high_s"]
        parts = row["moe_s"] + row["communication_s"] + row["other_s"]
        assert parts == pytest.approx(row["total_s"])
        assert (row["communication_s"] > 0) == (row["method"] != "one node")
        in_ring = row["nodes"] > 1
        for kind in ("planned", "predicted"):
            assert (row[f"{kind}_s"] is not None) == in_ring
            if in_ring:
                of = row[f"{kind}_moe_s"] + row[f"{kind}_communication_s"] + row[f"{kind}_other_s"]
                assert of == pytest.approx(row[f"{kind}_s"])
                assert row[f"{kind}_error"] == pytest.approx(row[f"{kind}_s"] / row["total_s"] - 1)
        assert row["exchange"] == ("" if not in_ring else "envoy" if row["method"] == "P-L_R-D" else "tls")


@pytest.mark.soak
def test_a_ring_is_measured_beside_its_prediction(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = iter([1.7, 1.2])
    monkeypatch.setattr(ring, "experts_at_once", lambda *_: next(at_once))
    folder = write_tiny_model(tmp_path / "tiny-mixtral", "mixtral", num_local_experts=8)
    request = Bench(id=7, kind="ring", load=Load(id=1, model=str(folder), cpu_threads=1), rounds=2, nodes=[3, 2])
    result = bench_ring(request, quiet, lambda: False, launch=forked)
    check(result, ["tiny-mixtral"], [2, 3])
    assert result.id == 7 and result.data["rounds"] == 2
    assert all(row["at_once"] == pytest.approx(1.45) for row in result.data["rows"])


@pytest.mark.soak
@pytest.mark.slow
def test_without_a_model_the_starter_and_one_made_up_are_measured(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = write_tiny_model(tmp_path / "tiny-starter", "mixtral")
    monkeypatch.setattr(ring, "STARTER", str(starter))
    request = Bench(id=1, kind="ring", load=Load(id=1, model="", cpu_threads=1), rounds=1, nodes=[2])
    check(bench_ring(request, quiet, lambda: False, SMALL, forked), ["tiny-starter", ring.MADE_UP], [2])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("when", ["measuring the links", "measuring experts"])
def test_stopping_leaves_nothing_behind(folders: Path, tmp_path: Path, when: str) -> None:
    folder = write_tiny_model(tmp_path / "tiny-mixtral", "mixtral")

    def stop(stage: str, done: int, total: int, unit: str) -> None:
        if stage == when:
            raise Cancelled("Stopped.")

    request = Bench(id=1, kind="ring", load=Load(id=1, model=str(folder), cpu_threads=1), rounds=1, nodes=[2])
    with pytest.raises(Cancelled):
        bench_ring(request, stop, lambda: False)


def test_a_node_that_was_silent_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "tiny-mixtral", "mixtral")
    states = iter(["ready", "unreachable", "unreachable", "ready"])
    asked: list[str] = []

    def state() -> SimpleNamespace:
        asked.append(next(states))
        return SimpleNamespace(peers=[SimpleNamespace(node_id="other", state=asked[-1])])

    def formed(*_: object) -> SimpleNamespace:
        there = 1 if len(asked) == 1 else 2
        asked.append("formed")
        return SimpleNamespace(
            facts=SimpleNamespace(ring=SimpleNamespace(nodes=[""] * there)),
            recorder=SimpleNamespace(take_notices=list),
            close=lambda: None,
        )

    monkeypatch.setattr(ring, "experts_at_once", lambda *_: 1.0)
    monkeypatch.setattr(ring, "RingFormer", lambda *_: None)
    monkeypatch.setattr(ring, "RingModel", formed)
    request = Bench(id=1, kind="ring", load=Load(id=1, model=str(folder), cpu_threads=1), rounds=1, nodes=[2])
    bench = ring._Bench(request, "tiny", folder, 1, quiet, lambda: False)
    node = SimpleNamespace(identity=SimpleNamespace(node_id="me"))
    network: Any = SimpleNamespace(node=node, surveyor=lambda *_: None, state=state)
    bench._formed(network, ring.NAIVE, ["other"])
    assert asked == ["ready", "formed", "unreachable", "unreachable", "ready", "formed"]


@pytest.mark.parametrize("nodes", [[], [1], [2, 9]])
def test_numbers_of_nodes_that_make_no_ring(nodes: list[int]) -> None:
    with pytest.raises(ModelError, match="2 to 8 processes"):
        bench_ring(Bench(id=1, kind="ring", load=Load(id=1, model="x"), nodes=nodes), quiet, lambda: False)


@needs_kernels
def test_the_model_made_up_runs(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "made-up", SMALL, quiet)
    assert (folder / "model.safetensors").stat().st_size > SMALL.nbytes
    experts = open_model(folder).experts
    assert experts is not None and experts.layers == (0, 1) and experts.count == SMALL.experts
    first, other = experts.expert(0, 0), experts.expert(1, 3)
    assert first.down.words.shape == other.down.words.shape and not (first.down.words == other.down.words).all()
    logits = load_native(folder).start().extend([3, 4, 5])
    assert logits is not None and np.isfinite(logits).all() and logits.std() > 0


def test_a_disk_that_is_too_small_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="GB free") as refused:
        write_moe(tmp_path / "made-up", MoeShape(ffn=1 << 36), quiet)
    assert refused.value.kind == "disk"


@needs_kernels
def test_a_ring_of_one_equals_a_machine_without_a_ring(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "made-up", SMALL, quiet)
    request = Load(id=1, model="made-up", partitioning="ring", cpu_threads=1)
    place = ring_of_one((0, 1), SMALL.experts)
    logits = []
    for model in (load_native(folder), runtime_named("native").load(folder, request, quiet, place)):
        rows = model.start()
        rows.extend([3, 4, 5, 6], want_logits=False)
        logits.append(rows.step([7]))
        model.close()
    assert (logits[0] == logits[1]).all()


def test_cores_are_shared_out_whole() -> None:
    cores = [frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7})]
    assert shared_out(cores, 2) == [frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})]
    assert shared_out(cores, 3) == [cores[0], cores[1], cores[2]]
    assert shared_out(cores, 5) == []
    assert shared_out([], 2) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here")
def test_threads_run_where_they_ran_before() -> None:
    before = os.sched_getaffinity(0)
    cores = cores_here()
    assert frozenset().union(*cores) == before
    with bound(cores[0]):
        assert os.sched_getaffinity(0) == cores[0]
    assert os.sched_getaffinity(0) == before
    with bound(()):
        assert os.sched_getaffinity(0) == before


def test_what_a_layer_costs_is_measured() -> None:
    assert 0 < layer_seconds(64) < 1
    assert 0 < central_seconds(64) < 1


@needs_kernels
def test_experts_of_several_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_experts, "AT_ONCE_S", AT_ONCE_S)
    shape = ExpertShape(hidden=64, ffn=96, dtype="F32", expert_bytes=3 * 64 * 96 * 4)
    assert experts_at_once(shape, 1, 1) == 1.0
    assert 1.0 <= experts_at_once(shape, 1, 2) <= 2.0


def test_nodes_hold_half_of_each_layers_experts(tmp_path: Path) -> None:
    sizes = sizes_of(open_model(write_tiny_model(tmp_path, "mixtral", num_local_experts=5)), "float32")
    assert ring.held_at_most(sizes) == 3 * sizes.moe_layers * sizes.slab_bytes
