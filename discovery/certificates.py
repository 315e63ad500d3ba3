"""The certificate that is a machine's identity: self-signed, and pinned by paired machines."""

from __future__ import annotations

import datetime
import functools
import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import NameOID

from discovery.errors import DiscoveryError

TLS_NAME = "privatellm"
"""The DNS name in every certificate. It identifies nobody, but some libraries insist on a host name."""
MAX_CERTIFICATE = 2048
"""Maximum bytes of a certificate (DER). Ours have about 450."""

# Fixed dates: a certificate says nothing about when it was made, and machines whose clocks are apart agree about it.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC)
_PUBLIC = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
_ECDSA_WITH_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
"""Identifier of the signature algorithm, DER."""


class CertificateError(DiscoveryError):
    """Bytes that are not a certificate in the form this program makes."""


def make_certificate() -> tuple[bytes, bytes]:
    """A new P-256 key and its self-signed certificate, both PEM: (key, certificate)."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key.public_key(), x509.random_serial_number(), key)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(public: ec.EllipticCurvePublicKey, serial: int, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """The certificate in its only form. Raises ValueError for a serial number that is not positive or has more than 20
    bytes."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    # The name differs for every key, because TLS libraries look a pinned certificate up by its name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{TLS_NAME} {identifier.digest.hex()}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def fingerprint(der: bytes) -> str:
    """The node id: SHA-256 of the certificate, 64 hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


def der_of(certificate_pem: bytes) -> bytes:
    """A certificate (PEM) as DER. Raises CertificateError as :func:`pem_of` does."""
    try:
        der = x509.load_pem_x509_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise CertificateError("The text is not a certificate in PEM.") from error
    if pem_of(der).split() != certificate_pem.split():
        raise CertificateError("The text is more than one certificate in PEM.")
    return der


def pem_of(der: bytes) -> bytes:
    """A certificate (DER) from the network, checked, as PEM.

    Raises CertificateError unless it equals, byte for byte, what :func:`make_certificate` makes of its key and serial
    number, signed by that key. TLS libraries differ in what they accept. A certificate that one of them cannot read, or
    takes for another machine's, would keep other machines out.
    """
    if not 0 < len(der) <= MAX_CERTIFICATE:
        raise CertificateError(f"A certificate of {len(der)} bytes was offered; ours have at most {MAX_CERTIFICATE}.")
    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.verify_directly_issued_by(certificate)
        public = certificate.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
            raise ValueError("another kind of key")
        # What is signed does not depend on who signs.
        signed = _certificate(public, certificate.serial_number, _anybody()).tbs_certificate_bytes
        if _joined(signed, encode_dss_signature(*decode_dss_signature(certificate.signature))) != der:
            raise ValueError("another form")
        return certificate.public_bytes(serialization.Encoding.PEM)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateError("What was offered is not a certificate of this program.") from error
    except Exception as error:  # parsers of foreign bytes raise many things; none of them may get further than this
        raise CertificateError("What was offered cannot be read as a certificate.") from error


def public_key_of(certificate_pem: bytes) -> bytes:
    """The public key of a certificate, DER. Raises CertificateError."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).public_key().public_bytes(*_PUBLIC)
    except (ValueError, TypeError) as error:
        raise CertificateError("The text is not a certificate in PEM.") from error


@functools.cache
def _anybody() -> ec.EllipticCurvePrivateKey:
    """A key that belongs to no machine."""
    return ec.derive_private_key(1, ec.SECP256R1())


def _joined(signed: bytes, signature: bytes) -> bytes:
    """The certificate, DER: a sequence of the signed part, the algorithm and the signature (a bit string of whole
    bytes)."""
    return _element(b"\x30", signed + _ECDSA_WITH_SHA256 + _element(b"\x03", b"\0" + signature))


def _element(tag: bytes, content: bytes) -> bytes:
    length = len(content)
    if length < 0x80:
        return tag + bytes([length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return tag + bytes([0x80 | len(size)]) + size + content


def belong_together(key_pem: bytes, certificate_pem: bytes) -> bool:
    """Whether the private key belongs to the certificate."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except (ValueError, TypeError):
        return False
    return key.public_key().public_bytes(*_PUBLIC) == certificate.public_key().public_bytes(*_PUBLIC)
