"""Prefixes kept on disk between runs, within a limit: the choice of one that helps a prompt, and of those to write.

Files of all models share the limit. A file is written while no question waits, and appears when it is complete. No file
is ever needed: if anything is wrong with it, the prompt is run without it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from engine.ipc.messages import Load, ModelFacts
from engine.models.store.prefix_files import (
    PrefixFile,
    is_owner,
    new_path,
    prefix_files,
    remove_abandoned,
    remove_file,
    remove_prefixes,
)
from engine.moe.kernels.bindings import path as kernels_path
from engine.planning.units import byte_size
from engine.runtimes.model_headers import weight_stamps
from engine.runtimes.protocol import LoadedModel
from engine.session.kept_rows import CachedRow
from engine.session.origins import Origins
from engine.session.stored_prefix import (
    StoppedError,
    StoredPrefix,
    WrongPrefixError,
    open_prefix,
    read_prefix,
    stored_bytes,
    write_prefix,
)

LEAST_TOKENS = 32
"""Number of tokens by which a file must exceed memory to be read, and the previous file to be written."""

GROWTH = 8
"""Divisor of a file's tokens: the part by which a row must grow before it is written again between questions. The bytes
written for a conversation are then about ten times its size at most, however long it becomes."""

MOST_FILES = 256
"""Maximum number of files. Their names are examined for every prompt."""


class DiskPrefixes:
    """The files of one loaded model. Only :meth:`forget` is thread-safe.

    ``identity`` covers the model and everything else on which the bits of keys and values depend, 64 hexadecimal
    digits. ``limit`` is the maximum of bytes of all files together. ``memory`` gives the bytes that a row may take.
    """

    def __init__(self, model: LoadedModel, identity: str, limit: int, memory: Callable[[], int]) -> None:
        self._model = model
        self._identity = identity
        self._key = identity[:16]
        self._limit = limit
        self._memory = memory
        self._headers: dict[Path, tuple[int, StoredPrefix]] = {}
        """Headers that were read, with their files' sizes in bytes."""
        self._lock = threading.Lock()
        self._forgotten: set[str] = set()
        self._refused = False
        remove_abandoned()

    # --- reading --------------------------------------------------------------------------------------------------

    def better(
        self, prompt: Sequence[int], wanted: Origins | None, reusable: int, should_stop: Callable[[], bool]
    ) -> CachedRow | None:
        """The row on disk with most to reuse for ``prompt``, if that is clearly more than ``reusable`` tokens.

        ``wanted``: the origins that the prompt's tokens must have; None: any.
        """
        tokens = np.array(prompt, np.int32)
        found = [(header.reusable(tokens, wanted), owner, header) for owner, header in self._known()]
        for reused, owner, header in sorted(found, key=lambda each: -each[0]):
            if reused < reusable + LEAST_TOKENS:
                break
            if sum(part.nbytes for part in header.fields.parts) > self._memory():
                continue
            try:
                row = read_prefix(header.path, self._identity, self._model, should_stop)
            except StoppedError:
                return None
            except (WrongPrefixError, OSError) as error:
                self._discard(header.path, error)
                continue
            with suppress(OSError):
                os.utime(header.path)
            row.owner, row.path, row.on_disk = owner, header.path, len(row.tokens)
            return row
        return None

    def discard(self, row: CachedRow) -> None:
        """Remove the file of a row that could not be used."""
        if row.path is not None:
            self._discard(row.path, WrongPrefixError("its keys and values do not fit the model"))

    def _known(self) -> list[tuple[str, StoredPrefix]]:
        """The owners and headers of the model's files."""
        files = prefix_files(self._key)
        there = {file.path for file in files}
        self._headers = {path: header for path, header in self._headers.items() if path in there}
        headers = []
        for file in files:
            header = self._header(file)
            if header is not None:
                headers.append((file.owner, header))
        return headers

    def _header(self, file: PrefixFile) -> StoredPrefix | None:
        size, header = self._headers.get(file.path, (-1, None))
        if header is not None and size == file.nbytes:
            return header
        try:
            header = open_prefix(file.path, self._identity, self._model.facts.vocabulary)
        except FileNotFoundError:
            return None
        except (WrongPrefixError, OSError) as error:
            self._discard(file.path, error)
            return None
        self._headers[file.path] = file.nbytes, header
        return header

    def _discard(self, path: Path, error: Exception) -> None:
        why = getattr(error, "strerror", None) or error
        sys.stderr.write(f"The kept prefix {path.name} cannot be used and is removed: {why}.\n")
        self._headers.pop(path, None)
        remove_file(path)

    # --- writing --------------------------------------------------------------------------------------------------

    def due(self, row: CachedRow, *, last: bool) -> bool:
        """Whether ``row`` has grown enough to be written again. ``last``: this is the last chance to write it."""
        if row.rows is None or not is_owner(row.owner):
            return False
        grown = len(row.tokens) - row.on_disk
        if grown < (LEAST_TOKENS if last else max(LEAST_TOKENS, row.on_disk // GROWTH)):
            return False
        # The ids of a picture's tokens mean nothing to another process.
        return min(row.tokens) >= 0

    def write(self, row: CachedRow, should_stop: Callable[[], bool]) -> str:
        """Write ``row``, and remove the least recently used files to keep the limit.

        Returns a sentence for the person the first time that the disk refuses; otherwise an empty string.
        """
        nbytes = stored_bytes(row)
        row.on_disk = len(row.tokens) if not 0 < nbytes <= self._limit else row.on_disk
        if not 0 < nbytes <= self._limit:
            return ""
        try:
            path = row.path or new_path(row.owner, self._key)
            self._make_room(nbytes, path)
            part = write_prefix(path, self._identity, row, lambda: should_stop() or row.owner in self._forgotten)
            with self._lock:
                if row.owner in self._forgotten:
                    remove_file(part)
                    return ""
                part.replace(path)
        except StoppedError:
            return ""
        except OSError as error:
            return self._refuse(row, error, nbytes)
        row.path, row.on_disk = path, len(row.tokens)
        self._refused = False
        self._remove_contained(row)
        return ""

    def _refuse(self, row: CachedRow, error: OSError, nbytes: int) -> str:
        # It is tried again when the row has grown.
        row.on_disk = len(row.tokens)
        said, self._refused = self._refused, True
        if said:
            return ""
        return (
            f"What the model has read ({byte_size(nbytes)}) cannot be kept on disk: {error.strerror or error}; answers "
            "are not affected. Free some space, or set “Kept on disk” to 0."
        )

    def _make_room(self, nbytes: int, path: Path) -> None:
        """Remove the least recently used files until ``nbytes`` more fit, in place of the file at ``path``."""
        files = [file for file in prefix_files() if file.path != path]
        total = sum(file.nbytes for file in files)
        while files and (total + nbytes > self._limit or len(files) >= MOST_FILES):
            total -= files[-1].nbytes
            remove_file(files.pop().path)

    def _remove_contained(self, row: CachedRow) -> None:
        """Remove the other files of the row's owner that contain only a beginning of it."""
        tokens = np.array(row.tokens, np.int32)
        for owner, header in self._known():
            if owner == row.owner and header.path != row.path and header.shared(tokens) == len(header.tokens):
                self._headers.pop(header.path, None)
                remove_file(header.path)

    # --- forgetting -----------------------------------------------------------------------------------------------

    def forget(self, owners: Collection[str]) -> None:
        """Remove the files of ``owners``. Their rows in memory are not written again. Thread-safe."""
        with self._lock:
            self._forgotten.update(owners)
            remove_prefixes(set(owners))

    def take_forgotten(self, rows: Sequence[CachedRow]) -> None:
        """Take the owner from those of ``rows`` whose owners were forgotten."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, set()
        for row in rows:
            if row.owner in forgotten:
                row.owner, row.path, row.on_disk = "", None, 0


# --- what a kept prefix depends on -----------------------------------------------------------------------------------


_LIBRARIES = ("privatellm", "torch", "transformers", "mlx", "mlx-lm")
"""Packages whose versions are part of the identity."""


def prefix_identity(folder: Path, request: Load, facts: ModelFacts) -> str:
    """64 hexadecimal digits that identify the weights in ``folder``, this program, this machine, and how the model was
    loaded.

    Weights are identified by the names, sizes and times of their files, and by the contents of the configuration.
    """
    how = (
        facts.runtime,
        facts.device,
        facts.dtype,
        facts.trunk,
        facts.vocabulary,
        facts.key_value_bytes_per_token,
        facts.state_bytes,
        facts.policy is not None,
        request.key_values,
        request.context_limit,
    )
    kernels = kernels_path()
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        how,
        (platform.node(), platform.machine(), platform.processor()),
        [(name, _version(name)) for name in _LIBRARIES],
        None if kernels is None else hashlib.blake2b(kernels.read_bytes()).hexdigest(),
        weight_stamps(folder),
        hashlib.blake2b((folder / "config.json").read_bytes()).hexdigest(),
    ):
        digest.update(msgspec.msgpack.encode(part) + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
