"""One node's part in every MoE layer: same results everywhere, disagreement mended, ways out of a pass, errors."""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.cluster.all_gather import RingLayers
from engine.cluster.assignment import FEW_ROUTES, Router
from engine.cluster.contributions import HEADER, REASON_BYTES, NodeFailed
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.moe.expert_parallel import Gathered, Loading, Mode, RankContext, Words
from engine.moe.timing import Recorder
from engine.planning.placement import Placement
from engine.runtimes.protocol import Interrupted
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, on_all_ranks
from tests.engine.cluster.ring_layer import run_layer
from tests.support.random_examples import examples

LAYERS = (1, 2, 4)
EXPERTS = 8
WIDTH = 6


def placement(nodes: int, overlap: bool = False, layers: tuple[int, ...] = LAYERS) -> Placement:
    """Expert e lives at rank e % nodes; with ``overlap`` every third also at the next."""

    def ranks(expert: int) -> tuple[int, ...]:
        first = expert % nodes
        return tuple(sorted({first, (first + 1) % nodes})) if overlap and expert % 3 == 0 else (first,)

    row = tuple(ranks(expert) for expert in range(EXPERTS))
    return Placement(layers, nodes, (row,) * len(layers))


def contexts(
    nodes: int, mode: Mode = "exact", loading: Loading = "selected", overlap: bool = False
) -> list[RankContext]:
    return [RankContext("epoch", rank, placement(nodes, overlap), mode, loading) for rank in range(nodes)]


def result_of(layer: int, expert: int, token: int) -> NDArray[np.float32]:
    return np.arange(WIDTH, dtype=np.float32) + layer * 1000 + expert * 10 + token / 8


class CountedExperts:
    """Experts whose results say who they are; keeps what it was asked for."""

    def __init__(self, layer: int, exact: bool = True) -> None:
        self.layer = layer
        self.exact = exact
        self.calls: list[tuple[list[int], tuple[int, ...]]] = []

    def __call__(self, indices: NDArray[np.int32], weights: NDArray[np.float32], extra: tuple[int, ...]) -> Words:
        self.calls.append((sorted(set(indices.ravel().tolist()) - {-1}), extra))
        tokens, k = indices.shape
        out = np.full((tokens * k, WIDTH), np.nan, np.float32)
        for route, expert in enumerate(indices.ravel().tolist()):
            if expert >= 0:
                out[route] = result_of(self.layer, expert, route // k)
        if self.exact:
            return out
        weighted = np.where(np.isnan(out), 0, out) * weights.reshape(-1, 1)
        summed: Words = weighted.reshape(tokens, k, WIDTH).sum(axis=1, dtype=np.float32)
        return summed


def routes_for(tokens: int, k: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    indices = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :k].astype(np.int32)
    return indices, random.random((tokens, k), dtype=np.float32)


def run(layers: RingLayers, layer: int, routes: Any, local: Any, **more: Any) -> Gathered:
    return run_layer(layers, layer, routes, local, WIDTH, **more)


def one_pass(layers: RingLayers, tokens: int = 1, k: int = 3) -> list[Gathered]:
    layers.begin_pass()
    exact = layers.context.mode == "exact"
    return [run(layers, layer, routes_for(tokens, k, layer), CountedExperts(layer, exact)) for layer in LAYERS]


def ring(all_contexts: list[RankContext]) -> tuple[MemoryRing, list[RingLayers]]:
    memory = MemoryRing(len(all_contexts))
    return memory, [RingLayers(context, end) for context, end in zip(all_contexts, memory.ends, strict=True)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("overlap", [False, True])
def test_exact_every_route_has_its_result_on_every_node(nodes: int, tokens: int, overlap: bool) -> None:
    _, layers = ring(contexts(nodes, overlap=overlap))
    for found in must_succeed(on_all_ranks(lambda rank: one_pass(layers[rank], tokens), nodes)):
        for layer, gathered in zip(LAYERS, found, strict=True):
            indices, _ = routes_for(tokens, 3, layer)
            assert gathered.outputs is not None
            expected = [result_of(layer, e, route // 3) for route, e in enumerate(indices.ravel().tolist())]
            assert np.array_equal(gathered.outputs, np.array(expected))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 40])
def test_fast_the_sums_of_all_ranks_are_the_weighted_sum(nodes: int, tokens: int) -> None:
    _, layers = ring(contexts(nodes, "fast", overlap=True))
    passes = must_succeed(on_all_ranks(lambda rank: one_pass(layers[rank], tokens), nodes))
    for found in passes:
        for layer, gathered, other in zip(LAYERS, found, passes[0], strict=True):
            indices, weights = routes_for(tokens, 3, layer)
            expected = np.zeros((tokens, WIDTH))
            for route, expert in enumerate(indices.ravel().tolist()):
                expected[route // 3] += result_of(layer, expert, route // 3) * weights.ravel()[route]
            assert np.allclose(np.sum(gathered.sums, axis=0), expected, rtol=1e-5)
            assert all(np.array_equal(a, b) for a, b in zip(gathered.sums, other.sums, strict=True))


def test_a_rank_without_routes_sends_a_header_only() -> None:
    memory, layers = ring(contexts(2))
    routes = np.array([[0, 2, 4]], np.int32), np.ones((1, 3), np.float32)
    experts = [CountedExperts(1), CountedExperts(1)]
    must_succeed(on_all_ranks(lambda rank: run(layers[rank], 1, routes, experts[rank]), 2))
    assert memory.ends[0].sent == [HEADER.size + 3 * WIDTH * 4]
    assert memory.ends[1].sent == [HEADER.size]
    assert experts[1].calls == []


def test_no_tokens_are_an_exchange_of_headers() -> None:
    memory, layers = ring(contexts(3))
    found = must_succeed(on_all_ranks(lambda rank: one_pass(layers[rank], tokens=0), 3))
    assert all(each.outputs is not None and each.outputs.shape == (0, WIDTH) for each in found[1])
    assert memory.exchanges == len(LAYERS)
    assert {size for end in memory.ends for size in end.sent} == {HEADER.size}


def test_without_tokens_no_further_experts_are_run() -> None:
    _, layers = ring(contexts(2, loading="busy-full"))
    experts = [CountedExperts(1), CountedExperts(1)]
    must_succeed(on_all_ranks(lambda rank: run(layers[rank], 1, routes_for(0, 3), experts[rank]), 2))
    assert [each.calls for each in experts] == [[], []]


def test_an_array_that_cannot_be_written_is_copied() -> None:
    _, layers = ring(contexts(2))
    routes = routes_for(1, 3)

    def local(indices: Any, weights: Any, extra: Any) -> Words:
        out = CountedExperts(1)(indices, weights, extra)
        out.flags.writeable = False
        return out

    for found in must_succeed(on_all_ranks(lambda rank: run(layers[rank], 1, routes, local), 2)):
        assert found.outputs is not None and not np.isnan(found.outputs).any()


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 99))
@settings(max_examples=examples(12), deadline=None)
def test_every_route_has_one_owner_that_holds_its_expert(
    tokens: int, k: int, nodes: int, overlap: bool, seed: int
) -> None:
    indices, _ = routes_for(tokens, k, seed)
    shared = [Router(context).share(2, indices, True) for context in contexts(nodes, overlap=overlap)]
    mine = np.stack([each.mine for each in shared])
    assert np.array_equal(mine.max(axis=0), indices) and ((mine >= 0).sum(axis=0) == 1).all()
    for rank, each in enumerate(shared):
        assert each.hash == shared[0].hash
        assert sorted(int(row) for rows in each.rows for row in rows) == list(range(tokens * k))
        assert [int(row) for row in each.rows[rank]] == np.flatnonzero(each.mine.ravel() >= 0).tolist()
        held = placement(nodes, overlap).held(rank, 2)
        assert set(each.mine.ravel().tolist()) <= {-1, *held}
        for expert in set(indices.ravel().tolist()):
            assert len({owner for owner in range(nodes) if (shared[owner].mine == expert).any()}) == 1
    assert (tokens * k <= FEW_ROUTES) == isinstance(shared[0].rows[0], list)


# --- disagreement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_other_routes_on_one_node_are_mended_within_the_layer(nodes: int, mode: Mode) -> None:
    memory, layers = ring(contexts(nodes, mode))
    recorder = Recorder(5, LAYERS, EXPERTS)
    layers[0].recorder = recorder

    def work(rank: int) -> list[Gathered]:
        found = []
        for layer in LAYERS:
            odd = rank == nodes - 1 and layer == 2
            local = CountedExperts(layer, mode == "exact")
            found.append(run(layers[rank], layer, routes_for(4, 3, 77 if odd else layer), local))
        return found

    results = must_succeed(on_all_ranks(work, nodes))
    wanted = routes_for(4, 3, 2)
    for found in results:
        assert np.array_equal(found[1].indices, wanted[0]) and np.array_equal(found[1].weights, wanted[1])
        if mode == "exact":
            assert np.array_equal(found[1].outputs, results[0][1].outputs)
        else:
            assert all(np.array_equal(a, b) for a, b in zip(found[1].sums, results[0][1].sums, strict=True))
    assert memory.exchanges == len(LAYERS) + 2
    assert [each.disagreements for each in layers] == [1] * nodes
    (notice,) = recorder.take_notices()
    assert "layer 2" in notice


def test_many_disagreements_suggest_central_mode_once() -> None:
    _, layers = ring(contexts(2))
    recorder = layers[0].recorder = Recorder(5, LAYERS, EXPERTS)

    def work(rank: int) -> None:
        for number in range(4):
            for layer in LAYERS:
                run(layers[rank], layer, routes_for(1, 3, number + 50 * rank), CountedExperts(layer))

    must_succeed(on_all_ranks(work, 2))
    notices = recorder.take_notices()
    assert "layer 1" in notices[0] and "central" in notices[1]
    assert layers[0].disagreements == 12


def test_mended_routes_must_be_to_experts_that_exist() -> None:
    memory, layers = ring(contexts(2))

    def work(rank: int) -> Gathered:
        routes = routes_for(1, 3, rank)
        if rank == 0:
            end = memory.ends[0]
            end.send([HEADER.pack(0, 1, 0, bytes(8)), bytes(36)], 9999)
            end.receive()
            told = struct.pack("<iii", 1, 2, 1000) + bytes(12)
            end.send([HEADER.pack(1, 1, 0, bytes(8)), told], 9999)
            end.receive()
        return run(layers[1], 1, routes, CountedExperts(1)) if rank else Gathered(*routes)

    _, refused = on_all_ranks(work, 2)
    assert isinstance(refused, RingProtocolError) and "experts" in str(refused)


# --- ways out of a pass ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_abort_ends_the_pass_everywhere_and_the_next_is_in_step(nodes: int) -> None:
    memory, layers = ring(contexts(nodes))

    def work(rank: int) -> list[Gathered]:
        layers[rank].begin_pass()
        run(layers[rank], 1, routes_for(3, 2), CountedExperts(1))
        if rank == 0:
            layers[0].abort()
        with pytest.raises(Interrupted):
            run(layers[rank], 2, routes_for(3, 2), CountedExperts(2))
        assert layers[rank].give_up()
        return one_pass(layers[rank])

    found = must_succeed(on_all_ranks(work, nodes))
    assert memory.exchanges == 2 + len(LAYERS)
    assert all(np.array_equal(each[2].outputs, found[0][2].outputs) for each in found)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("earlier", ["nothing", "whole", "interrupted"])
def test_the_head_gives_up_between_layers(position: int, earlier: str) -> None:
    _, layers = ring(contexts(3))

    def work(rank: int) -> list[Gathered]:
        mine = layers[rank]
        if earlier == "whole":
            one_pass(mine)
        if earlier == "interrupted":
            mine.begin_pass()
            if rank == 0:
                assert mine.give_up()
            else:
                with pytest.raises(Interrupted):
                    run(mine, LAYERS[0], routes_for(1, 2), CountedExperts(LAYERS[0]))
        mine.begin_pass()
        for layer in LAYERS[:position]:
            run(mine, layer, routes_for(1, 2), CountedExperts(layer))
        if rank == 0:
            assert mine.give_up()
            assert mine.give_up()
        else:
            with pytest.raises(Interrupted):
                run(mine, LAYERS[position], routes_for(1, 2), CountedExperts(LAYERS[position]))
        return one_pass(mine)

    must_succeed(on_all_ranks(work, 3))


def test_after_the_last_layer_there_is_nobody_to_tell() -> None:
    memory, layers = ring(contexts(2))

    def work(rank: int) -> bool:
        one_pass(layers[rank])
        return layers[rank].give_up() if rank == 0 else True

    assert must_succeed(on_all_ranks(work, 2)) == [False, True]
    assert memory.exchanges == len(LAYERS)


def test_an_abort_before_the_pass_is_forgotten() -> None:
    _, layers = ring(contexts(2))
    layers[0].abort()
    assert len(must_succeed(on_all_ranks(lambda rank: one_pass(layers[rank]), 2))) == 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_node_reaches_all(failing: int) -> None:
    _, layers = ring(contexts(3))

    def broken(*_: Any) -> Words:
        raise MemoryError("no memory for layer 2" + "!" * 2 * REASON_BYTES)

    def work(rank: int) -> Any:
        mine = layers[rank]
        run(mine, 1, routes_for(6, 3), CountedExperts(1))
        try:
            run(mine, 2, routes_for(6, 3), broken if rank == failing else CountedExperts(2))
        except (MemoryError, NodeFailed, Interrupted) as error:
            return error, one_pass(mine)

    for rank, (error, after) in enumerate(must_succeed(on_all_ranks(work, 3))):
        assert len(after) == len(LAYERS)
        if rank == failing:
            assert isinstance(error, MemoryError)
        elif failing == 0:
            assert isinstance(error, Interrupted)
        else:
            assert isinstance(error, NodeFailed) and error.ranks == (failing,)
            assert str(error).startswith("no memory for layer 2") and len(str(error)) == REASON_BYTES


def test_an_error_while_the_wire_is_busy_leaves_the_node_in_step() -> None:
    memory, layers = ring(contexts(2))

    def broken() -> None:
        raise MemoryError("shared expert")

    def work(rank: int) -> str:
        mine = layers[rank]
        mine.begin_pass()
        try:
            run(mine, 1, routes_for(2, 2), CountedExperts(1), meanwhile=broken if rank == 1 else None)
            run(mine, 2, routes_for(2, 2), CountedExperts(2))
        except MemoryError as error:
            assert mine.give_up(str(error))
        except NodeFailed as error:
            assert error.ranks == (1,) and "shared expert" in str(error)
        one_pass(mine)
        return "in step"

    assert must_succeed(on_all_ranks(work, 2)) == ["in step"] * 2
    assert memory.exchanges == 2 + len(LAYERS)


def test_a_lost_peer_stays_lost() -> None:
    memory, layers = ring(contexts(3))

    def work(rank: int) -> Any:
        run(layers[rank], 1, routes_for(2, 2), CountedExperts(1))
        if rank == 2:
            memory.ends[2].close()
            return None
        with pytest.raises(PeerLost) as lost:
            run(layers[rank], 2, routes_for(2, 2), CountedExperts(2))
        assert lost.value.ranks == (2,)
        with pytest.raises(PeerLost):
            one_pass(layers[rank])
        with pytest.raises(PeerLost):
            layers[rank].give_up()
        return None

    must_succeed(on_all_ranks(work, 3))


@pytest.mark.parametrize(
    ("contribution", "words"),
    [
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        (HEADER.pack(7, 1, 0, bytes(8)), "exchange 7"),
        (HEADER.pack(0, 3, 0, bytes(8)), "layer 3"),
        (HEADER.pack(0, 1, 64, bytes(8)), "flags 64"),
        (HEADER.pack(0, 1, 1, bytes(8)), "flags 1"),
    ],
)
def test_what_no_node_sends_is_refused(contribution: bytes, words: str) -> None:
    memory, layers = ring(contexts(2))

    def work(rank: int) -> Any:
        if rank == 1:
            memory.ends[1].send([contribution], 9999)
            return memory.ends[1].receive() and None
        with pytest.raises(RingProtocolError, match=words):
            run(layers[0], 1, routes_for(1, 3), CountedExperts(1))
        with pytest.raises(PeerLost):
            layers[0].give_up()

    must_succeed(on_all_ranks(work, 2))


def test_results_of_the_wrong_size_are_refused() -> None:
    memory, layers = ring(contexts(2))
    routes = routes_for(1, 3)
    right = Router(layers[1].context).share(1, routes[0], True)

    def work(rank: int) -> Any:
        if rank == 1:
            memory.ends[1].send([HEADER.pack(0, 1, 0, right.hash), bytes(5)], 9999)
            return memory.ends[1].receive() and None
        with pytest.raises(RingProtocolError, match="21 bytes"):
            run(layers[0], 1, routes, CountedExperts(1))

    must_succeed(on_all_ranks(work, 2))


def test_layers_out_of_turn_are_a_mistake_of_the_caller() -> None:
    _, (layers,) = ring(contexts(1))
    with pytest.raises(ValueError, match="out of turn"):
        run(layers, 2, routes_for(1, 2), CountedExperts(2))


# --- loading --------------------------------------------------------------------------------------------------------


def test_busy_full_runs_all_that_is_held() -> None:
    _, layers = ring(contexts(2, loading="busy-full"))
    routes = np.array([[0, 2, 1]], np.int32), np.ones((1, 3), np.float32)
    experts = [CountedExperts(1), CountedExperts(1)]
    found = must_succeed(on_all_ranks(lambda rank: run(layers[rank], 1, routes, experts[rank]), 2))
    assert experts[0].calls == [([0, 2], (4, 6))]
    assert experts[1].calls == [([1], (3, 5, 7))]
    assert np.array_equal(found[0].outputs, found[1].outputs)


def test_router_aided_runs_as_many_as_the_busiest_node_oldest_first() -> None:
    _, layers = ring(contexts(2, loading="router-aided"))
    asked = [[0, 2, 1], [0, 2, 1], [0, 2, 4], [1, 3, 5]]
    experts = [[CountedExperts(1) for _ in asked] for _ in range(2)]

    def work(rank: int) -> None:
        for number, chosen in enumerate(asked):
            layers[rank].begin_pass()
            routes = np.array([chosen], np.int32), np.ones((1, 3), np.float32)
            run(layers[rank], 1, routes, experts[rank][number])

    must_succeed(on_all_ranks(work, 2))
    assert [each.calls for each in experts[0]] == [[([0, 2], ())], [([0, 2], ())], [([0, 2, 4], ())], [([], (6, 0, 2))]]
    assert [each.calls for each in experts[1]] == [
        [([1], (3,))],
        [([1], (5,))],
        [([], (7, 3, 1))],
        [([1, 3, 5], ())],
    ]


# --- timing ---------------------------------------------------------------------------------------------------------


def test_waiting_for_the_slowest_is_told_apart_from_exchanging() -> None:
    _, layers = ring(contexts(2))
    recorders = [Recorder(5, LAYERS, EXPERTS) for _ in range(2)]
    for each, recorder in zip(layers, recorders, strict=True):
        each.recorder = recorder
        recorder.enabled = True
    late = threading.Event()

    def work(rank: int) -> None:
        recorders[rank].begin_step("decode", 1)
        if rank == 1:
            late.wait(0.05)
        run(layers[rank], 1, routes_for(1, 3), CountedExperts(1))
        recorders[rank].end_step()

    must_succeed(on_all_ranks(work, 2))
    fast, slow = (recorder.frame(1).decode.layers[1] for recorder in recorders)
    assert fast.wait > 20 > fast.exchange
    assert slow.wait < fast.wait
