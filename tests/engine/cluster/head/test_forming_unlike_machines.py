"""Machines that are not alike: other runtimes, other instruction sets, another version."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.moe.kernels.bindings import choose
from engine.moe.kernels.pool import usable_cpus
from tests.engine.cluster import machine_hooks
from tests.engine.cluster.real_rings import Machine, RealRing, with_runtimes
from tests.support.engine_forks import with_libraries
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not choose("float32").native, reason="the native kernels are not built"),
]
NEAR = 1e-4
HALF = 190_000
"""Bytes, of the experts of the tiny model: else a machine that measures itself faster may get all."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRing]:
    """The head has all runtimes; the others have torch only, torch and native with other instructions, mlx, or
    one CPU."""
    machines = [
        Machine(),
        with_runtimes("torch"),
        Machine(environment={"PRIVATELLM_KERNELS": "scalar"}),
        with_runtimes("mlx"),
        Machine(arguments=hooked(machine_hooks.on_one_cpu)),
    ]
    with RealRing(tmp_path_factory.mktemp("ring"), machines, with_libraries, lent_threads=None) as made:
        yield made


UNLIKE = [
    ("native", 2),
    ("mlx", 1),
    ("torch", 3),
    *(pytest.param("native", follower, marks=pytest.mark.soak) for follower in (1, 3)),
]
"""Runtimes of the head, and machines that compute otherwise."""


@pytest.mark.parametrize(("head", "follower"), UNLIKE)
def test_unlike_machines_form_a_central_ring_and_why_is_said(
    unlike: RealRing, model: Path, head: str, follower: int
) -> None:
    if (head == "mlx" or follower == 3) and importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    unlike.alone(model, head)
    alone, beams = unlike.answer(), unlike.beams()
    formed = unlike.form(model, head, nodes=[unlike.ids[follower]], shares={unlike.ids[0]: HALF})
    assert formed.mode == "central"
    assert "the machines compute differently" in formed.reason
    assert unlike.answer() == alone
    found = unlike.beams()
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in beams]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in beams], abs=NEAR)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_other_modes_are_refused_between_unlike_machines(unlike: RealRing, model: Path, mode: str) -> None:
    with pytest.raises(ModelError, match=f"Mode {mode} needs machines that compute alike .*scalar"):
        unlike.load(model, "native", mode=mode, nodes=[unlike.ids[2]])


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or usable_cpus() < 2, reason="needs two CPUs to take one away")
def test_torch_computes_alike_on_equally_many_threads_only(unlike: RealRing, model: Path) -> None:
    """Native gives the same bits on any number; the nodes of torch are told the head's, as far as they can have it."""
    one_cpu, shares = [unlike.ids[4]], {unlike.ids[0]: HALF}
    assert unlike.form(model, "torch", mode="exact", nodes=one_cpu, shares=shares).mode == "exact"
    unlike.threads = 2
    try:
        assert unlike.form(model, "native", mode="exact", nodes=one_cpu, shares=shares).mode == "exact"
        with pytest.raises(ModelError, match=r"Mode exact needs machines that compute alike .*2 threads.*1 thread"):
            unlike.load(model, "torch", mode="exact", nodes=one_cpu, shares=shares)
        unlike.alone(model, "torch")
        alone = unlike.answer()
        formed = unlike.form(model, "torch", nodes=one_cpu, shares=shares)
        assert formed.mode == "central" and "compute differently" in formed.reason
        assert unlike.answer() == alone
    finally:
        unlike.threads = 1


@pytest.mark.soak
def test_another_version_is_refused_with_both_named(tmp_path: Path, model: Path) -> None:
    """Whether the head finds it out at the greeting or at forming."""
    older = Machine(arguments=hooked(machine_hooks.saying, version="0.0.1"))
    with RealRing(tmp_path / "ring", [Machine(), Machine(), older]) as ring:
        loaded = ring.load(model, "native", 2, mode="exact")
        assert loaded.facts.ring is not None
        assert [share.name for share in loaded.facts.ring.nodes] == ["head", "node 1"]
        state = ring.head.state()
        assert state is not None
        mine = ring.engines[1].state()
        assert mine is not None
        said = " ".join([*loaded.facts.notices, *(peer.problem for peer in state.peers)])
        assert "0.0.1" in said
        assert "version" in said
