"""A ring of machines with GPUs, from what they say to its answer: planned, formed and run on stand-in devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.stand_in_device import StandInDevice
from engine.calibration.calibration_file import calibration_key, save_calibration
from engine.cluster.head import forming
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.head_model import RingModel
from engine.cluster.head.survey import Surveyor
from engine.cluster.membership import measuring_node
from engine.cluster.worker import follower_work
from engine.cluster.worker.lending import ClusterWorker
from engine.ipc.messages import LendTerms, Load
from engine.ipc.messages.ring import RingChoice
from engine.planning.calibration import Calibration, Curve
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes import runtime_named
from engine.runtimes.choosing import as_ring_node
from engine.runtimes.common.loading import Runtime
from engine.runtimes.model_headers import read_headers
from engine.runtimes.torch.runtime import TorchRuntime
from engine.system.machine import Gpu
from tests.engine.cluster.paired_nodes import Nodes
from tests.engine.cluster.ring_conversation import assert_same, conversation
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")

MEMORY = 4 * GPU_RUNTIME_BYTES
"""Bytes of the GPU, which the nodes share as processes of one machine; half of it is lent."""
DEFAULT = RuntimeChoice("native", "the default on a CPU")
FAST, SLOW = 1e-6, 1.0
"""Seconds of one expert on the GPU; on the CPU it takes a millisecond."""


class Machines:
    """Anna, the head, and Bob, who is lent on ``terms``. Each has a stand-in device of its own."""

    def __init__(self, folder: Path, terms: LendTerms, gpu_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[StandInDevice] = []
        self.folder = tiny_mixtral(folder / "model")
        choice = RingChoice(even_if_slower=True, overlap=False, exchange="tls")
        self.load = Load(id=1, model="tiny", dtype="float32", cpu_threads=1, partitioning="ring", ring=choice)
        monkeypatch.setattr(measuring_node, "gpu_present", lambda: True)
        monkeypatch.setattr(measuring_node, "first_gpu", lambda: Gpu("the stand-in", MEMORY, MEMORY))
        monkeypatch.setattr(measuring_node, "expert_curve", lambda *_: Curve((1, 64), (1e-3, 64e-3)))
        monkeypatch.setattr(measuring_node, "memory_rate", lambda threads: 1e10)
        for module in (forming, follower_work):
            monkeypatch.setattr(module, "runtime_named", self.runtime)
        shape = read_headers(self.folder, self.load).shape
        assert shape is not None
        curve = Curve((1, 64), (gpu_s, 2 * gpu_s))
        save_calibration(
            Calibration(
                version=1,
                machine=calibration_key("float32", 1, "the stand-in"),
                shape=shape,
                cpu=Curve((1, 64), (1e-3, 64e-3)),
                memory_read=1e10,
                gpu=curve,
                weight_copy=gpu_s,
                activation_copy=curve,
            )
        )
        self.nodes = Nodes(folder / "nodes", "Anna", "Bob", lend=True)
        self.lender = ClusterWorker(self.nodes.nodes[1], terms=terms)
        eventually(self.nodes.ready)

    def runtime(self, name: str) -> Runtime:
        return TorchRuntime(self._device) if name == "torch" else runtime_named(name)

    def _device(self) -> StandInDevice:
        self.devices.append(StandInDevice(MEMORY))
        return self.devices[-1]

    def ring(self, name: str = "native", choice: RuntimeChoice | None = DEFAULT) -> RingFormer:
        load = msgspec.structs.replace(as_ring_node(self.load, name), runtime=name)
        head = self.nodes.nodes[0]
        surveyor = Surveyor(head.identity.node_id, self.folder, load)
        return RingFormer(head, "tiny", self.folder, self.runtime(name), load, surveyor, choice=choice)

    def ran(self) -> list[int]:
        """Experts that each device ran."""
        return [sum(operation.kind == "run" for operation in device.trace) for device in self.devices]

    def close(self) -> None:
        self.lender.close()
        self.nodes.close()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """``request.param``: options of Machines."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    # Which of torch's kernels runs is a setting of the process, which the nodes would take from each other.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    options: dict[str, Any] = {"terms": LendTerms(cpu_threads=1), "gpu_s": FAST} | getattr(request, "param", {})
    made = Machines(tmp_path, monkeypatch=monkeypatch, **options)
    yield made
    made.close()


def alone(machines: Machines) -> Any:
    """The conversation on one machine's CPU."""
    load = Load(id=1, model="tiny", dtype="float32", cpu_threads=1, partitioning="cpu")
    return conversation(TorchRuntime(lambda: None).load(machines.folder, load, lambda *_: None))


def test_a_ring_runs_by_torch_where_gpus_make_it_faster_and_is_one_machine_to_the_bit(machines: Machines) -> None:
    former = machines.ring()
    model = RingModel("tiny", former, lambda *_: None)
    try:
        decision = former.decision
        assert decision is not None and decision.kind == "ring" and decision.mode == "exact"
        assert decision.facts is not None and decision.placement is not None
        for share in decision.facts.nodes:
            assert share.gpu == "the stand-in"
            assert share.gpu_expert_bytes == share.expert_bytes > 0
        assert_same([conversation(model)], alone(machines))
        assert len(machines.devices) == 2 and min(machines.ran()) > 0
        assert model.facts.runtime == "torch"
        (line,) = [line for line in model.recorder.take_notices() if line.startswith("The ring runs by torch: ")]
        assert "tokens/s are predicted with the stand-in of Anna and the stand-in of Bob" in line
    finally:
        model.close()
        former.close()
    assert all(device.buffers == {} for device in machines.devices[:1])


@pytest.mark.parametrize("machines", [{"gpu_s": SLOW}], indirect=True)
def test_slow_gpus_leave_the_ring_native_and_that_is_said(machines: Machines) -> None:
    former = machines.ring()
    try:
        formed = former.form(lambda *_: None)
        assert formed.model.facts.runtime == "native"
        assert machines.devices == []
        (line,) = [line for line in formed.notices if line.startswith("The ring runs by native: ")]
        assert "by torch with the stand-in of Anna" in line
        assert [share.gpu for share in formed.facts.nodes] == ["", ""]
    finally:
        former.close()


def test_a_runtime_that_was_asked_for_is_kept(machines: Machines) -> None:
    former = machines.ring(choice=None)
    try:
        assert former.form(lambda *_: None).model.facts.runtime == "native"
    finally:
        former.close()


@pytest.mark.parametrize("machines", [{"terms": LendTerms(cpu_threads=1, lend_gpu_memory=0)}], indirect=True)
def test_a_gpu_of_which_nothing_is_lent_is_left_alone(machines: Machines) -> None:
    former = machines.ring("torch", choice=None)
    try:
        formed = former.form(lambda *_: None)
        assert [share.gpu for share in formed.facts.nodes] == ["the stand-in", ""]
        # Only the head asked for a device.
        assert len(machines.devices) == 1
    finally:
        former.close()
