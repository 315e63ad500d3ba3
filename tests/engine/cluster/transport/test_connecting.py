"""Who gets a link, and who is turned away."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.errors import DiscoveryError
from discovery.link_listener import LinkListener, dial
from engine.cluster.transport import connecting
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.connecting import connect_commands, connect_mesh, dial_link
from engine.cluster.transport.epochs import LINK_KIND, Epoch, LinkRequest, Member, Transport, in_networks, split_address
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import FramedLink, FramedSocket
from engine.cluster.transport.link_probe import measure_latency, measure_link
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from tests.engine.cluster.linked_nodes import LinkedNode, LinkedNodes, make_identity, opened
from tests.support.eventually import eventually
from tests.support.random_examples import examples

Make = Callable[..., LinkedNodes]
SOON = 60.0


RIGHT: dict[str, object] = {
    "purpose": "exchange",
    "transport": "tls",
    "epoch": "an epoch",
    "from_rank": 0,
    "to_rank": 1,
    "node_id": "0" * 64,
}


def by() -> float:
    return time.monotonic() + SOON


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def refused(connection: socket.socket) -> bool:
    """Whether the other end closes without a word."""
    connection.settimeout(SOON)
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def request(nodes: LinkedNodes, **changes: object) -> bytes:
    """A request of node 0 for the exchange link to node 1, with ``changes``."""
    right = LinkRequest(
        purpose="exchange",
        transport="tls",
        epoch=nodes.nodes[0].epoch.epoch,
        from_rank=0,
        to_rank=1,
        node_id=nodes.members[0].node_id,
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(right, **changes))


def test_commands_go_between_the_head_and_each_follower(linked_nodes: Make) -> None:
    nodes = linked_nodes(3)
    head, *followers = nodes.everywhere(lambda node: connect_commands(node.links, node.epoch))
    assert sorted(head) == [1, 2]
    for rank, links in enumerate(followers, 1):
        assert sorted(links) == [0]
        head[rank].send(b"step ", str(rank).encode())
        assert bytes(links[0].receive(100)) == f"step {rank}".encode()
        links[0].send(b"done")
        assert bytes(head[rank].receive(100)) == b"done"
    for link in [*head.values(), *(links[0] for links in followers)]:
        link.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "another epoch"},
        {"from_rank": 2},
        {"to_rank": 2},
        {"node_id": "0" * 64},
        {"purpose": "command"},
        {"transport": "socket"},
    ],
)
def test_what_is_not_expected_is_closed_without_a_word(linked_nodes: Make, changes: dict[str, object]) -> None:
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    one.links.expect(one.epoch, "exchange", "tls", nodes.members[0])
    assert refused(dial(("127.0.0.1", one.listener.port), LINK_KIND, request(nodes, **changes)))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"{}", bytes(1000), request.__name__.encode()])
def test_bodies_that_are_no_request_are_closed_without_a_word(linked_nodes: Make, body: bytes) -> None:
    nodes = linked_nodes(2)
    assert refused(dial(("127.0.0.1", nodes.nodes[1].listener.port), LINK_KIND, body))


@settings(max_examples=examples(25), deadline=None)
@given(
    preamble=st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda changes: msgspec.msgpack.encode({**RIGHT, **changes}),
            st.dictionaries(
                st.sampled_from([*sorted(RIGHT), "more"]),
                st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=20), st.binary(max_size=20)),
                max_size=3,
            ),
        ),
    ),
    noise=st.binary(max_size=300),
    plain=st.booleans(),
)
def test_no_bytes_at_all_get_a_link_or_an_exception(preamble: bytes, noise: bytes, plain: bool) -> None:
    """The handler of the link listener, with any request and anything after it; it never raises, and hands nothing
    on."""
    nodes = FUZZED.get()
    one = nodes.nodes[1]
    body = msgspec.msgpack.encode({**RIGHT, "transport": "socket"}) if plain else preamble
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(noise)
        ours.shutdown(socket.SHUT_WR)
        one.links.accept(theirs, body, ("127.0.0.1", 1))
        assert theirs.fileno() == -1
    assert not any(expected.done() for expected in FUZZED.expected)


class Fuzzed:
    """Two nodes of which the second expects the first, made when they are needed."""

    def __init__(self) -> None:
        self.expected: list[Future[FramedSocket]] = []
        self._nodes: LinkedNodes | None = None

    def get(self) -> LinkedNodes:
        if self._nodes is None:
            self._nodes = nodes = LinkedNodes(2)
            one = nodes.nodes[1]
            zero = dataclasses.replace(nodes.members[0], node_id=str(RIGHT["node_id"]))
            transports: tuple[Transport, ...] = ("tls", "socket")
            self.expected = [one.links.expect(one.epoch, "exchange", name, zero) for name in transports]
        return self._nodes

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()


FUZZED = Fuzzed()


@pytest.fixture(scope="module", autouse=True)
def fuzzed_nodes_are_closed() -> Iterator[None]:
    yield
    FUZZED.close()


def test_links_over_ipv6(linked_nodes: Make) -> None:
    try:
        listeners = [LinkListener.open("::1") for _ in range(2)]
    except DiscoveryError:
        pytest.skip("this machine has no IPv6")
    nodes = linked_nodes(2, trusted=("::1/128",))
    members = tuple(
        dataclasses.replace(member, addresses=(f"[::1]:{listener.port}",))
        for member, listener in zip(nodes.members, listeners, strict=True)
    )
    for node, listener in zip(nodes.nodes, listeners, strict=True):
        node.links.attach(listener)
        node.epoch = dataclasses.replace(node.epoch, members=members)
    exchanges: tuple[ExchangeName, ...] = ("tls", "socket", "envoy")
    for name in exchanges:

        def act(node: LinkedNode, name: ExchangeName = name) -> list[bytes]:
            exchange = opened(node, name)
            exchange.send((bytes([node.epoch.rank]),), 1)
            got = [bytes(part) for part in exchange.receive()]
            exchange.close()
            return got

        assert nodes.everywhere(act) == [[b"\0", b"\1"]] * 2
    for listener in listeners:
        listener.close()


def test_a_stranger_with_the_right_words_is_not_let_in(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    expected = one.links.expect(one.epoch, "exchange", "tls", nodes.members[0])
    stranger = make_identity()
    pretending = dataclasses.replace(stranger, node_id=nodes.members[0].node_id)
    with pytest.raises((RingProtocolError, PeerLost)):
        dial_link(Links(pretending), nodes.nodes[0].epoch, nodes.members[1], "exchange", "tls", address(nodes, 1), by())
    assert not expected.done()
    # The right one is still let in afterwards.
    framed = dial_link(
        nodes.nodes[0].links, nodes.nodes[0].epoch, nodes.members[1], "exchange", "tls", address(nodes, 1), by()
    )
    expected.result(SOON).close()
    framed.close()


def address(nodes: LinkedNodes, rank: int) -> str:
    return nodes.members[rank].addresses[0]


def test_a_server_with_another_certificate_is_refused_by_the_dialler(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    one.links.expect(one.epoch, "exchange", "tls", nodes.members[0])
    other = make_identity()
    wrong = Member(1, other.node_id, other.certificate_pem, nodes.members[1].addresses)
    with pytest.raises(RingProtocolError, match="not the machine that was paired"):
        dial_link(nodes.nodes[0].links, nodes.nodes[0].epoch, wrong, "exchange", "tls", address(nodes, 1), by())


def test_a_node_without_the_epochs_key_gets_a_random_number_and_no_more(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    expected = one.links.expect(one.epoch, "exchange", "socket", nodes.members[0])
    wrong = dataclasses.replace(nodes.nodes[0].epoch, key=bytes(32))
    with pytest.raises((PeerLost, RingProtocolError)):
        dial_link(nodes.nodes[0].links, wrong, nodes.members[1], "exchange", "socket", address(nodes, 1), by())
    assert not expected.done()
    connection = dial(("127.0.0.1", one.listener.port), LINK_KIND, request(nodes, transport="socket"))
    connection.settimeout(SOON)
    assert len(connection.recv(100)) == 32
    connection.sendall(bytes(64))
    assert refused(connection)
    assert not expected.done()


def test_plain_text_only_where_the_network_is_trusted(linked_nodes: Make) -> None:
    nodes = linked_nodes(2, trusted=("10.1.2.0/24",))
    with pytest.raises(ModelError, match="no network that was called trusted"):
        connect_mesh(nodes.nodes[0].links, nodes.nodes[0].epoch, "socket", seconds=0.5)
    one = nodes.nodes[1]
    one.links.expect(one.epoch, "exchange", "socket", nodes.members[0])
    daring = dataclasses.replace(nodes.nodes[0].epoch, trusted=("127.0.0.0/8",))
    with pytest.raises((PeerLost, RingProtocolError)):
        dial_link(nodes.nodes[0].links, daring, nodes.members[1], "exchange", "socket", address(nodes, 1), by())


def test_a_welcome_that_comes_late_is_waited_for(linked_nodes: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that takes a link refuses every other one for its place, a second attempt of the same node's as well."""
    nodes = linked_nodes(2)
    one = nodes.nodes[1].links
    prove = one._prove

    def busy(*arguments: Any) -> FramedSocket:
        framed = prove(*arguments)
        time.sleep(connecting._PATIENCE_S[0] + 0.2)  # longer than a first attempt takes to find an address wrong
        return framed

    monkeypatch.setattr(one, "_prove", busy)
    for mesh in nodes.meshes("tls"):
        mesh.close()


def test_a_second_link_for_the_same_place_is_refused(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    meshes = nodes.meshes("tls")
    zero = nodes.nodes[0]
    with pytest.raises((PeerLost, RingProtocolError)):
        dial_link(zero.links, zero.epoch, nodes.members[1], "exchange", "tls", address(nodes, 1), by())
    with ThreadPoolExecutor(2) as pool:  # and the first one is none the worse

        def exchange(rank: int) -> list[bytes]:
            meshes[rank].send((bytes([rank]),), 1)
            return [bytes(part) for part in meshes[rank].receive()]

        assert list(pool.map(exchange, range(2))) == [[b"\0", b"\1"]] * 2
    for mesh in meshes:
        mesh.close()


def test_a_link_opened_for_one_purpose_is_not_taken_for_another(linked_nodes: Make) -> None:
    """The preamble is not protected: somebody on the way changes it, and the link is refused inside."""
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    expected = one.links.expect(one.epoch, "command", "tls", nodes.members[0])

    real = connecting.dial  # the way is changed, not the node

    def change(target: tuple[str, int], kind: str, body: bytes = b"", seconds: float = 5.0) -> socket.socket:
        return real(target, kind, request(nodes, purpose="command"), seconds)

    connecting.dial = change
    try:
        with pytest.raises((PeerLost, RingProtocolError)):
            dial_link(
                nodes.nodes[0].links,
                nodes.nodes[0].epoch,
                nodes.members[1],
                "exchange",
                "tls",
                address(nodes, 1),
                by(),
            )
    finally:
        connecting.dial = real
    assert not expected.done()


def test_a_node_that_never_comes_is_named_in_time(linked_nodes: Make) -> None:
    nodes = linked_nodes(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(connect_mesh, node.links, node.epoch, "tls", 0.7) for node in nodes.nodes[:2]]
        for future in waiting:
            with pytest.raises(ModelError, match="node 2"):
                future.result()
    # Nothing is expected any more: the same epoch can be connected again when all three are there.
    for mesh in nodes.meshes("tls"):
        mesh.close()


def test_addresses_are_tried_until_one_works(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    unused = socket.create_server(("127.0.0.1", 0))
    dead = f"127.0.0.1:{unused.getsockname()[1]}"
    unused.close()
    several = (dataclasses.replace(nodes.members[1], addresses=(dead, address(nodes, 1))),)
    nodes.nodes[0].epoch = dataclasses.replace(nodes.nodes[0].epoch, members=(nodes.members[0], *several))
    for mesh in nodes.meshes("tls"):
        mesh.close()


def test_closed_links_take_nobody(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    expected = one.links.expect(one.epoch, "exchange", "tls", nodes.members[0])
    one.links.close()
    assert expected.cancelled()
    assert refused(dial(("127.0.0.1", one.listener.port), LINK_KIND, request(nodes)))


def test_a_link_is_measured_only_by_those_who_are_known(linked_nodes: Make) -> None:
    nodes = linked_nodes(2)
    zero = nodes.nodes[0]
    speed = measure_link(zero.links, zero.epoch, nodes.members[1], address(nodes, 1))
    assert 0 < speed.latency_s < 1
    assert speed.bytes_per_s > 1e5
    assert speed.address == address(nodes, 1)
    stranger = Links(make_identity())
    with pytest.raises(ModelError, match="cannot be measured"):
        measure_link(stranger, Epoch("x", 0, (), bytes(32)), nodes.members[1], address(nodes, 1))


def test_only_the_measurements_of_a_forgotten_machine_are_cut(linked_nodes: Make) -> None:
    nodes = linked_nodes(3)
    zero, one, two = nodes.nodes

    def measuring(node: LinkedNode) -> FramedLink:
        at = address(nodes, 1)
        return FramedLink(dial_link(node.links, node.epoch, nodes.members[1], "measure", "tls", at, by()))

    kept, cut = measuring(zero), measuring(two)
    eventually(lambda: len(one.links._measuring) == 2)
    one.links.cut_measuring(two.identity.node_id)
    with pytest.raises(PeerLost):
        cut.receive(1)
    assert measure_latency(kept) > 0
    one.links.close()
    with pytest.raises(PeerLost):
        kept.receive(1)


def test_many_connections_leave_no_descriptor_behind(linked_nodes: Make) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open descriptors are counted in /proc")
    nodes = linked_nodes(2)
    for mesh in nodes.meshes("tls"):
        mesh.close()
    before = open_descriptors()
    for attempt in range(30):
        for mesh in nodes.meshes("tls" if attempt % 2 else "socket"):
            mesh.close()
    for _ in range(20):
        refused(dial(("127.0.0.1", nodes.nodes[1].listener.port), LINK_KIND, request(nodes, epoch="none")))
    eventually(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    ("text", "networks", "inside"),
    [
        ("192.168.7.9", ["192.168.7.0/24"], True),
        ("192.168.8.9", ["192.168.7.0/24"], False),
        ("::ffff:10.0.0.2", ["10.0.0.2"], True),
        ("fe80::1%eth0", ["fe80::/10"], True),
        ("fe80::1", ["10.0.0.0/8"], False),
        ("no address", ["0.0.0.0/0"], False),
        ("10.0.0.2", ["no network", "10.0.0.1/8"], True),
        ("10.0.0.2", [], False),
    ],
)
def test_networks_that_are_trusted(text: str, networks: list[str], inside: bool) -> None:
    assert in_networks(text, networks) is inside


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:٣"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(RingProtocolError, match="HOST:PORT"):
        split_address(text)


def test_addresses() -> None:
    assert split_address("10.0.0.2:47821") == ("10.0.0.2", 47821)
    assert split_address("[fe80::1%eth0]:5") == ("fe80::1%eth0", 5)


def test_who_is_known_is_looked_at_only_after_the_proof(linked_nodes: Make) -> None:
    """So neither what a stranger is told nor how long it takes depends on it."""
    nodes = linked_nodes(2)
    asked: list[str] = []

    def known(node_id: str) -> bytes | None:
        asked.append(node_id)
        return None

    links = Links(nodes.nodes[1].identity, known, lambda link: pytest.fail("nobody may measure"))
    links.attach(nodes.nodes[1].listener)
    zero = nodes.nodes[0]
    with pytest.raises(ModelError, match="cannot be measured"):
        measure_link(zero.links, zero.epoch, nodes.members[1], address(nodes, 1))
    assert asked == [zero.identity.node_id]
    assert refused(dial(("127.0.0.1", nodes.nodes[1].listener.port), LINK_KIND, request(nodes, purpose="measure")))
    stranger = request(nodes, purpose="measure", node_id="0" * 64, certificate=zero.identity.certificate_der)
    assert refused(dial(("127.0.0.1", nodes.nodes[1].listener.port), LINK_KIND, stranger))
    assert asked == [zero.identity.node_id]


def test_what_is_waited_for_already_is_refused_in_words(linked_nodes: Make) -> None:
    """A head that asks for the same epoch twice is told so; nothing is printed as unexpected."""
    nodes = linked_nodes(2)
    one = nodes.nodes[1]
    first = one.links.expect(one.epoch, "command", "tls", nodes.members[0])
    with pytest.raises(RingProtocolError, match="node 0 is waited for already"):
        one.links.expect(one.epoch, "command", "tls", nodes.members[0])
    assert not first.done()
