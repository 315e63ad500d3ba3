"""The key that clients must present: made once, shown once. Only its hash is kept, by which it can be checked."""

from __future__ import annotations

import secrets
from pathlib import Path

from app.serve.gate import hash_of
from discovery.identity import KEYRING_SERVICE
from discovery.storage import write_private
from discovery.system_keyring import KeyringUnavailable, read_secret, store_secret

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
