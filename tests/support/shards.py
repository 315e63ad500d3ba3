"""Shards in tests: what a node is offered of a model, and sending it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.cluster.weights.shard_store import Need, ShardStore
from engine.cluster.weights.transfer import Offer, offer, stream
from engine.models.folders.opening import open_model
from tests.support.progress import quiet

PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def offer_part(folder: Path, held: Mapping[int, Sequence[int]], trunk: bool = True, name: str = "") -> Offer:
    """The offer for a node with the experts ``held`` of the model in ``folder``; see :meth:`Offer.part`."""
    return offer(folder, quiet, name).part(held, trunk)


def send(store: ShardStore, folder: Path, offered: Offer) -> Need:
    """Send what ``store`` lacks of the offer. Returns what it lacked."""
    need = store.need(offered, quiet)
    store.receive(offered, need.wanted, stream(folder, offered, need.wanted), quiet)
    return need


def assert_same_experts(share: Path, whole: Path, held: Mapping[int, Sequence[int]]) -> None:
    """The shard hands out exactly the experts ``held``, with the words of the whole model."""
    mine, theirs = open_model(share).experts, open_model(whole).experts
    assert mine is not None and theirs is not None
    assert (mine.layers, mine.count, mine.dtype) == (theirs.layers, theirs.count, theirs.dtype)
    for layer in theirs.layers:
        assert list(mine.held(layer)) == list(held[layer])
        for expert in range(theirs.count):
            if expert not in held[layer]:
                with pytest.raises(IndexError):
                    mine.expert(layer, expert)
                continue
            left, right = mine.expert(layer, expert), theirs.expert(layer, expert)
            for part in PARTS:
                one, other = getattr(left, part), getattr(right, part)
                assert (one is None) == (other is None)
                if one is not None:
                    np.testing.assert_array_equal(one.words, other.words)
