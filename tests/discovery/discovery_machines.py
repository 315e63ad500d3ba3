"""What the tests of this folder share: machines, a keyring in memory, a machine that shows codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import keyring.backend
import keyring.errors

from discovery.identity import Identity, load_identity
from discovery.link_listener import LinkListener
from discovery.pairing_service import PairingService
from discovery.peers import Peer, PeersFile


class MemoryKeyring(keyring.backend.KeyringBackend):
    """A keyring that works, in memory."""

    priority = 5

    def __init__(self) -> None:
        super().__init__()
        self.secrets: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.secrets.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.secrets[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        if self.secrets.pop((service, username), None) is None:
            raise keyring.errors.PasswordDeleteError(username)


@dataclass
class Machine:
    """A machine of a test: its folder and what is in it."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self.identity: Identity = load_identity(self.folder)
        self.peers = PeersFile(self.folder)

    def as_peer(self) -> Peer:
        return Peer(
            node_id=self.identity.node_id,
            certificate_pem=self.identity.certificate_pem.decode(),
            name=self.name,
            paired_at=1.0,
        )


@dataclass
class Shower:
    """A machine that shows codes behind a live listener."""

    machine: Machine
    listener: LinkListener
    service: PairingService
    paired: list[Peer]
    failed: list[tuple[str, int]]
    now: list[float]
