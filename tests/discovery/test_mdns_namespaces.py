"""Discovery between machines with real interfaces: several of them, addresses that change, cables that are pulled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from announcing_machines import Process, ids
from network_namespaces import Network, network


@pytest.fixture
def cables() -> Iterator[Network]:
    """Two machines with two cables between them."""
    with network(2, lans=2) as made:
        yield made


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
