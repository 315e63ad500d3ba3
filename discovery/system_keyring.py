"""The system's keyring, with a timeout: a locked one may wait for a dialogue that nobody sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

SECONDS = 10.0
_SAFE_PRIORITY = 1.0
"""Lowest accepted priority of a backend. keyring gives its own encrypted backends at least this; plain files and the
refusing backend have less."""

T = TypeVar("T")


class KeyringUnavailable(Exception):
    """Raised if there is no keyring, or if it does not answer. The text says which."""


def store_secret(service: str, account: str, secret: str, seconds: float | None = None) -> None:
    """Store the secret and read it back. Raises KeyringUnavailable."""

    def store() -> bool:
        backend = _backend()
        backend.set_password(service, account, secret)
        return backend.get_password(service, account) == secret

    if not _within(seconds, store):
        raise KeyringUnavailable("the system's keyring does not keep what it is given")


def read_secret(service: str, account: str, seconds: float | None = None) -> str | None:
    """The secret, or None if the keyring works and has none. Raises KeyringUnavailable."""
    return _within(seconds, lambda: _backend().get_password(service, account))


def delete_secret(service: str, account: str, seconds: float | None = None) -> None:
    """Delete the secret if there is one. Raises KeyringUnavailable."""

    def delete() -> None:
        backend = _backend()
        if backend.get_password(service, account) is not None:
            backend.delete_password(service, account)

    _within(seconds, delete)


def _backend() -> KeyringBackend:
    import keyring

    backend = keyring.get_keyring()
    if backend.priority < _SAFE_PRIORITY:
        raise KeyringUnavailable("this system has no keyring")
    return backend


def _within(limit: float | None, work: Callable[[], T]) -> T:
    """Run ``work`` in a separate thread. A hanging thread is left behind, because it cannot be ended from outside."""
    seconds = SECONDS if limit is None else limit
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as failure:  # backends raise whatever their system's library raises
            failures.append(failure)

    thread = threading.Thread(target=run, name="keyring", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if not failures:
        raise KeyringUnavailable(f"the system's keyring did not answer within {seconds:.0f} s")
    failure = failures[0]
    if isinstance(failure, KeyringUnavailable):
        raise failure
    raise KeyringUnavailable(f"the system's keyring failed ({type(failure).__name__}: {failure})") from failure
