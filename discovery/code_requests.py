"""A pairing code requested by another process of the same account.

``peers code`` and the ``join`` that shows the code share only the folder, which only this account can use. Whoever can
write there can read the private key as well, so this opens no new way in.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from discovery.errors import PeersError
from discovery.storage import write_private

FRESH_S = 10.0
"""Seconds after which a question counts as left behind by a process that no longer waits."""
_LOOK_S = 0.05
_MOST_BYTES = 64 * 1024
_ASKED = "code-asked.json"
_TAKEN = "code-taken.json"
_SHOWN = "code-shown.json"

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _Asked(msgspec.Struct, frozen=True):
    nonce: str
    at: float


class ShownCode(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the ``code`` that can be typed now, for how long and how often, and where."""

    nonce: str
    code: str
    seconds: int
    tries: int
    name: str
    listening: list[str]


class CodeRequests:
    """The side that shows codes. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answered = False

    def take(self) -> str | None:
        """The nonce of a waiting question, if there is one. It is answered once, by one process."""
        asked = self._folder / _ASKED
        if not asked.exists():
            return None
        taken = self._folder / _TAKEN
        try:
            asked.replace(taken)
            question = _read(taken, _Asked)
            taken.unlink(missing_ok=True)
        except OSError:  # another process was faster
            return None
        fresh = question is not None and abs(time.time() - question.at) <= FRESH_S
        return question.nonce if question is not None and fresh else None

    def answer(self, shown: ShownCode) -> None:
        """Write the answer. If the folder cannot be written, the code is still shown on this side."""
        with contextlib.suppress(OSError):
            write_private(self._folder / _SHOWN, msgspec.json.encode(shown))
            self._answered = True

    def tidy(self) -> None:
        """Delete an answer that nobody fetched, because its code is no longer valid."""
        if self._answered:
            self._answered = False
            with contextlib.suppress(OSError):
                (self._folder / _SHOWN).unlink(missing_ok=True)


def ask_for_code(folder: Path, seconds: float = FRESH_S / 2) -> ShownCode | None:
    """Have the process that lends this machine show a new code; None if none answers within ``seconds``.

    Raises PeersError if ``folder`` cannot be written.
    """
    question = _Asked(secrets.token_hex(16), time.time())
    try:
        write_private(folder / _ASKED, msgspec.json.encode(question))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = _read(folder / _SHOWN, ShownCode)
            if found is not None and found.nonce == question.nonce:
                (folder / _SHOWN).unlink(missing_ok=True)
                return found
            time.sleep(_LOOK_S)
        (folder / _ASKED).unlink(missing_ok=True)
    except OSError as error:
        raise PeersError(
            f"No code can be asked for in {folder} ({error.strerror or error}): make the folder writable."
        ) from error
    return None


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    """The content; None if the file is absent or holds something else."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=kind)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
