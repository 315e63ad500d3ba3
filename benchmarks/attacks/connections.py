"""Connections before anybody has proved who they are, to a machine whose network is open. A paired one is answered
throughout."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.attacks.campaign import Attack, Attempt, Draw
from benchmarks.attacks.mutating import spoiled
from engine.ipc.messages import OpenNetwork

LOOK_EVERY = 25
MOST_DESCRIPTORS = 400
_RESET = struct.pack("ii", 1, 0)
_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(509)
_HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def strangers(home: Path) -> Iterator[Attempt]:
    """Nothing, half a greeting, noise, other protocols, calls of the link listener of every kind; some stay open for a
    while."""
    from discovery.identity import load_identity
    from discovery.link_listener import dial
    from discovery.peers import PeersFile, new_peer
    from engine.cluster.membership.client import PeerClient
    from engine.cluster.membership.control_messages import Greeting
    from engine.cluster.membership.node import Node
    from engine.cluster.membership.server import Credentials

    folders = [home / name for name in ("victim", "friend")]
    for folder in folders:
        folder.mkdir()
    victim, friend = map(load_identity, folders)
    peers = PeersFile(folders[0])
    peers.add(new_peer(friend.certificate_der, "friend"))
    node = Node(victim, peers, OpenNetwork(id=1, name="victim", listen="127.0.0.1:0", lend=True))
    host, _, port = node.listening[0].rpartition(":")
    control, listener = (host, int(port)), (host, int(port) + 1)
    credentials = Credentials(friend.key_pem, friend.certificate_pem, victim.certificate_pem)
    client = PeerClient(node.listening[0], credentials, "privatellm")
    greeting = msgspec.structs.replace(node.greeting(), node_id=friend.node_id, instance="friend", name="friend")
    held: list[socket.socket] = []

    def attempt(draw: Draw) -> None:
        try:
            if draw.random() < 0.4:
                kind = draw.choice(("pair", "link", "code", "nothing"))
                made = dial(listener, kind, draw.randbytes(draw.choice((0, 1, 30, 300))))
            else:
                made = socket.create_connection(draw.choice((control, listener)), timeout=5.0)
                what = draw.choice((b"", _HELLO, _HTTP, draw.randbytes(64), _HELLO[: draw.randrange(1, 400)]))
                made.sendall(spoiled(what, draw) if what and draw.random() < 0.3 else what)
            if draw.random() < 0.2:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if draw.random() < 0.3:
                held.append(made)
            else:
                made.close()
        except OSError:
            pass
        while len(held) > draw.randrange(1, 60):
            held.pop(0).close()
        if draw.number % LOOK_EVERY == 0:
            client.call("Hello", greeting, Greeting, 60.0)
            if len(list(Path("/dev/fd").iterdir())) > MOST_DESCRIPTORS:
                raise AssertionError("connections are not let go")

    client.call("Hello", greeting, Greeting, 60.0)
    yield attempt
    for connection in held:
        connection.close()
    client.close()
    node.close()


ATTACKS = [Attack("connections of strangers", 30_000, strangers)]
