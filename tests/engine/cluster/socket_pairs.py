"""Pairs of sockets over a local pair of sockets, and what an attacker on such a link can do."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from discovery.tls import client_context, server_context
from engine.cluster.transport.epochs import Member, as_peer
from engine.cluster.transport.framed_socket import FramedSocket
from engine.cluster.transport.plain_socket import PlainSocket
from engine.cluster.transport.tls_socket import TlsSocket, open_tls_socket

KEY_AB, KEY_BA = b"a" * 32, b"b" * 32
LIMIT_S = 120.0


def plain_pair() -> tuple[PlainSocket, PlainSocket]:
    left, right = socket.socketpair()
    return PlainSocket(left, "right", 1, KEY_AB, KEY_BA), PlainSocket(right, "left", 0, KEY_BA, KEY_AB)


def tls_pair(identities: tuple[Any, Any]) -> tuple[TlsSocket, TlsSocket]:
    left, right = socket.socketpair()
    mine, theirs = identities
    by = time.monotonic() + LIMIT_S
    known = [as_peer(Member(rank, one.node_id, one.certificate_pem)) for rank, one in enumerate(identities)]
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(
            open_tls_socket, right, server_context(theirs, [known[0]]), True, mine.node_id, "left", 0, by
        )
        client = open_tls_socket(left, client_context(mine, known[1]), False, theirs.node_id, "right", 1, by)
        return client, server.result(LIMIT_S)


def plain_victim() -> tuple[PlainSocket, socket.socket]:
    """A framed socket, and the bare socket at its other end: what comes from there is the attacker's."""
    left, right = socket.socketpair()
    return PlainSocket(left, "right", 1, KEY_AB, KEY_BA), right


def recorded_frames(*payloads: bytes) -> list[bytes]:
    """The bytes of frames as a node with the right key sends them to the victim of :func:`plain_victim`."""
    left, right = socket.socketpair()
    sender = PlainSocket(left, "victim", 0, KEY_BA, KEY_AB)
    frames = []
    with left, right:
        right.settimeout(LIMIT_S)
        for payload in payloads:
            sender.push((payload,))
            sender.flush(wait=True)
            frames.append(right.recv(1 << 20, socket.MSG_DONTWAIT))
    return frames


def close_all(*sockets: FramedSocket) -> None:
    for framed in sockets:
        framed.close()
