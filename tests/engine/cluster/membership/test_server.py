"""The control plane between nodes of this process: who is answered, who is not, and what ends when."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.addresses import shown_address
from discovery.identity import load_identity
from discovery.peers import PeersFile, new_peer
from engine.cluster.membership import control_messages as messages
from engine.cluster.membership import server as control_server
from engine.cluster.membership.client import Unreachable
from engine.cluster.membership.control_messages import (
    LENDING,
    SERVICE,
    EndEpoch,
    EpochMember,
    EpochSpec,
    Greeting,
    NodeLoad,
)
from engine.cluster.membership.node import LentState, Node
from engine.cluster.membership.server import ControlServer, Credentials, CrowdLimit, RpcMethod, _end_of
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from engine.ipc.messages import ModelOptions, OpenNetwork
from engine.planning.placement import Placement
from engine.planning.ring_nodes import NodeFacts
from engine.system import free_memory
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.random_examples import examples

pytestmark = pytest.mark.usefixtures("no_keyring")


ALL_METHODS = ["Hello", "Beat", *LENDING]


def raw_call(address: str, credentials: Credentials, method: str, body: bytes, kind: str) -> bytes | list[bytes]:
    """One call as anybody could make it, whatever its body."""
    secured = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificate)
    options = (("grpc.ssl_target_name_override", "privatellm"), ("grpc.enable_retries", 0))
    with grpc.secure_channel(address, secured, options) as channel:
        path = f"/{SERVICE}/{method}"
        if kind == "up":
            return bytes(channel.stream_unary(path)(iter([body]), timeout=PATIENCE_S))
        if kind == "down":
            return list(channel.unary_stream(path)(body, timeout=PATIENCE_S))
        return bytes(channel.unary_unary(path)(body, timeout=PATIENCE_S))


def kind_of(method: str) -> str:
    return LENDING[method][1] if method in LENDING else "one"


def test_paired_nodes_find_each_other_by_address(pair: Nodes) -> None:
    eventually(pair.ready)
    facts = pair.nodes[0].table.facts()[0]
    assert (facts.name, facts.state) == ("Bob", "ready")
    assert facts.addresses[0] == pair.nodes[1].listening[0]
    back = pair.nodes[1].table.facts()[0]
    # Only one side was told an address: the greeting brought the other's.
    assert (back.name, back.state, back.addresses[0]) == ("Anna", "ready", pair.nodes[0].listening[0])


def test_a_machine_says_how_much_memory_its_control_group_has(pair: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_limits", lambda *_: [(1_000_000_000, 700_000_000)])
    load = pair.nodes[0].load()
    assert (load.memory_total, load.memory_free) == (1_000_000_000, 700_000_000 - free_memory.RESERVE_BYTES)


@pytest.mark.parametrize(
    ("said", "address", "port"),
    [
        ("ipv4:127.0.0.1:59584", "127.0.0.1", 59584),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", "::ffff:10.0.0.1", 7),
        ("ipv6:%5Bfe80::5%251%5D:56286", f"fe80::5%{socket.if_indextoname(1)}", 56286),
        ("unix:", "", 0),
    ],
)
def test_the_caller_is_where_it_can_be_called_back(said: str, address: str, port: int) -> None:
    """gRPC writes brackets and the number of an interface as in an address of the web."""
    context: Any = SimpleNamespace(peer=lambda: said)
    assert _end_of(context) == (address, port)
    assert shown_address(*_end_of(context)).endswith(f":{port}")
    if address:
        assert ip_address(_end_of(context)[0])


def test_a_proven_caller_is_recognised_by_a_link_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    crowds = CrowdLimit()
    here = SimpleNamespace(port=1)
    one = SimpleNamespace(fd=3, raddr=SimpleNamespace(ip="fe80::5", port=7), laddr=here, status=psutil.CONN_ESTABLISHED)
    seen: list[tuple[object, object]] = []
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [one])
    monkeypatch.setattr(control_server, "too_many", lambda ends, proved: seen.append((ends, proved)) or [])
    crowds.proved("fe80::5%eth0", 7)
    crowds._look(1)
    crowds.close()
    assert ({3: ("fe80::5", 7)}, {("fe80::5", 7)}) in seen  # others may look at this moment


def test_one_paired_by_another_process_is_found(tmp_path: Path) -> None:
    """As `privatellm peers pair` does it beside a lent machine: in another process, which changes the file."""
    nodes = Nodes(tmp_path, "Anna")
    late = Nodes(tmp_path / "late", "Bob")
    try:
        late.peers[0].add(new_peer(nodes.identities[0].certificate_der, "Anna"))
        here = new_peer(late.identities[0].certificate_der, "Bob", late.nodes[0].listening[0])
        PeersFile(tmp_path / "Anna").add(here)
        eventually(lambda: nodes.nodes[0].table.facts() and nodes.ready())
        assert [(one.name, one.state) for one in nodes.nodes[0].table.facts()] == [("Bob", "ready")]
    finally:
        nodes.close()
        late.close()


def test_forgotten_machine_is_answered_on_no_method_of_its_open_connection(pair: Nodes) -> None:
    client = pair.client(1, pair.identities[0])
    try:
        client.call("Beat", NodeLoad(process="x", memory_total=1, memory_free=1), NodeLoad)
        pair.peers[1].forget(pair.identities[0].node_id)
        invoke: Any = client._channel
        for method in ALL_METHODS:
            path, kind = f"/{SERVICE}/{method}", kind_of(method)
            with pytest.raises(grpc.RpcError) as refused:
                if kind == "up":
                    invoke.stream_unary(path)(iter([b"\x80"]), timeout=PATIENCE_S)
                elif kind == "down":
                    list(invoke.unary_stream(path)(b"\x80", timeout=PATIENCE_S))
                else:
                    invoke.unary_unary(path)(b"\x80", timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
            assert refused.value.details() == ""
    finally:
        client.close()


def test_pairing_over_the_link_listener_takes_effect_without_restart(tmp_path: Path) -> None:
    nodes = [
        Node(*make_identity(tmp_path / name), OpenNetwork(id=1, name=name, listen="127.0.0.1:0", lend=True))
        for name in ("Anna", "Bob")
    ]
    try:
        nodes[1].show_code()
        code = nodes[1].pairing.code
        assert code is not None
        found = nodes[0].pair(nodes[1].listening[0], code.text)
        assert found.label == "Bob"
        eventually(lambda: all(peer.state == "ready" for node in nodes for peer in node.table.facts()))
        assert nodes[1].pairing.code is None
        assert [peer.name for peer in nodes[1].table.facts()] == ["Anna"]
    finally:
        for node in nodes:
            node.close()


def test_server_with_another_certificate_is_not_believed(tmp_path: Path, pair: Nodes) -> None:
    impostor, _ = make_identity(tmp_path / "impostor")
    credentials = Credentials(pair.identities[0].key_pem, pair.identities[0].certificate_pem, impostor.certificate_pem)
    with pytest.raises(grpc.RpcError) as refused:
        raw_call(pair.nodes[1].listening[0], credentials, "Beat", b"\x80", "one")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_machine_that_is_not_lent_refuses_in_a_sentence(pair: Nodes) -> None:
    client = pair.client(0, pair.identities[1])
    try:
        with pytest.raises(ModelError, match="Anna is not lent; run `privatellm join` there"):
            client.call("End", EndEpoch(epoch="x"), messages.EmptyBody)
    finally:
        client.close()


def test_damaged_body_is_refused_and_the_server_lives(pair: Nodes) -> None:
    credentials = Credentials(
        pair.identities[0].key_pem, pair.identities[0].certificate_pem, pair.identities[1].certificate_pem
    )
    ClusterWorker(pair.nodes[1])
    for method in set(ALL_METHODS) - {"Receive"}:  # that one wants no weights which nobody offered, whatever they are
        for body in (b"", b"\xc1", b"\x93\x01\x02", b"\x81\xa5epoch\xc0", os.urandom(300)):
            with pytest.raises(grpc.RpcError) as refused:
                raw_call(pair.nodes[1].listening[0], credentials, method, body, kind_of(method))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    eventually(pair.ready)


def test_message_over_the_limit_is_refused(pair: Nodes) -> None:
    credentials = Credentials(
        pair.identities[0].key_pem, pair.identities[0].certificate_pem, pair.identities[1].certificate_pem
    )
    body = msgspec.msgpack.encode({"process": "x" * (messages.MESSAGE_LIMIT + 1)})
    with pytest.raises(grpc.RpcError) as refused:
        raw_call(pair.nodes[1].listening[0], credentials, "Beat", body, "one")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(RingProtocolError):
        messages.pack(messages.DataPiece(data=bytes(messages.MESSAGE_LIMIT)))


@settings(max_examples=examples(20), deadline=None)
@given(st.binary(max_size=400), st.sampled_from([*messages.ControlBody.__subclasses__(), NodeFacts]))
def test_random_bytes_are_a_message_or_a_protocol_error(data: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        found = messages.unpack(data, kind)
    except RingProtocolError:
        return
    assert isinstance(found, kind)


def spec_with(**changes: Any) -> EpochSpec:
    members = [EpochMember(rank=rank, node_id=f"{rank}" * 64, certificate=b"") for rank in range(2)]
    values: dict[str, Any] = {
        "epoch": "e",
        "version": "1",
        "rank": 1,
        "members": members,
        "key": bytes(32),
        "placement": Placement((0,), 2, (((0,), (1,), (0, 1)),)),
        "mode": "exact",
        "loading": "selected",
        "weights": [1.0, 1.0],
        "exchanges": ["tls"],
        "options": ModelOptions(model="m", runtime="native"),
    }
    return EpochSpec(**(values | changes))


def test_an_epoch_that_fits_together_is_accepted() -> None:
    spec = spec_with()
    messages.check_spec(spec)
    assert messages.unpack(messages.pack(spec), EpochSpec) == spec
    messages.check_spec(spec_with(whole=True, exchanges=[], placement=Placement((0,), 2, (((1,), (1,)),))))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": 2},
        {"members": [EpochMember(rank=0, node_id="a" * 64, certificate=b"")]},
        {"members": [EpochMember(rank=rank, node_id="a" * 64, certificate=b"") for rank in range(2)]},
        {"key": b"short"},
        {"weights": [1.0]},
        {"placement": Placement((0,), 2, (((0,), ()),))},
        {"placement": Placement((0,), 2, (((0,), (2,)),))},
        {"placement": Placement((0,), 2, (((1, 0), (1,)),))},
        {"placement": Placement((0, 1), 2, (((0,), (1,)),))},
        {"whole": True},
        {"whole": True, "exchanges": [], "placement": Placement((0,), 2, (((0,), (1,)),))},
        {"whole": True, "exchanges": [], "mode": "central", "placement": Placement((0,), 2, (((1,), (1,)),))},
    ],
)
def test_an_epoch_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RingProtocolError):
        messages.check_spec(spec_with(**changes))


def test_other_version_is_refused_with_both_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["0.9.1", "0.8.0"])
    monkeypatch.setattr("engine.cluster.membership.node.privatellm_version", lambda: next(versions))
    nodes = Nodes(tmp_path, "Anna", "Bob")
    try:
        eventually(lambda: nodes.nodes[0].table.facts()[0].state == "refused")
        problem = nodes.nodes[0].table.facts()[0].problem
        assert "0.9.1" in problem
        assert "0.8.0" in problem
        assert "install the same version" in problem
        eventually(lambda: nodes.nodes[1].table.facts()[0].state == "refused")
    finally:
        nodes.close()


def test_greeting_that_names_another_machine_is_refused(pair: Nodes) -> None:
    client = pair.client(1, pair.identities[0])
    try:
        lie = msgspec.structs.replace(pair.nodes[0].greeting(), node_id="f" * 64)
        with pytest.raises(ModelError, match="another machine than its certificate"):
            client.call("Hello", lie, Greeting)
    finally:
        client.close()


def test_telling_is_waited_for(pair: Nodes) -> None:
    """When it returns the other machine has heard it, whatever it heard before."""
    eventually(pair.ready)
    first, second = pair.nodes
    stages = [f"stage {number}" for number in range(20)]
    heard = []
    for stage in stages:
        first.lent = lambda said=stage: LentState(stage=said)  # type: ignore[misc]
        first.table.send_heartbeats(20.0)
        view = second.table.view(first.identity.node_id)
        heard.append("" if view is None or view.load is None else view.load.stage)
    # An answer to the other machine's own heartbeat may be on its way from before.
    assert sum(one == two for one, two in zip(heard, stages, strict=True)) >= 15
    second.close()
    eventually(lambda: all(one.client is None for one in first.table.views()))
    first.table.send_heartbeats(20.0)  # nobody is there to be waited for


def test_a_machine_that_called_and_was_not_found_yet_is_not_ready(pair: Nodes) -> None:
    """As it has just been restarted: no ring could be formed with it at this moment."""
    eventually(pair.ready)
    table, node_id = pair.nodes[0].table, pair.identities[1].node_id
    pair.nodes[1].close()
    eventually(lambda: (view := table.view(node_id)) is not None and view.client is None)
    table.record_contact(node_id)
    view = table.view(node_id)
    assert view is not None and view.alive
    assert [one.state for one in table.facts()] == ["paired"]


def test_machine_that_closes_is_noticed_and_comes_back(tmp_path: Path, pair: Nodes) -> None:
    eventually(pair.ready)
    address = pair.nodes[1].listening[0]
    pair.nodes[1].close()
    eventually(lambda: pair.nodes[0].table.facts()[0].state == "paired")
    options = OpenNetwork(id=1, name="Bob", listen=address, lend=True)
    pair.nodes[1] = Node(pair.identities[1], pair.peers[1], options)
    eventually(pair.ready)


def test_forgetting_ends_a_call_that_runs(pair: Nodes) -> None:
    entered, left = threading.Event(), threading.Event()

    def slow(caller: Any, body: Any) -> Iterator[messages.Forming]:
        entered.set()
        try:
            while caller.active():
                yield messages.Forming(stage="busy")
                left.wait(0.05)
        finally:
            left.set()

    pair.nodes[1].add_methods({"Form": RpcMethod(messages.LoadShard, slow, "down")})
    client = pair.client(1, pair.identities[0])
    try:
        answers = client.stream("Form", messages.LoadShard(epoch="x", exchange="tls"), messages.Forming)
        assert next(answers).stage == "busy"
        assert entered.is_set()
        pair.peers[1].forget(pair.identities[0].node_id)
        eventually(left.is_set)
        with pytest.raises(Unreachable):
            for _ in answers:
                continue
    finally:
        client.close()


def test_failure_of_this_program_tells_the_caller_nothing_of_it(tmp_path: Path) -> None:
    here, _ = make_identity(tmp_path / "here")
    there, _ = make_identity(tmp_path / "there")

    def broken(caller: Any, body: Any) -> messages.EmptyBody:
        raise ZeroDivisionError("secret /home/me")

    server = ControlServer(
        "127.0.0.1:0",
        lambda: Credentials(there.key_pem, there.certificate_pem, here.certificate_pem),
        lambda node_id: node_id == here.node_id,
        {"End": RpcMethod(EndEpoch, broken)},
    )
    credentials = Credentials(here.key_pem, here.certificate_pem, there.certificate_pem)
    try:
        with pytest.raises(grpc.RpcError) as refused:
            raw_call(f"127.0.0.1:{server.port}", credentials, "End", messages.pack(EndEpoch(epoch="x")), "one")
        assert "secret" not in str(refused.value.details())
    finally:
        server.close()


def test_port_that_is_taken_is_said(pair: Nodes) -> None:
    address = pair.nodes[0].listening[0]
    identity, _ = pair.identities[0], pair.peers[0]
    with pytest.raises(ModelError, match="cannot be listened at"):
        ControlServer(
            address,
            lambda: Credentials(identity.key_pem, identity.certificate_pem, identity.certificate_pem),
            lambda node_id: True,
            {},
        )


def test_openings_leave_nothing_behind(tmp_path: Path) -> None:
    identity, peers = make_identity(tmp_path / "me")
    other, _ = make_identity(tmp_path / "other")
    peers.add(new_peer(other.certificate_der, "other", "127.0.0.1:9"))

    def once() -> None:
        node = Node(identity, peers, OpenNetwork(id=1, name="me", listen="127.0.0.1:0", lend=True))
        lender = ClusterWorker(node)
        lender.close()
        node.close()

    for _ in range(3):
        once()
    gc.collect()
    before = SimpleNamespace(threads=threading.active_count(), files=len(list(Path("/proc/self/fd").iterdir())))
    for _ in range(12):
        once()
    gc.collect()
    eventually(lambda: threading.active_count() <= before.threads)
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before.files + 2)


def test_identity_is_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    first, _ = make_identity(tmp_path / "me")
    assert load_identity(tmp_path / "me").node_id == first.node_id


def test_an_answer_that_nobody_expects_ends_no_watching(pair: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(pair.ready)
    watch = pair.nodes[0].table.watch(pair.identities[1].node_id)
    assert watch is not None
    asked: list[object] = []

    def fail(client: object) -> None:
        asked.append(client)
        raise OverflowError("of one answer")

    with monkeypatch.context() as patch:
        patch.setattr(watch, "_send_heartbeat", fail)
        eventually(lambda: len(asked) > 1)
        answered = watch._answered
    eventually(lambda: watch._answered > answered)
