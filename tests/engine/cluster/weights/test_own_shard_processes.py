"""A head without a copy of the model: the ring begins with the trunk and its own experts, and answers as one node."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from engine.bench.local_ring import LocalEngine
from engine.errors import ModelError
from engine.ipc.messages import Load, NetworkState, Plan, Planned
from engine.ipc.messages.ring import RingChoice
from engine.models.folders.prepare import prepare
from engine.models.folders.shard_files import read_shard
from tests.engine.cluster import machine_hooks
from tests.engine.cluster.real_rings import Machine, RealRing
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
PLAIN, PREPARED = "owner--plain", "owner--prepared"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the names that they have where they are whole."""
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_model(folder / PLAIN, "mixtral", num_local_experts=8, dtype="bfloat16")
    prepare(model, folder / f"{PREPARED}.prepared", lambda *_: None)
    return {PLAIN: model, PREPARED: folder / f"{PREPARED}.prepared"}


def shares(engine: LocalEngine) -> list[Path]:
    return sorted((engine.home / "models").glob("*.share"))


def held(folder: Path) -> int:
    return sum(map(len, read_shard(folder).experts.values()))


@pytest.mark.parametrize("key", [pytest.param(PLAIN, marks=pytest.mark.soak), PREPARED])
def test_a_ring_begins_without_a_copy_on_its_head(tmp_path: Path, made: dict[str, Path], key: str):
    """One of two followers has all of it. The other one gets its share through the head.

    The other tests have a plain checkpoint there.
    """
    with RealRing(tmp_path, [Machine(), Machine(models=(made[key],)), Machine()]) as ring:
        facts = ring.form(Path(key.replace("--", "/")), "native", 2, "bfloat16")
        tokens, beams = ring.answer(), ring.beams()
        # By now a plan needs nothing of the others but their figures.
        choice = RingChoice(even_if_slower=True, nodes=ring.ids[1:])
        load = Load(id=0, model=key.replace("--", "/"), runtime="native", partitioning="ring", ring=choice)
        planned = ring.head.ask(Plan(id=ring.head.new_id(), load=load))
        assert isinstance(planned, Planned) and planned.ring is not None
        assert planned.ring.nodes[0].has_bytes > planned.ring.nodes[0].trunk_bytes > 0
        (mine,), (theirs,) = shares(ring.head), shares(ring.engines[2])
        assert shares(ring.engines[1]) == []
        assert [held(mine), held(theirs)] == [facts.nodes[0].experts, facts.nodes[2].experts]
        assert sum(share.experts for share in facts.nodes) == 8 * 3
        assert not (ring.head.home / "models" / key).exists()
        ring.alone(made[PLAIN], "native", "bfloat16")
        assert tokens == ring.answer()
        assert [(beam.token_ids, beam.score) for beam in beams] == [
            (beam.token_ids, beam.score) for beam in ring.beams()
        ]


def test_a_ring_formed_again_takes_what_is_missing_or_says_who_had_it(tmp_path: Path, made: dict[str, Path]):
    with RealRing(tmp_path, [Machine(), Machine(models=(made[PLAIN],)), Machine()]) as ring:
        ring.load(Path("owner/plain"), "native", 2, "bfloat16", wait_s=1.0)
        answer = ring.answer()
        (mine,) = shares(ring.head)
        before = held(mine)
        ring.engines[2].process.kill()
        # Its experts are taken from the machine that has all of them.
        assert ring.answer() == answer
        assert held(mine) > before
        whole = ring.engines[1].process
        whole.send_signal(signal.SIGSTOP)
        # Now all of them would have to be here.
        with pytest.raises(
            ModelError, match=r"of owner/plain are on no machine that is there now; node 1 had all of it"
        ):
            ring.answer()
        since = len(ring.head.events)
        whole.send_signal(signal.SIGCONT)
        ring.head.wait(lambda event: isinstance(event, NetworkState) and is_ready(event, ring.ids[1]), 30, since)
        assert ring.answer() == answer


def is_ready(state: NetworkState, node_id: str) -> bool:
    return any(peer.node_id == node_id and peer.state in ("ready", "ring") for peer in state.peers)


def test_a_head_that_is_alone_in_the_end_takes_all_of_it(tmp_path: Path, made: dict[str, Path]):
    """What it has of it already is not taken again, and lies there once afterwards."""
    with RealRing(tmp_path, [Machine(), Machine(models=(made[PLAIN],))]) as ring:
        ring.load(Path("owner/plain"), "native", 1, "bfloat16")
        answer = ring.answer()
        assert len(shares(ring.head)) == 1
        loaded = ring.load(Path("owner/plain"), "native", 1, "bfloat16", even_if_slower=False)
        assert loaded.facts.ring is not None
        assert len(loaded.facts.ring.nodes) == 1
        assert (ring.head.home / "models" / PLAIN / "config.json").is_file()
        assert shares(ring.head) == []
        assert ring.answer() == answer


def test_a_head_for_which_another_machine_computes_takes_no_weights(tmp_path: Path, made: dict[str, Path]):
    slow, fast = hooked(machine_hooks.slow), hooked(machine_hooks.another)
    with RealRing(tmp_path, [Machine(arguments=slow), Machine(arguments=fast, models=(made[PLAIN],))]) as ring:
        loaded = ring.load(Path("owner/plain"), "native", 1, "bfloat16", even_if_slower=False)
        assert loaded.facts.ring is not None and loaded.facts.ring.elsewhere
        (mine,) = shares(ring.head)
        assert held(mine) == 0 and not read_shard(mine).has_trunk
        answer = ring.answer()
        ring.alone(made[PLAIN], "native", "bfloat16")
        assert ring.answer() == answer
