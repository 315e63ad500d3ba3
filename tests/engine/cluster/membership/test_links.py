"""Links between machines: which address is used, and who may open one."""

from __future__ import annotations

import pytest

from engine.cluster.membership.control_messages import (
    Linked,
    MeasuredLink,
)
from engine.cluster.membership.links import measure_best, one_of_each_first, reachable
from engine.cluster.transport.addresses import (
    listener_address,
)
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from tests.engine.cluster.paired_nodes import Nodes

pytestmark = pytest.mark.usefixtures("no_keyring")


def test_the_fastest_address_is_used_and_dead_ones_do_not_hold_it_up(three: Nodes) -> None:
    identity = three.identities[1]
    good = listener_address(three.nodes[1].listening[0])
    found = measure_best(three.nodes[0].links, "e", identity.node_id, identity.certificate_pem, ["127.0.0.1:9", good])
    assert found.address == good
    assert found.interface == "lo"
    assert found.latency_s > 0
    assert found.bytes_per_s > 0
    assert reachable(["127.0.0.1:9", good]) == [good]
    assert reachable(["127.0.0.1:9"]) == ["127.0.0.1:9"]


def test_the_only_address_that_answers_may_be_the_last_of_many(three: Nodes) -> None:
    identity = three.identities[1]
    addresses = [*(f"127.0.0.1:{port}" for port in range(2, 22)), listener_address(three.nodes[1].listening[0])]
    found = measure_best(three.nodes[0].links, "e", identity.node_id, identity.certificate_pem, addresses)
    assert found.address == addresses[-1]


def test_a_cut_leaves_no_interface_out() -> None:
    wired = ["10.0.0.2:1", *(f"[fd00::{number}]:1" for number in range(9))]
    addresses = [*wired, "192.168.1.2:1", "[fe80::9%bridge0]:1"]
    interfaces = dict.fromkeys(addresses, "en0") | {addresses[-2]: "en1", addresses[-1]: "bridge0"}
    found = one_of_each_first(addresses, interfaces.__getitem__)
    assert found[:3] == ["10.0.0.2:1", "192.168.1.2:1", "[fe80::9%bridge0]:1"]
    assert sorted(found) == sorted(addresses) and found[3:] == wired[1:]


def test_link_to_a_machine_that_is_not_paired_needs_the_heads_word(three: Nodes) -> None:
    lenders = [ClusterWorker(node) for node in three.nodes[1:]]
    bob, carl = (three.client(index, three.identities[0]) for index in (1, 2))
    try:
        wanted = Linked(
            epoch="e",
            node_id=three.identities[2].node_id,
            certificate=three.identities[2].certificate_pem,
            addresses=[listener_address(three.nodes[2].listening[0])],
        )
        with pytest.raises(ModelError):
            bob.call("MeasureLinks", wanted, MeasuredLink, 15)
        vouched = Linked(
            epoch="e", node_id=three.identities[1].node_id, certificate=three.identities[1].certificate_pem
        )
        assert carl.call("MeasureLinks", vouched, MeasuredLink).link is None
        found = bob.call("MeasureLinks", wanted, MeasuredLink, 15).link
        assert found is not None
        assert found.latency_s > 0
    finally:
        for closing in (bob, carl, *lenders):
            closing.close()
