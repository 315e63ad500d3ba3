"""A machine that is there and contributes nothing: stopping the answer does not wait for it, and after a limit the ring
goes on without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import contributions
from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.head import head_model
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.mesh import Mesh
from engine.moe.expert_parallel import RankContext
from engine.moe.kernels.bindings import choose
from engine.planning.placement import Placement
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_chat import Setting
from tests.engine.cluster.ring_layer import Doubling, run_layer

DECODING = {"max_tokens": 10}


class Mute(Setting):
    """The last machine sends heartbeats, and sends nothing any more from its contribution of that number on."""

    muted = threading.Event()

    def silence(self, after: int) -> None:
        formation = self.formation
        rank = max(formation.names)
        end = formation.memory.ends[rank]
        send, sent = end.send, iter(range(10**9))
        self.muted.clear()

        def mute(*given: Any) -> None:
            if next(sent) >= after:
                self.muted.set()
                with formation.memory.condition:
                    assert formation.memory.condition.wait_for(lambda: formation.memory.lost, 60)
                raise PeerLost("its links were closed")
            send(*given)

        end.send = mute  # type: ignore[method-assign]


@pytest.fixture(params=["native", "torch"])
def setting(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Mute]:
    if request.param == "native" and not choose("float32").native:
        pytest.skip("the native kernels are not built")
    made = Mute(tiny_model("qwen3_moe"), request.param)
    yield made
    made.close()


@pytest.mark.sampled
def test_stopped_while_a_machine_is_silent(setting: Mute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_model, "STOPPED_S", 0.2)
    expected = setting.alone()
    setting.silence(16)
    setting.ring.cancel_when = lambda events: setting.muted.is_set()
    found = setting.ring()
    assert found.finish_reason == "cancelled"
    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    setting.ring.cancel_when = lambda events: False
    assert setting.ring().token_ids == expected.token_ids
    assert setting.ring.notices == "Going on with 3 machines."
    assert len(setting.former.formations) == 2


@pytest.mark.sampled
def test_stopped_in_a_prompt_while_a_machine_is_silent(setting: Mute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_model, "STOPPED_S", 0.2)
    setting.silence(4)
    setting.ring.cancel_when = lambda events: setting.muted.is_set()
    found = setting.ring()
    assert (found.finish_reason, found.token_ids) == ("cancelled", [])
    setting.ring.cancel_when = lambda events: False
    assert setting.ring().token_ids == setting.alone().token_ids


@pytest.mark.sampled
@pytest.mark.parametrize("options", [DECODING, {"max_tokens": 6, "beams": 3}], ids=["decoding", "beams"])
def test_a_silent_machine_is_left_out(setting: Mute, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    expected = setting.alone(**options)
    monkeypatch.setattr(contributions, "LIMIT_S", 0.5)
    monkeypatch.setattr(contributions, "FIRST", 1)
    setting.silence(12)
    found = setting.ring(**options)
    assert found.token_ids == expected.token_ids
    assert "Lost cellar: contributed nothing for" in setting.ring.notices
    assert list(setting.formation.names.values()) == ["head", "attic"]


def test_a_slow_machine_is_not_taken_for_a_silent_one() -> None:
    """Weights that come from a cold disk, and a prompt's many tokens."""
    step = contributions.exchange_timeout(1, first=False)
    assert step == contributions.LIMIT_S
    assert contributions.exchange_timeout(512, first=False) > 2 * step
    assert contributions.exchange_timeout(1, first=True) == contributions.FIRST * step


@pytest.mark.sampled
def test_a_command_that_nobody_takes_is_waited_for_no_longer(setting: Mute, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of a node that never answers."""
    monkeypatch.setattr(head_model, "STOPPED_S", 0.2)
    formation, stuck = setting.formation, threading.Event()
    follower = formation.followers[2]
    do = follower.do

    def deaf(command: Any) -> Any:
        if type(command).__name__ == "AskTimes":
            stuck.set()
            return None
        return do(command)

    follower.do = deaf  # type: ignore[method-assign]
    setting.ring.panel = True
    setting.ring.cancel_when = lambda events: stuck.is_set()
    assert setting.ring().finish_reason == "cancelled"
    setting.ring.panel = False
    setting.ring.cancel_when = lambda events: False
    assert setting.ring().token_ids == setting.alone().token_ids


# --- the exchanges themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["tls", "socket"])
def test_an_exchange_knows_whom_it_waits_for(
    linked_nodes: Callable[..., LinkedNodes], transport: str, size: int
) -> None:
    meshes = linked_nodes(size).meshes(transport)

    def act(rank: int) -> list[int]:
        mesh: Mesh = meshes[rank]
        if rank == size - 1:
            return []
        mesh.send([b"here"], 100)

        def receive() -> None:
            with pytest.raises(PeerLost):
                mesh.receive()

        receiving = threading.Thread(target=receive)
        receiving.start()
        while len(mesh.missing()) != 1:
            receiving.join(0.01)
            assert receiving.is_alive()
        found = mesh.missing()
        mesh.close()
        receiving.join(120)
        return found

    found = act(0) if size == 2 else must_succeed(on_all_ranks(act, size))[0]
    assert found == [size - 1]
    for mesh in meshes:
        mesh.close()


class Formation:
    """What a watch sees of one."""

    patience = 1.0

    def __init__(self, layers: Any, exchange: Exchange) -> None:
        self.layers = layers
        self.exchange = exchange
        self.told: list[tuple[tuple[int, ...], str]] = []

    def lose(self, ranks: tuple[int, ...], why: str) -> None:
        self.told.append((ranks, why))
        self.exchange.close()


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "limit"])
def test_nobody_waits_over_real_links(
    linked_nodes: Callable[..., LinkedNodes], monkeypatch: pytest.MonkeyPatch, mode: Any, stopped: bool
) -> None:
    """The other node takes part in one layer and then does nothing, its links open."""
    import numpy as np

    monkeypatch.setattr(contributions, "LIMIT_S", 600.0 if stopped else 0.3)
    monkeypatch.setattr(contributions, "FIRST", 1)
    monkeypatch.setattr(head_model, "STOPPED_S", 0.1)
    placement = Placement((0, 1), 2, (((0,), (1,)),) * 2)
    contexts = [RankContext("epoch", rank, placement, mode) for rank in (0, 1)]
    ends = linked_nodes(2).meshes("tls")
    rows, weights = np.ones((1, 4), np.float32), np.ones((1, 2), np.float32)
    routes = np.array([[0, 1]], np.int32)

    def local(indices: Any, weights: Any, extra: Any) -> Any:
        return rows.repeat(2, axis=0) if mode != "fast" else rows.copy()

    if mode == "central":
        layers: Any = CentralHead(contexts[0], ends[0])
        node = CentralNode(contexts[1], ends[1], Doubling())
        other = threading.Thread(target=node.serve_layer)
    else:
        layers = RingLayers(contexts[0], ends[0])
        follower = RingLayers(contexts[1], ends[1])
        other = threading.Thread(target=lambda: run_layer(follower, 0, (routes, weights), local, 4))
    other.start()
    formation = Formation(layers, ends[0])
    begun = threading.Event()
    watch = head_model.PassWatch(formation, lambda: stopped and begun.is_set())  # type: ignore[arg-type]
    layers.begin_pass()
    for layer in (0, 1):
        if layer == 0:
            run_layer(layers, layer, (routes, weights), local, 4, rows)
            other.join(120)
            continue
        threading.Timer(0.1, begun.set).start()
        with pytest.raises(PeerLost):
            run_layer(layers, layer, (routes, weights), local, 4, rows)
    ((ranks, why),) = formation.told
    assert (ranks, watch.stopped) == (((), True) if stopped else ((1,), False))
    assert why.startswith("the answer was stopped" if stopped else "contributed nothing for")
    watch.close()
    for end in ends:
        end.close()
