"""Nodes of a ring that share their experts with a stand-in device: the logits of one machine's CPU, to the bit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from benchmarks.stand_in_device import Faults, Speeds, StandInDevice, calibration_of
from engine.cluster.central import CentralHead, CentralNode
from engine.errors import PeerLost
from engine.ipc.messages import ExpertPolicy, Load
from engine.moe.expert_parallel import Mode, RankContext
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.runtimes.protocol import Logits, RingPlace
from engine.runtimes.torch import gpu_memory_plan
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.runtime import TorchRuntime
from tests.engine.cluster.memory_exchange import MemoryRing, on_all_ranks
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation
from tests.engine.cluster.ring_places import PLACEMENTS, placement_for, places
from tests.support.opened_experts import experts_of
from tests.support.pairwise import in_turn, pairwise
from tests.support.progress import quiet

POLICIES: tuple[ExpertPolicy, ...] = get_args(ExpertPolicy)
MEMORY = 2 * GPU_RUNTIME_BYTES
FEW_EXPERTS = 3 * 3 * 48 * 56 * 4
"""Bytes of three experts of the smallest models."""

SPEEDS = Speeds(copy_s=0.2)

Devices = list[StandInDevice | None]


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which of torch's kernels runs is a setting of the process, which ranks that are threads would take from each
    other."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    # A machine whose GPU is worth its copies for the smallest experts too: nothing is measured here.
    monkeypatch.setattr(gpu_memory_plan, "guessed", lambda shape, width: calibration_of(SPEEDS, shape.expert_bytes))


def load(folder: Path, place: RingPlace | None, device: StandInDevice | None, **options: Any) -> TorchModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, **options)
    return TorchRuntime(lambda: device).load(folder, request, quiet, place)


def ring_of(folder: Path, devices: Devices, how: str, mode: Mode = "exact", **options: Any) -> list[TorchModel]:
    made = places(placement_for(folder, len(devices), how), mode)
    models = [load(folder, place, device, **options) for place, device in zip(made, devices, strict=True)]
    for model, device in zip(models, devices, strict=True):
        assert model.executor is not None and model.executor.in_ring
        assert isinstance(model.executor.backend, HybridBackend) == (device is not None)
    return models


def on_one_machine(folder: Path) -> list[Logits]:
    """The conversation in float32 with the kernels that are chosen now, held once for each of them."""
    return _on_one_machine(folder, os.environ.get("PRIVATELLM_KERNELS", ""))


@functools.cache
def _on_one_machine(folder: Path, kernels: str) -> list[Logits]:
    return conversation(load(folder, None, None, dtype="float32"))


def ran(device: StandInDevice | None) -> int:
    """Experts that the device ran."""
    return 0 if device is None else sum(operation.kind == "run" for operation in device.trace)


FAMILIES = ("mixtral", "qwen2_moe", "llama4_text", "deepseek_v3", "gpt_oss")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "dtype", "count", "how"),
    [
        (family, dtype, *ring)
        for family, dtype, ring in in_turn(FAMILIES, ("float32", "bfloat16"), ((2, "unequal"), (3, "overlapping")))
    ],
)
def test_a_ring_with_devices_is_one_machine_to_the_bit(
    family: str, dtype: str, count: int, how: str, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(family)
    alone = conversation(load(folder, None, None, dtype=dtype))
    devices: Devices = [StandInDevice(MEMORY) if rank != 1 else None for rank in range(count)]
    models = ring_of(folder, devices, how, dtype=dtype)
    assert_same(all_conversations(models), alone)
    assert ran(devices[0]) > 0
    for model in models:
        model.close()
    assert all(device is None or device.buffers == {} for device in devices)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stored", "kernels", "policy"), [("Q4_K_M", "native", "lru-offload"), ("MXFP4", "off", "balanced")]
)
def test_packed_experts_are_shared_with_a_device_in_a_ring(
    stored: str,
    kernels: str,
    policy: ExpertPolicy,
    packed: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "off":
        monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = packed("qwen3_moe", stored)
    experts = experts_of(folder)
    alone = conversation(load(folder, None, None))
    devices: Devices = [StandInDevice(MEMORY), StandInDevice(MEMORY)]
    room = 3 * experts.place(0, 0).nbytes
    models = ring_of(folder, devices, "overlapping", policy=policy, gpu_expert_bytes=room)
    assert_same(all_conversations(models), alone)
    assert all(ran(device) for device in devices)
    sizes = {operation.nbytes for device in devices if device is not None for operation in device.trace}
    assert {experts.place(layer, 0).nbytes for layer in experts.layers} & sizes


WAYS: tuple[Sequence[Any], ...] = (POLICIES, PLACEMENTS, ("native", "off"), (0, FEW_EXPERTS, None))
SAMPLED = in_turn(*WAYS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("policy", "how", "kernels", "room"),
    [*SAMPLED, *(pytest.param(*row, marks=pytest.mark.soak) for row in pairwise(*WAYS) if row not in SAMPLED)],
)
def test_no_policy_changes_a_bit(
    how: str,
    kernels: str,
    policy: ExpertPolicy,
    room: int | None,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "off":
        monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = tiny_model("qwen3_moe")
    alone = on_one_machine(folder)
    devices: Devices = [StandInDevice(MEMORY), StandInDevice(MEMORY)]
    models = ring_of(folder, devices, how, policy=policy, gpu_expert_bytes=room, dtype="float32")
    assert_same(all_conversations(models), alone)
    assert policy == "layers" or sum(map(ran, devices)) > 0


def test_a_device_keeps_its_own_nodes_experts_only(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    devices: Devices = [StandInDevice(MEMORY), StandInDevice(MEMORY)]
    models = ring_of(folder, devices, "unequal")
    placement = placement_for(folder, 2, "unequal")
    all_conversations(models)
    for rank, model in enumerate(models):
        resident = model.recorder.frame(0).resident
        assert resident == [list(placement.held(rank, layer)) for layer in placement.layers]
        assert model.facts.gpu_expert_bytes == model.facts.expert_bytes
        assert model.facts.executor.startswith(f"ring (node {rank + 1} of 2, exact; hybrid (balanced; 100% of the")
        assert model.facts.device == "cpu"
        assert model.memory_for_rows() is None
    assert models[0].resize_experts(0).gpu_expert_bytes == 0


def test_fast_mode_is_close_and_the_same_on_all_nodes(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    alone = on_one_machine(folder)
    devices: Devices = [StandInDevice(MEMORY), None, StandInDevice(MEMORY)]
    found = all_conversations(ring_of(folder, devices, "overlapping", "fast", dtype="float32"))
    assert_same(found[1:], found[0])
    for ours, expected in zip(found[0], alone, strict=True):
        assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize(
    "faults",
    [
        Faults(lost_at=70),
        Faults(copies_refused={2, 3, 9}, copies_damaged={5, 12}),
        Faults(runs_without_room={2, 5}),
        Faults(uploads_without_room={1, 4}),
    ],
    ids=["lost", "copies", "room", "uploads"],
)
def test_what_happens_to_a_device_changes_no_bit_and_ends_no_pass(
    faults: Faults, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("mixtral")
    alone = on_one_machine(folder)
    # The device would hold a trunk, but in a ring the trunk is on the CPU and outlives it.
    devices: Devices = [StandInDevice(MEMORY, holds_trunk=True), StandInDevice(MEMORY)]
    models = ring_of(folder, devices, "even", dtype="float32", policy="lru-offload", gpu_expert_bytes=FEW_EXPERTS)
    assert devices[0] is not None
    devices[0].faults = faults
    devices[0]._counts = dict.fromkeys(devices[0]._counts, 0)
    assert_same(all_conversations(models), alone)
    if faults.lost_at is not None:
        assert models[0].executor is not None and "GPU is lost" in models[0].executor.description
        assert any("stopped working" in notice for notice in models[0].recorder.take_notices())


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_a_node_of_central_mode_shares_its_experts_with_a_device(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    alone = on_one_machine(folder)
    placement = placement_for(folder, 2, "even")
    memory = MemoryRing(2)
    contexts = [RankContext("epoch", rank, placement, "central") for rank in range(2)]
    head = load(folder, RingPlace(contexts[0], CentralHead(contexts[0], memory.ends[0])), StandInDevice(MEMORY))
    device = StandInDevice(MEMORY)
    request = Load(id=1, model=folder.name, cpu_threads=1, dtype="float32")
    experts = TorchRuntime(lambda: device).load_experts(folder, request, contexts[1], quiet)
    assert experts.description.startswith("hybrid (")

    def work(rank: int) -> Any:
        if rank:
            return CentralNode(contexts[1], memory.ends[1], experts).serve()
        try:
            return conversation(head)
        finally:
            memory.ends[0].close()

    found, ended = on_all_ranks(work, 2)
    assert isinstance(ended, PeerLost)
    assert_same([found], alone)
    assert ran(device) > 0
    experts.close()
    assert device.buffers == {}


def test_partitioning_cpu_leaves_the_device_alone(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    device = StandInDevice(MEMORY)
    place = places(placement_for(folder, 1, "even"))[0]
    model = load(folder, place, device, partitioning="cpu")
    assert model.executor is not None and not isinstance(model.executor.backend, HybridBackend)
    assert device.trace == [] and device.buffers == {}


@pytest.mark.parametrize(
    ("lent", "keeps"),
    [
        ({}, True),
        ({"most_gpu_share": 0.5}, False),
        ({"most_gpu_memory": MEMORY // 2}, False),
        ({"most_gpu_memory": MEMORY - 1}, True),
    ],
)
def test_no_more_of_a_device_is_taken_than_is_lent(
    lent: dict[str, Any], keeps: bool, tiny_model: Callable[..., Path]
) -> None:
    """Half of this one is less than what its own libraries take."""
    folder = tiny_model("mixtral")
    device = StandInDevice(MEMORY)
    place = places(placement_for(folder, 1, "even"))[0]
    model = load(folder, place, device, **lent)
    assert model.executor is not None
    assert isinstance(model.executor.backend, HybridBackend) == keeps
    said = [line for line in model.facts.notices if "are lent" in line]
    assert bool(said) != keeps
    assert all("`privatellm join --gpu-memory` lends more" in line for line in said)


def test_no_more_pages_are_locked_than_memory_is_lent(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    for most, locked in ((None, True), (1, False)):
        device = StandInDevice(MEMORY)
        model = load(folder, places(placement_for(folder, 1, "even"))[0], device, most_memory=most,
                     gpu_expert_bytes=FEW_EXPERTS)  # fmt: skip
        assert bool(device.locked) == locked
        model.close()
