"""Shards in tests: what a node is offered of a model, and sending it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.cluster.weights.shard_store import Need, ShardStore
from engine.cluster.weights.transfer import Offer, offer, stream
from tests.support.progress import quiet


def offer_part(folder: Path, held: Mapping[int, Sequence[int]], trunk: bool = True, name: str = "") -> Offer:
    """The offer for a node with the experts ``held`` of the model in ``folder``; see :meth:`Offer.part`."""
    return offer(folder, quiet, name).part(held, trunk)


def send(store: ShardStore, folder: Path, offered: Offer) -> Need:
    """Send what ``store`` lacks of the offer. Returns what it lacked."""
    need = store.need(offered, quiet)
    store.receive(offered, need.wanted, stream(folder, offered, need.wanted), quiet)
    return need
