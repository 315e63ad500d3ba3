"""The dialling side of links, and all exchange and command links of an epoch.

Of two nodes the one of lower rank dials. The other accepts what it expects (:mod:`engine.cluster.transport.accepting`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import msgspec

from discovery.errors import DiscoveryError, LinkListenerError
from discovery.link_listener import dial
from discovery.tls import client_context
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.epochs import (
    CONNECT_S,
    HANDSHAKE_S,
    LINK_KIND,
    WELCOME,
    Epoch,
    LinkRequest,
    Member,
    Purpose,
    Transport,
    as_peer,
    in_networks,
    split_address,
)
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import FramedLink, FramedSocket, pull_by
from engine.cluster.transport.mesh import Mesh
from engine.cluster.transport.plain_socket import open_plain_socket
from engine.cluster.transport.tls_socket import open_tls_socket
from engine.errors import ModelError

_RETRY_S = (0.02, 0.05, 0.1, 0.25)
_PATIENCE_S = (0.5, 1.0, 2.0, HANDSHAKE_S)
"""Seconds for one address in the first rounds. An address that leads nowhere must not keep the others from being
tried."""
UNREACHED_S = 3.0
"""Seconds without an accepted connection at any address after which a link is given up. A busy machine accepts at once
and answers later."""
_POLL_S = 0.1
"""Seconds between two checks whether the epoch was given up."""
_GRACE_S = 0.5


def connect_mesh(links: Links, epoch: Epoch, transport: Transport = "tls", seconds: float = CONNECT_S) -> Mesh:
    """This node's exchange with all others of ``epoch``. Every node calls this at about the same time.

    Raises ModelError (network) naming the node that could not be reached.
    """
    sockets = connect_sockets(links, epoch, "exchange", transport, seconds)
    return Mesh(epoch.rank, len(epoch.members), sockets)


def connect_commands(links: Links, epoch: Epoch, seconds: float = CONNECT_S) -> dict[int, FramedLink]:
    """The head's links to every follower, by rank; for a follower its link to the head, under 0. Raises ModelError
    (network)."""
    sockets = connect_sockets(links, epoch, "command", "tls", seconds)
    return {rank: FramedLink(framed) for rank, framed in sockets.items()}


def connect_sockets(
    links: Links, epoch: Epoch, purpose: Purpose, transport: Transport, seconds: float = CONNECT_S
) -> dict[int, FramedSocket]:
    """A framed socket to every other member, made in parallel. Commands go between the head and each follower only."""
    me = epoch.rank
    others = [member for member in epoch.members if member.rank != me]
    if purpose == "command" and me != 0:
        others = [member for member in others if member.rank == 0]
    by = time.monotonic() + seconds
    stop = threading.Event()
    coming: dict[int, Future[FramedSocket]] = {}
    dialling = [member for member in others if member.rank > me]
    pool = ThreadPoolExecutor(max_workers=max(1, len(dialling)), thread_name_prefix="dialling")
    try:
        for member in others:
            if member.rank < me:
                coming[member.rank] = links.expect(epoch, purpose, transport, member)
        for member in dialling:
            coming[member.rank] = pool.submit(_dial_until, links, epoch, member, purpose, transport, by, stop)
        return {member.rank: _arrived(epoch, coming[member.rank], member, seconds, by) for member in others}
    except BaseException:
        stop.set()
        links.forget(epoch.epoch, purpose, transport)
        for future in coming.values():
            future.add_done_callback(_close_socket)
        raise
    finally:
        pool.shutdown(wait=False)


def _arrived(epoch: Epoch, future: Future[FramedSocket], member: Member, seconds: float, by: float) -> FramedSocket:
    end = by + _GRACE_S
    try:
        while not wait([future], timeout=min(_POLL_S, max(0.0, end - time.monotonic()))).done:
            if epoch.given_up.is_set():
                raise PeerLost("The epoch was ended while its links were made.")
            if time.monotonic() >= end:
                raise TimeoutError
        return future.result()
    except (TimeoutError, CancelledError):
        raise ModelError(
            f"{member.called} did not connect its link within {seconds:g} s: is it still there, and does its firewall "
            "let this program in?",
            kind="network",
        ) from None


def _close_socket(future: Future[FramedSocket]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def dial_link(
    links: Links,
    epoch: Epoch,
    member: Member,
    purpose: Purpose,
    transport: Transport,
    address: str,
    by: float,
    welcomed_by: float = 0.0,
) -> FramedSocket:
    """One attempt to dial ``address``, at which ``member`` must have proved itself at the moment ``by``, and have
    welcomed the link at ``welcomed_by``, if that is later.

    A welcome is waited for longer, as the other node takes no second link once it has taken this one.
    Raises PeerLost, RingProtocolError, DiscoveryError.
    """
    host, port = split_address(address)
    request = LinkRequest(
        purpose=purpose,
        transport=transport,
        epoch=epoch.epoch,
        from_rank=epoch.rank,
        to_rank=member.rank,
        node_id=links.identity.node_id,
        certificate=links.identity.certificate_der if purpose == "measure" else b"",
    )
    body = msgspec.msgpack.encode(request)
    connection = dial((host, port), LINK_KIND, body, seconds=max(0.1, min(by - time.monotonic(), HANDSHAKE_S)))
    try:
        framed: FramedSocket
        if transport == "tls":
            context = client_context(links.identity, as_peer(member))
            framed = open_tls_socket(connection, context, False, member.node_id, member.called, member.rank, by)
        else:
            if not in_networks(connection.getpeername()[0], epoch.trusted):
                raise RingProtocolError(
                    f"{member.called} is at {address}, which is on no network that was called trusted: plain text is "
                    "not sent there.",
                    kind="network",
                )
            framed = open_plain_socket(connection, epoch.key, body, False, member.called, member.rank, by)
        framed.push((body,))
        framed.flush(wait=True)
        if pull_by(framed, len(WELCOME), max(by, welcomed_by)) != WELCOME:
            raise RingProtocolError(f"{member.called} answered a link with something else.", kind="network")
        return framed
    except BaseException:
        connection.close()
        raise


def _dial_until(
    links: Links,
    epoch: Epoch,
    member: Member,
    purpose: Purpose,
    transport: Transport,
    by: float,
    stop: threading.Event,
) -> FramedSocket:
    """Try all addresses until one works, as the other node may not expect this link yet."""
    reason = "it has no address"
    attempt = 0
    reached = time.monotonic()
    while True:
        for address in member.addresses:
            if stop.is_set():
                break
            try:
                patience = _PATIENCE_S[min(attempt, len(_PATIENCE_S) - 1)]
                proved_by = min(by, time.monotonic() + patience)
                framed = dial_link(links, epoch, member, purpose, transport, address, proved_by, welcomed_by=by)
            except (PeerLost, RingProtocolError, DiscoveryError, OSError) as error:
                reason = str(error)
                if not isinstance(error, LinkListenerError):
                    reached = time.monotonic()
                continue
            if stop.is_set():
                framed.close()
                break
            return framed
        pause = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
        attempt += 1
        end = min(by, reached + UNREACHED_S)
        if not member.addresses or time.monotonic() + pause >= end or stop.wait(pause):
            raise ModelError(f"The link to {member.called} cannot be made: {reason}", kind="network")
