"""What forming is made of: addresses, the survey's figures as the planner takes them, links, epochs on a lent node."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from discovery.addresses import OwnAddress, shown_address
from engine.cluster.head.connecting_nodes import NothingConnected
from engine.cluster.head.formed import FormedRing
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.survey import (
    TORCH_LAYER_S,
    Candidate,
    NodeRefused,
    Survey,
    Surveyor,
    ask,
    candidates,
    decide,
    planned_links,
    planned_nodes,
)
from engine.cluster.membership.client import CallGroup, PeerClient, Unreachable
from engine.cluster.membership.control_messages import (
    Connected,
    DataPiece,
    EpochMember,
    EpochSpec,
    Forming,
    GpuFacts,
    Linked,
    LoadShard,
    MeasuredLink,
    NodeFacts,
    WantedFacts,
    Wants,
)
from engine.cluster.membership.heartbeat import FORMING
from engine.cluster.membership.links import measure_best, one_of_each_first, reachable
from engine.cluster.membership.measuring_node import measure_node
from engine.cluster.membership.node import LentState, Node
from engine.cluster.parts import Effort, EngineParts, Moment
from engine.cluster.transport import addresses as transport_addresses
from engine.cluster.transport.addresses import (
    as_dialled,
    as_sent,
    listener_address,
    own_addresses,
    parse_address,
    plain_ip,
)
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.weights.transfer import encode_offer, offer
from engine.cluster.worker import lending
from engine.cluster.worker.follower_work import Busy
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load, ModelOptions, OpenNetwork
from engine.ipc.messages.ring import LinkFacts, RingChoice
from engine.planning.calibration import Curve, ExpertShape
from engine.planning.placement import Placement
from engine.planning.ring_change import FORMING_S, Rerun, RingChange
from engine.runtimes import runtime_named
from engine.runtimes.model_headers import read_headers
from engine.system.locations import locate
from tests.engine.cluster.paired_nodes import Nodes, make_identity
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")


def facts(**changes: Any) -> NodeFacts:
    values: dict[str, Any] = {
        "memory_total": 8_000_000_000,
        "memory_free": 6_000_000_000,
        "memory_read": 20e9,
        "disk_free": 10**10,
        "expert": Curve((1, 16), (1e-4, 2e-4)),
        "instruction_set": "avx512_bf16",
        "runtimes": ["native", "torch"],
        "processor": "a processor",
        "system": "Linux x86_64",
        "threads": 2,
        "machine": "one",
    }
    return NodeFacts(**(values | changes))


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:47820", "10.0.0.1", 47820), ("[fe80::1]:5", "fe80::1", 5), ("mac.local:80", "mac.local", 80)],
)
def test_addresses_are_read_and_shown(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert shown_address(host, port) == text
    assert parse_address(listener_address(text)) == (host, port + 1)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(ModelError, match="HOST:PORT"):
        parse_address(text)


def test_own_addresses_are_those_that_are_listened_at() -> None:
    assert own_addresses("127.0.0.1", 9) == ["127.0.0.1:9"]
    for address in own_addresses("", 9):
        host, port = parse_address(address)
        assert port == 9
        assert not host.startswith("127.")


def test_a_link_local_address_is_sent_without_scope_and_dialled_on_every_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [
        OwnAddress("lo", "::1", 128),
        OwnAddress("eth0", "192.168.1.7", 24),
        OwnAddress("eth0", "fe80::7", 64),
        OwnAddress("eth1", "fe80::8", 64),
        OwnAddress("docker0", "fe80::9", 64),
        OwnAddress("wlan0", "10.0.0.7", 24),
    ]
    monkeypatch.setattr(transport_addresses, "addresses_here", lambda: own)
    sent = ["192.168.1.7:9", "10.0.0.7:9", "[fe80::7]:9", "[fe80::8]:9"]
    assert sorted(own_addresses("", 9)) == sorted(sent)
    assert own_addresses("fe80::7%eth0", 9) == ["[fe80::7]:9"]
    assert as_sent(["[fe80::1%en7]:9", "[fe80::1%en8]:9", "10.0.0.1:9", "name:9", "[fd00::1]:9", "wrong"]) == [
        "[fe80::1]:9",
        "10.0.0.1:9",
        "name:9",
        "[fd00::1]:9",
        "wrong",
    ]
    assert as_dialled(["[fe80::1]:9", "10.0.0.1:9", "wrong"]) == [
        "[fe80::1%eth0]:9",
        "[fe80::1%eth1]:9",
        "10.0.0.1:9",
        "wrong",
    ]
    # Where it is known by which interface it is reached, no other is tried.
    assert as_dialled(["[fe80::1]:9", "[fe80::1%eth1]:9", "[fe80::2]:9"]) == [
        "[fe80::1%eth1]:9",
        "[fe80::2%eth0]:9",
        "[fe80::2%eth1]:9",
    ]
    monkeypatch.setattr(transport_addresses, "addresses_here", lambda: own[:2])
    assert as_dialled(["[fe80::1]:9", "10.0.0.1:9"]) == ["10.0.0.1:9"], "no cable has such an address"


def test_ipv4_in_an_ipv6_socket_is_ipv4() -> None:
    assert plain_ip("::ffff:10.1.2.3") == "10.1.2.3"
    assert plain_ip("fe80::1%eth0") == "fe80::1%eth0"
    assert plain_ip("name") == "name"


# --- figures --------------------------------------------------------------------------------------------------------


def test_processes_of_one_machine_share_its_memory_and_its_overheads() -> None:
    survey = Survey(
        facts={
            "head": facts(layer_overhead_s={"native": 3e-5}),
            "near": facts(),
            "far": facts(machine="two", memory_free=1_000_000_000),
        }
    )
    order = [("head", "Anna"), ("near", "Bob"), ("far", "Carl")]
    head, near, far = planned_nodes(survey, order, "native", "bfloat16")
    assert (head.memory_free, near.memory_free, far.memory_free) == (3_000_000_000, 3_000_000_000, 1_000_000_000)
    assert head.layer_overhead_s == near.layer_overhead_s == 3e-5
    assert far.layer_overhead_s == 0.0
    assert head.machine == near.machine != far.machine


def test_no_more_than_what_is_lent_is_planned_with() -> None:
    survey = Survey(facts={"head": facts(), "near": facts(memory_lent=2 * 10**9), "far": facts(memory_lent=10**11)})
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.memory_free for node in nodes] == [2 * 10**9, 2 * 10**9, 2 * 10**9]
    survey.facts["near"] = facts(memory_lent=10**9)
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.memory_free for node in nodes] == [2 * 10**9, 10**9, 2 * 10**9]


def test_a_gpu_is_planned_with_where_torch_runs_experts() -> None:
    gpu = GpuFacts(name="an\x1b[31m L4", memory_total=24 << 30, memory_free=20 << 30)
    survey = Survey(
        facts={
            "head": facts(gpu=gpu, machine="head"),
            "lent": facts(gpu=msgspec.structs.replace(gpu, memory_lent=2 << 30), machine="two"),
            "near": facts(gpu=gpu, machine="three"),
            "beside": facts(gpu=gpu, machine="three"),
            "plain": facts(machine="four"),
            "without": facts(gpu=gpu, machine="five", runtimes=["native"]),
        }
    )
    order = [(name, name) for name in survey.facts]
    assert all(node.gpu is None for node in planned_nodes(survey, order, "native", "bfloat16"))
    own = Load(id=0, model="m", policy="twiddler", gpu_expert_bytes=1 << 30)
    found = [node.gpu for node in planned_nodes(survey, order, "torch", "bfloat16", own)]
    assert [each and each.free >> 30 for each in found] == [20, 2, 10, 10, None, None]
    assert [each and each.total >> 30 for each in found] == [24, 24, 12, 12, None, None]
    head, lent = found[:2]
    assert head is not None and lent is not None
    assert (head.policy, head.expert_bytes, lent.policy, lent.expert_bytes) == ("twiddler", 1 << 30, "balanced", None)
    assert "\x1b" not in head.name
    on_cpu = msgspec.structs.replace(own, partitioning="cpu")
    assert planned_nodes(survey, order, "torch", "bfloat16", on_cpu)[0].gpu is None


@pytest.mark.parametrize(
    ("measured", "runtime", "seconds"),
    [
        ({}, "torch", 0.0),
        ({"native": 3e-5}, "native", 3e-5),
        ({"native": 3e-5}, "torch", TORCH_LAYER_S),
        ({"native": 3e-5, "torch": 2e-4}, "torch", 2e-4),
        ({"native": 2.0}, "torch", 2.0),
    ],
)
def test_torch_is_not_taken_to_cost_as_little_as_native(
    measured: dict[str, float], runtime: str, seconds: float
) -> None:
    survey = Survey(facts={"a": facts(layer_overhead_s=measured)})
    (found,) = planned_nodes(survey, [("a", "a")], runtime, "bfloat16")
    assert found.layer_overhead_s == seconds


def test_processes_that_are_sent_weights_share_the_disk_they_are_put_on() -> None:
    survey = Survey(
        facts={
            "head": facts(disk="one"),
            "near": facts(disk="one", disk_free=6_000_000_000),
            "beside": facts(disk="one", disk_free=6_000_000_000),
            "elsewhere": facts(disk="two", disk_free=6_000_000_000),
            "unknown": facts(machine="two", disk_free=5_000_000_000),
        }
    )
    nodes = planned_nodes(survey, [(name, name) for name in survey.facts], "native", "bfloat16")
    # The head has the whole model: nothing is put on its disk.
    free = [None, 3_000_000_000, 3_000_000_000, 6_000_000_000, 5_000_000_000]
    assert [node.disk_free for node in nodes] == free
    # It has not: it takes its share from the others, on the same disk.
    nodes = planned_nodes(replace(survey, whole=False), [(name, name) for name in survey.facts], "native", "bfloat16")
    assert [node.disk_free for node in nodes][:4] == [10**10 // 3, 2_000_000_000, 2_000_000_000, 6_000_000_000]


def test_machines_that_compute_other_bits_are_of_other_kinds() -> None:
    survey = Survey(facts={"a": facts(), "b": facts(runtimes=["mlx"]), "c": facts(instruction_set="avx2")})
    kinds = {node.kind for node in planned_nodes(survey, [("a", ""), ("b", ""), ("c", "")], "native", "bfloat16")}
    assert len(kinds) == 3


@pytest.mark.parametrize(
    ("runtime", "change", "alike"),
    [
        ("native", {"threads": 3, "processor": "another"}, True),
        ("native", {"system": "Darwin arm64"}, False),
        ("torch", {"threads": 3}, False),
        ("torch", {"processor": "another"}, False),
        ("torch", {"libraries": {"torch": "0.1"}}, False),
        ("torch", {"libraries": {"mlx": "0.1"}}, True),
        ("mlx", {"threads": 3}, True),
        ("mlx", {"processor": "another"}, False),
    ],
)
def test_what_the_bits_of_a_runtime_depend_on(runtime: str, change: dict[str, Any], alike: bool) -> None:
    here = {"runtimes": ["native", "torch", "mlx"]}
    survey = Survey(facts={"a": facts(**here), "b": facts(**here, **change)})
    one, other = planned_nodes(survey, [("a", ""), ("b", "")], runtime, "bfloat16")
    assert (one.kind == other.kind) is alike


def test_nodes_of_torch_are_told_the_heads_threads(tmp_path: Path) -> None:
    chosen = Load(id=1, model="m", cpu_threads=1)
    for runtime, threads in (("torch", 1), ("native", None), ("mlx", None)):
        load = msgspec.structs.replace(chosen, runtime=runtime)
        assert Surveyor("head", tmp_path, load).threads_for(runtime) == threads


def test_measured_links_reach_the_planner() -> None:
    link = LinkFacts(interface="lo", address="127.0.0.1:2", latency_s=1e-4, bytes_per_s=1e9)
    (found,) = planned_links(Survey(links={("a", "b"): link}))
    assert (found.first, found.second, found.latency_s, found.bytes_per_s) == ("a", "b", 1e-4, 1e9)


def test_a_node_measures_itself_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    found = measure_node(WantedFacts(shape=ExpertShape(64, 96, "F32", 3 * 64 * 96 * 4), dtype="float32"))
    assert found.memory_total > found.memory_free > 0
    assert found.memory_read > 0
    assert found.disk_free > 0
    assert found.expert is not None
    assert all(seconds > 0 for seconds in found.expert.seconds)
    assert list(found.expert.seconds) == sorted(found.expert.seconds)
    assert "torch" in found.runtimes


def test_deciding_refuses_with_the_shortfall(tmp_path: Path) -> None:
    folder = tiny_mixtral(tmp_path)
    load = Load(id=0, model="tiny", runtime="native", ring=RingChoice(even_if_slower=True, shares={"a": 0, "b": 0}))
    survey = Survey(facts={"a": facts(), "b": facts(machine="two")})
    refused = decide(read_headers(folder, load), "tiny", load, [("a", "Anna"), ("b", "Bob")], survey)
    assert refused.kind == "refused"
    assert refused.shortfall > 0
    by_all = Load(id=0, model="tiny", runtime="native", ring=RingChoice(even_if_slower=True, overlap=False))
    formed = decide(read_headers(folder, by_all), "tiny", by_all, [("a", "Anna"), ("b", "Bob")], survey)
    assert formed.kind == "ring"
    assert formed.ranks == ("a", "b")


@pytest.mark.parametrize(
    ("error", "gone"), [(Unreachable("no"), True), (PeerLost("no"), True), (ModelError("no", kind="disk"), False)]
)
def test_a_nodes_failure_is_that_nodes(error: Exception, gone: bool) -> None:
    def fail() -> None:
        raise error

    one = Candidate("id", "Bob", None, (), "p")  # type: ignore[arg-type]
    with pytest.raises(NodeRefused) as refused:
        ask(one, fail)
    assert (refused.value.node_id, refused.value.gone) == ("id", gone)


def test_stopping_is_nobodys_failure() -> None:
    def stop() -> None:
        raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        ask(Candidate("id", "Bob", None, (), "p"), stop)  # type: ignore[arg-type]


def test_busy_is_a_share_of_the_last_seconds() -> None:
    now = [0.0]
    busy = Busy(lambda: now[0])
    assert busy.share() == 0.0
    busy.begin()
    now[0] = 1.0
    assert busy.share() == pytest.approx(0.2)
    busy.end()
    now[0] = 5.5
    assert busy.share() == pytest.approx(0.1)
    now[0] = 60.0
    assert busy.share() == 0.0


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", "Carl", lend=True)
    eventually(nodes.ready)
    yield nodes
    nodes.close()


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


# --- a lent node ----------------------------------------------------------------------------------------------------


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
        data = encode_offer(offer(folder, {0: [0]}, lambda *_: None))
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


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingFormer]:
    """Of a head that knows nobody."""
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    folder = tiny_mixtral(tmp_path / "model")
    node = Node(*make_identity(tmp_path / "me"), OpenNetwork(id=1, name="me", listen="127.0.0.1:0"))
    load = Load(id=0, model="tiny", runtime="native", partitioning="cpu")
    surveyor = Surveyor(node.identity.node_id, folder, load)
    made = RingFormer(node, "tiny", folder, runtime_named("native"), load, surveyor)
    yield made
    made.close()
    node.close()


def test_forming_with_nobody_is_one_machine(former: RingFormer) -> None:
    formed = former.form(lambda *_: None)
    assert formed.names == {0: "me"}
    assert formed.command_links == {}
    assert len(formed.facts.nodes) == 1
    assert formed.lost() is None
    assert formed.layers.give_up() is False
    rows = formed.model.start()
    assert rows.extend([1, 2, 3]) is not None
    assert not former.changed(lambda *_: None, lambda text: None, Rerun())


@pytest.mark.parametrize(("again", "failures", "formed"), [(True, 3, True), (True, 4, False), (False, 1, False)])
def test_a_ring_that_was_there_is_connected_again_when_all_failed_at_once(
    former: RingFormer, monkeypatch: pytest.MonkeyPatch, again: bool, failures: int, formed: bool
) -> None:
    """Machines that are too busy for a moment do not end an answer."""
    form, left = former._form_with, iter(range(failures))

    def failing(*arguments: Any) -> FormedRing:
        if next(left, None) is not None:
            raise NothingConnected("The link to Bob cannot be made.", "network")
        return form(*arguments)

    if again:
        former.form(lambda *_: None)
    monkeypatch.setattr(former, "_form_with", failing)
    if formed:
        assert former.form(lambda *_: None).names == {0: "me"}
        return
    with pytest.raises(ModelError, match="link to Bob"):
        former.form(lambda *_: None)


class Lent:
    """A head with a model, and machines that are lent to it and have nothing of it."""

    def __init__(self, folder: Path, *names: str) -> None:
        model = tiny_mixtral(folder / "model")
        self.nodes = Nodes(folder / "nodes", "Anna", *names, lend=True)
        self.head, *self.others = self.nodes.nodes
        for node in self.nodes.nodes:
            node.parts = EngineParts(effort=Effort(link_s=0.01, exchange_rounds=5, rehearse=False))
        self.lenders = [ClusterWorker(node) for node in self.others]
        load = Load(
            id=0,
            model="tiny",
            runtime="native",
            partitioning="cpu",
            ring=RingChoice(even_if_slower=True, exchange="tls"),
        )
        surveyor = Surveyor(self.head.identity.node_id, model, load)
        self.former = RingFormer(self.head, "tiny", model, runtime_named("native"), load, surveyor)
        eventually(self.nodes.ready)

    def close(self) -> None:
        self.former.close()
        for lender in self.lenders:
            lender.close()
        self.nodes.close()


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lent]]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    with contextlib.ExitStack() as opened:

        def make(*names: str) -> Lent:
            made = Lent(tmp_path, *names)
            opened.callback(made.close)
            return made

        yield make


def test_no_failed_heartbeat_ends_a_transfer_and_forgetting_the_machine_does(lent: Callable[..., Lent]) -> None:
    """First the connection of the heartbeats to Bob is given up while weights are on their way to him."""
    made = lent("Bob")
    head, (bob,) = made.head, made.others
    offered: list[str] = []
    dropped: list[PeerClient] = []

    def drop() -> None:
        watch = head.table.watch(bob.identity.node_id)
        assert watch is not None
        client = watch.view().client
        if client is not None and not dropped:
            dropped.append(client)
            watch._drop(client, refused=False)

    def forget() -> None:
        if head.peers.get(bob.identity.node_id) is not None:
            head.peers.forget(bob.identity.node_id)
            head.forget(bob.identity.node_id)

    happens = [drop]

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "offered":
            offered.append("offered")
        if moment == "piece":
            happens[0]()

    bob.parts = replace(bob.parts, observe=observe)
    formed = made.former.form(lambda *_: None)
    assert list(formed.names.values()) == ["Anna", "Bob"]
    assert dropped and dropped[0].closed
    assert offered == ["offered"]
    watch = head.table.watch(bob.identity.node_id)
    assert watch is not None and watch._apart and all(one.closed for one in watch._apart), "nothing is left open"
    happens[0] = forget
    shutil.rmtree(locate("models"))
    eventually(lambda: watch.view().client is not None)
    formed.lose((), "all is formed again")
    assert list(made.former.form(lambda *_: None).names.values()) == ["Anna"]
    assert head.peers.get(bob.identity.node_id) is None


def test_a_machine_that_does_not_pay_yet_waits_and_is_named(
    lent: Callable[..., Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lent("Bob")
    former, head, bob = made.former, made.head, made.others[0].identity.node_id
    monkeypatch.setattr(former, "_present_machines", list)
    assert list(former.form(lambda *_: None).names.values()) == ["Anna"]
    monkeypatch.setattr(former, "_present_machines", lambda: candidates(head, []))
    former._rejoin_policy.members.add(bob)
    planned: list[RingChange] = []

    def plan(*given: Any) -> RingChange:
        """As planned, but for the speeds, which nobody measured here."""
        found = former_plan(*given)
        assert found is not None and former._wanted == {head.identity.node_id, bob}
        planned.append(replace(found, now_s=0.12, then_s=0.08, read_s=0.005, asked=False))
        return planned[-1]

    former_plan = former._plan_change
    monkeypatch.setattr(former, "_plan_change", plan)
    said: list[str] = []
    for _ in range(2):
        assert not former.changed(lambda *_: None, said.append, Rerun(read=100_000))
    assert len(planned) == 1 and len(said) == 1, "planned once, said once"
    assert said[0].startswith("Bob is there and not used yet: this conversation would be run again and ")
    assert f"about {round(500 + planned[0].send_s + FORMING_S)} s" in said[0]
    (facts_of_bob,) = head.table.facts()
    assert (facts_of_bob.state, facts_of_bob.problem) == ("ready", said[0])
    # A new conversation has nothing to run again.
    assert former.changed(lambda *_: None, said.append, Rerun())
    assert list(former.form(lambda *_: None).names.values()) == ["Anna", "Bob"]
    assert [one.problem for one in head.table.facts()] == [""] and len(said) == 1


def test_a_machine_whose_taking_in_was_stopped_is_not_waited_for_again(
    lent: Callable[..., Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lent("Bob")
    former, head = made.former, made.head
    monkeypatch.setattr(former, "_present_machines", list)
    former.form(lambda *_: None)
    monkeypatch.setattr(former, "_present_machines", lambda: candidates(head, []))
    former._rejoin_policy.members.add(made.others[0].identity.node_id)
    planned: list[int] = []

    def plan(*_: object) -> None:
        planned.append(len(planned))
        if len(planned) == 1:
            raise Cancelled("stopped")

    monkeypatch.setattr(former, "_plan_change", plan)
    with pytest.raises(Cancelled):
        former.changed(lambda *_: None, lambda _: None, Rerun())
    assert not former.changed(lambda *_: None, lambda _: None, Rerun()) and len(planned) == 1
    # A link that is back is looked at whatever was planned before.
    former._link_retry.restored.set()
    assert not former.changed(lambda *_: None, lambda _: None, Rerun()) and len(planned) == 2


def test_a_machine_that_was_left_out_as_silent_is_asked_again_when_it_answers(lent: Callable[..., Lent]) -> None:
    made = lent("Bob", "Carl")
    former, bob = made.former, made.others[0]
    form, back = former._form_with, former._back_again
    asked: list[set[str]] = []

    def forming(machines: Sequence[Candidate], notices: list[str], progress: Any) -> FormedRing:
        asked.append({one.name for one in machines})
        match len(asked):
            case 1:
                raise NodeRefused(bob.identity.node_id, "it cannot be reached.", gone=True)
            case 2:
                assert [line for line in notices if line.startswith("Bob is left out of the ring")]
                progress("sending weights", 0, 0, "")
                pytest.fail("it was not asked again while weights are on their way to Carl")
        assert notices == []
        return form([], notices, progress)

    former._form_with = forming  # type: ignore[method-assign]
    # It is silent for as long as it is waited for, and then answers.
    former._back_again = lambda *given: back(*given) if len(asked) > 1 else None  # type: ignore[method-assign]
    former.form(lambda *_: None)
    assert asked == [{"Bob", "Carl"}, {"Carl"}, {"Bob", "Carl"}]
