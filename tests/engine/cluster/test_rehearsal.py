"""Rehearsed layers: what they take beside the work, over a real exchange, and that the ring goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.cluster.rehearsal import LAYERS, Rehearsal, Shared, _gather_seconds, beside_work, ranks_together
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.transport.mesh import Mesh
from engine.moe.expert_parallel import Loading, Mode, RankContext
from engine.planning.placement import Placement
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.engine.cluster.memory_exchange import MemoryRing


def placement(nodes: int) -> Placement:
    return Placement((1, 3, 4), nodes, (tuple((expert % nodes,) for expert in range(8)),) * 3)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mode", "loading", "nodes"),
    [("exact", "selected", 2), ("fast", "router-aided", 3), ("central", "selected", 2), ("central", "busy-full", 3)],
)
def test_all_nodes_rehearse_and_stay_in_step(
    linked_nodes: Callable[..., LinkedNodes], mode: Mode, loading: Loading, nodes: int
) -> None:
    meshes = linked_nodes(nodes).meshes("tls")

    def rehearse(mesh: Mesh) -> float:
        context = RankContext("an epoch", mesh.rank, placement(nodes), mode, loading)
        return Rehearsal(context, 256, 2, 1, one_by_one=loading == "selected").run(mesh)

    def again(mesh: Mesh) -> list[bytes]:
        mesh.send((b"a step",), 6)
        return [bytes(part) for part in mesh.receive()]

    with ThreadPoolExecutor(nodes) as pool:
        seconds = list(pool.map(rehearse, meshes))
        assert all(0.0 < each < 60.0 for each in seconds)
        assert list(pool.map(again, meshes)) == [[b"a step"] * nodes] * nodes


def test_what_is_neither_trunk_nor_experts_is_left() -> None:
    trunks, experts = [[1.0, 1.0], [1.5, 1.5]], [[3.0, 3.0], [2.0, 2.0]]
    assert beside_work([6.0, 6.0, 6.0], [[1.0] * 3, [1.5] * 3], [[3.0] * 3, [2.0] * 3], False, Shared()) == 2.0
    assert beside_work([6.0, 6.0], trunks, experts, True, Shared()) == 2.0
    # On one core they come one after the other.
    crowded = Shared(((0, 1),), 1)
    assert beside_work([9.0, 9.0], trunks, experts, False, crowded) == 1.5
    assert beside_work([9.0, 9.0], trunks, experts, True, crowded) == 3.0
    assert beside_work([6.0], [[1.0], [1.0]], [[3.0], [2.0]], False, Shared(((0, 1),), 2)) == 2.0


def test_waiting_now_for_one_node_and_now_for_another_counts() -> None:
    """Both nodes work for 2 s on average, and each layer takes 3."""
    first, second = [1.0, 3.0] * (LAYERS // 2), [3.0, 1.0] * (LAYERS // 2)
    nothing = [[0.0] * LAYERS] * 2
    assert beside_work([3.0] * LAYERS, nothing, [first, second], False, Shared()) == 1.0


def test_a_disturbance_of_a_moment_does_not_count() -> None:
    wholes = [2.0] * LAYERS
    wholes[5] = wholes[6] = 1000.0
    assert beside_work(wholes, [[0.0] * LAYERS], [[1.0] * LAYERS], False, Shared()) == 1.0


def test_ranks_of_one_machine_are_found() -> None:
    assert ranks_together(["a", "b", "a", "c", "b"]) == ((0, 2), (1, 4))
    assert ranks_together(["a", "b"]) == ()


@pytest.mark.parametrize("told", [b"", b"\0" * 8, b"\xff" * 16, b"\0" * 24])
def test_a_node_that_tells_of_no_seconds_is_refused(told: bytes) -> None:
    """Not a number, and what is shorter or longer than all readings."""
    ring = MemoryRing(2)
    ring.ends[1].send((told,), 1000)
    with pytest.raises(RingProtocolError):
        _gather_seconds(ring.ends[0], [1e-3, 2e-3])
