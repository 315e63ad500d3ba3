"""What a full disk is weighed against: bytes that are there already, and may be of the model that is asked about."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.weight_fingerprint import held_of, reusable_bytes
from engine.models.folders.model_folder import folder_bytes
from engine.models.folders.weight_layout import layout_of
from tests.support.shards import offer_part, send


def test_what_may_be_of_the_model_counts_as_room(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    models = tmp_path / "models"
    models.mkdir()
    folder = tiny_model("mixtral")
    assert reusable_bytes("", "mixtral", "head") == 0
    # A share counts as long as its head does not say which weights it has; after that it is known what is there.
    layout = layout_of(folder)
    offered = offer_part(folder, {layer: [0, 1] for layer in layout.layers})
    send(ShardStore(models, "head"), folder, offered)
    sent = offered.nbytes
    assert (
        sent <= reusable_bytes("", "mixtral", "head") < layout.trunk_bytes + layout.expert_bytes * len(layout.experts)
    )
    assert reusable_bytes("", "mixtral", "another head") == 0
    weights = offered.identity.weights
    assert reusable_bytes(weights, "mixtral", "head") == 0
    assert held_of(weights, "head") == ({layer: [0, 1] for layer in layout.layers}, True)
    # A whole model of the family may be the same one, and would be used where it lies.
    whole = models / "whole"
    shutil.copytree(folder, whole)
    assert reusable_bytes(weights, "mixtral", "head") == folder_bytes(whole)
    assert reusable_bytes(weights, "olmoe", "head") == 0
