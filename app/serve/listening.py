"""The address of the server, and its socket."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from app.serve.gate import hash_of
from discovery.identity import KEYRING_SERVICE
from discovery.storage import write_private
from discovery.system_keyring import KeyringUnavailable, read_secret, store_secret

USUAL_PORT = 8777
"""Port where none is given."""
_BACKLOG = 128
_SEND_MS = 60_000
"""Milliseconds after which a connection ends whose other side does not take what is sent."""


class ListenProblem(Exception):
    """The address cannot be used. The text is one sentence."""


@dataclass(frozen=True)
class ListenAddress:
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def url(self, *, tls: bool) -> str:
        """The base URL for clients. For all interfaces it has this machine's own name."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if tls else ''}://{host}:{self.port}/v1"


def parse_address(text: str) -> ListenAddress:
    """``HOST:PORT``, ``HOST``, ``:PORT`` or ``PORT``. Raises ListenProblem."""
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, port = text, ""
    elif not colon:
        host, port = ("", text) if text.isdecimal() else (text, "")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if port and not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ListenProblem(f"--listen takes HOST:PORT with a port below 65536, not {text[:100]!r}.")
    return ListenAddress(host, int(port) if port else USUAL_PORT)


def listen(address: ListenAddress) -> socket.socket:
    """A listening socket. Raises ListenProblem."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{address.host}:{address.port}"
        if error.errno == errno.EADDRINUSE:
            raise ListenProblem(
                f"Port {address.port} is in use: choose another with --listen {address.host}:PORT, or see "
                "`privatellm serve --status`."
            ) from error
        if error.errno == errno.EACCES:
            raise ListenProblem(f"{where} may not be used: take a port above 1023.") from error
        why = (error.strerror or str(error)).partition(" (")[0]
        raise ListenProblem(f"{where} cannot be listened on ({why}): give an address of this machine.") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit it: one whose client has vanished, or never reads, does not stay.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SEND_MS)
    return sock


# --- the clients' key ------------------------------------------------------------------------------------------------


_FILE = "serve-key.sha256"
_BEGINNING = "privatellm-"
_BYTES = 32


class KeyProblem(Exception):
    """The key cannot be kept or read. The text is one sentence."""


def new_key(folder: Path) -> tuple[str, str]:
    """A new key instead of the former one, and where its hash is kept, in words. Raises KeyProblem."""
    key = _BEGINNING + secrets.token_urlsafe(_BYTES)
    file = folder / _FILE
    try:
        try:
            store_secret(KEYRING_SERVICE, _account(folder), hash_of(key))
            file.unlink(missing_ok=True)
            return key, "the system's keyring"
        except KeyringUnavailable:
            write_private(file, hash_of(key).encode())
            return key, f"the file {file}"
    except OSError as error:
        raise KeyProblem(f"The key cannot be kept in {folder} ({error.strerror or error}).") from error


def kept_hash(folder: Path) -> str:
    """The hash of the key; empty if none was made. Raises KeyProblem if the keyring does not answer."""
    try:
        return (folder / _FILE).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise KeyProblem(f"{folder / _FILE} cannot be read: run `privatellm serve --new-key`.") from error
    try:
        return read_secret(KEYRING_SERVICE, _account(folder)) or ""
    except KeyringUnavailable:
        return ""


def _account(folder: Path) -> str:
    return f"serve {folder.resolve()}"
