"""The accepting side of links. This node accepts only what it expects: an epoch, a purpose and a rank, once.

All other connections are closed without an answer. A link is requested in the listener's preamble of the kind ``link``.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from discovery.certificates import fingerprint, pem_of
from discovery.errors import DiscoveryError
from discovery.identity import Identity
from discovery.link_listener import LinkListener
from discovery.tls import server_context
from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.cluster.transport.epochs import (
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
)
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import FramedLink, FramedSocket, pull_by
from engine.cluster.transport.plain_socket import open_plain_socket
from engine.cluster.transport.tls_socket import open_tls_socket

_FIRST_FRAME = 1024
_MOST_MEASURING = 8


class _Expected:
    """A link that this node waits for."""

    def __init__(self, member: Member, epoch: Epoch, transport: Transport) -> None:
        self.member = member
        self.epoch = epoch
        self.transport = transport
        self.framed: Future[FramedSocket] = Future()


_Key = tuple[str, Purpose, Transport, int]


class Links:
    """Accepts the links that are expected, and answers measurements of known machines.

    ``certificate_of`` returns the certificate (PEM) of a machine that may measure its link to this one now: a paired
    one, or one that the head of a forming ring vouches for; None for all others. ``serve_measuring`` answers on such a
    link.
    """

    def __init__(
        self,
        identity: Identity,
        certificate_of: Callable[[str], bytes | None] = lambda _: None,
        serve_measuring: Callable[[FramedLink], None] | None = None,
        parts: EngineParts = THE_PRODUCT,
    ) -> None:
        self.identity = identity
        self.parts = parts
        self._certificate_of = certificate_of
        self._serve_measuring = serve_measuring
        self._expected: dict[_Key, _Expected] = {}
        self._measuring: dict[FramedLink, str] = {}
        """Links on which a measurement runs, with the node id of the machine that measures."""
        self._mutex = threading.Lock()
        self._closed = False

    def attach(self, listener: LinkListener) -> None:
        """Take the listener's connections of the kind ``link``."""
        listener.register(LINK_KIND, self.accept)

    def accept(self, connection: socket.socket, body: bytes, address: tuple[str, int]) -> None:
        """Handle a connection: it becomes an expected link, or is closed without an answer."""
        try:
            request = msgspec.msgpack.decode(body, type=LinkRequest)
            by = time.monotonic() + HANDSHAKE_S
            if request.purpose == "measure":
                taken = self._accept_measuring(connection, body, request, by)
            else:
                taken = self._accept_expected(connection, body, request, address, by)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
            PeerLost,
            RingProtocolError,
            DiscoveryError,
            OSError,
        ):
            taken = False
        if not taken:
            connection.close()

    def _accept_expected(
        self, connection: socket.socket, body: bytes, request: LinkRequest, address: tuple[str, int], by: float
    ) -> bool:
        key: _Key = (request.epoch, request.purpose, request.transport, request.from_rank)
        with self._mutex:
            expected = self._expected.get(key)
        if expected is None or expected.member.node_id != request.node_id or expected.epoch.rank != request.to_rank:
            return False
        if request.transport == "socket" and not in_networks(address[0], expected.epoch.trusted):
            return False
        framed = self._prove(connection, body, request, expected.member, expected.epoch.key, by)
        with self._mutex:
            taken = self._expected.get(key) is expected and not self._closed
            if taken:
                del self._expected[key]
        if not taken:  # another connection with the same right was faster, or nobody waits any more
            framed.close()
            return False
        framed.push((WELCOME,))
        framed.flush(wait=True)
        expected.framed.set_result(framed)
        return True

    def _accept_measuring(self, connection: socket.socket, body: bytes, request: LinkRequest, by: float) -> bool:
        own = request.node_id == self.identity.node_id
        if own or self._serve_measuring is None or request.transport != "tls":
            return False
        # Every caller goes through the same handshake, in which it must prove the certificate of its preamble. Only
        # then is checked whether that machine is known. Otherwise the answer to a certificate without its key, or the
        # time it takes, would reveal who is paired with whom.
        certificate = pem_of(request.certificate)
        if not hmac.compare_digest(fingerprint(request.certificate), request.node_id):
            return False
        framed = self._prove(
            connection, body, request, Member(request.from_rank, request.node_id, certificate), b"", by
        )
        if self._certificate_of(request.node_id) is None:
            return False
        framed.push((WELCOME,))
        framed.flush(wait=True)
        link = FramedLink(framed)
        with self._mutex:
            if self._closed or len(self._measuring) >= _MOST_MEASURING:
                link.close()
                return False
            self._measuring[link] = request.node_id
        threading.Thread(target=self._measured, args=(link,), name="measuring a link", daemon=True).start()
        return True

    def _measured(self, link: FramedLink) -> None:
        assert self._serve_measuring is not None
        try:
            with contextlib.suppress(PeerLost, RingProtocolError):
                self._serve_measuring(link)
        finally:
            link.close()
            with self._mutex:
                del self._measuring[link]

    def _prove(
        self, connection: socket.socket, body: bytes, request: LinkRequest, member: Member, key: bytes, by: float
    ) -> FramedSocket:
        framed: FramedSocket
        if request.transport == "tls":
            context = server_context(self.identity, [as_peer(member)])
            framed = open_tls_socket(connection, context, True, member.node_id, member.called, member.rank, by)
        else:
            framed = open_plain_socket(connection, key, body, True, member.called, member.rank, by)
        # The preamble came unprotected. Its repetition inside binds this link to the request.
        if pull_by(framed, _FIRST_FRAME, by) != body:
            raise RingProtocolError(f"{member.called} asked for one link and opened another.", kind="network")
        return framed

    def expect(self, epoch: Epoch, purpose: Purpose, transport: Transport, member: Member) -> Future[FramedSocket]:
        """Expect the link that ``member`` will dial. The future gets it, or is cancelled by :meth:`forget`.

        Raises PeerLost if these links are closed, RingProtocolError if the link is expected already.
        """
        key: _Key = (epoch.epoch, purpose, transport, member.rank)
        expected = _Expected(member, epoch, transport)
        with self._mutex:
            if self._closed:
                raise PeerLost("This machine's network was closed.")
            if key in self._expected:
                raise RingProtocolError(f"The {purpose} link of {member.called} is waited for already.")
            self._expected[key] = expected
        return expected.framed

    def forget(self, epoch: str, purpose: Purpose | None = None, transport: Transport | None = None) -> None:
        """Stop expecting links of ``epoch`` (with that purpose and transport)."""
        with self._mutex:
            keys = [
                key
                for key in self._expected
                if key[0] == epoch and purpose in (None, key[1]) and transport in (None, key[2])
            ]
            gone = [self._expected.pop(key) for key in keys]
        for expected in gone:
            expected.framed.cancel()

    def cut_measuring(self, node_id: str) -> None:
        """Cut the running measurements of the machine ``node_id``, which is no longer paired."""
        with self._mutex:
            links = [link for link, other in self._measuring.items() if other == node_id]
        for link in links:
            link.close()

    def close(self) -> None:
        """Refuse every connection from now on. May be called twice."""
        with self._mutex:
            self._closed = True
            gone = list(self._expected.values())
            self._expected.clear()
            measuring = list(self._measuring)
        for expected in gone:
            expected.framed.cancel()
        for link in measuring:
            link.close()
