"""Discovery between machines with real interfaces: several of them, addresses that change, cables that are pulled."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from discovery.addresses import own_addresses, towards
from engine.cluster.membership.links import reachable
from engine.cluster.transport.addresses import as_dialled, as_sent, interface_towards
from tests.discovery.announcing_machines import Process, ids
from tests.support.network_namespaces import Network, ip, network


@pytest.fixture
def cables() -> Iterator[Network]:
    """Two machines with two cables between them."""
    with network(2, lans=2) as made:
        yield made


def test_two_cables_with_self_assigned_addresses_are_told_apart(cables: Network) -> None:
    """The last machine is on the second cable. Packets to its IPv4 address go where the route says, and its link-local
    IPv6 address leads there in any case, without the name that its interface has there."""
    here, there = cables.spaces
    for machine in (0, 1):
        for lan in (0, 1):
            cables.assign_local(machine, lan)
    port, listening = there.call(_listening)
    mine = here.call(own_addresses)
    theirs = there.call(own_addresses)
    assert {one.interface for one in mine if one.ip.startswith("169.254.")} == {"lan0", "lan1"}
    second = next(one.ip for one in theirs if one.interface == "lan1" and one.ip.startswith("169.254."))

    def interface() -> str:
        (found,) = towards([(second, port)], mine)
        return found.interface

    with listening:
        assert here.call(interface) == "lan0"
        ip("-n", here.name, "route", "add", second, "dev", "lan1")
        assert here.call(interface) == here.call(lambda: interface_towards(f"{second}:{port}")) == "lan1"
        (local,) = [one.ip for one in theirs if one.interface == "lan1" and one.ip.startswith("fe80:")]
        sent = as_sent([f"[{local}%their-name]:{port}"])
        assert here.call(lambda: sorted(as_dialled(sent))) == [f"[{local}%lan0]:{port}", f"[{local}%lan1]:{port}"]
        reached = here.call(lambda: reachable(as_dialled(sent)))
        assert reached == [f"[{local}%lan1]:{port}"]
        assert here.call(lambda: interface_towards(reached[0])) == "lan1"


def _listening() -> tuple[int, socket.socket]:
    listening = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return listening.getsockname()[1], listening


@pytest.mark.slow
def test_several_interfaces_and_addresses_that_change(cables: Network, start: Callable[..., Process]) -> None:
    (one, one_instance), (other, other_instance) = ids(), ids()
    first = start(one, one_instance, 4001, "all", space=cables.spaces[0].name)
    second = start(other, other_instance, 4002, "all", space=cables.spaces[1].name)
    assert first.wait(lambda heard: {"10.77.0.2:4002", "10.77.1.2:4002"} <= set(heard.get(other, ())))
    assert second.wait(lambda heard: {"10.77.0.1:4001", "10.77.1.1:4001"} <= set(heard.get(one, ())))

    moved = cables.move(1, 99)
    assert first.wait(
        lambda heard: f"{moved}:4002" in heard.get(other, ()) and "10.77.0.2:4002" not in heard.get(other, ())
    )

    cables.pull(1, lan=1)
    assert first.wait(lambda heard: other in heard and not any("10.77.1." in text for text in heard[other]))
    cables.plug(1, lan=1)
    assert first.wait(lambda heard: "10.77.1.2:4002" in heard.get(other, ()))
