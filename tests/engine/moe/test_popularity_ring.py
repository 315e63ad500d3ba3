"""A person's profile of a model's use is one and the same, whether one machine or a ring answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.head.forming import RingFormer
from engine.cluster.head.survey import Surveyor
from engine.cluster.worker.lending import ClusterWorker
from engine.ipc.messages import LendTerms, Load
from engine.ipc.messages.ring import RingChoice
from engine.model_in_use import popularity_writer_for
from engine.models.store.local_models import profile_key
from engine.moe.popularity import load_profile, model_of
from engine.runtimes.choosing import as_ring_node
from engine.session.loading import load_session
from engine.system.locations import profile_paths
from tests.engine.cluster.paired_nodes import Nodes
from tests.engine.cluster.tests_models import tiny_mixtral
from tests.support.eventually import eventually
from tests.support.opened_experts import experts_of

pytestmark = pytest.mark.usefixtures("no_keyring")


class OneRing:
    """What loading asks of a network."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.formers: list[RingFormer] = []

    @property
    def loaded_from(self) -> Path | None:
        return self.formers[-1].folder

    def former(self, name: str, folder: Path, runtime: Any, load: Load, lacked: None, choice: Any = None) -> RingFormer:
        head, as_node = self.nodes.nodes[0], as_ring_node(load, runtime.name)
        surveyor = Surveyor(head.identity.node_id, folder, as_node)
        self.formers.append(RingFormer(head, name, folder, runtime, as_node, surveyor))
        return self.formers[-1]


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRing]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", lend=True)
    lender = ClusterWorker(nodes.nodes[1], terms=LendTerms(cpu_threads=1))
    eventually(nodes.ready)
    made = OneRing(nodes)
    yield made
    for former in made.formers:
        former.close()
    lender.close()
    nodes.close()


def test_a_ring_adds_to_the_profile_of_the_whole_model(ring: OneRing, tmp_path: Path) -> None:
    folder = tiny_mixtral(tmp_path / "model")
    experts = experts_of(folder)
    own, _ = profile_paths(profile_key(folder))
    said: list[str] = []
    choice = RingChoice(even_if_slower=True, overlap=False, exchange="tls")
    alone = Load(id=1, model=str(folder), runtime="native", dtype="float32", cpu_threads=1, partitioning="cpu")
    shared = msgspec.structs.replace(alone, partitioning="ring", ring=choice)
    totals = []
    for request, network in ((alone, None), (shared, ring), (alone, None)):
        session = load_session(request, lambda *_: None, network=network)  # type: ignore[arg-type]
        if network is not None:
            (former,) = ring.formers
            assert former.decision is not None and former.decision.kind == "ring"
            assert session.facts.expert_bytes < experts.nbytes
        writer = popularity_writer_for(session, str(folder), said.append)
        assert writer is not None
        session.model.start().extend([5, 6, 7])
        writer.save()
        session.close()
        found = load_profile(own, model_of(experts), said.append)
        assert found is not None
        totals.append(sum(map(sum, found.values())))
    assert said == []
    # Counts fade a little with those that come after.
    assert totals == pytest.approx([totals[0], 2 * totals[0], 3 * totals[0]], rel=1e-3)
