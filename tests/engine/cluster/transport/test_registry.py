"""Which exchange is allowed, and which one is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.transport.accepting import Links
from engine.cluster.transport.connecting import connect_mesh
from engine.cluster.transport.epochs import Epoch
from engine.cluster.transport.exchange import RingProtocolError, measure_exchange
from engine.cluster.transport.link_probe import ECHO_BYTES, answer_measuring, measure_bandwidth, measure_latency
from engine.cluster.transport.registry import (
    MARGIN,
    TIE,
    TRANSPORTS,
    allowed_exchanges,
    available_exchanges,
    choose_exchange,
    open_exchange,
)
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from tests.engine.cluster.linked_nodes import LinkedNodes, make_identity

ALL: list[ExchangeName] = list(TRANSPORTS)
PLAIN = sorted(name for name, transport in TRANSPORTS.items() if transport.plain_text)
HOME = ["192.168.7.0/24"]


def test_plain_text_is_allowed_only_where_all_addresses_are_trusted() -> None:
    assert allowed_exchanges("auto", ["192.168.7.1", "192.168.7.2"], HOME, ALL) == ALL
    assert allowed_exchanges("auto", ["192.168.7.1", "192.168.8.2"], HOME, ALL) == ["tls", "envoy"]
    assert allowed_exchanges("auto", ["192.168.7.1"], [], ALL) == ["tls", "envoy"]


@pytest.mark.parametrize("wanted", PLAIN)
def test_plain_text_on_another_network_is_refused_with_the_address(wanted: ExchangeName) -> None:
    with pytest.raises(ModelError, match=r"10\.9\.9\.9 is on no network that was called trusted"):
        allowed_exchanges(wanted, ["192.168.7.1", "10.9.9.9"], HOME, ALL)
    assert allowed_exchanges(wanted, ["192.168.7.1"], HOME, ALL) == [wanted]


def test_what_not_every_node_can_run_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="“envoy” is not available on every node"):
        allowed_exchanges("envoy", ["192.168.7.1"], HOME, ["tls", "socket"])
    assert allowed_exchanges("auto", ["192.168.7.1"], HOME, ["socket", "tls"]) == ["tls", "socket"]


def test_what_spins_is_not_for_nodes_of_one_machine() -> None:
    apart = allowed_exchanges("auto", ["192.168.7.1"], HOME, ALL, "mlx")
    together = allowed_exchanges("auto", ["192.168.7.1"], HOME, ALL, "mlx", together=True)
    assert "mlx" in apart
    assert together == [name for name in apart if name != "mlx"]
    assert allowed_exchanges("mlx", ["192.168.7.1"], HOME, ALL, "mlx", together=True) == ["mlx"]  # who asks gets it


def test_without_any_exchange_there_is_nothing_to_choose() -> None:
    with pytest.raises(ModelError, match="No exchange could be connected"):
        choose_exchange({})


@given(st.dictionaries(st.sampled_from(ALL), st.floats(1e-6, 1.0), min_size=1))
def test_the_choice_is_tls_or_the_fastest_or_equal_to_it(medians: dict[ExchangeName, float]) -> None:
    chosen = choose_exchange(medians)
    fastest = min(medians.values())
    assert (chosen == "tls") == ("tls" in medians and medians["tls"] <= fastest * (1 + MARGIN))
    if chosen == "tls":
        return
    assert medians[chosen] <= fastest * (1 + TIE)
    earlier = ALL[: ALL.index(chosen)]
    assert all(medians[name] > fastest * (1 + TIE) for name in earlier if name in medians)


def test_tls_is_kept_unless_another_is_clearly_faster() -> None:
    assert choose_exchange({"tls": 1.4e-3, "envoy": 1e-3}) == "tls"
    assert choose_exchange({"tls": 1.6e-3, "envoy": 1e-3}) == "envoy"


def test_equal_ones_go_by_preference() -> None:
    assert choose_exchange({"gloo": 1e-4, "envoy": 1e-4, "tls": 1.04e-4}) == "tls"
    assert choose_exchange({"gloo": 1e-4, "envoy": 1e-3, "tls": 2e-4}) == "gloo"


@pytest.mark.parametrize("transport", ["tls", "socket", "envoy"])
def test_measuring_an_exchange(linked_nodes: Callable[..., LinkedNodes], transport: ExchangeName) -> None:
    nodes = linked_nodes(2)
    exchanges = nodes.exchanges(transport)
    assert [exchange.name for exchange in exchanges] == [transport] * 2
    medians = nodes.everywhere(lambda node: measure_exchange(exchanges[node.epoch.rank], 1000, rounds=5, warm=2))
    assert all(median > 0 for median in medians)
    for exchange in exchanges:
        exchange.close()


def test_an_exchange_that_gives_something_else_is_not_measured(linked_nodes: Callable[..., LinkedNodes]) -> None:
    nodes = linked_nodes(2)
    meshes = nodes.meshes("tls")
    meshes[1].send((b"short",), 1000)
    with pytest.raises(RingProtocolError, match="something else"):
        measure_exchange(meshes[0], 1000, rounds=1, warm=0)
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("name", PLAIN)
def test_plain_text_is_not_even_begun_on_another_network(
    linked_nodes: Callable[..., LinkedNodes], name: ExchangeName
) -> None:
    nodes = linked_nodes(2, trusted=("10.0.0.0/8",))
    with pytest.raises(ModelError, match="no network that was called trusted"):
        open_exchange(name, nodes.nodes[0].links, nodes.nodes[0].epoch)


def test_unknown_exchanges_are_refused_by_name() -> None:
    epoch = Epoch("e", 0, (), bytes(32))
    with pytest.raises(ModelError, match="“auto” cannot be run on this machine"):
        open_exchange("auto", Links(make_identity()), epoch)
    assert {"tls", "socket", "envoy"} <= set(available_exchanges())


def test_a_measured_link_answers_nothing_but_measurements(linked_nodes: Callable[..., LinkedNodes]) -> None:
    from threading import Thread

    from engine.cluster.transport.framed_socket import FramedLink
    from tests.engine.cluster.socket_pairs import plain_pair

    left, right = (FramedLink(framed) for framed in plain_pair())
    errors: list[BaseException] = []

    def answer() -> None:
        try:
            answer_measuring(right)
        except RingProtocolError as error:
            errors.append(error)

    thread = Thread(target=answer)
    thread.start()
    assert measure_latency(left, ECHO_BYTES, rounds=3) > 0
    assert measure_bandwidth(left, most_bytes=1 << 20, most_seconds=5.0) > 0
    left.send(b"?please")
    thread.join(120)
    assert len(errors) == 1
    left.close()
    right.close()


def test_a_mesh_cannot_be_made_in_a_network_that_was_closed(linked_nodes: Callable[..., LinkedNodes]) -> None:
    nodes = linked_nodes(2)
    nodes.nodes[1].links.close()
    with pytest.raises(ModelError, match="node 1"):
        connect_mesh(nodes.nodes[0].links, nodes.nodes[0].epoch, "tls", seconds=0.3)
