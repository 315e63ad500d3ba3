"""Nodes that load what the head sent them answer as one machine does that has the whole model, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cluster.weights.shard_store import ShardStore
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.prepare import prepare
from engine.models.folders.weight_layout import layout_of
from engine.planning.placement import Placement
from engine.runtimes import runtime_named
from engine.runtimes.common.loading import load_model
from engine.runtimes.protocol import LoadedModel, Logits, RingPlace
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_places import placed, places
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.support.progress import quiet
from tests.support.shards import offer_part, send

TinyModel = Callable[..., Path]
PROMPT = [5, 17, 101, 42, 9, 77, 30, 12, 64, 3, 88]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    # Which of torch's kernels runs is a setting of the process, which ranks that are threads would take from another.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def sent(folder: Path, node: Path, placement: Placement, rank: int) -> Path:
    """The folder that ``rank`` loads."""
    held = {layer: placement.held(rank, layer) for layer in placement.layers}
    return send(ShardStore(node, "head"), folder, offer_part(folder, held)).folder


def load(folder: Path, runtime: str, place: RingPlace | None = None) -> LoadedModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, partitioning="cpu" if place is None else "ring")
    return runtime_named(runtime).load(folder, request, quiet, place)  # type: ignore[arg-type]


def conversation(model: LoadedModel) -> list[Logits]:
    rows = model.start()
    found = [rows.extend(PROMPT)]
    found += [rows.step([token])[0] for token in (5, 9, 17)]
    return [logits for logits in found if logits is not None]


def assert_the_ring_is_one_machine(folder: Path, tmp_path: Path, runtime: str, nodes: int = 3) -> None:
    alone = load(folder, runtime)
    wanted = conversation(alone)
    alone.close()
    layout = layout_of(folder)
    placement = placed(layout.layers, layout.count, nodes, "overlapping")
    models = [
        load(folder if rank == 0 else sent(folder, tmp_path / f"node-{rank}", placement, rank), runtime, place)
        for rank, place in enumerate(places(placement))
    ]
    found: list[Any] = must_succeed(on_all_ranks(lambda rank: conversation(models[rank]), nodes))
    for logits in found:
        for one, other in zip(logits, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    for model in models:
        model.close()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("runtime", "family", "prepared"),
    [
        pytest.param("native", "mixtral", False, marks=needs_kernels),
        pytest.param("native", "qwen3_moe", True, marks=needs_kernels),
        ("torch", "mixtral", True),
        ("torch", "gpt_oss", False),
        ("torch", "dbrx", False),
    ],
)
def test_shares_of_a_checkpoint_or_a_bank(
    tiny_model: TinyModel, tmp_path: Path, runtime: str, family: str, prepared: bool
):
    folder = tiny_model(family, dtype="bfloat16")
    if prepared:
        prepare(folder, tmp_path / "bank", quiet)
        folder = tmp_path / "bank"
    assert_the_ring_is_one_machine(folder, tmp_path, runtime)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_shares_of_what_mlx_wrote(tmp_path: Path, family: str):
    pytest.importorskip("mlx.core")
    from tests.engine.runtimes.mlx_oracle import write_quantised

    assert_the_ring_is_one_machine(write_quantised(tmp_path, family), tmp_path, "mlx", nodes=2)


def test_mlx_loads_a_share_of_a_plain_checkpoint(tiny_model: TinyModel, tmp_path: Path):
    pytest.importorskip("mlx.core")
    assert_the_ring_is_one_machine(tiny_model("mixtral"), tmp_path, "mlx", nodes=2)


def test_a_share_is_not_run_alone(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    share = sent(folder, tmp_path / "node", placed(layout.layers, layout.count, 2), 1)
    with pytest.raises(ModelError, match="share of a model"):
        load_model(runtime_named("torch"), "a share", share, Load(id=1, model="a share"), quiet)
