"""Epochs on a lent machine: which are refused, and when one waits or fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.head.survey import (
    candidates,
)
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import (
    Connected,
    DataPiece,
    EpochMember,
    EpochSpec,
    Forming,
    LoadShard,
    Wants,
)
from engine.cluster.membership.heartbeat import FORMING
from engine.cluster.membership.node import LentState
from engine.cluster.transport.addresses import (
    listener_address,
)
from engine.cluster.weights.transfer import encode_offer
from engine.cluster.worker import lending
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from engine.ipc.messages import ModelOptions
from engine.planning.placement import Placement
from tests.engine.cluster.paired_nodes import Nodes
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually
from tests.support.shards import offer_part

pytestmark = pytest.mark.usefixtures("no_keyring")


def spec_for(nodes: Nodes, rank: int = 1, **changes: Any) -> EpochSpec:
    members = [
        EpochMember(rank=0, node_id=nodes.identities[0].node_id, certificate=nodes.identities[0].certificate_pem),
        EpochMember(
            rank=1,
            node_id=nodes.identities[1].node_id,
            certificate=nodes.identities[1].certificate_pem,
            addresses=[listener_address(nodes.nodes[1].listening[0])],
        ),
    ]
    values: dict[str, Any] = {
        "epoch": "epoch",
        "version": nodes.nodes[1].version,
        "rank": rank,
        "members": members,
        "key": bytes(32),
        "placement": Placement((0,), 2, (((0,), (1,)),)),
        "mode": "exact",
        "loading": "selected",
        "weights": [],
        "exchanges": ["tls"],
        "options": ModelOptions(model="m", runtime="native"),
    }
    return EpochSpec(**(values | changes))


def test_epoch_of_another_version_or_another_head_is_refused(three: Nodes) -> None:
    lender = ClusterWorker(three.nodes[1])
    client = three.client(1, three.identities[0])
    try:
        with pytest.raises(ModelError, match=r"0\.0\.1.*install the same version"):
            client.call("Connect", spec_for(three, version="0.0.1"), Connected)
        stranger = spec_for(three)
        members = [EpochMember(rank=0, node_id="f" * 64, certificate=b""), stranger.members[1]]
        with pytest.raises(ModelError, match="another head"):
            client.call("Connect", spec_for(three, members=members), Connected)
        with pytest.raises(ModelError, match="The epoch is over"):
            list(client.stream("Form", LoadShard(epoch="none", exchange="tls"), Forming))
        assert lender.facts() is None
    finally:
        client.close()
        lender.close()


def test_a_machine_waits_for_the_weights_that_others_are_sent(
    three: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all it needs, and hears nothing of the head but that it forms."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lending, "RESERVED_S", 0.0)
    head, folder = three.nodes[0], tiny_mixtral(tmp_path / "model")
    head.lent = lambda: LentState(stage=FORMING)
    head.table.send_heartbeats(1.0)
    lender = ClusterWorker(three.nodes[1])
    client = three.client(1, three.identities[0])

    def stage_of_head() -> str:
        view = three.nodes[1].table.view(three.identities[0].node_id)
        return view.load.stage if view is not None and view.load is not None else ""

    try:
        eventually(lambda: stage_of_head() == FORMING)
        looked: list[str] = []
        is_forming = lender._is_forming
        monkeypatch.setattr(lender, "_is_forming", lambda node_id: (looked.append(node_id), is_forming(node_id))[1])
        data = encode_offer(offer_part(folder, {0: [0]}))
        client.upload("Offer", [DataPiece(data=data)], Wants, CallGroup())
        eventually(lambda: len(looked) > 2)
        assert lender.facts() is not None
        head.lent = LentState
        head.table.send_heartbeats(1.0)
        eventually(lambda: lender.facts() is None)
    finally:
        client.close()
        lender.close()


def test_connecting_without_the_head_fails_and_frees_the_links(three: Nodes) -> None:
    lender = ClusterWorker(three.nodes[1], connect_s=0.5)
    client = three.client(1, three.identities[0])
    try:
        with pytest.raises(ModelError, match="did not connect"):
            client.call("Connect", spec_for(three), Connected, 120)
        three.peers[1].forget(three.identities[0].node_id)
        eventually(lambda: lender.facts() is None)
        assert not any(thread.name == "following" for thread in threading.enumerate())
    finally:
        client.close()
        lender.close()


def test_candidates_are_lent_free_and_wanted(three: Nodes) -> None:
    lenders = [ClusterWorker(node) for node in three.nodes[1:]]
    try:
        names = {one.name for one in candidates(three.nodes[0], [])}
        assert names == {"Bob", "Carl"}
        only = three.identities[2].node_id
        assert [one.node_id for one in candidates(three.nodes[0], [only])] == [only]
        assert candidates(three.nodes[1], []) == []
    finally:
        for lender in lenders:
            lender.close()
