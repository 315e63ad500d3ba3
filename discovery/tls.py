"""TLS 1.3 between paired machines: both ends show the certificate that was pinned at pairing, or nothing is said."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator, Sequence

from discovery import certificates
from discovery.errors import TlsError
from discovery.frames import Deadline, FrameError, receive_exactly
from discovery.identity import Identity, short
from discovery.peers import Peer

TLS_NAME = certificates.TLS_NAME
_WELCOME = b"\x06"
"""In TLS 1.3 a client has finished before the server has looked at its certificate; this byte says that it is in."""


def server_context(identity: Identity, peers: Sequence[Peer]) -> ssl.SSLContext:
    """Accepts exactly these peers. Make one per connection: who is paired may have changed.

    The fingerprint has to be looked at as well: :func:`verified_peer`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, peers)
    context.num_tickets = 0  # a resumed session would skip the certificate of a peer that was forgotten
    return context


def client_context(identity: Identity, peer: Peer) -> ssl.SSLContext:
    """Talks to exactly this peer."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, [peer])


def verified_peer(connection: ssl.SSLSocket, peers: Sequence[Peer]) -> Peer:
    """Which of ``peers`` is at the other end of a finished handshake. Raises TlsError if none is."""
    shown = connection.getpeercert(binary_form=True)
    node_id = certificates.fingerprint(shown) if shown else ""
    for peer in peers:
        if peer.node_id == node_id:
            return peer
    raise TlsError(f"The machine at the other end ({short(node_id) or 'no certificate'}) is not the paired one.")


def accept_tls(
    connection: socket.socket, identity: Identity, peers: Sequence[Peer], seconds: float = 5.0
) -> tuple[ssl.SSLSocket, Peer]:
    """The server's side on an accepted connection. Raises TlsError, and has closed the connection then."""
    with _closing_on_failure(connection):
        connection.settimeout(seconds)
        secured = server_context(identity, peers).wrap_socket(connection, server_side=True)
        with _closing_on_failure(secured):
            peer = verified_peer(secured, peers)
            secured.sendall(_WELCOME)
            secured.settimeout(None)
            return secured, peer


def connect_tls(connection: socket.socket, identity: Identity, peer: Peer, seconds: float = 5.0) -> ssl.SSLSocket:
    """The client's side on a connection to ``peer``; returns when the peer has accepted this machine.

    Raises TlsError, and has closed the connection then."""
    with _closing_on_failure(connection):
        deadline = Deadline(seconds)
        connection.settimeout(seconds)
        secured = client_context(identity, peer).wrap_socket(connection, server_hostname=TLS_NAME)
        with _closing_on_failure(secured):
            verified_peer(secured, [peer])
            if receive_exactly(secured, 1, deadline) != _WELCOME:
                raise TlsError(f"{peer.label} does not speak this program's language; update the older of the two.")
            secured.settimeout(None)
            return secured


def grpc_material(identity: Identity, peers: Sequence[Peer]) -> tuple[bytes, bytes, bytes]:
    """(private key, certificate, accepted certificates), all PEM, for a library that takes no ssl context.

    With no peer at all the accepted ones are this machine's own: such libraries refuse an empty list, and nobody else
    has that key. A client passes one peer, and ``TLS_NAME`` as the name to check.
    """
    accepted = "".join(peer.certificate_pem for peer in peers).encode() or identity.certificate_pem
    return identity.key_pem, identity.certificate_pem, accepted


def _context(protocol: int, identity: Identity, peers: Sequence[Peer]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned certificate is trusted itself, not as an issuer
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if peers:
        context.load_verify_locations(cadata="\n".join(peer.certificate_pem for peer in peers))
    with _readable_once(identity.certificate_pem + identity.key_pem) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _readable_once(content: bytes) -> Iterator[str]:
    """A path under which only this process, and only now, can read ``content``: the ssl module takes paths only."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):  # noqa: PTH112
        descriptor = os.memfd_create("privatellm", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(prefix="privatellm-") as file:  # mode 0600
        file.write(content)
        file.flush()
        yield file.name


@contextlib.contextmanager
def _closing_on_failure(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except TlsError:
        connection.close()
        raise
    except (OSError, FrameError) as error:  # ssl.SSLError is an OSError
        connection.close()
        raise TlsError(_explained(error)) from error
    except BaseException:
        connection.close()
        raise


def _explained(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "The machine at the other end is not the paired one (its certificate differs): pair the two again."
    if isinstance(error, TimeoutError):
        return "The machine at the other end did not finish the handshake in time."
    return (
        f"The machine at the other end ended the handshake ({getattr(error, 'reason', None) or error}): it may not be "
        "paired with this one (any more); pair the two again."
    )
