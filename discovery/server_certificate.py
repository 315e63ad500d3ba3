"""The certificate by which this machine's HTTP server is known to ordinary clients: it names the machine, and is signed
by the key of its identity, so that no second secret is kept."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from discovery.errors import IdentityError
from discovery.identity import Identity
from discovery.storage import write_private
from discovery.tls import readable_once

SERVER_CERTIFICATE = "server-certificate.pem"
"""Name of the file, beside the identity's. Clients are given a copy of it; it holds no secret."""
_LIFE = datetime.timedelta(days=397)
"""Validity; clients refuse certificates of servers that are valid for much longer."""
_RENEWED_BEFORE = datetime.timedelta(days=30)


def server_certificate(folder: Path, identity: Identity, names: Collection[str]) -> tuple[bytes, bool]:
    """The certificate (PEM) for ``names``, host names and addresses, and whether it is new.

    The one in ``folder`` is used as long as it has the key and all the names, for 30 days before it ends at most.
    Raises IdentityError if a new one cannot be kept.
    """
    path = folder / SERVER_CERTIFICATE
    key = serialization.load_pem_private_key(identity.key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    try:
        kept = path.read_bytes()
        if _is_good(x509.load_pem_x509_certificate(kept), key.public_key(), names, now):
            return kept, False
    except (OSError, ValueError):
        pass  # none is there, or what is there is no certificate
    made = _made(key, names, now).public_bytes(serialization.Encoding.PEM)
    try:
        write_private(path, made)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written ({error.strerror or error}): make it writable.") from error
    return made, True


def server_context(identity: Identity, certificate_pem: bytes) -> ssl.SSLContext:
    """A context for ordinary clients, which present no certificate of their own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    with readable_once(certificate_pem + identity.key_pem) as path:
        context.load_cert_chain(path)
    return context


def _is_good(
    certificate: x509.Certificate, public: ec.EllipticCurvePublicKey, names: Collection[str], now: datetime.datetime
) -> bool:
    if certificate.public_key() != public or not certificate.not_valid_before_utc <= now:
        return False
    if certificate.not_valid_after_utc - _RENEWED_BEFORE < now:
        return False
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(map(_general_name, names)) <= set(held)


def _made(key: ec.EllipticCurvePrivateKey, names: Collection[str], now: datetime.datetime) -> x509.Certificate:
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"privatellm server {identifier.digest.hex()[:16]}")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(sorted(map(_general_name, names), key=repr)), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
