"""Certificates are taken in exactly the one form in which they are made, whatever else is valid X.509."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.certificates import (
    CertificateError,
    _certificate,
    _element,
    der_of,
    fingerprint,
    make_certificate,
    pem_of,
)
from discovery.errors import PeersError
from discovery.peers import Peer, PeersFile, new_peer
from discovery.tls import grpc_material
from tests.discovery.discovery_machines import Machine
from tests.support.random_examples import examples

MakeMachine = Callable[[str], Machine]
Key = ec.EllipticCurvePrivateKey

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
SOUND = _certificate(KEY.public_key(), 4711, KEY)
OTHER = _certificate(OTHER_KEY.public_key(), 815, OTHER_KEY)
SIGNED = SOUND.tbs_certificate_bytes
"""What is signed."""
NAME = SOUND.subject.public_bytes()
DER = serialization.Encoding.DER


def content(element: bytes) -> bytes:
    """Of a DER element."""
    size = element[1] & 0x7F if element[1] & 0x80 else 0
    return element[2 + size :]


def signed_anew(inner: bytes, key: Key = KEY) -> bytes:
    """The certificate (DER) of the fields ``inner``, with a signature that is right."""
    fields = _element(b"\x30", inner)
    how = bytes.fromhex("300a06082a8648ce3d040302")
    signature = key.sign(fields, ec.ECDSA(hashes.SHA256()))
    return _element(b"\x30", fields + how + _element(b"\x03", b"\0" + signature))


def changed(old: bytes, new: bytes, count: int = -1) -> bytes:
    """The sound certificate with fields exchanged; lengths of what is around them are mended where they are lists of
    extensions, which are last."""
    inner = content(SIGNED)
    assert old in inner
    if old in EXTENSIONS:
        listed = content(content(inner[inner.index(_element(b"\xa3", _element(b"\x30", EXTENSIONS))) :]))
        return with_extensions(listed.replace(old, new, 1))
    return signed_anew(inner.replace(old, new, count))


def one_extension(name: type[x509.ExtensionType], of: x509.Certificate = SOUND) -> bytes:
    """DER of an extension as it stands in the certificate."""
    found = of.extensions.get_extension_for_class(name)  # type: ignore[type-var]
    critical = b"\x01\x01\xff" if found.critical else b""
    value = _element(b"\x04", found.value.public_bytes())
    return _element(b"\x30", encoded_oid(found.oid) + critical + value)


def encoded_oid(oid: x509.ObjectIdentifier) -> bytes:
    """Of the arc 2.5.29, where all of them are."""
    return b"\x06\x03\x55\x1d" + bytes([int(oid.dotted_string.rpartition(".")[2])])


CONSTRAINTS = one_extension(x509.BasicConstraints)
SAN = one_extension(x509.SubjectAlternativeName)
SKI = one_extension(x509.SubjectKeyIdentifier)
AKI = one_extension(x509.AuthorityKeyIdentifier)
EXTENSIONS = CONSTRAINTS + SAN + SKI + AKI


def with_extensions(listed: bytes) -> bytes:
    inner = content(SIGNED)
    before = inner[: inner.index(_element(b"\xa3", _element(b"\x30", EXTENSIONS)))]
    return signed_anew(before + _element(b"\xa3", _element(b"\x30", listed)))


def with_name(name: bytes) -> bytes:
    return changed(NAME, name)


def common_name(text: bytes, kind: bytes = b"\x0c") -> bytes:
    attribute = _element(b"\x30", b"\x06\x03\x55\x04\x03" + _element(kind, text))
    return _element(b"\x30", _element(b"\x31", attribute))


def with_serial(number: bytes) -> bytes:
    return changed(b"\x02\x02" + (4711).to_bytes(2, "big"), _element(b"\x02", number), 1)


def built(key: object, algorithm: hashes.HashAlgorithm | None, ca: bool = False) -> bytes:
    """The same with a key of another kind, or another digest."""
    public = key.public_key()  # type: ignore[attr-defined]
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"privatellm {identifier.digest.hex()}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(4711)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("privatellm")]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, algorithm)  # type: ignore[arg-type]
        .public_bytes(DER)
    )


def extension(value: x509.ExtensionType, critical: bool = False) -> bytes:
    flag = b"\x01\x01\xff" if critical else b""
    return _element(b"\x30", encoded_oid(value.oid) + flag + _element(b"\x04", value.public_bytes()))


def san(*names: x509.GeneralName) -> bytes:
    return extension(x509.SubjectAlternativeName(names))


POINT = KEY.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
COMPRESSED = KEY.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
SPKI = KEY.public_key().public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
CURVE = bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107")
WHOLE = SOUND.public_bytes(DER)
VERSION = bytes.fromhex("a003020102")
NOT_BEFORE, NOT_AFTER = b"\x17\x0d000101000000Z", b"\x18\x0f20991231000000Z"
if NOT_AFTER not in SIGNED:
    NOT_AFTER = b"\x17\x0d991231000000Z"

FORMS: dict[str, Callable[[], bytes]] = {
    "version 1 with extensions": lambda: changed(VERSION, b"", 1),
    "version 2": lambda: changed(VERSION, bytes.fromhex("a003020101"), 1),
    "version 4": lambda: changed(VERSION, bytes.fromhex("a003020103"), 1),
    "no extensions": lambda: signed_anew(
        content(SIGNED).replace(_element(b"\xa3", _element(b"\x30", EXTENSIONS)), b"")
    ),
    "UTF8String invalid": lambda: with_name(common_name(b"privatellm \xff\xfe")),
    "empty RDN set": lambda: with_name(_element(b"\x30", _element(b"\x31", b""))),
    "empty name": lambda: with_name(_element(b"\x30", b"")),
    "PrintableString": lambda: with_name(NAME.replace(b"\x0c\x33", b"\x13\x33")),
    "BMPString": lambda: with_name(common_name("privatellm".encode("utf-16-be"), b"\x1e")),
    "another name": lambda: with_name(common_name(b"privatellm")),
    "a name in capitals": lambda: with_name(NAME.replace(b"privatellm", b"PRIVATELLM")),
    "the name of another machine": lambda: with_name(OTHER.subject.public_bytes()),
    "another issuer": lambda: changed(NAME, OTHER.subject.public_bytes(), 1),
    "serial number 0": lambda: with_serial(b"\0"),
    "a negative serial number": lambda: with_serial(b"\xff"),
    "a serial number of 21 bytes": lambda: with_serial(b"\x01" + bytes(20)),
    "a serial number with a zero before it": lambda: with_serial(b"\0\x12\x67"),
    "valid later": lambda: changed(NOT_BEFORE, b"\x17\x0d010101000000Z"),
    "valid for ever": lambda: changed(NOT_AFTER, b"\x18\x0f99991231235959Z"),
    "a certificate authority": lambda: built(KEY, hashes.SHA256(), ca=True),
    "constraints that are not critical": lambda: changed(CONSTRAINTS, CONSTRAINTS.replace(b"\x01\x01\xff", b"")),
    "no constraints": lambda: changed(CONSTRAINTS, b""),
    "no alternative name": lambda: changed(SAN, b""),
    "another alternative name": lambda: changed(SAN, san(x509.DNSName("localhost"))),
    "two alternative names": lambda: changed(SAN, san(x509.DNSName("privatellm"), x509.DNSName("localhost"))),
    "an address besides the name": lambda: changed(SAN, san(x509.DNSName("privatellm"), x509.RFC822Name("a@b"))),
    "an alternative name that is critical": lambda: changed(
        SAN, extension(x509.SubjectAlternativeName([x509.DNSName("privatellm")]), critical=True)
    ),
    "no key identifier": lambda: changed(SKI, b""),
    "another machine's key identifier": lambda: changed(SKI, one_extension(x509.SubjectKeyIdentifier, OTHER)),
    "no identifier of the issuer's key": lambda: changed(AKI, b""),
    "another machine's as the issuer's": lambda: changed(AKI, one_extension(x509.AuthorityKeyIdentifier, OTHER)),
    "all that names another machine": lambda: signed_anew(
        content(SIGNED)
        .replace(NAME, OTHER.subject.public_bytes())
        .replace(b"\x02\x02" + (4711).to_bytes(2, "big"), b"\x02\x02" + (815).to_bytes(2, "big"))
        .replace(SKI, one_extension(x509.SubjectKeyIdentifier, OTHER))
        .replace(AKI, one_extension(x509.AuthorityKeyIdentifier, OTHER))
    ),
    "one extension more": lambda: with_extensions(
        EXTENSIONS + extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))
    ),
    "an unknown critical extension": lambda: with_extensions(
        EXTENSIONS + _element(b"\x30", b"\x06\x03\x55\x1d\x7f\x01\x01\xff\x04\x02\x05\x00")
    ),
    "an extension twice": lambda: with_extensions(EXTENSIONS + SKI),
    "extensions in another order": lambda: with_extensions(SAN + CONSTRAINTS + AKI + SKI),
    "an explicit false": lambda: changed(SKI, SKI.replace(b"\x04\x16", b"\x01\x01\x00\x04\x16")),
    "a compressed key": lambda: changed(
        SPKI, _element(b"\x30", CURVE + _element(b"\x03", b"\0" + COMPRESSED))
    ),
    "a point that is none": lambda: changed(POINT, b"\x04" + b"\x11" * 64),
    "another curve": lambda: built(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
    "a key of RSA": lambda: built(rsa.generate_private_key(65537, 2048), hashes.SHA256()),
    "a key of Ed25519": lambda: built(ed25519.Ed25519PrivateKey.generate(), None),
    "another digest": lambda: built(KEY, hashes.SHA384()),
    "signed by another machine": lambda: signed_anew(content(SIGNED), OTHER_KEY),
    "something behind it": lambda: WHOLE + b"\0",
    "a length in another form": lambda: WHOLE[:1] + b"\x83\x00" + WHOLE[2:],
}  # fmt: skip


def test_the_sound_one_is_taken() -> None:
    """So each of the forms is refused for what was changed: this is how they are put together."""
    assert pem_of(signed_anew(content(SIGNED))) and pem_of(WHOLE)
    # Signatures differ in length by a byte or two, and so does what the first four bytes tell.
    assert with_extensions(EXTENSIONS)[4:60] == WHOLE[4:60]
    assert len({form() for form in FORMS.values()}) == len(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_every_other_form_is_refused(form: str) -> None:
    with pytest.raises(CertificateError):
        pem_of(FORMS[form]())


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_any_change_of_bytes_is_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(WHOLE) - 1))
    length = data.draw(st.integers(0, 3))
    put = data.draw(st.binary(max_size=3))
    mutated = WHOLE[:at] + put + WHOLE[at + length :]
    if mutated != WHOLE:
        with pytest.raises(CertificateError):
            pem_of(mutated)


@settings(deadline=None, max_examples=examples(8))
@given(st.integers(1, 2**255), st.one_of(st.integers(1, 2**159 - 1), st.sampled_from([127, 128, 255, 256])))
def test_whatever_is_made_is_taken_by_all_libraries(secret: int, serial: int) -> None:
    key = ec.derive_private_key(secret, ec.SECP256R1())
    der = _certificate(key.public_key(), serial, key).public_bytes(DER)
    assert der_of(pem_of(der)) == der


def test_pem_with_a_second_certificate_is_refused() -> None:
    first, second = (make_certificate()[1] for _ in range(2))
    assert der_of(first)
    with pytest.raises(CertificateError, match="more than one"):
        der_of(first + second)


def as_pem(der: bytes) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.encodebytes(der).decode()}-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("form", ["version 1 with extensions", "UTF8String invalid", "empty RDN set"])
def test_a_certificate_that_poisons_the_list_is_left_out_and_named(
    form: str, machine: MakeMachine, tmp_path: Path
) -> None:
    """It may be in the file from before it was checked: the others are still given to the libraries."""
    der = FORMS[form]()
    poison = Peer(node_id=fingerprint(der), certificate_pem=as_pem(der), name="poison", paired_at=1.0)
    friend = machine("friend").as_peer()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "peers.json").write_bytes(msgspec.json.encode({"format": 1, "peers": [poison, friend]}))
    file = PeersFile(folder)
    assert file.all() == [friend]
    (notice,) = file.take_notices()
    assert "poison" in notice and "paired again" in notice
    assert grpc_material(machine("here").identity, file.all())[2].decode() == friend.certificate_pem
    file.rename(friend.node_id, "Friend")
    assert [peer.name for peer in file.all()] == ["Friend"] and file.take_notices() == []


def test_two_certificates_of_one_key_are_not_both_paired(machine: MakeMachine, tmp_path: Path) -> None:
    """A signature can be changed into another that is valid, by anybody: such a copy must not stand in the way."""
    original = new_peer(WHOLE, "original")
    copy = new_peer(_certificate(KEY.public_key(), 4711, KEY).public_bytes(DER), "copy")
    assert original.node_id != copy.node_id
    file = PeersFile(tmp_path / "folder")
    file.add(original)
    with pytest.raises(PeersError, match=f"peers forget {original.node_id[:8]}"):
        file.add(copy)
    written = msgspec.json.encode({"format": 1, "peers": [original, copy]})
    (tmp_path / "folder" / "peers.json").write_bytes(written)
    assert [peer.name for peer in PeersFile(tmp_path / "folder").all()] == ["original"]
