"""Nodes of this process on loopback, each with an identity of its own, paired as a code would have paired them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discovery.identity import Identity, load_identity
from discovery.peers import PeersFile, new_peer
from engine.cluster.membership.client import PeerClient
from engine.cluster.membership.node import Node
from engine.cluster.membership.server import Credentials
from engine.ipc.messages import OpenNetwork
from tests.engine.cluster.machine_hooks import QUICK


def make_identity(folder: Path) -> tuple[Identity, PeersFile]:
    folder.mkdir(parents=True)
    return load_identity(folder), PeersFile(folder)


class Nodes:
    """``names`` open in order; the first knows the addresses of the others, and is paired with each of them."""

    def __init__(self, folder: Path, *names: str, lend: bool = False, terms: Mapping[str, Any] | None = None) -> None:
        """``terms``: of those that are lent; see OpenNetwork."""
        self.identities: list[Identity] = []
        self.peers: list[PeersFile] = []
        self.nodes: list[Node] = []
        for name in names:
            identity, peers = make_identity(folder / name)
            self.identities.append(identity)
            self.peers.append(peers)
        for index in range(1, len(names)):
            self.pair(0, index, names)
        for index in [*range(1, len(names)), 0]:
            tried = [node.listening[0] for node in self.nodes] if index == 0 else []
            lent: dict[str, Any] = {"lend": lend, **(terms or {})} if index else {}
            options = OpenNetwork(id=1, name=names[index], listen="127.0.0.1:0", peers=tried, **lent)
            node = Node(self.identities[index], self.peers[index], options, parts=QUICK)
            self.nodes.insert(0 if index == 0 else len(self.nodes), node)

    def pair(self, one: int, other: int, names: tuple[str, ...]) -> None:
        for mine, theirs in ((one, other), (other, one)):
            self.peers[mine].add(new_peer(self.identities[theirs].certificate_der, names[theirs]))

    def ready(self) -> bool:
        return all(peer.state == "ready" for node in self.nodes for peer in node.table.facts())

    def client(self, to: int, identity: Identity) -> PeerClient:
        """A connection to node ``to`` of whoever has ``identity``, pinned to that node's certificate."""
        credentials = Credentials(identity.key_pem, identity.certificate_pem, self.identities[to].certificate_pem)
        return PeerClient(self.nodes[to].listening[0], credentials, "privatellm")

    def close(self) -> None:
        for node in self.nodes:
            node.close()
