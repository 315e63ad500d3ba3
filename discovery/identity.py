"""This machine's identity: a private key, its certificate, and the certificate's fingerprint as node id."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from discovery import certificates, system_keyring
from discovery.errors import IdentityError
from discovery.storage import PRIVATE, locked, put_aside, write_private
from discovery.system_keyring import KeyringUnavailable

KEYRING_SERVICE = "privatellm"
IN_KEYRING = "the system's keyring"
RENEWAL = "run `privatellm peers new-identity` there"
"""Command by which a person gives a machine a new identity. A program uses :func:`new_identity`."""
_CERTIFICATE = "certificate.pem"
_KEY = "private-key.pem"
_LOCK = "identity.lock"
_WORDS_SHOWN = 6


@dataclass(frozen=True)
class Identity:
    """This machine's identity. The key is in memory only. :attr:`storage` says where it is kept."""

    node_id: str
    """SHA-256 of the certificate's DER, 64 hexadecimal digits."""
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    storage: str
    """Place of the key, in words: the system's keyring, or the file."""
    instance: str
    """Number that differs between machines, boots and folders with the same (copied) identity; 16 hexadecimal
    digits."""
    notice: str = ""
    """A sentence to be shown once; empty if there is none."""

    @functools.cached_property
    def certificate_der(self) -> bytes:
        return certificates.der_of(self.certificate_pem)


def load_identity(folder: Path, patience_s: float | None = None) -> Identity:
    """The identity kept in ``folder``, made there if there is none.

    ``patience_s``: seconds that the system's keyring may take to hand out the key, as long as a person needs to answer
    its dialogue (None: the usual few seconds). Two processes that come at the same time get the same identity. Raises
    IdentityError if the key is in a keyring that does not answer now, or if the folder cannot be read or written.
    """
    try:
        with locked(folder / _LOCK):
            return _load(folder, patience_s)
    except OSError as error:
        raise IdentityError(
            f"This machine's identity cannot be kept in {folder} ({error.strerror or error}): make the folder writable."
        ) from error


def new_identity(folder: Path) -> Identity:
    """Replace the identity in ``folder`` by a new one. Paired machines must be paired again. Raises IdentityError."""
    try:
        with locked(folder / _LOCK):
            certificate = folder / _CERTIFICATE
            if certificate.exists():
                _delete_key(folder, certificate)
            (folder / _KEY).unlink(missing_ok=True)
            certificate.unlink(missing_ok=True)
            return _create(folder, "This machine has a new identity: pair it with the others again.")
    except OSError as error:
        raise IdentityError(
            f"A new identity cannot be written to {folder} ({error.strerror or error}): make the folder writable."
        ) from error


def short(node_id: str) -> str:
    """The beginning of a node id, long enough to tell the machines of a household apart."""
    return node_id[:8]


def fingerprint_words(node_id: str) -> list[str]:
    """The first 48 bits of a node id as six words, for two people to compare. Raises ValueError if it is not a node
    id."""
    return [WORDS[byte] for byte in bytes.fromhex(node_id)[:_WORDS_SHOWN]]


def machine_instance(folder: Path) -> str:
    """The instance number: the same for every process of one boot of one machine that uses ``folder``. It reveals
    nothing else."""
    parts = (_boot(), str(folder.resolve()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Announced(Protocol):
    """The compared part of an announcement or a greeting."""

    @property
    def node_id(self) -> str: ...

    @property
    def instance(self) -> str: ...


def copied_identities(mine: Announced, others: Iterable[Announced]) -> list[str]:
    """A sentence for every node id that more than one machine claims."""
    instances: dict[str, set[str]] = {}
    for other in others:
        instances.setdefault(other.node_id, set()).add(other.instance)
    sentences = []
    if instances.pop(mine.node_id, set()) - {mine.instance}:
        sentences.append(
            f"Another machine announces this machine's identity {short(mine.node_id)}: its files were copied; "
            f"give one of the two a new identity ({RENEWAL}) and pair it again."
        )
    sentences += [
        f"{len(seen)} machines announce the identity {short(node_id)}: the files of one were copied; give one of them "
        f"a new identity ({RENEWAL}) and pair it again."
        for node_id, seen in sorted(instances.items())
        if len(seen) > 1
    ]
    return sentences


def _load(folder: Path, patience_s: float | None) -> Identity:
    path = folder / _CERTIFICATE
    if not path.exists():
        return _create(folder, "")
    certificate_pem = path.read_bytes()
    try:
        node_id = certificates.fingerprint(certificates.der_of(certificate_pem))
    except certificates.CertificateError:
        aside = put_aside(path)
        return _create(
            folder, f"The certificate was damaged (now {aside}): this machine has a new identity, pair it again."
        )
    key_file = folder / _KEY
    notice = ""
    if key_file.exists():
        notice = _closed_to_others(key_file)
        key_pem, storage = key_file.read_bytes(), f"the file {key_file}"
    else:
        stored_key = _key_from_keyring(folder, node_id, patience_s)
        if stored_key is None:
            return _create(
                folder,
                f"The private key of {short(node_id)} is not on this machine (were its files copied from another?): "
                "this machine has a new identity, pair it again.",
            )
        key_pem, storage = stored_key, IN_KEYRING
    if not certificates.belong_together(key_pem, certificate_pem):
        put_aside(path)
        if key_file.exists():
            put_aside(key_file)
        return _create(
            folder,
            f"The private key does not belong to the certificate {short(node_id)} (both put aside in {folder}): "
            "this machine has a new identity, pair it again.",
        )
    return Identity(node_id, certificate_pem, key_pem, storage, machine_instance(folder), notice)


def _create(folder: Path, notice: str) -> Identity:
    """Store the key before the certificate, so that a certificate on disk always has its key somewhere."""
    key_pem, certificate_pem = certificates.make_certificate()
    node_id = certificates.fingerprint(certificates.der_of(certificate_pem))
    key_file = folder / _KEY
    try:
        system_keyring.store_secret(KEYRING_SERVICE, _account(folder, node_id), key_pem.decode())
        storage = IN_KEYRING
        key_file.unlink(missing_ok=True)
    except KeyringUnavailable as reason:
        write_private(key_file, key_pem)
        storage = f"the file {key_file}"
        said = f"The private key of this machine is kept in {storage}, readable by you alone, because {reason}."
        notice = f"{notice} {said}".strip()
    write_private(folder / _CERTIFICATE, certificate_pem)
    return Identity(node_id, certificate_pem, key_pem, storage, machine_instance(folder), notice)


def _account(folder: Path, node_id: str) -> str:
    """The name of the key in the keyring. It contains the folder, so a copied folder does not find the key and gets its
    own identity."""
    return f"{node_id} {folder.resolve()}"


def _key_from_keyring(folder: Path, node_id: str, patience_s: float | None) -> bytes | None:
    try:
        secret = system_keyring.read_secret(KEYRING_SERVICE, _account(folder, node_id), patience_s)
    except KeyringUnavailable as reason:
        # A session over SSH finds a Mac's login keychain locked, and no dialogue appears.
        over_ssh = sys.platform == "darwin" and "SSH_CONNECTION" in os.environ
        how = " (over SSH: `security unlock-keychain`)" if over_ssh else ""
        raise IdentityError(
            f"The private key of this machine ({short(node_id)}) is in the system's keyring, but {reason}: unlock the "
            f"keyring{how} and try again, or delete {folder / _CERTIFICATE} for a new identity and pair again."
        ) from reason
    return None if secret is None else secret.encode()


def _delete_key(folder: Path, certificate: Path) -> None:
    """Delete the key if possible. A key that stays behind in the keyring belongs to an identity that nobody uses."""
    try:
        node_id = certificates.fingerprint(certificates.der_of(certificate.read_bytes()))
        system_keyring.delete_secret(KEYRING_SERVICE, _account(folder, node_id))
    except (certificates.CertificateError, KeyringUnavailable):
        return


def _closed_to_others(key_file: Path) -> str:
    mode = stat.S_IMODE(key_file.stat().st_mode)
    if mode & 0o077 == 0:
        return ""
    key_file.chmod(PRIVATE)
    return (
        f"The private key {key_file} could be read by others (mode {mode:o}) and is closed to them now; if somebody "
        f"may have copied it, delete {key_file.with_name(_CERTIFICATE)} for a new identity and pair again."
    )


def _boot() -> str:
    """A number that stays the same until this machine starts again. Containers share the host's, but not its name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {socket.gethostname()}"
    except OSError:
        pass
    try:
        answer = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, timeout=3, check=True)
        return answer.stdout.decode().strip()
    except (OSError, subprocess.SubprocessError):
        import psutil

        return f"{psutil.boot_time():.0f} {uuid.getnode()}"


# --- words for fingerprints ------------------------------------------------------------------------------------------


_TEXT = """
acorn agent amber anchor angle apple apron arrow aspen atlas attic autumn bacon badge bakery bamboo banjo barrel
basket beacon beaver berry bishop blanket blossom border bottle branch bridge bronze bucket butter button cabin
cactus camel candle canoe canvas carbon carpet castle cedar cellar cello chalk cherry chimney circus clover cobalt
coffee comet copper coral corner cotton cradle crayon cricket crystal cushion daisy dancer denim desert diamond
dinner dolphin donkey dragon drawer eagle easel echo elbow elephant ember engine evening fabric falcon farmer
feather fence ferry fiddle finger flame flute forest fossil fountain galaxy garden garlic ginger glacier glove
goblet granite grape guitar hammer harbor harvest hazel helmet hermit hollow honey horizon hunter icicle igloo
indigo island ivory jacket jaguar jasmine jersey jigsaw jungle juniper kayak kernel kettle kitchen kite ladder
lagoon lantern lemon leopard letter library lilac linen lizard lobster locket lotus lumber magnet mango maple marble
meadow medal melon mirror mitten monkey mosaic mountain muffin museum mustard napkin nectar needle nickel noodle
nutmeg oasis ocean olive onion opal orange orchard otter oyster paddle palace panda paper parrot pasta pebble
pelican pencil pepper piano pigeon pillow pirate planet plaza pocket pony poppy potato prism puzzle quartz quilt
rabbit radio raven ribbon river robin rocket rubber saddle saffron salmon sandal satin scarf sculptor shadow shovel
silver singer spider spruce stable statue summer sunset tailor tango teapot temple thistle thunder ticket tiger
timber tomato topaz tower trumpet tulip tunnel turtle umbrella uncle valley vanilla velvet village vinegar violin
volcano voyage waffle wagon walnut walrus warden whisper willow
"""

WORDS = tuple(_TEXT.split())
