"""A whole ring in threads of one process: real models, real commands, the exchange and links in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import Buffer
from engine.cluster.worker.follower import Follower
from engine.errors import ModelError, PeerLost
from engine.ipc.messages import Load, RingFacts
from engine.ipc.messages.ring import NodeShard
from engine.ipc.progress import ProgressCallback
from engine.moe.expert_parallel import Loading, Mode, RankContext
from engine.planning.placement import Placement
from engine.planning.ring_change import Rerun
from engine.runtimes import runtime_named
from engine.runtimes.protocol import LoadedModel, RingPlace
from tests.engine.cluster.memory_exchange import MemoryRing

PATIENCE_S = 120.0


class MemoryLink:
    """One end of a link between threads; see :class:`engine.cluster.transport.exchange.Link`."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.other: MemoryLink = self
        self.closed = False

    def send(self, *parts: Buffer) -> None:
        if self.closed or self.other.closed:
            raise PeerLost("the link is closed")
        self.other.inbox.put(b"".join(parts))

    def receive(self, limit: int) -> memoryview:
        frame = self.inbox.get(timeout=PATIENCE_S)
        if frame is None:
            raise PeerLost("the link was closed")
        assert len(frame) <= limit
        return memoryview(frame)

    def close(self) -> None:
        self.closed = True
        self.inbox.put(None)
        self.other.inbox.put(None)


def link_pair() -> tuple[MemoryLink, MemoryLink]:
    one, two = MemoryLink(), MemoryLink()
    one.other, two.other = two, one
    return one, two


def split(layers: tuple[int, ...], experts: int, nodes: int, overlap: int = 0) -> Placement:
    """Expert e at rank e modulo ``nodes``; the first ``overlap`` of each layer at every rank."""
    row = tuple(tuple(range(nodes)) if e < overlap else (e % nodes,) for e in range(experts))
    return Placement(layers, nodes, tuple(row for _ in layers))


class ThreadFormation:
    """See :class:`engine.cluster.formation.Formation`."""

    patience = 1.0

    def __init__(
        self,
        folder: Path,
        request: Load,
        names: list[str],
        placement: Placement,
        mode: Mode = "exact",
        loading: Loading = "selected",
    ) -> None:
        self.memory = MemoryRing(len(names))
        self.names: Mapping[int, str] = dict(enumerate(names))
        self.command_links: dict[int, MemoryLink] = {}
        self.notices: list[str] = []
        self.newcomers: frozenset[str] = frozenset()
        self.without_links: frozenset[str] = frozenset()
        self.failures: dict[int, BaseException] = {}
        self.followers: dict[int, Follower] = {}
        self.silent: list[str] = []
        self._lost: PeerLost | None = None
        self._threads = []
        self._models = []
        self._links: list[MemoryLink] = []
        nodes = [
            NodeShard(rank=rank, node_id=name, name=name, experts=1, expert_bytes=1, trunk_bytes=1, memory_free=1 << 30)
            for rank, name in enumerate(names)
        ]
        self.facts = RingFacts(mode="exact", exchange="socket", loading="selected", nodes=nodes)
        for rank in range(len(names)):
            self.context = RankContext("epoch", rank, placement, mode, loading)
            layers = RingLayers(self.context, self.memory.ends[rank])
            model = runtime_named(request.runtime).load(
                folder, request, lambda *_: None, RingPlace(self.context, layers)
            )
            layers.recorder = model.recorder
            self._models.append(model)
            if rank == 0:
                self.layers, self.model = layers, model
                continue
            mine, theirs = link_pair()
            self.command_links[rank] = mine
            self._links.append(theirs)
            self.followers[rank] = Follower(model, layers)
            thread = threading.Thread(target=self._follow, args=(rank, theirs), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _follow(self, rank: int, link: MemoryLink) -> None:
        try:
            self.followers[rank].follow(link)
        except PeerLost:
            return
        except BaseException as error:
            self.failures[rank] = error
            self.kill(rank, str(error))

    def kill(self, rank: int, why: str = "killed") -> None:
        """The node is gone: its links and its part of the exchange close."""
        self._lost = PeerLost(why, [rank])
        self.memory.ends[rank].close()
        self.command_links[rank].close()

    def why_lost(self, lost: PeerLost) -> PeerLost:
        return self._lost or lost

    def lose(self, ranks: Sequence[int], why: str) -> None:
        names = ", ".join(self.names[rank] for rank in ranks)
        self._lost = PeerLost(f"{names} {why}".strip(), ranks, reason=why)
        self.silent += [self.names[rank] for rank in ranks]
        for end in self.memory.ends:
            end.close()
        for link in self.command_links.values():
            link.close()

    def lost(self) -> PeerLost | None:
        return self._lost

    def close(self) -> None:
        for end in self.memory.ends:
            end.close()
        for link in self.command_links.values():
            link.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for model in self._models:
            model.close()


class ThreadFormer:
    """See :class:`engine.cluster.formation.Former`; ``names`` are those who are there now."""

    def __init__(self, folder: Path, request: Load, names: list[str], layers: tuple[int, ...], experts: int) -> None:
        self.names = names
        self.formations: list[ThreadFormation] = []
        self.least = 1
        self.overlap = 0
        self.again: list[Rerun] = []
        """What each question would have had to run again if the ring had been formed again."""
        self._folder = folder
        self._request = request
        self._layers = layers
        self._experts = experts
        self._formed: list[str] = []
        self._been: set[str] = set()

    def form(self, progress: ProgressCallback, say: Callable[[str], None] | None = None) -> ThreadFormation:
        if len(self.names) < self.least:
            raise ModelError(f"{self.least - len(self.names)} GB are missing.", kind="memory")
        progress("loading", 0, 0, "")
        if self.formations:
            self.names = [name for name in self.names if name not in self.formations[-1].silent]
        placement = split(self._layers, self._experts, len(self.names), self.overlap)
        self._formed = list(self.names)
        formed = ThreadFormation(self._folder, self._request, self._formed, placement)
        formed.newcomers = frozenset(self._formed) - self._been
        self._been.update(self._formed)
        self.formations.append(formed)
        return formed

    def changed(self, progress: ProgressCallback, say: Callable[[str], None], again: Rerun) -> bool:
        self.again.append(again)
        return self._formed != self.names

    def close(self) -> None:
        self.names = []


def loaded_model(folder: Path, request: Load) -> LoadedModel:
    """The same model on one machine."""
    return runtime_named(request.runtime).load(folder, request, lambda *_: None)
