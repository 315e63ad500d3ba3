"""A lent machine works on the terms of its own person: memory, threads, whether weights are kept and locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.cluster.membership.control_messages import (
    Connected,
    EpochMember,
    EpochSpec,
    WantedFacts,
)
from engine.cluster.transport.addresses import listener_address
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.shard_store import Need
from engine.cluster.worker import lending
from engine.cluster.worker.follower_work import gpu_shard_bytes, lent_gpu, lent_threads, load_of
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from engine.ipc.messages import LendTerms, ModelOptions, OpenNetwork, RuntimeName
from engine.models.folders.weight_layout import layout_of
from engine.planning.placement import Placement
from engine.planning.ring_nodes import GpuFacts, NodeFacts
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")
TinyModel = Callable[..., Path]
BOTH = ["native", "torch"]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    eventually(nodes.ready)
    yield nodes
    nodes.close()


def spec_of(pair: Nodes, placement: Placement, cpu_threads: int | None = None, mode: str = "exact") -> EpochSpec:
    listeners = [[], [listener_address(pair.nodes[1].listening[0])]]
    members = [
        EpochMember(rank=rank, node_id=one.node_id, certificate=one.certificate_pem, addresses=listeners[rank])
        for rank, one in enumerate(pair.identities)
    ]
    return EpochSpec(
        epoch="epoch",
        version=pair.nodes[1].version,
        rank=1,
        members=members,
        key=bytes(32),
        placement=placement,
        mode=mode,  # type: ignore[arg-type]
        loading="selected",
        weights=[],
        exchanges=["tls"],
        options=ModelOptions(model="m", runtime="native", cpu_threads=cpu_threads),
    )


def computed_by(spec: EpochSpec, runtime: RuntimeName) -> EpochSpec:
    return msgspec.structs.replace(spec, options=ModelOptions(model="m", runtime=runtime))


@pytest.mark.parametrize(
    ("wanted", "lent", "used"), [(None, None, None), (4, None, 4), (None, 2, 2), (4, 2, 2), (1, 2, 1)]
)
def test_the_fewer_threads_are_used(wanted: int | None, lent: int | None, used: int | None) -> None:
    assert lent_threads(LendTerms(cpu_threads=lent), wanted) == used


def test_a_share_is_loaded_as_its_person_wants(pair: Nodes) -> None:
    spec = spec_of(pair, Placement((0,), 2, (((0,), (1,)),)), cpu_threads=64)
    kept = load_of(spec, OpenNetwork(id=1))
    assert (kept.keep_resident, kept.lock_memory) == (True, False)
    options = OpenNetwork(id=1, cpu_threads=1, keep_resident=False, lock_memory=True, lend_memory=5)
    own = load_of(spec, options)
    assert (own.keep_resident, own.lock_memory, own.cpu_threads) == (False, True, 1)


def test_a_head_is_told_what_is_lent(pair: Nodes) -> None:
    client = pair.client(1, pair.identities[0])
    lender = ClusterWorker(pair.nodes[1], terms=LendTerms(lend_memory=3 << 30, cpu_threads=1))
    try:
        found = client.call("Facts", WantedFacts(shape=None), NodeFacts, 120)
        assert (found.memory_lent, found.threads) == (3 << 30, 1)
    finally:
        client.close()
        lender.close()


@pytest.mark.parametrize(
    ("lent", "told", "partitioning", "most", "share"),
    [(None, 12 << 30, "auto", None, 0.5), (3 << 30, 3 << 30, "auto", 3 << 30, 1.0), (0, None, "cpu", 0, 1.0)],
)
def test_of_a_gpu_half_is_lent_or_what_its_person_says(
    lent: int | None, told: int | None, partitioning: str, most: int | None, share: float, pair: Nodes
) -> None:
    gpu = GpuFacts(name="an L4", memory_total=24 << 30, memory_free=20 << 30)
    terms = LendTerms(lend_gpu_memory=lent)
    found = lent_gpu(gpu, terms)
    assert (None if found is None else found.memory_lent) == told
    assert lent_gpu(None, terms) is None
    spec = computed_by(spec_of(pair, Placement((0,), 2, (((0,), (1,)),))), "torch")
    load = load_of(spec, terms)
    assert (load.partitioning, load.most_gpu_memory, load.most_gpu_share) == (partitioning, most, share)
    # mlx has nothing but the GPU, and refuses to run on the CPU.
    assert load_of(computed_by(spec, "mlx"), terms).partitioning == "auto"
    assert load_of(computed_by(spec, "native"), terms).partitioning == "cpu"


def test_what_a_gpu_keeps_needs_no_other_memory(
    pair: Nodes, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share beyond the memory that is lent is taken if lent GPU memory holds the rest, and by torch only."""
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    rows = tuple(((1,),) + ((0,),) * (layout.count - 1) for _ in layout.layers)
    placement = Placement(layout.layers, 2, rows)
    held = layout.expert_bytes * len(layout.layers)
    gpu = GpuFacts(name="an L4", memory_total=24 << 30, memory_free=20 << 30)
    monkeypatch.setattr(lending, "torch_gpu", lambda *_: gpu)
    spec = computed_by(spec_of(pair, placement), "torch")
    assert gpu_shard_bytes(folder, spec, gpu, LendTerms(), BOTH) == held
    assert gpu_shard_bytes(folder, spec, gpu, LendTerms(lend_gpu_memory=0), BOTH) == 0
    assert gpu_shard_bytes(folder, spec, gpu, LendTerms(lend_gpu_memory=1 << 20), BOTH) == 0
    assert gpu_shard_bytes(folder, spec, None, LendTerms(), BOTH) == 0
    assert gpu_shard_bytes(folder, computed_by(spec, "native"), gpu, LendTerms(), BOTH) == 0
    for lent, said in ((None, "not connect"), (0, "Bob lends .* of memory and its share would take")):
        terms = LendTerms(lend_memory=layout.trunk_bytes + 1000, lend_gpu_memory=lent)
        lender = ClusterWorker(pair.nodes[1], terms=terms, connect_s=0.5)
        lender._need = Need(folder, (), 0, 0)
        client = pair.client(1, pair.identities[0])
        try:
            with pytest.raises(ModelError, match=said):
                client.call("Connect", spec, Connected, 120)
        finally:
            client.close()
            lender.close()


def test_heartbeats_show_no_more_than_what_is_lent(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    try:
        free = nodes.nodes[1].load().memory_free
        assert free > 1 << 20
    finally:
        nodes.close()
    bounded = Nodes(tmp_path / "bounded", "Anna", "Bob", lend=True, terms={"lend_memory": 1 << 20})
    try:
        assert bounded.nodes[1].load().memory_free == 1 << 20
        eventually(lambda: [peer.memory_free for peer in bounded.nodes[0].table.facts()] == [1 << 20])
    finally:
        bounded.close()


@pytest.mark.parametrize(("mode", "refused"), [("exact", True), ("central", False)])
def test_a_share_beyond_what_is_lent_is_refused(pair: Nodes, tiny_model: TinyModel, mode: str, refused: bool) -> None:
    """Whatever a head makes of what it was told; a follower of central mode holds no trunk."""
    folder = tiny_model("mixtral")
    layout = layout_of(folder)
    rows = tuple(((1,),) + ((0,),) * (layout.count - 1) for _ in layout.layers)
    placement = Placement(layout.layers, 2, rows)
    held = layout.expert_bytes * len(layout.layers)
    lender = ClusterWorker(pair.nodes[1], terms=LendTerms(lend_memory=held + layout.trunk_bytes // 2))
    lender._need = Need(folder, (), 0, 0)
    client = pair.client(1, pair.identities[0])
    spec = msgspec.structs.replace(spec_of(pair, placement, mode=mode), exchanges=["socket"])
    try:
        # Where it is not refused, it goes on to connect, which plain text may not.
        said = "Bob lends .* of memory and its share would take .*; form the ring again" if refused else "trusted"
        with pytest.raises(ModelError, match=said):
            client.call("Connect", spec, Connected, 120)
    finally:
        client.close()
        lender.close()


@pytest.mark.parametrize("form", ["another machine's", "a list", "nonsense"])
def test_a_certificate_that_is_not_the_members_is_refused(pair: Nodes, form: str) -> None:
    """It would be given to TLS libraries with those of all others."""
    spec = spec_of(pair, Placement((0,), 2, (((0,), (1,)),)))
    first, second = pair.identities
    wrong = {
        "another machine's": second.certificate_pem,
        "a list": first.certificate_pem + second.certificate_pem,
        "nonsense": b"nonsense",
    }[form]
    member = msgspec.structs.replace(spec.members[0], certificate=wrong)
    lender = ClusterWorker(pair.nodes[1])
    client = pair.client(1, first)
    try:
        with pytest.raises(RingProtocolError, match=f"The certificate of {first.node_id[:8]}"):
            client.call("Connect", msgspec.structs.replace(spec, members=[member, spec.members[1]]), Connected, 120)
        assert pair.nodes[1].lent().head == ""
    finally:
        client.close()
        lender.close()
