"""The certificate that is a machine's identity: self-signed, pinned by whoever paired with it."""

from __future__ import annotations

import datetime
import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from discovery.errors import DiscoveryError

TLS_NAME = "privatellm"
"""The one DNS name in every certificate. It identifies nobody; libraries that insist on a host name are given it."""
MAX_CERTIFICATE = 2048
"""Bytes of DER; ours have about 450."""

# Fixed dates: a certificate says nothing about when it was made, and machines whose clocks are apart agree about it.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC)


class CertificateError(DiscoveryError):
    """Bytes that are not a certificate as this program makes them."""


def make_certificate() -> tuple[bytes, bytes]:
    """A new P-256 key and its self-signed certificate, both PEM: (key, certificate)."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    # The name differs for every key, because TLS libraries look a pinned certificate up by its name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{TLS_NAME} {identifier.digest.hex()}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint(der: bytes) -> str:
    """The node id: SHA-256 of the certificate, 64 hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


def der_of(certificate_pem: bytes) -> bytes:
    """PEM to DER. Raises CertificateError."""
    try:
        return x509.load_pem_x509_certificate(certificate_pem).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise CertificateError("The text is not a certificate in PEM.") from error


def pem_of(der: bytes) -> bytes:
    """DER that came over the network, checked, as PEM.

    Raises CertificateError unless it is small, has a P-256 key, the name above, and its own signature.
    """
    if not 0 < len(der) <= MAX_CERTIFICATE:
        raise CertificateError(f"A certificate of {len(der)} bytes was offered; ours have at most {MAX_CERTIFICATE}.")
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = certificate.public_key()
        certificate.verify_directly_issued_by(certificate)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        same = certificate.public_bytes(serialization.Encoding.DER) == der
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise CertificateError("What was offered is not a certificate of this program.") from error
    except Exception as error:  # parsers of foreign bytes raise many things; none of them may get further than this
        raise CertificateError("What was offered cannot be read as a certificate.") from error
    p256 = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    if not (p256 and same and names.get_values_for_type(x509.DNSName) == [TLS_NAME]):
        raise CertificateError("What was offered is not a certificate of this program.")
    return pem


def belong_together(key_pem: bytes, certificate_pem: bytes) -> bool:
    """Whether the private key is the certificate's."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except (ValueError, TypeError):
        return False
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
