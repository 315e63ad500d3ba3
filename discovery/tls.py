"""TLS 1.3 between paired machines: both ends present the certificate that was pinned at pairing, or the connection
ends."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from discovery import certificates
from discovery.identity import Identity
from discovery.peers import Peer

TLS_NAME = certificates.TLS_NAME


def server_context(identity: Identity, peers: Sequence[Peer]) -> ssl.SSLContext:
    """A server's context that accepts exactly these peers. Make one per connection, as pairings may have changed.

    The caller must check the fingerprint as well.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, peers)
    context.num_tickets = 0  # a resumed session would skip the certificate of a peer that was forgotten
    return context


def asked_context(identity: Identity) -> ssl.SSLContext:
    """A server's context that presents this machine's certificate and requests none. Callers prove their identity
    inside."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, [])
    context.verify_mode = ssl.CERT_NONE
    context.num_tickets = 0
    return context


def client_context(identity: Identity, peer: Peer) -> ssl.SSLContext:
    """A client's context that accepts exactly this peer."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, [peer])


def shown_certificate(host: str, port: int, seconds: float = 3.0) -> bytes:
    """The certificate (DER) that a control port presents to anybody. Nothing else is sent or trusted.

    Raises OSError if nobody answers there, or not by TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), timeout=seconds) as plain, context.wrap_socket(plain) as wrapped:
        certificate = wrapped.getpeercert(binary_form=True)
    if certificate is None:
        raise ConnectionError("no certificate was shown")
    return certificate


def grpc_material(identity: Identity, peers: Sequence[Peer]) -> tuple[bytes, bytes, bytes]:
    """Private key, certificate and accepted certificates, all PEM, for a library that takes no ssl context.

    Without any peer the accepted one is this machine's own: such libraries refuse an empty list, and nobody else has
    that key. A client passes one peer, and ``TLS_NAME`` as the name to check.
    """
    accepted = "".join(peer.certificate_pem for peer in peers).encode() or identity.certificate_pem
    return identity.key_pem, identity.certificate_pem, accepted


def shown_to_grpc(auth_context: Mapping[str, Sequence[bytes]] | None) -> str:
    """The node id of the caller of a gRPC call, from its only certificate; empty if it presents none."""
    shown = (auth_context or {}).get("x509_pem_cert", ())
    if len(shown) != 1:
        return ""
    try:
        return certificates.fingerprint(ssl.PEM_cert_to_DER_cert(bytes(shown[0]).decode("ascii")))
    except ValueError:
        return ""


def _context(protocol: int, identity: Identity, peers: Sequence[Peer]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned certificate is trusted itself, not as an issuer
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if peers:
        context.load_verify_locations(cadata="\n".join(peer.certificate_pem for peer in peers))
    with readable_once(identity.certificate_pem + identity.key_pem) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def readable_once(content: bytes) -> Iterator[str]:
    """A path at which only this process can read ``content``, and only now. The ssl module takes paths only."""
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
