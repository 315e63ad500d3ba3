"""The survey of a ring's machines: its figures as the planner takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.head.survey import (
    Survey,
    Surveyor,
    planned_nodes,
)
from engine.cluster.membership.control_messages import (
    WantedFacts,
)
from engine.cluster.membership.measuring_node import measure_node
from engine.cluster.worker.follower_work import Busy
from engine.ipc.messages import Load
from engine.planning.calibration import ExpertShape
from engine.planning.ring_nodes import TORCH_LAYER_S, GpuFacts
from tests.engine.cluster.tests_models import facts

pytestmark = pytest.mark.usefixtures("no_keyring")


def test_processes_of_one_machine_share_its_memory_and_its_overheads() -> None:
    survey = Survey(
        facts={
            "head": facts(layer_overhead_s={"native": 3e-5}),
            "near": facts(),
            "far": facts(machine="two", memory_free=1_000_000_000),
        }
    )
    order = [("head", "Anna"), ("near", "Bob"), ("far", "Carl")]
    head, near, far = planned_nodes(survey, order, "native", "bfloat16")
    assert (head.memory_free, near.memory_free, far.memory_free) == (3_000_000_000, 3_000_000_000, 1_000_000_000)
    assert head.overhead_s == near.overhead_s == 3e-5
    assert far.overhead_s == 0.0
    assert head.machine == near.machine != far.machine


def test_no_more_than_what_is_lent_is_planned_with() -> None:
    survey = Survey(facts={"head": facts(), "near": facts(memory_lent=2 * 10**9), "far": facts(memory_lent=10**11)})
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.memory_free for node in nodes] == [2 * 10**9, 2 * 10**9, 2 * 10**9]
    survey.facts["near"] = facts(memory_lent=10**9)
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.memory_free for node in nodes] == [2 * 10**9, 10**9, 2 * 10**9]


def test_a_gpu_is_planned_with_where_torch_runs_experts() -> None:
    gpu = GpuFacts(name="an\x1b[31m L4", memory_total=24 << 30, memory_free=20 << 30)
    survey = Survey(
        facts={
            "head": facts(gpu=gpu, machine="head"),
            "lent": facts(gpu=msgspec.structs.replace(gpu, memory_lent=2 << 30), machine="two"),
            "near": facts(gpu=gpu, machine="three"),
            "beside": facts(gpu=gpu, machine="three"),
            "plain": facts(machine="four"),
            "without": facts(gpu=gpu, machine="five", runtimes=["native"]),
        }
    )
    order = [(name, name) for name in survey.facts]
    assert all(node.gpu is None for node in planned_nodes(survey, order, "native", "bfloat16"))
    own = Load(id=0, model="m", policy="twiddler", gpu_expert_bytes=1 << 30)
    found = [node.gpu for node in planned_nodes(survey, order, "torch", "bfloat16", own)]
    assert [each and each.memory_free >> 30 for each in found] == [20, 2, 10, 10, None, None]
    assert [each and each.memory_total >> 30 for each in found] == [24, 24, 12, 12, None, None]
    head, lent = found[:2]
    assert head is not None and lent is not None
    assert (head.policy, head.expert_bytes, lent.policy, lent.expert_bytes) == ("twiddler", 1 << 30, "balanced", None)
    assert "\x1b" not in head.name
    on_cpu = msgspec.structs.replace(own, partitioning="cpu")
    assert planned_nodes(survey, order, "torch", "bfloat16", on_cpu)[0].gpu is None


def test_a_machine_does_not_decide_what_the_head_decides() -> None:
    gpu = GpuFacts(name="an L4", memory_total=24 << 30, memory_free=20 << 30, policy="stream", expert_bytes=1)
    lying = facts(node_id="a", name="Anna", runs="mlx", kind="any", gpu=gpu, machine="two")
    _, found = planned_nodes(
        Survey(facts={"a": facts(), "b": lying}), [("a", "Anna"), ("b", "Bob")], "torch", "float32"
    )
    assert (found.node_id, found.name, found.runs) == ("b", "Bob", "torch")
    assert found.kind.startswith("torch avx512_bf16 float32")
    assert found.gpu is not None and (found.gpu.policy, found.gpu.expert_bytes) == ("balanced", None)


@pytest.mark.parametrize(
    ("measured", "runtime", "seconds"),
    [
        ({}, "torch", 0.0),
        ({"native": 3e-5}, "native", 3e-5),
        ({"native": 3e-5}, "torch", TORCH_LAYER_S),
        ({"native": 3e-5, "torch": 2e-4}, "torch", 2e-4),
        ({"native": 2.0}, "torch", 2.0),
    ],
)
def test_torch_is_not_taken_to_cost_as_little_as_native(
    measured: dict[str, float], runtime: str, seconds: float
) -> None:
    survey = Survey(facts={"a": facts(layer_overhead_s=measured)})
    (found,) = planned_nodes(survey, [("a", "a")], runtime, "bfloat16")
    assert found.overhead_s == seconds


def test_processes_that_are_sent_weights_share_the_disk_they_are_put_on() -> None:
    survey = Survey(
        facts={
            "head": facts(disk="one"),
            "near": facts(disk="one", disk_free=6_000_000_000),
            "beside": facts(disk="one", disk_free=6_000_000_000),
            "elsewhere": facts(disk="two", disk_free=6_000_000_000),
            "unknown": facts(machine="two", disk_free=5_000_000_000),
        }
    )
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    # The head has the whole model: nothing is put on its disk.
    free = [None, 3_000_000_000, 3_000_000_000, 6_000_000_000, 5_000_000_000]
    assert [node.disk_free for node in nodes] == free
    # It has not: it takes its share from the others, on the same disk.
    nodes = planned_nodes(replace(survey, whole=False), [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.disk_free for node in nodes][:4] == [10**10 // 3, 2_000_000_000, 2_000_000_000, 6_000_000_000]


def test_machines_that_compute_other_bits_are_of_other_kinds() -> None:
    survey = Survey(facts={"a": facts(), "b": facts(runtimes=["mlx"]), "c": facts(instruction_set="avx2")})
    kinds = {node.kind for node in planned_nodes(survey, [("a", ""), ("b", ""), ("c", "")], "native", "bfloat16")}
    assert len(kinds) == 3


@pytest.mark.parametrize(
    ("runtime", "change", "alike"),
    [
        ("native", {"threads": 3, "processor": "another"}, True),
        ("native", {"system": "Darwin arm64"}, False),
        ("torch", {"threads": 3}, False),
        ("torch", {"processor": "another"}, False),
        ("torch", {"libraries": {"torch": "0.1"}}, False),
        ("torch", {"libraries": {"mlx": "0.1"}}, True),
        ("mlx", {"threads": 3}, True),
        ("mlx", {"processor": "another"}, False),
    ],
)
def test_what_the_bits_of_a_runtime_depend_on(runtime: str, change: dict[str, Any], alike: bool) -> None:
    here = {"runtimes": ["native", "torch", "mlx"]}
    survey = Survey(facts={"a": facts(**here), "b": facts(**here, **change)})
    one, other = planned_nodes(survey, [("a", ""), ("b", "")], runtime, "bfloat16")
    assert (one.kind == other.kind) is alike


def test_nodes_of_torch_are_told_the_heads_threads(tmp_path: Path) -> None:
    chosen = Load(id=1, model="m", cpu_threads=1)
    for runtime, threads in (("torch", 1), ("native", None), ("mlx", None)):
        load = msgspec.structs.replace(chosen, runtime=runtime)
        assert Surveyor("head", tmp_path, load).threads_for(runtime) == threads


def test_a_node_measures_itself_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    found = measure_node(WantedFacts(shape=ExpertShape(64, 96, "F32", 3 * 64 * 96 * 4), dtype="float32"))
    assert found.memory_total > found.memory_free > 0
    assert found.memory_read > 0
    assert found.disk_free > 0
    assert found.expert is not None
    assert all(seconds > 0 for seconds in found.expert.seconds)
    assert list(found.expert.seconds) == sorted(found.expert.seconds)
    assert "torch" in found.runtimes


def test_busy_is_a_share_of_the_last_seconds() -> None:
    now = [0.0]
    busy = Busy(lambda: now[0])
    assert busy.share() == 0.0
    busy.begin()
    now[0] = 1.0
    assert busy.share() == pytest.approx(0.2)
    busy.end()
    now[0] = 5.5
    assert busy.share() == pytest.approx(0.1)
    now[0] = 60.0
    assert busy.share() == 0.0
