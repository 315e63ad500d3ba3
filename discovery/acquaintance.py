"""Whether another machine still knows this one, asked at its link listener.

Both must prove who they are before anything is said: the machine that is asked by the certificate that was paired, and
the one that asks by a signature. So nobody learns of anybody else whether they are paired.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from discovery.certificates import CertificateError, fingerprint, pem_of
from discovery.errors import DiscoveryError
from discovery.frames import Deadline, FrameError, receive_frame, send_frame
from discovery.identity import Identity
from discovery.link_listener import dial
from discovery.peers import Peer
from discovery.tls import asked_context, client_context

KIND = "known"
"""Kind of connection at the link listener."""
ASK_SECONDS = 2.0
_DIAL_SECONDS = 0.5
"""Seconds for the whole question. The asking machine has just failed to reach the other, and has more to do."""
_NONCE = 32
_ABOUT = b"privatellm known 1"
_YES, _NO = b"yes", b"no"


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    """The question: the asking machine's certificate (DER), and a signature over the question."""

    certificate: bytes
    signature: bytes


def answer(identity: Identity, knows: Callable[[str], bool]) -> Callable[[socket.socket, bytes, tuple[str, int]], None]:
    """A handler for the link listener that answers whether this machine ``knows(node_id)``, to the proven owner of that
    id."""

    def handle(connection: socket.socket, body: bytes, address: tuple[str, int]) -> None:
        deadline = Deadline(ASK_SECONDS)
        with contextlib.closing(connection), contextlib.suppress(OSError, FrameError, DiscoveryError):
            connection.settimeout(deadline.left())
            with asked_context(identity).wrap_socket(connection, server_side=True) as secured:
                nonce = secrets.token_bytes(_NONCE)
                send_frame(secured, nonce, deadline)
                asking = _proved(receive_frame(secured, deadline), _question(nonce, identity.node_id))
                send_frame(secured, _YES if knows(asking) else _NO, deadline)

    return handle


def is_known(identity: Identity, peer: Peer, host: str, listener_port: int) -> bool | None:
    """Whether ``peer``, whose link listener is at that address, knows this machine. None if it does not answer."""
    deadline = Deadline(ASK_SECONDS)
    try:
        with contextlib.closing(dial((host, listener_port), KIND, seconds=_DIAL_SECONDS)) as connection:
            connection.settimeout(deadline.left())
            with client_context(identity, peer).wrap_socket(connection) as secured:
                if fingerprint(secured.getpeercert(binary_form=True) or b"") != peer.node_id:
                    return None
                nonce = receive_frame(secured, deadline)
                claim = _Claim(identity.certificate_der, _signed(identity, _question(nonce, peer.node_id)))
                send_frame(secured, msgspec.msgpack.encode(claim), deadline)
                said = receive_frame(secured, deadline)
    except (OSError, FrameError, DiscoveryError):
        return None
    return {_YES: True, _NO: False}.get(said)


def _question(nonce: bytes, asked: str) -> bytes:
    """The signed bytes, which are useless for another machine or at another time."""
    return b"\0".join((_ABOUT, asked.encode(), nonce))


def _signed(identity: Identity, question: bytes) -> bytes:
    key = serialization.load_pem_private_key(identity.key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.sign(question, ec.ECDSA(hashes.SHA256()))


def _proved(frame: bytes, question: bytes) -> str:
    """The node id of the machine that signed the ``question``. Raises CertificateError."""
    try:
        claim = msgspec.msgpack.decode(frame, type=_Claim)
        key = x509.load_pem_x509_certificate(pem_of(claim.certificate)).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(claim.signature, question, ec.ECDSA(hashes.SHA256()))
    except (msgspec.DecodeError, RecursionError, InvalidSignature) as error:
        raise CertificateError("Whoever asked did not prove who it is.") from error
    return fingerprint(claim.certificate)
