"""What the processes of a benchmark's ring have in common: identity, links, and requests on stdin.

Each line in and out is one message in JSON. A process ends with its stdin.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from discovery.certificates import der_of, fingerprint
from discovery.identity import Identity
from discovery.link_listener import LinkListener
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.epochs import Epoch, Member

LOOPBACK = ("127.0.0.0/8", "::1/128")
MOST_LINE = 1 << 24
"""Bytes of the longest request: recorded routes are long."""
END_S = 2.0
"""Time in seconds after its benchmark at which a process ends, whatever hangs."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own identity; it answers with :class:`NodePort`."""

    rank: int
    certificate: bytes
    private_key: bytes
    host: str = "127.0.0.1"
    """Where it listens."""


class NodePort(msgspec.Struct, frozen=True, kw_only=True):
    port: int


class NeighbourNode(msgspec.Struct, frozen=True, kw_only=True):
    certificate: bytes
    port: int
    host: str = "127.0.0.1"


class NodeLinks:
    """A node's identity, its listener, and its links to the other nodes."""

    def __init__(self, setup: NodeSetup) -> None:
        self._rank = setup.rank
        identity = Identity(
            node_id=fingerprint(der_of(setup.certificate)),
            certificate_pem=setup.certificate,
            key_pem=setup.private_key,
            storage="memory",
            instance="0" * 16,
        )
        self.links = Links(identity)
        self._listener = LinkListener.open(setup.host)
        self.links.attach(self._listener)

    @property
    def port(self) -> int:
        return self._listener.port

    def epoch(self, name: str, nodes: Sequence[NeighbourNode], key: bytes) -> Epoch:
        """An epoch of all ``nodes`` by rank."""
        members = tuple(
            Member(rank, fingerprint(der_of(one.certificate)), one.certificate, (f"{one.host}:{one.port}",))
            for rank, one in enumerate(nodes)
        )
        return Epoch(name, self._rank, members, key, LOOPBACK)

    def close(self) -> None:
        self.links.close()
        self._listener.close()


class Requests:
    """The benchmark's requests. A thread of its own reads them, so that the end of the benchmark is noticed while this
    node waits for other nodes."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="reading the bench", daemon=True).start()

    def receive(self, kind: type[Any]) -> Any:
        """The next message; None once the benchmark is gone."""
        line = self._lines.get()
        return msgspec.json.decode(line, type=kind) if line else None

    def _read(self) -> None:
        while line := sys.stdin.buffer.readline(MOST_LINE):
            self._lines.put(line)
        # This node may be waiting for nodes that have ended already. It must end in any case.
        ending = threading.Timer(END_S, os._exit, (0,))
        ending.daemon = True
        ending.start()
        self._lines.put(b"")


def send(message: msgspec.Struct) -> None:
    """Answer the benchmark."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
