"""The exchange over torch's gloo, for trusted networks only, because gloo sends plain text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
from torch import distributed

from engine.cluster.transport.accepting import Links
from engine.cluster.transport.collective import CollectiveExchange, Gathering, made_while_wanted
from engine.cluster.transport.connecting import connect_sockets
from engine.cluster.transport.epochs import Epoch, check_trusted
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.mesh import Mesh
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

SILENCE_S = 120.0
"""Seconds of silence in an exchange after which gloo gives up a peer. Heartbeats notice a loss earlier."""
CONNECT_S = 10.0
"""Timeout in seconds for connecting, which takes milliseconds as all nodes begin at once. A thread that waits for a
dead node is left behind until then; see :func:`engine.cluster.transport.collective.made_while_wanted`."""
STORE_BYTES = 1 << 20
"""Maximum bytes that a node exchanges about its addresses, far more than it needs."""
_log = logging.getLogger(__name__)
_words = msgspec.msgpack.Decoder(dict[str, bytes])


class GlooGathering(Gathering):
    """An all-gather over its own process group. ``store``: where its nodes find each other. ``own_address``: the IP
    address at which others reach this node."""

    def __init__(self, rank: int, size: int, store: distributed.Store, own_address: str) -> None:
        self._rank = rank
        self._size = size
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=CONNECT_S)
        try:
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise ModelError(f"gloo could not connect the nodes: {_first_line(error)}.", kind="network") from error
        self._group._set_default_timeout(timedelta(seconds=SILENCE_S))

    @property
    def name(self) -> ExchangeName:
        return "gloo"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def gather(self, block: bytearray) -> list[memoryview]:
        """See :class:`engine.cluster.transport.collective.Gathering`."""
        group = self._group
        if group is None:
            raise PeerLost("The ring's links were closed.")
        given = torch.frombuffer(block, dtype=torch.uint8)
        blocks = [torch.empty(len(block), dtype=torch.uint8) for _ in range(self._size)]
        try:
            group.allgather([blocks], [given]).wait()
        except RuntimeError as error:
            _log.info("gloo: %s", _first_line(error))
            raise PeerLost("gloo lost a node.") from error
        return [memoryview(each.numpy()) for each in blocks]

    def end(self) -> None:
        """See :class:`engine.cluster.transport.collective.Gathering`."""
        # Its sockets close when nobody has it any more.
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class ExchangedStore(distributed.Store):  # type: ignore[misc]  # typed as Any
    """The store in which gloo's nodes find each other, exchanged over authenticated links.

    torch's own store is a server that listens on all addresses and answers everybody.
    """

    def __init__(self, mesh: Mesh, told: Callable[[], None] = lambda: None) -> None:
        """``told`` is called once all nodes have told where they listen, before they connect."""
        super().__init__()
        self._mesh = mesh
        self._told = told
        self._own: dict[str, bytes] = {}
        self._exchanged: dict[str, bytes] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._all([key])[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._all(keys)
        return [found[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._all(keys)

    def _all(self, keys: list[str]) -> dict[str, bytes]:
        """The values that all nodes have set. They are exchanged at the first request, when each node has set its
        own."""
        if self._exchanged is None:
            values: dict[str, bytes] = {}
            self._mesh.send([msgspec.msgpack.encode(self._own)], STORE_BYTES)
            for rank, part in enumerate(self._mesh.receive()):
                # gloo's keys end in the rank that sets them: nobody speaks for another.
                own = f"/{rank}"
                values |= {key: value for key, value in _words.decode(part).items() if key.endswith(own)}
            self._exchanged = values
            self._told()
        missing = [key for key in keys if key not in self._exchanged]
        if missing:
            raise RuntimeError(f"no node has told {missing[0][:80]}")
        return self._exchanged


def connect_gloo(links: Links, epoch: Epoch) -> Exchange:
    """The exchange over gloo among all nodes of ``epoch``. Each of them calls this.

    They exchange their addresses over authenticated links first, and only on trusted networks, whatever addresses were
    named before. Raises ModelError (network) if it cannot be connected, PeerLost.
    """
    sockets = connect_sockets(links, epoch, "exchange", "tls")
    mesh = Mesh(epoch.rank, len(epoch.members), sockets)
    try:
        ends = [end for framed in sockets.values() for end in (framed.local_address, framed.remote_address)]
        check_trusted("gloo", ends, epoch.trusted)
        own_address = next((framed.local_address for framed in sockets.values()), "127.0.0.1")

        def told() -> None:
            links.parts.observe("addresses told", "gloo")

        gathering = made_while_wanted(epoch, lambda: _gathering(mesh, own_address, told), GlooGathering.end)
    except (RuntimeError, msgspec.DecodeError) as error:
        raise ModelError(f"gloo could not connect the nodes: {_first_line(error)}.", kind="network") from error
    finally:
        mesh.close()
    return CollectiveExchange(gathering)


def _gathering(mesh: Mesh, own_address: str, told: Callable[[], None]) -> GlooGathering:
    """The group, once all nodes have connected: no node goes on before the last one has."""
    gathering = GlooGathering(mesh.rank, mesh.size, ExchangedStore(mesh, told), own_address)
    try:
        mesh.send([], 0)
        mesh.receive()
    except BaseException:
        gathering.end()
        raise
    return gathering


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
