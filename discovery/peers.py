"""The paired machines, in a file that only its owner can read."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from discovery import certificates
from discovery.errors import PeersError
from discovery.identity import short
from discovery.names import clean_name
from discovery.storage import locked, put_aside, write_private

MAX_ADDRESSES = 8
"""Maximum addresses remembered per machine, the last one that worked first."""
MAX_COPIES = 16
"""Maximum copies of an identity that are remembered, the last ones found."""
_FORMAT = 1
_FILE = "peers.json"
_LOCK = "peers.lock"
_MAX_FILE = 4 * 1024 * 1024


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A paired machine: the holder of this certificate's key is that machine."""

    node_id: str
    certificate_pem: str
    name: str
    """The peer's current name, already harmless to show."""
    former_name: str = ""
    """The peer's former name, which settings may still use."""
    paired_at: float
    """Time of pairing in seconds since 1970, by this machine's clock."""
    addresses: list[str] = []
    """Addresses (``HOST:PORT``) of its control port, the last one that worked first."""
    copies: list[str] = []
    """Instances with a copy of the peer's identity. They stay out until a person pairs the machine anew."""

    @property
    def label(self) -> str:
        """The peer's name, or the beginning of its id."""
        return self.name or short(self.node_id)


class _PeersDocument(msgspec.Struct, kw_only=True):
    format: int
    peers: list[Peer]


class PeersFile:
    """The file ``peers.json`` in ``folder``. Readers always see the latest state, also if another process wrote it.

    Reading and writing raise PeersError if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._mutex = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._peers: dict[str, Peer] = {}
        self._notices: list[str] = []
        self._left_out: set[str] = set()
        """Notices about machines whose certificates cannot be used. Each notice is returned once."""

    def all(self) -> list[Peer]:
        """All peers, in the order of pairing."""
        with self._mutex:
            self._refresh()
            return sorted(self._peers.values(), key=lambda peer: (peer.paired_at, peer.node_id))

    def get(self, node_id: str) -> Peer | None:
        """The peer with exactly this node id."""
        with self._mutex:
            self._refresh()
            return self._peers.get(node_id)

    def find(self, text: str) -> Peer:
        """The peer with this name (case is ignored) or this beginning of the node id. Raises PeersError: none, or
        several."""
        peers = self.all()
        wanted = text.strip()
        matches = [peer for peer in peers if wanted and peer.name.casefold() == wanted.casefold()]
        matches = matches or [peer for peer in peers if wanted and peer.former_name.casefold() == wanted.casefold()]
        matches = matches or [peer for peer in peers if wanted and peer.node_id.startswith(wanted.lower())]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            known = ", ".join(f"{peer.label} ({short(peer.node_id)})" for peer in peers) or "none"
            raise PeersError(f"No paired machine is called “{clean_name(text)}”; paired are: {known}.")
        which = ", ".join(f"{peer.label} ({_distinct(peer, matches)})" for peer in matches)
        raise PeersError(f"“{clean_name(text)}” could be {which}: say the id that stands in brackets.")

    def labels(self, my_name: str = "") -> dict[str, str]:
        """The name of each peer in sentences and tables, by node id.

        The beginning of its id is added if another machine, or this one (``my_name``), has the same name.
        """
        peers = self.all()
        names = Counter(name.casefold() for name in (my_name, *(peer.name for peer in peers)) if name)
        return {
            peer.node_id: f"{peer.name} ({_distinct(peer, peers)})" if names[peer.name.casefold()] > 1 else peer.label
            for peer in peers
        }

    def add(self, peer: Peer) -> None:
        """Add a peer, or replace the one with the same node id."""
        if not _is_sound(peer):
            raise PeersError(f"The certificate of {short(peer.node_id)} is not that machine's; pair it again.")
        key = certificates.public_key_of(peer.certificate_pem.encode())
        for other in self.all():
            if other.node_id != peer.node_id and certificates.public_key_of(other.certificate_pem.encode()) == key:
                raise PeersError(
                    f"The machine shows another certificate of the key that {other.label} has: "
                    f"`privatellm peers forget {short(other.node_id)}` first, if it is the same machine."
                )
        tidy = msgspec.structs.replace(peer, name=clean_name(peer.name), addresses=peer.addresses[:MAX_ADDRESSES])
        self._change(lambda peers: peers.__setitem__(tidy.node_id, tidy))

    def remember_address(self, node_id: str, address: str) -> None:
        """Remember an address (``HOST:PORT``) that worked as the first one. A machine that is not paired is ignored."""
        known = self.get(node_id)
        if known is None or known.addresses[:1] == [address]:
            return
        rest = [other for other in known.addresses if other != address]
        addresses = [address, *rest][:MAX_ADDRESSES]

        def remember(peers: dict[str, Peer]) -> None:
            if node_id in peers:
                peers[node_id] = msgspec.structs.replace(peers[node_id], addresses=addresses)

        self._change(remember)

    def remember_copy(self, node_id: str, instance: str) -> None:
        """Remember that ``instance`` has a copy of the machine's identity. A machine that is not paired is ignored."""

        def remember(peers: dict[str, Peer]) -> None:
            known = peers.get(node_id)
            if known is not None and instance not in known.copies:
                copies = [*known.copies, instance][-MAX_COPIES:]
                peers[node_id] = msgspec.structs.replace(known, copies=copies)

        self._change(remember)

    def rename(self, node_id: str, name: str) -> bool:
        """Keep the machine's current ``name``. Returns whether it is new. An empty name or an unpaired machine is
        ignored."""
        tidy = clean_name(name)
        known = self.get(node_id)
        if known is None or not tidy or known.name == tidy:
            return False

        def rename(peers: dict[str, Peer]) -> None:
            if node_id in peers:
                peers[node_id] = msgspec.structs.replace(peers[node_id], name=tidy, former_name=peers[node_id].name)

        self._change(rename)
        return True

    def forget(self, node_id: str) -> Peer:
        """Stop trusting a machine. Raises PeersError if it is not paired."""
        known = self.get(node_id)
        if known is None:
            raise PeersError(f"{short(node_id)} is not a paired machine.")
        self._change(lambda peers: peers.pop(node_id, None))
        return known

    def take_notices(self) -> list[str]:
        """Notices to be shown once: a damaged file that was put aside."""
        with self._mutex:
            notices, self._notices = self._notices, []
            return notices

    def _change(self, change: Callable[[dict[str, Peer]], object]) -> None:
        try:
            with self._mutex, locked(self._folder / _LOCK):
                self._refresh(always=True)
                peers = dict(self._peers)
                change(peers)
                content = msgspec.json.encode(_PeersDocument(format=_FORMAT, peers=list(peers.values())))
                write_private(self._path, msgspec.json.format(content, indent=2))
                self._peers, self._stamp = peers, _stamp(self._path)
        except OSError as error:
            raise PeersError(
                f"The paired machines cannot be written to {self._path} ({error.strerror or error}): make room, or "
                "make the folder writable."
            ) from error

    def _refresh(self, always: bool = False) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp and not always:
            return
        self._peers, self._stamp = {}, stamp
        if stamp is None:
            return
        try:
            content = self._path.read_bytes() if stamp[-1] <= _MAX_FILE else b""
            file = msgspec.json.decode(content, type=_PeersDocument)
            sound = file.format == _FORMAT
        except FileNotFoundError:  # put aside by another process a moment ago
            self._stamp = None
            return
        except OSError as error:
            self._stamp = None
            raise PeersError(
                f"The paired machines in {self._path} cannot be read ({error.strerror or error}): let yourself read it."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            sound = False
        if sound:
            self._take(file.peers)
            return
        self._stamp = None
        try:
            aside = put_aside(self._path)
        except FileNotFoundError:  # by another process, a moment ago
            return
        self._notices.append(f"The list of paired machines was damaged (now {aside}): pair them again.")

    def _take(self, peers: list[Peer]) -> None:
        """The ``peers`` whose certificates TLS libraries can read. An unreadable one would keep the others out."""
        keys: set[bytes] = set()
        for peer in peers:
            key = certificates.public_key_of(peer.certificate_pem.encode()) if _is_sound(peer) else b""
            if key and key not in keys:
                keys.add(key)
                self._peers[peer.node_id] = peer
                continue
            name = clean_name(peer.name) or short(clean_name(peer.node_id))
            notice = f"The certificate of {name} cannot be used: {name} is not trusted until it is paired again."
            if notice not in self._left_out:
                self._left_out.add(notice)
                self._notices.append(notice)


class PeersWatch:
    """Calls ``on_forgotten(node_id)`` soon after a peer was forgotten, by this process or another, until closed."""

    def __init__(self, peers: PeersFile, on_forgotten: Callable[[str], None], seconds: float = 0.25) -> None:
        self._peers = peers
        self._on_forgotten = on_forgotten
        self._seconds = seconds
        self._known = {peer.node_id for peer in peers.all()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                now = {peer.node_id for peer in self._peers.all()}
            except PeersError:  # not readable at this moment: whoever acts on the file is told, here nothing changes
                continue
            for node_id in sorted(self._known - now):
                self._on_forgotten(node_id)
            self._known = now


def new_peer(certificate_der: bytes, name: str, address: str = "") -> Peer:
    """A newly paired machine. Raises CertificateError."""
    return Peer(
        node_id=certificates.fingerprint(certificate_der),
        certificate_pem=certificates.pem_of(certificate_der).decode(),
        name=clean_name(name),
        paired_at=time.time(),
        addresses=[address] if address else [],
    )


def _is_sound(peer: Peer) -> bool:
    """Whether the certificate belongs to the node, has our form, and can be read by the ssl module."""
    pem = peer.certificate_pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem)
        sound = certificates.fingerprint(certificates.der_of(pem.encode())) == peer.node_id
    except (certificates.CertificateError, ValueError, OSError):  # ssl.SSLError is an OSError
        return False
    return sound and context.cert_store_stats()["x509"] == 1


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        facts = os.stat(path)  # noqa: PTH116  (one call, in a loop that polls)
    except FileNotFoundError:
        return None
    return (facts.st_ino, facts.st_mtime_ns, facts.st_size)


def _distinct(peer: Peer, among: list[Peer]) -> str:
    """The shortest unique beginning of its id, of at least 8 digits."""
    for length in range(8, len(peer.node_id)):
        start = peer.node_id[:length]
        if not any(other is not peer and other.node_id.startswith(start) for other in among):
            return start
    return peer.node_id
