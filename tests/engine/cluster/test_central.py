"""Central mode: the head's answers are its own, whoever runs the experts; what can go wrong is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import SHAPE, CentralHead, CentralNode
from engine.cluster.contributions import HEADER, NodeFailed
from engine.cluster.expert_runners import layers_for, load_experts
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.expert_parallel import Loading, RankContext
from engine.runtimes import runtime_named
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits, RingPlace
from tests.engine.cluster.memory_exchange import MemoryRing, on_all_ranks
from tests.engine.cluster.ring_layer import run_layer
from tests.engine.cluster.ring_places import placed
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet

pytestmark = pytest.mark.usefixtures("one_kernel")


WIDTH = 6


def conversation(model: LoadedModel) -> list[Logits]:
    tokens = [3 + 7 * position % 150 for position in range(40)]
    rows = model.start()
    assert rows.extend(tokens[:25], want_logits=False) is None
    found = [rows.extend(tokens[25:]), rows.step([5]), rows.step([9])]
    beams = rows.fan_out(3)
    found.append(beams.step([4, 5, 6]))
    return [each for each in found if each is not None]


def central_ring(
    folder: Path,
    runtimes: Sequence[str],
    how: str = "overlapping",
    loading: Loading = "selected",
    one_by_one: bool = False,
    dtype: str = "float32",
) -> tuple[list[Logits], list[int]]:
    """What the head answers, and how many tokens every other node ran."""
    nodes = len(runtimes)
    request = Load(id=1, model=folder.name, cpu_threads=1, dtype=dtype)
    experts = experts_of(folder)
    placement = placed(tuple(experts.layers), experts.count, nodes, how)
    memory = MemoryRing(nodes)
    contexts = [RankContext("epoch", rank, placement, "central", loading) for rank in range(nodes)]
    head = CentralHead(contexts[0], memory.ends[0], one_by_one=one_by_one)
    model = runtime_named(runtimes[0]).load(folder, request, quiet, RingPlace(contexts[0], head))
    ran = [0] * nodes
    runners = {rank: load_experts(runtimes[rank], folder, request, contexts[rank], quiet) for rank in range(1, nodes)}

    def work(rank: int) -> Any:
        if rank == 0:
            try:
                return conversation(model)
            finally:
                memory.ends[0].close()

        def counted(tokens: int) -> None:
            ran[rank] += tokens

        node = CentralNode(contexts[rank], memory.ends[rank], runners[rank], counted, one_by_one)
        with pytest.raises(PeerLost):
            node.serve()
        runners[rank].close()
        return None

    results = on_all_ranks(work, nodes)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0], ran


def alone(folder: Path, runtime: str, dtype: str = "float32") -> list[Logits]:
    request = Load(id=1, model=folder.name, cpu_threads=1, dtype=dtype, partitioning="auto")
    return conversation(runtime_named(runtime).load(folder, request, quiet))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["native", "off"])
@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "deepseek_v3", "gpt_oss", "nemotron_h_latents"])
def test_like_nodes_answer_as_the_head_alone_to_the_bit(
    family: str, kernels: str, dtype: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "off":
        monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = tiny_model(family)
    found, ran = central_ring(folder, ["torch"] * 3, dtype=dtype)
    for ours, expected in zip(found, alone(folder, "torch", dtype), strict=True):
        assert np.array_equal(ours, expected)
    assert min(ran[1:]) > 0


@pytest.mark.parametrize(("loading", "one_by_one"), [("busy-full", False), ("router-aided", False), ("selected", True)])
def test_the_baselines_of_the_paper_answer_the_same(
    loading: Loading, one_by_one: bool, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("qwen3_moe")
    found, _ = central_ring(folder, ["torch", "torch"], "even", loading, one_by_one)
    for ours, expected in zip(found, alone(folder, "torch"), strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("runtimes", [("mlx", "mlx"), ("mlx", "torch"), ("torch", "mlx")])
def test_unlike_runtimes_answer_together(runtimes: tuple[str, str], tiny_model: Callable[..., Path]) -> None:
    pytest.importorskip("mlx_lm")
    folder = tiny_model("mixtral")
    found, ran = central_ring(folder, runtimes)
    for ours, expected in zip(found, alone(folder, runtimes[0]), strict=True):
        if runtimes[0] == runtimes[1]:
            assert np.array_equal(ours, expected)
        assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4
    assert ran[1] > 0


# --- without a model ------------------------------------------------------------------------------------------------


class Doubling:
    """An expert e makes of a row e + 1 times as much."""

    width = WIDTH

    def run_experts(
        self, layer: int, hidden: Any, indices: Any, weights: Any, extra: Sequence[int], scale: bool, reads: bool
    ) -> Any:
        self.last = (layer, extra, scale)
        rows = hidden.repeat(indices.shape[1], axis=0) * (weights.reshape(-1, 1) if scale else 1)
        return (rows * (indices.reshape(-1, 1) + 1)).astype(np.float32)


def pair(runner: Any = None) -> tuple[MemoryRing, CentralHead, CentralNode]:
    memory = MemoryRing(2)
    contexts = [RankContext("epoch", rank, placed((0, 2), 4, 2), "central") for rank in range(2)]
    return (
        memory,
        CentralHead(contexts[0], memory.ends[0]),
        CentralNode(contexts[1], memory.ends[1], runner or Doubling()),
    )


def ask(head: CentralHead, layer: int = 0, scale: bool = False, meanwhile: Any = None, local: Any = None) -> Any:
    hidden = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    indices = np.array([[0, 1], [3, 2]], np.int32)
    weights = np.full((2, 2), 0.5, np.float32)

    def own(mine: Any, weights: Any, extra: Any) -> Any:
        return Doubling().run_experts(layer, hidden, mine, weights, extra, scale, False)

    found = run_layer(head, layer, (indices, weights), local or own, WIDTH, hidden, scale, meanwhile)
    expected = Doubling().run_experts(layer, hidden, indices, weights, (), scale, False)
    assert np.array_equal(found.outputs, expected)
    return found


def both(memory: MemoryRing, node: CentralNode, work: Callable[[], Any]) -> tuple[Any, BaseException]:
    """What ``work`` gave on the head, and what ended the node."""

    def run(rank: int) -> Any:
        if rank:
            return node.serve()
        try:
            return work()
        finally:
            memory.ends[0].close()

    first, second = on_all_ranks(run, 2)
    if isinstance(first, BaseException):
        raise first
    assert isinstance(second, BaseException)
    return first, second


def test_two_messages_per_layer_and_no_state_between() -> None:
    memory, head, node = pair()

    def work() -> None:
        done = []
        ask(head, 2, meanwhile=lambda: done.append(1))
        ask(head, 2, scale=True)
        head.begin_pass()
        head.abort()
        with pytest.raises(Interrupted):
            ask(head, 0)
        assert head.give_up()
        head.begin_pass()
        ask(head, 0)
        assert done == [1]

    _, ended = both(memory, node, work)
    assert isinstance(ended, PeerLost) and memory.exchanges == 6


def test_an_error_on_the_head_leaves_the_node_in_step() -> None:
    memory, head, node = pair()

    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    def work() -> None:
        with pytest.raises(MemoryError):
            ask(head, 0, local=fails)
        with pytest.raises(MemoryError):
            ask(head, 0, meanwhile=fails)
        ask(head, 0)

    _, ended = both(memory, node, work)
    assert isinstance(ended, PeerLost)


def test_a_node_that_fails_says_why() -> None:
    class Failing(Doubling):
        def run_experts(self, *_: Any, **__: Any) -> Any:
            raise ModelError("the file was changed")

    memory, head, node = pair(Failing())

    def work() -> None:
        with pytest.raises(NodeFailed, match="the file was changed") as failed:
            ask(head, 0)
        assert failed.value.ranks == (1,)

    _, ended = both(memory, node, work)
    assert isinstance(ended, ModelError)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "too few"),
        (SHAPE.pack(0, 2, WIDTH, 0, 0), "lacks"),
        (SHAPE.pack(1, 5, WIDTH, 0, 0) + bytes(44), "lacks"),
        (SHAPE.pack(1, 2, 9, 0, 0) + bytes(44), "lacks"),
        (SHAPE.pack(1, 2, WIDTH, 3, 0) + bytes(44), "lacks"),
        (SHAPE.pack(1, 2, WIDTH, 0, 2) + bytes(44), "lacks"),
        (SHAPE.pack(2**31, 2, WIDTH, 0, 0), "lacks"),
        (SHAPE.pack(1, 2, WIDTH, 0, 0) + bytes(31), "were expected"),
        (SHAPE.pack(1, 2, WIDTH, 0, 0) + np.array([0, 4], np.int32).tobytes() + bytes(24), "none of 4"),
    ],
)
def test_what_no_head_sends_is_refused(body: bytes, words: str) -> None:
    memory, _, node = pair()

    def run(rank: int) -> Any:
        if rank:
            with pytest.raises(RingProtocolError, match=words):
                node.serve()
            return None
        end = memory.ends[0]
        end.send([HEADER.pack(0, 0, 0, bytes(8)), body], 2**20)
        end.receive()
        end.send([HEADER.pack(1, 0, 0, bytes(8))], 2**20)
        return bytes(end.receive()[1])

    told, refused = on_all_ranks(run, 2)
    assert refused is None and isinstance(told, bytes) and len(told) > HEADER.size


def test_the_mode_decides_what_a_node_is_loaded_with() -> None:
    memory = MemoryRing(2)
    placement = placed((0, 2), 4, 2)
    assert isinstance(layers_for(RankContext("e", 0, placement, "central"), memory.ends[0]), CentralHead)
    assert isinstance(layers_for(RankContext("e", 1, placement, "exact"), memory.ends[1]), RingLayers)
    with pytest.raises(ValueError, match="not the head"):
        layers_for(RankContext("e", 1, placement, "central"), memory.ends[1])
