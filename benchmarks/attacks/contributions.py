"""What a follower contributes to the layers of a pass, spoiled: wrong lengths, numbers, flags, routes, no numbers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from benchmarks.attacks.campaign import Attack, Attempt, Draw, Refused
from benchmarks.attacks.mutating import spoiled
from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.moe.expert_parallel import FLOAT32, Mode, RankContext, Routes
from engine.planning.placement import Placement

LAYERS = (0, 1, 2)
EXPERTS, WIDTH, TOKENS, ROUTES = 8, 6, 3, 2
_PLACEMENT = Placement(LAYERS, 2, (tuple((expert % 2,) for expert in range(EXPERTS)),) * len(LAYERS))
_PATIENCE_S = 60.0


class _Recorded:
    """Rank ``rank`` of two; the other one's frames come from ``theirs``, this one's go to ``mine``. See Exchange."""

    name: ExchangeName = "tls"
    size = 2
    idle_s = 0.0

    def __init__(self, rank: int, theirs: SimpleQueue[bytes], mine: SimpleQueue[bytes]) -> None:
        self.rank = rank
        self._theirs, self._mine = theirs, mine
        self._own, self._capacity = b"", 0

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._own, self._capacity = b"".join(parts), capacity
        self._mine.put(self._own)

    def receive(self) -> list[memoryview]:
        frame = self._theirs.get(timeout=_PATIENCE_S)
        if len(frame) > self._capacity:
            raise RingProtocolError(f"{len(frame)} bytes where {self._capacity} are allowed")
        pair = (self._own, frame) if self.rank == 0 else (frame, self._own)
        return [memoryview(bytearray(each)) for each in pair]

    def missing(self) -> Sequence[int]:
        return (1 - self.rank,)

    def close(self) -> None:
        """There is nothing to close."""


def one_pass(layers: RingLayers) -> None:
    """All layers with routes that depend on the layer alone."""
    layers.begin_pass()
    for layer in LAYERS:
        random = np.random.default_rng(layer)
        indices = np.argsort(random.random((TOKENS, EXPERTS)), axis=1)[:, :ROUTES].astype(np.int32)
        weights = random.random((TOKENS, ROUTES), dtype=np.float32)
        rows = indices.size if layers.context.mode == "exact" else TOKENS
        calls = layers.assign(layer, Routes(indices, weights))
        layers.send(np.ones((rows, WIDTH), np.float32) if calls else None, WIDTH, FLOAT32)
        layers.receive()


def recorded(mode: Mode) -> list[bytes]:
    """What a follower that behaves contributes to one pass."""
    contexts = [RankContext("epoch", rank, _PLACEMENT, mode, "selected") for rank in range(2)]
    queues: list[SimpleQueue[bytes]] = [SimpleQueue(), SimpleQueue()]
    kept: list[bytes] = []

    class Keeping(_Recorded):
        def send(self, parts: Sequence[Buffer], capacity: int) -> None:
            super().send(parts, capacity)
            kept.append(self._own)

    follower = RingLayers(contexts[1], Keeping(1, queues[0], queues[1]))
    other = threading.Thread(target=one_pass, args=(follower,), daemon=True)
    other.start()
    one_pass(RingLayers(contexts[0], _Recorded(0, queues[1], queues[0])))
    other.join(_PATIENCE_S)
    return kept


@contextlib.contextmanager
def contributions(home: Path) -> Iterator[Attempt]:
    modes: tuple[Mode, ...] = ("exact", "fast")
    frames = {mode: recorded(mode) for mode in modes}

    def attempt(draw: Draw) -> None:
        mode = draw.choice(modes)
        theirs: SimpleQueue[bytes] = SimpleQueue()
        for frame in frames[mode]:
            theirs.put(spoiled(frame, draw) if draw.random() < 0.5 else frame)
        # Of layers that are run again with the head's routes there are more exchanges than were recorded.
        for frame in frames[mode] * 2:
            theirs.put(spoiled(frame, draw))
        context = RankContext("epoch", 0, _PLACEMENT, mode, "selected")
        try:
            one_pass(RingLayers(context, _Recorded(0, theirs, SimpleQueue())))
        except (PeerLost, RingProtocolError, ModelError) as error:
            raise Refused from error

    yield attempt


ATTACKS = [Attack("contributions of a follower", 50_000, contributions)]
