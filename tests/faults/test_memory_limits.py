"""A model larger than the memory there is: it answers from the mapping, and says so with the disk's measured rate."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.membership.control_messages import WantedFacts
from engine.cluster.membership.measuring_node import measure_node
from engine.doctor_facts import doctor_facts
from engine.ipc.messages import Load, Plan
from engine.models.folders.prepare import prepare
from engine.models.formats.model_files import Experts
from engine.runtimes.native import runtime as native_runtime
from engine.runtimes.native.model import NativeModel
from engine.runtimes.native.runtime import NativeRuntime
from engine.runtimes.native.weights import TrunkWeights
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.session.plan_model import plan_model
from engine.system import free_memory
from engine.system.free_memory import container_bytes, container_limit
from tests.faults import limited_memory
from tests.support.engine_forks import with_libraries
from tests.support.hooked_engine import hooked
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model


def group(folder: Path, version: int, limit: str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        names = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\nfile {files}"}
    else:
        statistics = f"cache 9\ntotal_active_file {files // 2}\ntotal_inactive_file {files - files // 2}"
        names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": statistics}
    for name, text in names.items():
        (folder / name).write_text(f"{text}\n")


@given(used=st.integers(0, 2000), files=st.integers(0, 2000), limit=st.integers(1, 3000))
def test_the_tightest_limit_around_the_process_counts(
    tmp_path_factory: pytest.TempPathFactory, used: int, files: int, limit: int
) -> None:
    root = tmp_path_factory.mktemp("groups")
    membership = root / "cgroup"
    membership.write_text("9:name=systemd:/\n4:cpu,memory:/outer/inner\n0::/slice/scope\n")
    assert container_bytes(root / "mount", membership) is None
    mount = root / "mount"
    group(mount / "slice", 2, "max", used, files)
    group(mount / "slice" / "scope", 2, str(limit), used, files)
    assert container_bytes(mount, membership) == max(0, limit - used + files)
    group(mount / "memory" / "outer", 1, "100", 60, 7)
    assert container_bytes(mount, membership) == min(47, max(0, limit - used + files))
    group(mount / "other", 2, "1", 0, 0)
    assert container_bytes(mount, membership) == min(47, max(0, limit - used + files))


def test_a_container_that_sees_only_itself(tmp_path: Path) -> None:
    group(tmp_path, 2, "1000", 300, 100)
    assert container_bytes(tmp_path, tmp_path / "absent") == 800
    assert container_limit(tmp_path, tmp_path / "absent") == 1000
    (tmp_path / "memory.stat").write_text("damaged\n")
    assert container_bytes(tmp_path, tmp_path / "absent") is None


def test_a_group_of_version_1_without_a_limit(tmp_path: Path) -> None:
    group(tmp_path / "memory", 1, str(2**63 - 4096), 300, 100)
    assert container_limit(tmp_path, tmp_path / "absent") is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everybody who asks is in a control group of a gigabyte, of which 300 MB are left."""
    folder = tmp_path / "group"
    group(folder, 2, "1000000000", 700_000_000, 0)
    limits = free_memory._limits
    monkeypatch.setattr(free_memory, "_limits", lambda mount, membership: limits(folder, folder / "absent"))
    return folder


def test_whoever_asks_for_memory_hears_of_the_same(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    machine = free_memory.memory()
    assert (machine.total, machine.free) == (1_000_000_000, 300_000_000) and machine.machine > machine.total
    assert free_memory.available_bytes() == 300_000_000 - free_memory.RESERVE_BYTES
    facts = doctor_facts(Load(id=0, model="starter"))
    assert (facts.memory_total, facts.memory_free) == (machine.total, machine.free)
    assert facts.memory_of_machine == machine.machine
    planned = plan_model(Plan(id=1, load=Load(id=1, model=str(write_tiny_model(tmp_path / "model", "mixtral")))))
    (cpu,) = [device for device in planned.memory if device.device == "CPU"]
    assert (cpu.total, cpu.free) == (machine.total, free_memory.available_bytes())
    node = measure_node(WantedFacts(shape=None))
    assert (node.memory_total, node.memory_free) == (machine.total, free_memory.available_bytes())


def test_no_more_is_locked_than_this_process_may_use(small: Path, tmp_path: Path) -> None:
    experts = experts_of(write_tiny_model(tmp_path / "model", "mixtral"))
    group(small, 2, "1000000000", 999_999_000, 0)
    (line,) = HostExperts(experts).lock(lambda address, nbytes: None, lambda address: None, lambda *told: None)
    assert "are not page-locked" in line


def test_the_native_runtime_says_that_a_model_exceeds_what_it_may_use(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    load = Load(id=1, model="m", runtime="native", cpu_threads=1)

    def notices() -> list[str]:
        return NativeRuntime().load(folder, load, lambda *_: None).facts.notices

    assert notices() == []
    (small / "memory.current").write_text("999999999")
    (line,) = notices()
    assert "GB of weights do not fit in the 0.0 GB of memory that are free for it" in line


def test_the_native_runtime_asks_for_experts_beyond_the_memory_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    load = Load(id=1, model="m", runtime="native", cpu_threads=2)

    def logits(model: NativeModel) -> list[bytes]:
        rows = model.start()
        found = [rows.extend(list(range(3, 40)))]
        found += list(rows.step([5]))
        beams = rows.fan_out(5)
        return [each.tobytes() for each in [*found, *beams.step([6, 7, 8, 9, 10])] if each is not None]

    told: list[TrunkWeights] = []
    read_ahead = TrunkWeights.read_ahead

    def watched(self: TrunkWeights, experts: Experts) -> None:
        told.append(self)
        read_ahead(self, experts)

    monkeypatch.setattr(TrunkWeights, "read_ahead", watched)
    roomy = NativeRuntime().load(folder, load, lambda *_: None)
    assert told == []
    monkeypatch.setattr(native_runtime, "available_bytes", lambda: roomy.facts.expert_bytes)
    tight = NativeRuntime().load(folder, load, lambda *_: None)
    assert len(tight.facts.notices) == len(roomy.facts.notices) + 1
    experts = experts_of(folder)
    for layer in experts.layers:
        filled = told[0].trunk.layers[layer]
        places = (ctypes.c_int64 * (experts.count + 1)).from_address(filled.ahead_from)
        pages = np.ctypeslib.as_array((ctypes.c_size_t * (2 * places[experts.count])).from_address(filled.ahead))
        for expert in range(experts.count):
            nbytes = sum(size for _, size in experts.place(layer, expert).page_ranges())
            assert pages[2 * places[expert] + 1 : 2 * places[expert + 1] : 2].sum() == nbytes > 0
    assert logits(tight) == logits(roomy)


LIMIT = 240 * 2**20
"""More than the process itself needs beside what it was forked with, less than that and the model's 252 MB of
experts."""


def _limited_group(parent: Path, limit_file: str) -> Path:
    if not (parent / "cgroup.procs").is_file():
        raise FileNotFoundError(f"{parent} is no control group")
    group = parent / f"privatellm-test-{os.getpid()}"
    group.mkdir()
    try:
        with (group / limit_file).open("r+") as file:
            file.write(str(LIMIT))
    except OSError:
        group.rmdir()
        raise
    return group


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group with a memory limit, where this machine lets us make one (root, as in most containers)."""
    mount = Path("/sys/fs/cgroup")
    group = None
    for parent, limit_file in ((mount, "memory.max"), (mount / "memory", "memory.limit_in_bytes")):
        try:
            group = _limited_group(parent, limit_file)
            break
        except OSError:
            continue
    if group is None:
        pytest.skip("no control group can be made here")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_a_process_with_less_memory_than_the_model_answers(tmp_path: Path, limited_group: Path) -> None:
    plain = write_tiny_model(
        tmp_path / "plain",
        "mixtral",
        dtype="bfloat16",
        hidden_size=1024,
        intermediate_size=2560,
        num_hidden_layers=2,
        num_attention_heads=8,
    )
    prepare(plain, tmp_path / "prepared", lambda *_: None)

    def ask(group: Path) -> dict[str, object]:
        process = with_libraries(
            hooked(limited_memory.run, folder=str(tmp_path / "prepared"), group=str(group)), os.environ
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        with process.stdout as output:
            said = output.read().decode().splitlines()
        assert process.wait(240) == 0
        found: dict[str, object] = json.loads(said[-1])
        return found

    unlimited = tmp_path / "no-group"
    unlimited.mkdir()
    expected, limited = ask(unlimited), ask(limited_group)
    assert expected["notices"] == []
    (line,) = limited["notices"]  # type: ignore[misc]
    assert "0.3 GB of experts do not fit" in line and re.search(r"at \d+\.\d\d GB/s", line)
    assert limited["used"] == [8, 8]
    assert (limited["tokens"], limited["highest"]) == (expected["tokens"], expected["highest"])
