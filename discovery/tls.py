"""TLS 1.3 between paired machines: both ends show the certificate that was pinned at pairing, or nothing is said."""

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
    """Accepts exactly these peers. Make one per connection: who is paired may have changed.

    Whoever uses it has to look at the fingerprint as well."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, peers)
    context.num_tickets = 0  # a resumed session would skip the certificate of a peer that was forgotten
    return context


def asked_context(identity: Identity) -> ssl.SSLContext:
    """Shows this machine's certificate and asks for none: whoever comes proves inside who it is, if at all."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, [])
    context.verify_mode = ssl.CERT_NONE
    context.num_tickets = 0
    return context


def client_context(identity: Identity, peer: Peer) -> ssl.SSLContext:
    """Talks to exactly this peer."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, [peer])


def shown_certificate(host: str, port: int, seconds: float = 3.0) -> bytes:
    """The certificate (DER) that whoever listens at a control port shows to anybody; nothing else is said or believed.

    Raises OSError: nobody answers there, or not by TLS 1.3.
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
    """(private key, certificate, accepted certificates), all PEM, for a library that takes no ssl context.

    With no peer at all the accepted ones are this machine's own: such libraries refuse an empty list, and nobody else
    has that key. A client passes one peer, and ``TLS_NAME`` as the name to check.
    """
    accepted = "".join(peer.certificate_pem for peer in peers).encode() or identity.certificate_pem
    return identity.key_pem, identity.certificate_pem, accepted


def shown_to_grpc(auth_context: Mapping[str, Sequence[bytes]] | None) -> str:
    """The node id of whoever is at the other end of a gRPC call, which shows one certificate; empty if it does not."""
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
