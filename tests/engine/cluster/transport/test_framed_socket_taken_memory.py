"""A paired machine that means harm gets no more memory of another than it was lent, or than what it really sends."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.cluster import commands
from engine.cluster.central import SHAPE, CentralHead, CentralNode
from engine.cluster.contributions import HEADER
from engine.cluster.head.head_model import RingModel
from engine.cluster.transport.envoy_process import FRAME, LAST, MORE, PIECE_BYTES
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import GROWN_BYTES, LARGEST_FRAME
from engine.cluster.transport.framed_socket import HEADER as FRAME_HEADER
from engine.cluster.weights import transfer
from engine.cluster.worker.follower import Follower
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.expert_parallel import RankContext
from engine.planning.placement import Placement
from tests.engine.cluster.linked_nodes import LinkedNodes, make_identity
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, on_all_ranks
from tests.engine.cluster.ring_chat import Chat, session_of
from tests.engine.cluster.ring_layer import Doubling, run_layer
from tests.engine.cluster.socket_pairs import close_all, plain_pair, plain_victim, tls_pair
from tests.engine.cluster.thread_ring import ThreadFormer
from tests.engine.cluster.transport.test_envoy_process_attacks import bare_exchange

MEGABYTE = 1 << 20


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """What is allocated meanwhile, at its highest, is less than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * MEGABYTE
    finally:
        tracemalloc.stop()


# --- frames -----------------------------------------------------------------------------------------------------------


def test_a_header_takes_no_memory_by_itself() -> None:
    framed, attacker = plain_victim()
    attacker.sendall(FRAME_HEADER.pack(LARGEST_FRAME, 0) + bytes(100))
    with at_most(8):
        assert framed.pull(LARGEST_FRAME) is None
    attacker.close()
    close_all(framed)


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_a_large_frame_arrives_whole_in_a_buffer_that_grows(kind: str) -> None:
    one, other = plain_pair() if kind == "plain" else tls_pair((make_identity(), make_identity()))
    sizes = [10, 5 * GROWN_BYTES + 7, 3, GROWN_BYTES, 70_000, 2 * GROWN_BYTES + 1]
    for size in sizes:
        sent = random.Random(size).randbytes(size)
        one.push((sent,))
        found = None
        while found is None:
            one.flush()
            found = other.pull(size)
        assert bytes(found) == sent
    close_all(one, other)


def test_pieces_of_nothing_are_refused_by_the_envoys_engine() -> None:
    for payload, kind in ((b"", MORE), (b"x", MORE), (bytes(PIECE_BYTES + 1), LAST)):
        exchange, envoy = bare_exchange()
        exchange.send([b"mine"], 100)
        # The beginning is taken out of the way, so that a large piece fits into the socket.
        envoy.recv(1 << 16)
        sending = threading.Thread(target=envoy.sendall, args=(FRAME.pack(len(payload), kind, 1) + payload,))
        sending.start()
        with pytest.raises(RingProtocolError, match="more than the exchange asks for, or less"):
            exchange.receive()
        sending.join(120)
        envoy.close()


# --- central mode -----------------------------------------------------------------------------------------------------

PLACEMENT = Placement((0,), 2, (((0,), (1,)),))
ROUTES = np.array([[0, 1]], np.int32)


def local(indices: Any, weights: Any, extra: Any) -> Any:
    return np.ones((indices.size, 4), np.float32)


@pytest.mark.parametrize("when", ["asked", "answering"])
def test_a_node_contributes_no_more_than_its_results(linked_nodes: Callable[..., LinkedNodes], when: str) -> None:
    ends = linked_nodes(2).meshes("tls")
    head = CentralHead(RankContext("epoch", 0, PLACEMENT, "central"), ends[0])

    def evil() -> None:
        header = HEADER.pack(0, 0, 0, bytes(8))
        if when == "answering":
            ends[1].send([header], LARGEST_FRAME)
            ends[1].receive()
        with suppress(PeerLost):  # the head may have gone before it took all of it
            ends[1].send([header, bytes(4 * MEGABYTE)], LARGEST_FRAME)

    def asks() -> None:
        with pytest.raises(RingProtocolError, match=r"sent \d+ bytes where \d{2,3} are allowed"):
            run_layer(head, 0, (ROUTES, np.ones((1, 2), np.float32)), local, 4, np.ones((1, 4), np.float32))

    must_succeed(on_all_ranks(lambda rank: (asks, evil)[rank](), 2))
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("layer", "shape", "why"),
    [
        (7, (1, 2, 4, 0, 0), "asked for layer 7, which has no experts"),
        (0, (60, 2, 4, 0, 0), r"routes \[60, 2\]"),
        (0, (1, 3, 4, 0, 0), r"routes \[1, 3\]"),
    ],
)
def test_what_a_head_asks_for_must_be_the_models(layer: int, shape: tuple[int, ...], why: str) -> None:
    memory = MemoryRing(2)
    node = CentralNode(RankContext("epoch", 1, PLACEMENT, "central"), memory.ends[1], Doubling(), most_tokens=50)

    def evil() -> bytes:
        tokens, k, width, *_ = shape
        asked = HEADER.pack(0, layer, 0, bytes(8)) + SHAPE.pack(*shape) + bytes(4 * tokens * (k + width))
        memory.ends[0].send([asked], 1000)
        memory.ends[0].receive()
        memory.ends[0].send([HEADER.pack(1, layer, 0, bytes(8))], 1000)
        return bytes(memory.ends[0].receive()[1])

    def serves() -> bytes:
        with pytest.raises(RingProtocolError, match=why):
            node.serve_layer()
        return b""

    told = must_succeed(on_all_ranks(lambda rank: (evil, serves)[rank](), 2))[0]
    assert b"the head" in told


def test_an_ask_of_more_tokens_than_a_chunk_has_is_not_received(linked_nodes: Callable[..., LinkedNodes]) -> None:
    ends = linked_nodes(2).meshes("tls")
    node = CentralNode(RankContext("epoch", 1, PLACEMENT, "central"), ends[1], Doubling(), most_tokens=50)
    ends[0].send([bytes(MEGABYTE)], 1000)
    with at_most(4), pytest.raises(RingProtocolError, match="are allowed"):
        node.serve_layer()
    for end in ends:
        end.close()


# --- commands ---------------------------------------------------------------------------------------------------------


class CountedRows:
    """Rows that only count; no model runs."""

    def __init__(self, rows: int = 1, length: int = 0) -> None:
        self.rows, self.length = rows, length

    def extend(self, tokens: list[int], want_logits: bool) -> None:
        self.length += len(tokens)

    def step(self, tokens: list[int]) -> None:
        self.length += 1

    def fan_out(self, rows: int) -> CountedRows:
        return CountedRows(rows, self.length)


class CountingModel:
    facts = SimpleNamespace(vocabulary=100, context_limit=512, key_value_bytes_per_token=1000, state_bytes=0)

    def start(self) -> CountedRows:
        return CountedRows()


class ToldLayers:
    """What the others are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_pass(self) -> None:
        return

    def give_up(self, reason: str = "") -> bool:
        self.told.append(reason)
        return True


def follower_of(memory: int | None = None) -> tuple[Follower, ToldLayers, Callable[[list[int]], None]]:
    """A follower with a row, and what extends it."""
    layers = ToldLayers()
    follower = Follower(CountingModel(), layers, memory=memory)  # type: ignore[arg-type]
    follower.do(commands.StartRows(1))
    prefixes = commands.Prefixes()

    def extend(tokens: list[int]) -> None:
        nonlocal prefixes
        follower.do(commands.Extend(1, prefixes.state, tokens, False))
        prefixes = prefixes.extended(tokens)

    return follower, layers, extend


def test_no_row_is_longer_than_the_context() -> None:
    follower, _, extend = follower_of()
    extend([5] * 300)
    with pytest.raises(ValueError, match="513 tokens in a context of 512"):
        extend([5] * 213)
    extend([5] * 212)
    state = commands.Prefixes().extended([5] * 512).state
    with pytest.raises(ValueError, match="513 tokens in a context of 512"):
        follower.do(commands.Step(1, state, [5]))


def test_a_command_is_no_longer_than_a_prompt_can_be() -> None:
    follower, _, _ = follower_of()
    limits: list[int] = []

    class Link:
        def receive(self, limit: int) -> memoryview:
            limits.append(limit)
            raise RingProtocolError("enough")

    with pytest.raises(RingProtocolError, match="enough"):
        follower.follow(Link())  # type: ignore[arg-type]
    longest = commands.encode(commands.Extend(2**31, 2**64 - 1, [2**31] * 512, True))
    assert len(longest) < limits[0] < 100_000


def test_keys_and_values_are_part_of_what_is_lent() -> None:
    follower, layers, extend = follower_of(memory=400_000)
    extend([5] * 300)
    with pytest.raises(ModelError, match="its keys and values would take") as refused:
        follower.do(commands.FanOut(1, 2, 4))
    assert refused.value.kind == "memory"
    assert len(layers.told) == 1 and "lent" in layers.told[0]
    with pytest.raises(ModelError, match="lent"):
        extend([5] * 101)
    extend([5] * 100)


# --- offers -----------------------------------------------------------------------------------------------------------


def bomb(items: int, runs: int) -> bytes:
    """An offer of many items, of one item with many runs."""
    pieces: list[Any] = [["", 0, 0]] * items
    pieces.append(["trunk/0", 0, 0, [[0, 0, 0]] * runs])
    return msgspec.msgpack.encode({"items": pieces, "files": [], "layout": "", "trunk_pieces": 1})


@pytest.mark.sampled
@pytest.mark.parametrize(("items", "runs"), [(1_500_000, 0), (0, 1_500_000), (12_000_000, 0)])
def test_an_offer_is_refused_before_it_is_large(items: int, runs: int) -> None:
    data = bomb(items, runs)
    assert len(data) < transfer.OFFER_LIMIT or items > 2_000_000
    with at_most(64), pytest.raises(RingProtocolError):
        transfer.decode_offer(data)
    wanted = msgspec.msgpack.encode([[1, 0]] * max(items, runs))
    with at_most(64), pytest.raises(RingProtocolError):
        transfer.decode_wanted(wanted)


# --- what is no number ------------------------------------------------------------------------------------------------


def test_numbers_that_are_none_are_the_rings(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    request = Load(id=1, model="tiny", runtime="torch", dtype="float32", cpu_threads=1)
    former = ThreadFormer(folder, request, ["head", "attic"], (0, 1, 2), 8)
    model = RingModel("tiny", former, lambda *_: None)
    end = former.formations[0].memory.ends[1]
    send = end.send

    def poisoned(parts: Any, capacity: int) -> None:
        whole = b"".join(parts)
        rows = np.full((len(whole) - HEADER.size) // 4, np.nan, np.float32)
        send([whole[: HEADER.size], rows.tobytes()], capacity)

    end.send = poisoned  # type: ignore[method-assign]
    chat = Chat(session_of(model))
    with pytest.raises(ModelError, match="results of attic are wrong, or the model's weights are damaged; leave"):
        chat()
    end.send = send  # type: ignore[method-assign]
    assert len(chat().token_ids) == 12
    chat.session.close()
