"""Nodes of central mode need no trunk on their disk, and what is not there is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cluster.expert_runners import load_experts
from engine.cluster.weights.shard_store import ShardStore
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import StoredTensor
from engine.moe.expert_parallel import RankContext
from engine.moe.held import HeldExperts, check_held, held_by
from engine.planning.placement import Placement
from tests.engine.cluster.ring_places import placed
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.engine.runtimes.subjects import FP8, PUBLISHED, ZERO_POINTS
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.shards import offer_part, send


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which of torch's kernels runs is a setting of the process; nothing touches the person's home."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))


def share_of(folder: Path, placement: Placement, rank: int, at: Path, trunk: bool = True) -> Path:
    held = {layer: list(placement.held(rank, layer)) for layer in placement.layers}
    store = ShardStore(at / f"node-{rank}", "head")
    return send(store, folder, offer_part(folder, held, trunk)).folder


@pytest.mark.parametrize(
    ("runtime", "family", "width"),
    [
        *((runtime, "mixtral", 48) for runtime in ("torch", "mlx", "native")),
        *((runtime, "nemotron_h_latents", 24) for runtime in ("torch", "native")),
    ],
)
def test_central_nodes_need_no_trunk(
    runtime: str, family: str, width: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    if runtime == "mlx":
        pytest.importorskip("mlx_lm")
    folder = tiny_model(family)
    layers = experts_of(folder).layers
    placement = placed(layers, 8, 2)
    share = share_of(folder, placement, 1, tmp_path, trunk=False)
    request = Load(id=1, model=folder.name, dtype="float32", cpu_threads=1)
    runner = load_experts(runtime, share, request, RankContext("e", 1, placement, "central"), quiet)
    whole = load_experts("torch", folder, request, RankContext("e", 0, placed(layers, 8, 1), "central"), quiet)
    assert runner.width == width
    hidden = np.random.default_rng(1).normal(size=(3, runner.width)).astype(np.float32)
    assert placement.held(1, 1) == (0, 2, 4, 6)
    indices = np.array([[0, -1], [2, 4], [-1, 6]], np.int32)
    weights = np.ones((3, 2), np.float32)
    found = runner.run_experts(1, hidden, indices, weights, (), False)
    expected = whole.run_experts(1, hidden, indices, weights, (), False)
    rows = np.flatnonzero(indices.reshape(-1) >= 0)
    assert np.allclose(found[rows], expected[rows], rtol=1e-4, atol=1e-5)
    runner.close()
    whole.close()


@needs_kernels
@pytest.mark.parametrize("runtime", ["torch", "native"])
def test_a_central_node_repacks_its_own_experts(
    runtime: str,
    grouped: Callable[[str, str], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.models.folders.checkpoint._WORTH_SAYING", 1)
    folder, truth = grouped("qwen3_moe", "GPTQ")
    layers = experts_of(folder).layers
    placement, alone = placed(layers, 4, 2), placed(layers, 4, 1)
    share = share_of(folder, placement, 1, tmp_path, trunk=False)
    request = Load(id=1, model=folder.name, dtype="float32", cpu_threads=1)
    runner = load_experts(runtime, share, request, RankContext("e", 1, placement, "central"), quiet)
    whole = load_experts("torch", truth, request, RankContext("e", 0, alone, "central"), quiet)
    assert "GB of weights in memory, which GPTQ stores otherwise" in runner.notices[0]
    hidden = np.random.default_rng(1).normal(size=(2, runner.width)).astype(np.float32)
    indices = np.array([placement.held(1, layers[-1])] * 2, np.int32)
    weights = np.ones(indices.shape, np.float32)
    found, expected = (one.run_experts(layers[-1], hidden, indices, weights, (), False) for one in (runner, whole))
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    runner.close()
    whole.close()


def test_an_expert_that_is_not_here_is_named(tiny_model: Callable[..., Path]) -> None:
    experts = experts_of(tiny_model("mixtral"))
    placement = placed((0, 1, 2), 8, 2)
    less = HeldExperts(experts, dict.fromkeys(experts.layers, (0, 1, 2, 3)))
    with pytest.raises(ModelError, match=r"Experts \[4, 6\] of layer 0"):
        held_by(less, placement, 0)
    held = held_by(experts, placement, 1)
    assert held.held(1) == placement.held(1, 1) and held.nbytes * 2 == experts.nbytes
    with pytest.raises(IndexError, match="not held"):
        held.expert(0, 0)
    with pytest.raises(ModelError, match="form the ring again"):
        check_held(placement, 0, (0, 1), 8, None)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("gpt_oss", PUBLISHED),
        ("qwen2_moe", "mlx-4-bit"),
        ("mixtral", "mlx-8-bit"),
        ("qwen3_moe", FP8),
        ("mixtral", "mlx-6-bit"),
        ("qwen3_moe", "AWQ"),
        ("mixtral", "packed-zero-points"),
    ],
)
def test_a_share_of_quantised_weights_has_codes_scales_and_biases(
    family: str, stored: str, grouped: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, _ = grouped(family, stored)
    whole = open_model(folder)
    assert whole.experts is not None
    placement = placed(whole.experts.layers, whole.experts.count, 2)
    share = open_model(share_of(folder, placement, 1, tmp_path))
    assert share.experts is not None and share.experts.nbytes * 2 == whole.experts.nbytes
    assert [files.repacks for files in (whole, share)] == [stored in ZERO_POINTS] * 2
    for files in (whole, share):
        files.repack(quiet)
    for layer in placement.layers:
        assert tuple(share.experts.held(layer)) == placement.held(1, layer)
        for expert in placement.held(1, layer):
            mine, theirs = (files.experts.expert(layer, expert) for files in (share, whole) if files.experts)
            assert len(mine.parts) == len(theirs.parts)
            assert all(map(same, mine.parts, theirs.parts))
    theirs_trunk = dict(whole.trunk())
    assert all(same(tensor, theirs_trunk.pop(name)) for name, tensor in share.trunk()) and not theirs_trunk


def same(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    if one is None or other is None:
        return one is other
    parts = (one.scales, other.scales), (one.biases, other.biases)
    return one.words.tobytes() == other.words.tobytes() and all(same(*pair) for pair in parts)
