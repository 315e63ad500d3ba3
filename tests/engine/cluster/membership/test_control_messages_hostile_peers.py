"""What strangers can use up, and what a machine that is paired and means harm can do: as little as is said."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from discovery.addresses import Address
from discovery.identity import Identity
from discovery.link_listener import dial
from discovery.mdns import FoundNode
from discovery.pairing import PAIRING_VERSION, Code, PairingRefused, PairingStart, ShowingSide
from discovery.peers import Peer, new_peer
from discovery.tls import client_context
from engine.bench.local_ring import LocalEngine, open_network
from engine.cluster import commands
from engine.cluster.contributions import HEADER, reason_in
from engine.cluster.epoch_links import EpochLinks
from engine.cluster.head.survey import check_link
from engine.cluster.membership import heartbeat, measuring_node, server
from engine.cluster.membership.client import Unreachable
from engine.cluster.membership.control_messages import (
    EmptyBody,
    EndEpoch,
    EpochMember,
    EpochSpec,
    Forming,
    Greeting,
    Linked,
    LoadShard,
    MeasuredLink,
    NodeLoad,
    WantedFacts,
    check_facts,
    check_spec,
    pack,
    unpack,
)
from engine.cluster.membership.heartbeat import MOST_ADDRESSES, PeerWatch
from engine.cluster.membership.node import Node
from engine.cluster.membership.server import (
    MOST_CALLS_EACH,
    MOST_CONNECTIONS,
    MOST_EACH,
    RpcMethod,
    too_many,
)
from engine.cluster.transport.addresses import as_dialled
from engine.cluster.transport.epochs import LINK_KIND, Epoch, LinkRequest
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.worker.follower import BEAMS_LIMIT, Follower
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from engine.generation.sampling import SamplerState, SamplingRule
from engine.ipc.messages import ModelOptions, OpenNetwork
from engine.ipc.messages.ring import LinkFacts
from engine.planning.calibration import Calibration, Curve, ExpertShape
from engine.planning.placement import Placement
from engine.planning.ring_nodes import GpuFacts, NodeFacts
from tests.engine.cluster.membership.test_server import spec_with
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.support.eventually import PATIENCE_S, eventually

pytestmark = pytest.mark.usefixtures("no_keyring")


@pytest.fixture
def patient_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Nobody is cut off or lost for being slow, as everybody is where the machine is busy."""
    options = dict(server.SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 600_000}
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(options.items()))
    monkeypatch.setattr(heartbeat, "HEARTBEAT_TIMEOUT_S", 60.0)
    nodes = Nodes(tmp_path, "Anna", "Bob", lend=True)
    yield nodes
    nodes.close()


# --- strangers ------------------------------------------------------------------------------------------------------


def test_silent_strangers_are_few(patient_pair: Nodes) -> None:
    port = patient_pair.nodes[1].server.port

    def open_here() -> int:
        found = psutil.Process().net_connections("inet")
        # Those that wait to be accepted have no file descriptor.
        return sum(one.fd >= 0 and one.laddr.port == port and one.status == "ESTABLISHED" for one in found)

    knocking = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * MOST_CONNECTIONS)]
    try:
        eventually(lambda: 0 < open_here() <= MOST_CONNECTIONS + 8)
    finally:
        for connection in knocking:
            connection.close()
    eventually(patient_pair.ready)


def test_silent_strangers_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(server.SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 500}
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(options.items()))
    identity, peers = make_identity(tmp_path / "Bob")
    node = Node(identity, peers, OpenNetwork(id=1, name="Bob", listen="127.0.0.1:0"))
    knocking = [socket.create_connection(("127.0.0.1", node.server.port)) for _ in range(3)]
    try:
        for connection in knocking:
            connection.settimeout(PATIENCE_S)
            try:
                assert connection.recv(100) == b""
            except ConnectionError:
                continue
    finally:
        for connection in knocking:
            connection.close()
        node.close()


def test_one_address_does_not_take_all_connections(patient_pair: Nodes) -> None:
    """The oldest of those on which nothing was proved end, and never one of a paired machine."""
    pair = patient_pair
    port = pair.nodes[1].server.port
    eventually(pair.ready)
    before = pair.nodes[0].table.views()[0].client

    def silent() -> int:
        ours = {one.getsockname()[1] for one in knocking}
        return sum(
            one.laddr.port == port and one.status == "ESTABLISHED" and one.raddr.port in ours
            for one in psutil.Process().net_connections("inet")
        )

    knocking = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CONNECTIONS // 2)]
    try:
        eventually(lambda: silent() <= MOST_EACH)
        assert silent() > 0
        another = pair.client(1, pair.identities[0])
        assert another.call("Beat", pair.nodes[0].load(), NodeLoad, 60)
        another.close()
    finally:
        for connection in knocking:
            connection.close()
    assert pair.nodes[0].table.views()[0].client is before


def test_the_oldest_strangers_of_a_crowd_end() -> None:
    ends = {10 + number: ("10.0.0.1", 1000 + number) for number in range(6)} | {5: ("10.0.0.2", 1000)}
    assert too_many(ends, {("10.0.0.1", 1000)}, most=3) == [11, 12]
    assert too_many(ends, set(ends.values()), most=3) == [] and too_many({}, set()) == []


def test_a_node_speaks_no_older_tls(tmp_path: Path) -> None:
    (tmp_path / "config" / "network").mkdir(parents=True)
    engine = LocalEngine(tmp_path)
    try:
        port = int(open_network(engine, "one").rpartition(":")[2])
        for newest, works in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = newest
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
                try:
                    with context.wrap_socket(connection) as secured:
                        assert secured.version() == "TLSv1.3"
                        assert works
                except (ssl.SSLError, ConnectionError):
                    assert not works
    finally:
        engine.close()


def test_an_unauthenticated_client_is_not_told_who_else_is_paired(pair: Nodes) -> None:
    """The server could name the certificates that it accepts, as TLS allows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    messages: list[bytes] = []
    context._msg_callback = lambda *said: messages.append(bytes(said[-1]))  # type: ignore[attr-defined]
    session = context.wrap_bio(incoming, outgoing)
    with socket.create_connection(("127.0.0.1", pair.nodes[1].server.port), timeout=PATIENCE_S) as connection:
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(1 << 16))
    everything = b"".join(messages)
    certificate = ssl.PEM_cert_to_DER_cert(pair.identities[1].certificate_pem.decode())
    assert certificate in everything  # so it would be seen if more was said
    name = pair.identities[0].certificate_der[60:100]
    assert name not in certificate
    assert name not in everything


def without_its_key(identity: Identity) -> Identity:
    """The certificate of ``identity`` with a private key that says to be that certificate's and is another one: what
    is signed with it is wrong, which is all that a stranger can make of somebody's certificate."""
    points = serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    theirs = serialization.load_pem_private_key(identity.key_pem, None).public_key().public_bytes(*points)
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    der = key.private_bytes(*form).replace(key.public_key().public_bytes(*points), theirs)
    pem = f"-----BEGIN EC PRIVATE KEY-----\n{base64.encodebytes(der).decode()}-----END EC PRIVATE KEY-----\n"
    return dataclasses.replace(identity, key_pem=pem.encode())


def answer_to_a_handshake(listener: tuple[str, int], shown: Identity, target: Peer, claimed: Identity) -> bytes:
    """What a link listener says on a link for measuring, until it closes it, after ``shown`` has ended its handshake:
    an alert, or words inside TLS, would be bytes."""
    request = LinkRequest(
        purpose="measure",
        transport="tls",
        epoch="e",
        from_rank=0,
        to_rank=1,
        node_id=claimed.node_id,
        certificate=claimed.certificate_der,
    )
    body = msgspec.msgpack.encode(request)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = client_context(shown, target).wrap_bio(incoming, outgoing)
    with dial(listener, LINK_KIND, body) as connection:
        connection.settimeout(PATIENCE_S)
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(1 << 16))
        session.write(len(body).to_bytes(4, "big") + body)
        connection.sendall(outgoing.read())
        said = incoming.read()
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                said += piece
        return said


def test_a_stranger_cannot_find_out_who_is_paired(tmp_path: Path, pair: Nodes) -> None:
    """A link for measuring ends in the same way for the certificate of a paired machine and for any other."""
    stranger, _ = make_identity(tmp_path / "stranger")
    third, _ = make_identity(tmp_path / "third")
    target = new_peer(pair.identities[1].certificate_der, "")
    listener = ("127.0.0.1", pair.nodes[1].listener.port)

    paired = pair.identities[0]
    answers = {
        "the certificate of a paired machine": (without_its_key(paired), paired),
        "the certificate of another machine": (without_its_key(third), third),
        "a paired machine is named, another certificate shown": (stranger, paired),
        "another machine is named, a third certificate shown": (stranger, third),
        "its own": (stranger, stranger),
    }
    said = {what: answer_to_a_handshake(listener, shown, target, claimed) for what, (shown, claimed) in answers.items()}
    assert said == dict.fromkeys(answers, b"")


def test_hints_do_not_put_out_where_a_machine_was_found() -> None:
    watch = PeerWatch("a" * 64, "one", lambda address: pytest.fail("not started"), Any, Any, lambda: None)  # type: ignore[arg-type]
    watch.try_addresses(["192.168.7.2:47820"], keep=True)
    for flood in range(100):
        watch.try_addresses([f"10.0.{flood}.{each}:1" for each in range(16)])
        assert watch.view().addresses[0] == "192.168.7.2:47820"  # whoever forges a hint sees nobody come
    watch.try_addresses(["10.1.1.1:1"], sure=True)
    found = watch.view().addresses
    assert found[:2] == ("10.1.1.1:1", "192.168.7.2:47820")
    assert len(found) <= MOST_ADDRESSES


def test_an_announcement_is_followed_into_networks_of_this_machine_only(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can announce a paired machine's id: at an address behind a router, it would see who comes."""
    tried: list[str] = []
    bait = FoundNode(
        pair.identities[1].node_id,
        "b" * 16,
        (Address("127.0.0.9", 9, "lo"), Address("203.0.113.9", 9)),
        1,
    )
    monkeypatch.setattr(PeerWatch, "try_addresses", lambda watch, addresses, **_: tried.extend(addresses))
    pair.nodes[0]._on_announced([bait])
    assert tried == ["127.0.0.9:9"]
    # A person who pairs by it has all of them.
    assert pair.nodes[0].table.find_announced(bait.node_id).addresses == ("127.0.0.9:9", "203.0.113.9:9")


def test_a_greeting_names_ip_addresses_only(pair: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else gRPC would take: it would connect to sockets of this machine, or look names up."""
    tried: set[str] = set()
    monkeypatch.setattr(PeerWatch, "try_addresses", lambda watch, addresses, **_: tried.update(addresses))
    client = pair.client(1, pair.identities[0])
    right = pair.nodes[0].greeting()
    others = ["unix:/tmp/x.sock:1", "dns:///10.0.0.1:1", "localhost:1", "0.0.0.0:1", "224.0.0.1:1", "10.0.0.1:0", ""]
    listening = [*others, "192.168.7.7:5", "[fd00::0:7]:5", "[fe80::1%eth0]:5"]
    try:
        client.call("Hello", msgspec.structs.replace(right, port=77, listening=listening), Greeting, PATIENCE_S)
    finally:
        client.close()
    own = set(right.listening)  # it greets by itself, too
    # The scope of another machine means nothing here.
    local = as_dialled(["[fe80::1]:5"])
    assert tried - own - set(as_dialled(own)) == {"127.0.0.1:77", "192.168.7.7:5", "[fd00::7]:5", *local}


# --- a machine that is paired ---------------------------------------------------------------------------------------


def test_one_machine_cannot_take_all_the_calls(pair: Nodes) -> None:
    enough = threading.Event()

    def slow(caller: Any, body: Any) -> Iterator[Forming]:
        while caller.active() and not enough.wait(0.05):
            yield Forming(stage="busy")

    pair.nodes[1].add_methods({"Form": RpcMethod(LoadShard, slow, "down")})
    client = pair.client(1, pair.identities[0])
    try:
        running = [client.stream("Form", LoadShard(epoch="x", exchange="tls"), Forming) for _ in range(40)]
        begun = refused = 0
        for answers in running:
            try:
                next(answers)
                begun += 1
            except Unreachable:
                refused += 1
        assert begun <= MOST_CALLS_EACH
        assert refused >= 40 - MOST_CALLS_EACH
        for answers in running:
            answers.cancel()
        enough.set()
        eventually(lambda: client.call("Beat", NodeLoad(process="x", memory_total=1, memory_free=1), NodeLoad))
    finally:
        enough.set()
        client.close()


def good_facts(**changes: Any) -> NodeFacts:
    values: dict[str, Any] = {
        "memory_total": 8 << 30,
        "memory_free": 4 << 30,
        "memory_read": 1e10,
        "disk_free": 1 << 40,
        "expert": Curve((1, 2, 4), (1e-3, 1e-3, 2e-3)),
        "instruction_set": "avx2",
        "runtimes": ["torch"],
        "processor": "p",
        "system": "s",
        "threads": 2,
    }
    return NodeFacts(**(values | changes))


def good_gpu(calibration: dict[str, Any] | None = None, **changes: Any) -> GpuFacts:
    curve = Curve((1, 64), (1e-4, 1e-3))
    figures: dict[str, Any] = {
        "version": 1,
        "machine": "here",
        "shape": ExpertShape(64, 96, "BF16", 36864),
        "cpu": curve,
        "memory_read": 1e10,
        "gpu": curve,
        "weight_copy": 1e-3,
        "activation_copy": curve,
    }
    values: dict[str, Any] = {"name": "a GPU", "memory_total": 8 << 30, "memory_free": 4 << 30}
    return GpuFacts(**(values | {"calibration": Calibration(**(figures | (calibration or {})))} | changes))


def test_figures_of_a_machine_are_accepted() -> None:
    check_facts(good_facts())
    check_facts(good_facts(gpu=good_gpu()))
    check_facts(good_facts(gpu=good_gpu(memory_lent=0, calibration=None)))
    check_facts(good_facts(expert=None, runtimes=[]))


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_total": 0},
        {"memory_total": 1 << 62},
        {"memory_free": -1},
        {"disk_free": -5},
        {"disk_free": None},
        {"memory_lent": -1},
        {"memory_read": 0.0},
        {"memory_read": math.nan},
        {"memory_read": math.inf},
        {"threads": 0},
        {"expert": Curve((), ())},
        {"expert": Curve((1, 2), (1e-3,))},
        {"expert": Curve((2, 1), (1e-3, 1e-3))},
        {"expert": Curve((1, 2), (1e-3, math.nan))},
        {"expert": Curve((1, 2), (0.0, -1.0))},
        {"layer_overhead_s": {"native": math.inf}},
        {"layer_overhead_s": {"native": -1.0}},
        {"processor": "x" * 5000},
        {"gpu": good_gpu(memory_total=0, memory_free=0)},
        {"gpu": good_gpu(memory_total=1 << 62)},
        {"gpu": good_gpu(memory_free=-1)},
        {"gpu": good_gpu(memory_free=9 << 30)},
        {"gpu": good_gpu(memory_lent=-1)},
        {"gpu": good_gpu({"gpu": None})},
        {"gpu": good_gpu({"gpu": Curve((), ())})},
        {"gpu": good_gpu({"gpu": Curve((1, 2), (1e-4,))})},
        {"gpu": good_gpu({"gpu": Curve((1,), (math.nan,))})},
        {"gpu": good_gpu({"gpu": Curve((1,), (-1.0,))})},
        {"gpu": good_gpu({"gpu": Curve((1,), (1e300,))})},
        {"gpu": good_gpu({"cpu": Curve((1,), (0.0,))})},
        {"gpu": good_gpu({"cpu": Curve(tuple(range(1, 100)), (1e-4,) * 99)})},
        {"gpu": good_gpu({"activation_copy": None})},
        {"gpu": good_gpu({"activation_copy": Curve((2, 1), (1e-4, 1e-4))})},
        {"gpu": good_gpu({"weight_copy": math.inf})},
        {"gpu": good_gpu({"weight_copy": 0.0})},
        {"gpu": good_gpu({"memory_read": 0.0})},
        {"gpu": good_gpu({"cpu_overlapped": 0.5})},
        {"gpu": good_gpu({"copy_overlapped": 1e9})},
    ],
)
def test_figures_that_no_machine_has_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RingProtocolError):
        check_facts(good_facts(**changes))


def test_a_machine_of_a_version_without_gpus_is_understood_and_understands() -> None:
    """The fields were added without another protocol: those who do not know them go without."""
    known = set(NodeFacts.__struct_fields__) - {"gpu"}
    before = msgspec.defstruct("NodeFacts", [(name, Any) for name in NodeFacts.__struct_fields__ if name in known])
    old = {name: value for name, value in msgspec.to_builtins(good_facts()).items() if name in known}
    found = unpack(msgspec.msgpack.encode(old), NodeFacts)
    check_facts(found)
    assert found == good_facts() and found.gpu is None
    new = msgspec.msgpack.decode(pack(good_facts(gpu=good_gpu())), type=before)
    assert new.memory_total == good_facts().memory_total
    assert unpack(pack(good_facts(gpu=good_gpu())), NodeFacts).gpu == good_gpu()


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_s": 0.0},
        {"latency_s": math.nan},
        {"bytes_per_s": -1.0},
        {"bytes_per_s": math.inf},
        {"address": "somewhere"},
        {"others": ["x"] * 1000},
        {"interface": "e" * 5000},
    ],
)
def test_links_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    good = LinkFacts(interface="en0", address="10.0.0.2:47821", latency_s=1e-4, bytes_per_s=1e9)
    check_link(good)
    with pytest.raises(ModelError):
        check_link(msgspec.structs.replace(good, **changes))


@pytest.mark.parametrize(
    "said",
    [
        {"name": "x" * 5000},
        {"listening": ["10.0.0.1:1"] * 1000},
        {"listening": ["1" * 5000]},
        {"instance": "x" * 100_000},
    ],
)
def test_greetings_are_short(pair: Nodes, said: dict[str, Any]) -> None:
    greeting = msgspec.structs.replace(pair.nodes[0].greeting(), **said)
    with pytest.raises(RingProtocolError):
        unpack(msgspec.msgpack.encode(greeting), Greeting)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": ""},
        {"epoch": "e\n"},
        {"epoch": "e" * 65},
        {"weights": [1.0, math.nan]},
        {"options": ModelOptions(model="m", prefill_chunk=0)},
    ],
)
def test_epochs_that_no_head_makes_are_refused(changes: dict[str, Any]) -> None:
    check_spec(spec_with())
    with pytest.raises(RingProtocolError):
        check_spec(spec_with(**changes))


@pytest.mark.parametrize(
    "shape",
    [
        ExpertShape(hidden=1 << 20, ffn=1 << 20, dtype="F32", expert_bytes=1),
        ExpertShape(hidden=1 << 40, ffn=1, dtype="F32", expert_bytes=1 << 42),
        ExpertShape(hidden=-4, ffn=-4, dtype="BF16", expert_bytes=96),
        ExpertShape(hidden=8, ffn=8, dtype="../../../etc/x", expert_bytes=96),
        ExpertShape(hidden=8, ffn=8, dtype="", expert_bytes=96),
        ExpertShape(hidden=8, ffn=8, dtype="F32", expert_bytes=0),
    ],
)
def test_experts_that_no_model_has_are_not_measured(shape: ExpertShape) -> None:
    with pytest.raises(ModelError):
        measuring_node.measure_node(WantedFacts(shape=shape, dtype="float32"), 1)


def test_no_more_threads_than_there_are_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(measuring_node, "memory_rate", lambda threads: asked.append(threads) or 1e9)
    monkeypatch.setattr(measuring_node, "load_speed", lambda key: None)
    measuring_node.measure_node(WantedFacts(shape=None, dtype="float32"), 1_000_000)
    assert asked == [measuring_node.usable_cpus()]


NESTED = b"\x91" * 5000 + b"\x90"


def test_nested_without_end_is_refused_everywhere() -> None:
    with pytest.raises(RingProtocolError):
        unpack(b"\x81\xa1x" + NESTED, EndEpoch)
    with pytest.raises(ModelError):
        commands.decode_command(b"\x82\xa4type\xa4drop\xa1x" + NESTED)
    with pytest.raises(ModelError):
        commands.decode_times(b"\x81\xa1x" + NESTED)
    code = Code()
    start = msgspec.msgpack.encode(PairingStart(PAIRING_VERSION, b"c", b"m"))
    with pytest.raises(PairingRefused):
        ShowingSide(b"mine", "name", code).on_start(bytes((start[0] + 1,)) + start[1:] + NESTED)
    assert code.is_valid


class _Rows:
    rows = 1
    length = 0

    def extend(self, tokens: list[int], want_logits: bool) -> None:
        raise AssertionError("it must not come to this")

    step = fan_out = extend


class _Model:
    facts = SimpleNamespace(vocabulary=100, context_limit=40, key_value_bytes_per_token=1000)

    def start(self) -> _Rows:
        return _Rows()


@pytest.mark.parametrize("tokens", [[100], [-1], [5, 2**40]])
def test_tokens_that_are_none_reach_no_runtime(tokens: list[int]) -> None:
    follower = Follower(_Model(), SimpleNamespace())  # type: ignore[arg-type]
    follower.do(commands.StartRows(1))
    before = commands.Prefixes().state
    sampling = [SamplerState(SamplingRule(), 0, tokens, {}), SamplerState(SamplingRule(), 0, [], {tokens[-1]: 1})]
    for command in (
        commands.Extend(1, before, tokens, True),
        commands.Step(1, before, tokens),
        commands.Choose(1, before, tokens[-1], None),
        *(commands.Choose(1, before, 5, state) for state in sampling),
    ):
        with pytest.raises(ValueError, match="vocabulary of 100"):
            follower.do(command)


def test_nobody_draws_for_rows_of_which_it_was_not_told_how() -> None:
    follower = Follower(_Model(), SimpleNamespace())  # type: ignore[arg-type]
    follower.do(commands.StartRows(1))
    before = commands.Prefixes().state
    with pytest.raises(ValueError, match="nothing says how"):
        follower.do(commands.Choose(1, before, 5, None))
    with pytest.raises(ValueError):
        follower.do(commands.Choose(1, before, 5, SamplerState(SamplingRule(seed=-1), 0, [], {})))


@pytest.mark.parametrize("count", [0, -1, BEAMS_LIMIT + 1, 2**62])
def test_a_row_is_fanned_out_into_few(count: int) -> None:
    follower = Follower(_Model(), SimpleNamespace())  # type: ignore[arg-type]
    follower.do(commands.StartRows(1))
    with pytest.raises(ValueError, match="rows of one"):
        follower.do(commands.FanOut(1, 2, count))


def test_what_a_node_says_of_its_failure_is_fit_to_be_shown() -> None:
    said = HEADER.pack(1, 1, 2, bytes(8)) + b"broken \x1b]0;evil\x07\x1b[2J\nsecond line"
    shown = reason_in(memoryview(said))
    assert shown.isprintable()
    assert "broken" in shown


# --- forgotten machines ---------------------------------------------------------------------------------------------


def formed_with(node: Node, lender: ClusterWorker, head: str, other: str) -> EpochSpec:
    """The state that Connect leaves, without the links."""
    members = [
        EpochMember(rank=rank, node_id=node_id, certificate=b"")
        for rank, node_id in enumerate((head, node.identity.node_id, other))
    ]
    placement = Placement((0,), 3, (((0,), (1,), (2,)),))
    spec = spec_with(members=members, placement=placement, weights=[])
    lender._spec, lender._head = spec, head
    lender._links = EpochLinks(Epoch("e", 1, (), bytes(32)))
    return spec


def test_forgetting_another_member_ends_the_epoch_and_keeps_it_out(tmp_path: Path, pair: Nodes) -> None:
    eventually(pair.ready)
    follower, peers = pair.nodes[1], pair.peers[1]
    third, _ = make_identity(tmp_path / "third")
    peers.add(new_peer(third.certificate_der, "Carla"))
    follower.table.refresh()
    eventually(lambda: third.node_id in follower._peers_watch._known)
    lender = ClusterWorker(follower)
    client = pair.client(1, pair.identities[0])
    try:
        spec = formed_with(follower, lender, pair.identities[0].node_id, third.node_id)
        links = lender._links
        assert links is not None
        peers.forget(third.node_id)
        eventually(lambda: lender.lent().epoch == "")
        assert links._closed
        again = msgspec.structs.replace(spec, version=follower.version)
        with pytest.raises(ModelError, match="has forgotten"):
            client.call("Connect", again, EmptyBody)
        vouched = Linked(epoch="e", node_id=third.node_id, certificate=third.certificate_pem)
        with pytest.raises(ModelError, match="has forgotten"):
            client.call("MeasureLinks", vouched, MeasuredLink)
        assert follower.certificate_of(third.node_id) is None
        peers.add(new_peer(third.certificate_der, "Carla"))
        assert client.call("MeasureLinks", vouched, MeasuredLink).link is None
    finally:
        client.close()
        lender.close()


def test_links_made_after_an_epoch_ended_are_closed() -> None:
    closed: list[str] = []
    links = EpochLinks(Epoch("e", 1, (), bytes(32)))
    links.close()
    with pytest.raises(Exception, match="ended while its links"):
        links.add_commands({0: SimpleNamespace(close=lambda: closed.append("command"))})  # type: ignore[dict-item]
    assert closed == ["command"]
