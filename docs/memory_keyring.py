"""A keyring in memory, for the engines in the pictures: it stands for the system's, and is gone when they end."""

from __future__ import annotations

from typing import ClassVar

import keyring.backend
import keyring.errors


class MemoryKeyring(keyring.backend.KeyringBackend):
    """Named by PYTHON_KEYRING_BACKEND; each process has its own."""

    priority: ClassVar[float] = 5

    def __init__(self) -> None:
        super().__init__()
        self._secrets: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self._secrets.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self._secrets[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        if self._secrets.pop((service, username), None) is None:
            raise keyring.errors.PasswordDeleteError(username)
