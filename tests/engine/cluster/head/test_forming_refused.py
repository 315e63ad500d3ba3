"""Machines that have something else by the same name: refused when they are to join, with both values in a sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cluster.membership.control_messages import CONTROL_PROTOCOL
from engine.ipc.messages import Notice
from engine.moe.kernels.bindings import choose
from tests.engine.cluster import machine_hooks
from tests.engine.cluster.real_rings import Machine, RealRing
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not choose("float32").native, reason="the native kernels are not built"),
]
OTHER_PROTOCOL = Machine(arguments=hooked(machine_hooks.saying, protocol=77))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("models"), {"version": "1.0"})


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RealRing]:
    """The head, three machines with a model of the same name (the same one, one with another tokenizer, one with other
    numbers), and one that speaks another protocol."""
    folder = tmp_path_factory.mktemp("others")
    machines = [
        Machine(),
        Machine(models=(_copied(model, folder / "same"),)),
        Machine(models=(_written(folder / "tokenizer", {"version": "1.1"}),)),
        Machine(models=(_written(folder / "numbers", {"version": "1.0"}, "bfloat16"),)),
        OTHER_PROTOCOL,
    ]
    with RealRing(tmp_path_factory.mktemp("ring"), machines) as made:
        yield made


def _written(folder: Path, tokenizer: dict[str, str], dtype: str = "float32") -> Path:
    made = write_tiny_model(folder / "tiny", "qwen3_moe", dtype=dtype)
    whole = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **tokenizer}
    (made / "tokenizer.json").write_text(json.dumps(whole))
    return made


def _copied(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / model.name))


@pytest.mark.parametrize(
    ("follower", "what", "value"), [(2, "tokenizer", "[0-9a-f]{12}"), (3, "quantisation", "[a-z]+[0-9]+")]
)
def test_another_model_by_the_same_name_is_refused(
    ring: RealRing, model: Path, follower: int, what: str, value: str
) -> None:
    since = len(ring.head.events)
    loaded = ring.load(model, "native", mode="exact", nodes=[ring.ids[follower]])
    assert loaded.facts.ring is not None and len(loaded.facts.ring.nodes) == 1
    told = [event.text for event in ring.head.events[since:] if isinstance(event, Notice)]
    said = next(line for line in told if "left out" in line)
    assert said.startswith(f"node {follower} is left out of the ring: The models differ in the {what}: ")
    both = re.search(rf" ({value}) \(tiny\) on node {follower}, ({value}) \(tiny\) on head; ", said)
    assert both is not None and both[1] != both[2], said
    assert f"remove it from node {follower}" in said
    assert not list((ring.engines[follower].home / "models").glob("*.share")), "something was sent to it"


def test_the_same_model_is_used_where_it_lies(ring: RealRing, model: Path) -> None:
    formed = ring.form(model, "native", mode="exact", nodes=[ring.ids[1]])
    assert formed.nodes[1].name == "node 1" and formed.nodes[1].has_bytes > 0
    assert not list((ring.engines[1].home / "models").glob("*.share"))


def test_another_protocol_is_refused_at_the_greeting(ring: RealRing) -> None:
    state = ring.head.state()
    assert state is not None
    other = next(peer for peer in state.peers if peer.node_id == ring.ids[4])
    assert other.state == "refused"
    assert other.problem.startswith(f"It speaks ring protocol 77 and this machine {CONTROL_PROTOCOL}; install")
