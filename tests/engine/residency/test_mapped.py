"""Weights in mapped files: which pages are touched and locked."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cluster.weights.shard_store import ShardStore
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.folders.weight_layout import layout_of
from engine.residency.mapped import PIECE_BYTES, MappedWeights
from engine.residency.resident_model import ResidentModel
from engine.runtimes import runtime_named
from engine.system.durable_files import forget_cached
from tests.support.progress import quiet
from tests.support.resident_memory import needs_smaps, resident_bytes
from tests.support.shards import offer_part, send

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]


GB = 10**9


def test_touching_brings_back_what_the_system_dropped(large: Path):
    layout = layout_of(large)
    weights = MappedWeights(large)
    assert weights.nbytes == layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    assert max(weights.sizes) <= PIECE_BYTES
    os.sync()
    for name, _ in layout.files:
        forget_cached(large / name)
    if all(map(weights.resident, range(len(weights.sizes)))):
        pytest.skip("this file system does not drop pages when asked")
    assert not weights.resident(len(weights.sizes) - 1)
    for index in range(len(weights.sizes)):
        weights.touch(index)
        assert weights.resident(index)
    assert all(map(weights.resident, range(len(weights.sizes))))
    weights.close()
    weights.close()


def test_tables_are_neither_touched_nor_locked(tiny_model: TinyModel):
    folder = tiny_model("qwen4_exp_text")
    layout, tables = layout_of(folder), sum(tensor.nbytes for _, tensor in open_model(folder).tables())
    weights = MappedWeights(folder)
    assert weights.nbytes == layout.trunk_bytes - tables + layout.expert_bytes * len(layout.experts)
    weights.close()


def test_what_a_gpu_has_a_copy_of_comes_last(large: Path):
    layout = layout_of(large)
    first = layout.layers[0]
    on_gpu = {first: range(layout.count), layout.layers[1]: [1]}
    whole, ordered = MappedWeights(large), MappedWeights(large, last=on_gpu)
    alone = MappedWeights(large, on_gpu, trunk=False)
    count = len(alone.sizes)
    assert ordered._pieces[-count:] == alone._pieces
    assert not set(ordered._pieces[:-count]) & set(alone._pieces)
    assert ordered.nbytes == whole.nbytes
    for weights in (whole, ordered, alone):
        weights.close()


@needs_smaps
def test_warming_up_leaves_no_page_to_the_first_question(large: Path):
    """What the runtime reads is in its own mapping, not only in memory; and copy-on-write pages are not copied."""
    files = open_model(large)
    weights = MappedWeights(large, in_use=files.mapped_files)
    before = {mapped.path: resident_bytes((mapped.address, mapped.size)) for mapped in files.mapped_files}
    assert sum(before.values()) < weights.nbytes / 2
    for index in range(len(weights.sizes)):
        weights.touch(index)
    for mapped in files.mapped_files:
        assert resident_bytes((mapped.address, mapped.size)) >= mapped.size * 0.9
    weights.close()


@needs_smaps
def test_the_native_runtime_names_the_mappings_it_reads(large: Path):
    model = runtime_named("native").load(large, Load(id=1, model=str(large)), quiet)
    assert {mapped.path for mapped in model.mapped_files} == {large / name for name, _ in layout_of(large).files}
    ready = ResidentModel(model, large, Load(id=1, model=str(large)))
    assert ready.warmer is not None and ready.warmer.wait_until_warm()
    for mapped in model.mapped_files:
        assert resident_bytes((mapped.address, mapped.size)) >= mapped.size * 0.9
    ready.close()
    model.close()


def test_of_a_share_only_what_is_here_is_touched(large: Path, tmp_path: Path):
    layout = layout_of(large)
    held = {layer: [1, 2] for layer in layout.layers}
    for trunk in (False, True):
        shares = ShardStore(tmp_path / f"node-{trunk}", "head")
        need = send(shares, large, offer_part(large, held, trunk=trunk))
        weights = MappedWeights(need.folder)
        assert weights.nbytes == trunk * layout.trunk_bytes + 2 * len(layout.layers) * layout.expert_bytes
        weights.close()
        weights = MappedWeights(need.folder, {layer: [2, 3] for layer in layout.layers})
        assert weights.nbytes == trunk * layout.trunk_bytes + len(layout.layers) * layout.expert_bytes
        weights.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is locked from /proc")
def test_locking_says_what_was_locked(large: Path, monkeypatch: pytest.MonkeyPatch):
    from engine.residency import mapped

    def locked_kilobytes() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmLck:")[1].split()[0])

    before = locked_kilobytes()
    weights = MappedWeights(large)
    monkeypatch.setattr(mapped, "_allowed_to_lock", lambda: 4 * mmap.PAGESIZE)
    found = weights.lock(available=GB)
    assert found.nbytes <= 4 * mmap.PAGESIZE
    assert found.wanted == weights.nbytes
    assert "`ulimit -l` raises that" in str(found)
    monkeypatch.undo()
    allowed = mapped._allowed_to_lock()
    if allowed is None or allowed > 2 * weights.nbytes:
        all_of_it = weights.lock(available=100 * GB)
        assert all_of_it.nbytes == weights.nbytes and all_of_it.reason == ""
        assert (locked_kilobytes() - before) * 1024 >= weights.nbytes
        assert weights.lock(available=0).nbytes == 0
    weights.close()
    assert locked_kilobytes() == before
