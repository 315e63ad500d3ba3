"""Nodes of a ring in one process: real certificates, real listeners on loopback."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from discovery import certificates
from discovery.identity import Identity
from discovery.link_listener import LinkListener
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.connecting import connect_mesh
from engine.cluster.transport.envoy import connect_envoy
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import Exchange
from engine.cluster.transport.link_probe import answer_measuring
from engine.cluster.transport.mesh import Mesh
from engine.cluster.transport.registry import open_exchange
from engine.ipc.messages.ring import ExchangeName
from tests.support.engine_forks import forked_module

LOOPBACK = ("127.0.0.0/8",)


def make_identity() -> Identity:
    key, certificate = certificates.make_certificate()
    node_id = certificates.fingerprint(certificates.der_of(certificate))
    return Identity(
        node_id=node_id, certificate_pem=certificate, key_pem=key, storage="memory", instance=secrets.token_hex(8)
    )


@dataclass
class LinkedNode:
    identity: Identity
    listener: LinkListener
    links: Links
    epoch: Epoch

    def close(self) -> None:
        self.links.close()
        self.listener.close()


def opened(node: LinkedNode, transport: ExchangeName) -> Exchange:
    """The exchange of that node, as ``open_exchange`` connects it; its envoy is forked."""
    if transport == "envoy":
        return connect_envoy(node.links, node.epoch, start=forked_module)  # type: ignore[arg-type]
    return open_exchange(transport, node.links, node.epoch)


class LinkedNodes:
    """``size`` nodes that know each other's certificates, and an epoch of all of them."""

    def __init__(self, size: int, trusted: tuple[str, ...] = LOOPBACK, name: str = "an epoch") -> None:
        identities = [make_identity() for _ in range(size)]
        listeners = [LinkListener.open("127.0.0.1") for _ in range(size)]
        self.members = tuple(
            Member(rank, identity.node_id, identity.certificate_pem, (f"127.0.0.1:{listener.port}",), f"node {rank}")
            for rank, (identity, listener) in enumerate(zip(identities, listeners, strict=True))
        )
        key = secrets.token_bytes(32)
        known = {identity.node_id: identity.certificate_pem for identity in identities}
        self.nodes: list[LinkedNode] = []
        for rank, (identity, listener) in enumerate(zip(identities, listeners, strict=True)):
            links = Links(identity, known.get, answer_measuring)
            links.attach(listener)
            epoch = Epoch(name, rank, self.members, key, trusted)
            self.nodes.append(LinkedNode(identity, listener, links, epoch))

    def everywhere(self, act: Callable[[LinkedNode], Any]) -> list[Any]:
        """``act`` on all nodes at once, in threads; results by rank."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(act, self.nodes))

    def exchanges(self, transport: ExchangeName) -> list[Exchange]:
        return self.everywhere(lambda node: opened(node, transport))

    def meshes(self, transport: str) -> list[Mesh]:
        return self.everywhere(lambda node: connect_mesh(node.links, node.epoch, transport))  # type: ignore[arg-type]

    def close(self) -> None:
        for node in self.nodes:
            node.close()
