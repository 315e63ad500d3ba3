"""A file with the contents of a cache row: a header, the arrays, and a checksum of both.

It contains no code, and nothing in it is trusted before its checksum matches. Sizes are checked against the file's own
size before memory is allocated.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.models.store.prefix_files import part_of
from engine.runtimes.protocol import Bytes, LoadedModel, Logits, RowArray, RowPart, TokenRows, as_bytes
from engine.session.kept_rows import CachedRow, reusable_length
from engine.session.origins import Origins

MAGIC = b"PLLMPFX3"
"""Beginning of every file. Its last character is the version of the format."""

HEADER_LIMIT = 64 * 1024 * 1024
"""Maximum bytes of a header, which has about six per token."""

_BLOCK = 4 * 1024 * 1024
"""Bytes read or written between two checks whether to stop."""
_DIGEST_BYTES = 32
_LOGITS = "logits"
_LENGTH = struct.Struct("<I")


class WrongPrefixError(Exception):
    """Raised for a file that cannot be used. The text says why, in a few words."""


class StoppedError(Exception):
    """Raised if reading or writing was stopped before its end."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The header as stored. ``tokens`` are 32-bit numbers; runs are those of Origins."""

    model: str
    tokens: bytes
    runs: list[int]
    known: int
    """Number of tokens after which the logits are stored; 0: they are not."""
    begun: int
    """Number of tokens up to the last checkpoint; 0: there is none."""
    can_truncate: bool
    shortest_cut: int = 0
    """Smallest number of tokens to which a row that can be truncated can be cut back."""
    parts: list[RowPart]


class StoredPrefix:
    """A checked header: it describes the file's contents, if the checksum is right."""

    def __init__(self, path: Path, fields: _Fields) -> None:
        """Check the header. Raises WrongPrefixError."""
        self.path = path
        self.tokens: NDArray[np.int32] = np.frombuffer(fields.tokens, np.dtype("<i4"))
        self.origins = _sequence(fields.runs)
        self.fields = fields
        if not len(self.tokens) or self.origins.length != len(self.tokens):
            raise WrongPrefixError("its tokens were neither read nor written")
        if not 0 <= fields.known <= len(self.tokens) or not 0 <= fields.begun <= len(self.tokens):
            raise WrongPrefixError("it knows more than it holds")
        named = bool(fields.parts) and fields.parts[-1].name == _LOGITS
        if named != bool(fields.known):
            raise WrongPrefixError("its logits are of no prompt")

    def shared(self, prompt: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning that the file and ``prompt`` have in common."""
        length = min(len(prompt), len(self.tokens))
        different = np.flatnonzero(self.tokens[:length] != prompt[:length])
        return int(different[0]) if len(different) else length

    def reusable(self, prompt: NDArray[np.int32], wanted: Origins | None) -> int:
        """Tokens of ``prompt`` that the file can supply; see :meth:`engine.session.kept_rows.CachedRow.reusable`."""
        return reusable_length(
            len(prompt),
            self.shared(prompt),
            self.origins,
            wanted,
            known_length=self.fields.known,
            shortest_cut=self.fields.shortest_cut if self.fields.can_truncate else len(self.tokens),
            checkpoints=[self.fields.begun],
        )


def open_prefix(path: Path, model: str, vocabulary: int) -> StoredPrefix:
    """The header of the file at ``path``, which must be of the model with this identity. Raises WrongPrefixError,
    OSError."""
    with _opened(path) as file:
        return _header(file, path, model, vocabulary, lambda data: None)


def read_prefix(path: Path, identity: str, model: LoadedModel, should_stop: Callable[[], bool]) -> CachedRow:
    """The row in the file at ``path``. Raises WrongPrefixError, OSError, StoppedError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    vocabulary = model.facts.vocabulary
    with _opened(path) as file:
        header = _header(file, path, identity, vocabulary, digest.update)
        fields = header.fields

        def fill(place: Bytes) -> None:
            for begin in range(0, len(place), _BLOCK):
                if should_stop():
                    raise StoppedError
                block = place[begin : begin + _BLOCK]
                if file.readinto(block.data) != len(block):
                    raise WrongPrefixError("it is shorter than it says")
                digest.update(block.data)

        parts = fields.parts[:-1] if fields.known else fields.parts
        try:
            rows, saved = model.restored(len(header.tokens), fields.begun, parts, fill)
        except ValueError as error:
            raise WrongPrefixError(str(error)) from error
        last_logits: tuple[int, Logits] | None = None
        if fields.known:
            if fields.parts[-1] != RowPart(_LOGITS, "float32", (vocabulary,)):
                raise WrongPrefixError("its logits are not of this vocabulary")
            logits = np.empty(vocabulary, np.float32)
            fill(logits.view(np.uint8))
            last_logits = fields.known, logits
        if file.read(_DIGEST_BYTES + 1) != digest.digest():
            raise WrongPrefixError("its checksum is wrong")
    tokens = header.tokens.tolist()
    return CachedRow(rows, tokens, header.origins, last_logits, () if saved is None else (saved,))


def stored_bytes(row: CachedRow) -> int:
    """Approximate bytes of a file with ``row``; 0 if its runtime cannot export its contents."""
    contents = _contents(row)
    return 0 if contents is None else sum(array.part.nbytes for array in contents) + 8 * len(row.tokens) + 4096


def write_prefix(path: Path, identity: str, row: CachedRow, should_stop: Callable[[], bool]) -> Path:
    """Write the contents of ``row`` to a temporary file beside ``path``, which the caller renames. Returns its path.

    Raises OSError, StoppedError; then no file is left.
    """
    contents = _contents(row)
    assert contents is not None and row.rows is not None
    saved = _checkpoint(row)
    header = msgspec.msgpack.encode(
        _Fields(
            model=identity,
            tokens=np.array(row.tokens, "<i4").tobytes(),
            runs=list(row.origins.runs),
            known=0 if row.known is None else row.known[0],
            begun=0 if saved is None else saved.length,
            can_truncate=row.rows.can_truncate,
            shortest_cut=row.rows.shortest_cut,
            parts=[array.part for array in contents],
        )
    )
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    part = part_of(path)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:

            def write(data: memoryview) -> None:
                for begin in range(0, len(data), _BLOCK):
                    if should_stop():
                        raise StoppedError
                    block = data[begin : begin + _BLOCK]
                    digest.update(block)
                    _write_all(file, block)

            write(memoryview(MAGIC + _LENGTH.pack(len(header)) + header))
            for array in contents:
                write(array.read().data)
            _write_all(file, memoryview(digest.digest()))
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return part


def _checkpoint(row: CachedRow) -> TokenRows | None:
    """The checkpoint that a file with ``row`` holds."""
    return row.checkpoints[-1] if row.checkpoints else None


def _contents(row: CachedRow) -> list[RowArray] | None:
    """The arrays of a file with ``row``."""
    assert row.rows is not None
    contents = row.rows.contents(_checkpoint(row))
    if contents is None or row.known is None:
        return None if contents is None else list(contents)
    return [*contents, RowArray.of(_LOGITS, row.known[1], as_bytes)]


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _opened(path: Path) -> io.BufferedReader:
    """The file at ``path``, opened, if this program wrote it for this person. Raises WrongPrefixError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        os.close(descriptor)
        raise WrongPrefixError("it is no file that only its owner can read")
    return os.fdopen(descriptor, "rb")


def _header(
    file: io.BufferedReader, path: Path, identity: str, vocabulary: int, seen: Callable[[bytes], None]
) -> StoredPrefix:
    """The header at the beginning of ``file``. Its bytes are passed to ``seen``. Raises WrongPrefixError, OSError."""
    size = os.fstat(file.fileno()).st_size
    begin = file.read(len(MAGIC) + _LENGTH.size)
    if len(begin) != len(MAGIC) + _LENGTH.size or not begin.startswith(MAGIC):
        raise WrongPrefixError("it is of another kind or version")
    (length,) = _LENGTH.unpack(begin[len(MAGIC) :])
    if length > min(HEADER_LIMIT, size):
        raise WrongPrefixError(f"its header has {length} bytes")
    header = file.read(length)
    seen(begin + header)
    try:
        fields = msgspec.msgpack.decode(header, type=_Fields)
        payload = sum(part.nbytes for part in fields.parts)
        if len(fields.tokens) % 4:
            raise ValueError("its tokens are cut off")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WrongPrefixError(f"its header is damaged: {str(error)[:100]}") from error
    if fields.model != identity:
        raise WrongPrefixError("it is of another model")
    if len(begin) + length + payload + _DIGEST_BYTES != size:
        raise WrongPrefixError("its size is not what it says")
    found = StoredPrefix(path, fields)
    if found.tokens.min() < 0 or found.tokens.max() >= vocabulary:
        raise WrongPrefixError("its tokens are not of this vocabulary")
    return found


def _sequence(runs: Sequence[int]) -> Origins:
    """The sequence of ``runs``. Raises WrongPrefixError."""
    follow = any((left < 0) == (right < 0) for left, right in itertools.pairwise(runs))
    if follow or not all(0 < abs(run) < 2**31 for run in runs):
        raise WrongPrefixError("its tokens cannot have been read and written so")
    return Origins(runs)
