"""Downloads of files: resumable and checked."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import Cancelled, ModelError
from engine.models.folders import model_folder
from engine.models.formats.json_files import SMALL_FILE, read_object, read_text
from engine.planning.units import byte_size
from engine.system.durable_files import flush, new_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx2

    from engine.ipc.progress import ProgressCallback
    from engine.models.store.hub import RemoteFile

StopCheck = Callable[[], bool] | None
"""Function that is called now and then and returns True to stop; None if the download cannot be stopped."""

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to pause after each failure without any progress in between. After the last one the download fails, and can
be resumed."""

STOP_INTERVAL_S = 0.05
"""Seconds between two checks whether to stop while waiting for the network."""

RANGES = 4
"""Number of ranges of a large file that are received at once, each over a connection of its own. A hub limits the speed
of each connection rather than that of all."""
LARGE = 64 << 20
"""Number of missing bytes from which a file is received in ranges."""

_CHUNK = 1 << 20
_REPORT_S = 0.1
"""Seconds between two reports of a file that is received in ranges."""
_JOURNAL = "verified.json"


@dataclass
class Download:
    """Downloads the files of ``what`` (a repository, for messages) into ``folder``.

    ``url_of(name)`` is the address of a file. ``raise_for_status`` raises ModelError with a line for a refusal.
    """

    client: httpx2.Client
    what: str
    url_of: Callable[[str], str]
    raise_for_status: Callable[[httpx2.Response], None]
    folder: Path
    progress: ProgressCallback
    should_stop: StopCheck
    done: int = 0
    total: int = 0
    unlock: Callable[[httpx2.Response], bool] = lambda response: False
    """Whether a refused request may be tried again, in another way."""

    def fetch(self, files: list[RemoteFile], total: int) -> None:
        """Bring all ``files`` into the folder, verified. Raises ModelError, Cancelled, OSError."""
        verified = _read_journal(self.folder)
        missing = [file for file in files if not _is_there(self.folder, file, verified)]
        parts = [(_part(self.folder, file), file.size) for file in missing]
        have = sum(bytes_here(part, size) for part, size in parts if part.exists())
        self.total, self.done = total, total - sum(file.size for file in missing)
        model_folder.check_space(self.folder, sum(file.size for file in missing) - have, f"Downloading {self.what}")
        for file in missing:
            self._fetch_one(file)
            verified[file.name] = file.digest
            write_json(self.folder / _JOURNAL, verified)

    def beginning(self, file: RemoteFile, nbytes: int) -> bytes:
        """The first ``nbytes`` of ``file``, or all of a shorter one. :meth:`fetch` goes on where they end.

        Raises ModelError, Cancelled, OSError.
        """
        source = self.folder / file.name
        if not _is_there(self.folder, file, _read_journal(self.folder)):
            source = self._begun(file)
            keep_beginning(source, file.size)
            self.total = self.done = 0
            self._receive_all(source, file, min(nbytes, file.size))
        with source.open("rb") as begun:
            return begun.read(nbytes)

    def _begun(self, file: RemoteFile) -> Path:
        """What is here of ``file``, which may be nothing yet."""
        part = _part(self.folder, file)
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        part.touch()
        return part

    def _fetch_one(self, file: RemoteFile) -> None:
        from engine.models.store import hub

        part = self._begun(file)
        if is_in_ranges(part, file.size) or file.size - part.stat().st_size >= LARGE:
            try:
                self._receive_in_ranges(part, file)
            except _NoRanges:
                keep_beginning(part, file.size)
        self._receive_all(part, file, file.size)
        if file.size >= 64 << 20:
            self.progress(f"checking {file.name}", self.done + file.size, self.total, "bytes")
        found = hub.digest_of(part, file.digest, self._check_stop)
        if found != file.digest:
            part.unlink()
            raise ModelError(
                f"{file.name} of {self.what} arrived damaged ({found[:19]}… instead of {file.digest[:19]}…) "
                f"and was deleted; run the download again.",
                "network",
            )
        part.replace(self.folder / file.name)
        self.done += file.size

    def _receive_all(self, part: Path, file: RemoteFile, end: int) -> None:
        """Have at least the first ``end`` bytes of ``file`` in ``part``."""
        self._persist(lambda: self._receive(part, file, part.stat().st_size, end), lambda: part.stat().st_size, end)

    def _receive_in_ranges(self, part: Path, file: RemoteFile) -> None:
        """Have all of ``file`` in ``part``, received in several ranges at once, or as much as was here when it failed.

        Raises _NoRanges if the server sends no ranges.
        """
        ended = threading.Event()
        stop = self.should_stop or (lambda: False)
        # What it asks of the person's side is asked by this thread only.
        worker = replace(self, progress=_report_nothing, should_stop=lambda: ended.is_set() or stop())
        partial = PartialFile(part, file.size, RANGES)

        def receive(wanted: Range) -> None:
            # While any range goes on, one that does not is asked for again.
            worker._persist(
                lambda: worker._receive_range(partial, file, wanted),
                lambda: file.size if wanted.have == wanted.end else partial.have,
                file.size,
            )

        try:
            self._report(file, partial.have)
            with ThreadPoolExecutor(RANGES, "download") as pool:
                waiting = {pool.submit(receive, wanted) for wanted in partial.ranges if wanted.have < wanted.end}
                try:
                    while waiting:
                        done, waiting = wait(waiting, _REPORT_S, FIRST_EXCEPTION)
                        for future in done:
                            future.result()
                        self._report(file, partial.have)
                finally:
                    ended.set()
        finally:
            partial.close()

    def _receive_range(self, partial: PartialFile, file: RemoteFile, wanted: Range) -> None:
        """One request for what is missing of ``wanted``."""
        start = wanted.have
        headers = {"Range": f"bytes={start}-{wanted.end - 1}"}
        with self.client.stream("GET", self.url_of(file.name), headers=headers) as response:
            if response.status_code >= 500 or response.status_code == 429:
                raise _Busy(f"HTTP {response.status_code}")
            if response.status_code == 416:
                raise _NoRanges
            if self.unlock(response):
                return
            self.raise_for_status(response)
            if response.status_code != 206 or not response.headers.get("Content-Range", "").startswith(
                f"bytes {start}-"
            ):
                raise _NoRanges
            with self._stoppable(response):
                self._copy(response, lambda data: partial.write(wanted, data), file, start, wanted.end)

    def _persist(self, receive: Callable[[], None], have: Callable[[], int], end: int) -> None:
        """Call ``receive`` until ``have`` is ``end``, or too often without progress."""
        import httpx2

        failures = 0
        while (before := have()) < end:
            reason = "the connection was closed"
            try:
                receive()
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            except _Busy as error:
                reason = str(error)
            self._check_stop()
            if have() >= end:
                return
            failures = 0 if have() > before else failures + 1
            if failures > len(RETRY_DELAYS_S):
                raise ModelError(
                    f"The download of {self.what} broke off ({reason[:120]}); "
                    f"{byte_size(self.done + have())} are kept: run it again to go on.",
                    "network",
                )
            self._pause(RETRY_DELAYS_S[max(0, failures - 1)])

    def _receive(self, part: Path, file: RemoteFile, start: int, end: int) -> None:
        """One request for the bytes from ``start`` to ``end``, appended to ``part``."""
        last = str(end - 1) if end < file.size else ""
        headers = {"Range": f"bytes={start}-{last}"} if start or last else {}
        with self.client.stream("GET", self.url_of(file.name), headers=headers) as response:
            if response.status_code >= 500 or response.status_code == 429:
                raise _Busy(f"HTTP {response.status_code}")
            if response.status_code == 416:  # what we have is not the beginning of what the server has
                part.write_bytes(b"")
                return
            if self.unlock(response):
                return
            self.raise_for_status(response)
            resumes = response.status_code == 206
            if resumes and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                part.write_bytes(b"")
                return
            with part.open("ab" if resumes else "wb") as out, self._stoppable(response):
                self._copy(response, out.write, file, start if resumes else 0, end)
                flush(out)

    @contextlib.contextmanager
    def _stoppable(self, response: httpx2.Response) -> Iterator[None]:
        """Let the download inside be stopped although the server sends nothing."""
        stop = self.should_stop
        stream = response.extensions.get("network_stream")
        connection = stream.get_extra_info("socket") if stream is not None else None
        if stop is None or connection is None:
            yield
            return
        finished = threading.Event()

        def watch() -> None:
            while not finished.wait(STOP_INTERVAL_S):
                if stop():
                    # This wakes the reading thread; the orderly shutdown of an encrypted connection would wait for it.
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)
                    return

        watcher = threading.Thread(target=watch, name="watching for a stop", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()

    def _copy(
        self, response: httpx2.Response, write: Callable[[bytes], int], file: RemoteFile, have: int, end: int
    ) -> None:
        self._report(file, have)
        for chunk in response.iter_raw(_CHUNK):
            have += len(chunk)
            if have > file.size:
                raise ModelError(
                    f"The server sends more of {file.name} than the {file.size} bytes the hub states; the download was "
                    f"stopped.",
                    "network",
                )
            write(chunk)
            self._report(file, have)
            if end < file.size and have >= end:  # a server that ignores ranges sends everything
                return

    def _report(self, file: RemoteFile, have: int) -> None:
        if self.total:
            self.progress("downloading", self.done + have, self.total, "bytes")
        else:
            self.progress(f"looking into {file.name}", have, 0, "bytes")
        self._check_stop()

    def _check_stop(self) -> None:
        if self.should_stop is not None and self.should_stop():
            raise Cancelled(f"Stopped the download of {self.what}; pull it again to go on.")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_stop()
            time.sleep(min(STOP_INTERVAL_S, left))


class _Busy(Exception):
    """The server cannot answer now."""


class _NoRanges(Exception):
    """The server does not send the part of a file that was asked for."""


def _report_nothing(stage: str, done: int, total: int, unit: str) -> None:
    pass


def _part(folder: Path, file: RemoteFile) -> Path:
    """The path of a partial file. Its name contains the digest, so that a newer revision is not appended to an older
    one."""
    return folder / f"{file.name}.{file.digest.partition(':')[2][:12]}.part"


def _is_there(folder: Path, file: RemoteFile, verified: dict[str, str]) -> bool:
    path = folder / file.name
    return verified.get(file.name) == file.digest and path.is_file() and path.stat().st_size == file.size


def _read_journal(folder: Path) -> dict[str, str]:
    try:
        journal = read_object(folder / _JOURNAL, SMALL_FILE)
    except ModelError:
        return {}
    return {name: str(digest) for name, digest in journal.items()}


def write_json(path: Path, value: object) -> None:
    with new_file(path) as file:
        file.write(json.dumps(value, indent=2).encode())


def disk_error(error: OSError, folder: Path) -> ModelError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        free = byte_size(shutil.disk_usage(folder.parent).free)
        return ModelError(
            f"The disk of {folder.parent} is full ({free} free); make room and run it again to go on.", "disk"
        )
    return ModelError(f"Writing to {folder} failed: {error.strerror or error}.", "disk")


# --- a file that arrives in several ranges at once -------------------------------------------------------------------


_MOST_NOTE = 10_000
"""Maximum bytes of a note."""
_NOTED = 64 << 20
"""Number of bytes of a range after which it is noted how far it is."""


@dataclass
class Range:
    """Bytes of a file up to ``end``, of which those before ``have`` are here."""

    have: int
    end: int
    noted: int = 0


class _Note(msgspec.Struct):
    size: int
    ranges: list[tuple[int, int]]


class PartialFile:
    """The file at ``path`` that is to have ``size`` bytes, in at most ``most`` ranges. Raises OSError."""

    def __init__(self, path: Path, size: int, most: int) -> None:
        self._path = path
        self._size = size
        self._mutex = threading.Lock()
        noted = _ranges_noted(path, size)
        self.ranges = noted or _cut(path.stat().st_size, size, most)
        if noted is None:
            # The note comes first: a file of the whole size without one is taken for complete.
            self._write_note()
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._file, size)

    @property
    def have(self) -> int:
        """Number of bytes that are here."""
        return self._size - sum(each.end - each.have for each in self.ranges)

    def write(self, wanted: Range, data: bytes) -> int:
        """Add ``data`` to ``wanted``, of which what is beyond its end is left out. From any thread."""
        left = memoryview(data)[: wanted.end - wanted.have]
        while left:
            written = os.pwrite(self._file, left, wanted.have)
            wanted.have += written
            left = left[written:]
        if wanted.have - wanted.noted >= _NOTED:
            self.note()
        return len(data)

    def note(self) -> None:
        """Sync what is here to the disk, and note how far each range is. From any thread."""
        with self._mutex:
            reached = [each.have for each in self.ranges]
            os.fsync(self._file)
            for each, have in zip(self.ranges, reached, strict=True):
                each.noted = have
            self._write_note()

    def close(self) -> None:
        """Note what is here, of a whole file nothing, and close the file."""
        try:
            self.note()
            if self.have == self._size:
                _note_of(self._path).unlink()
        finally:
            os.close(self._file)

    def _write_note(self) -> None:
        ranges = [(each.noted, each.end) for each in self.ranges]
        with new_file(_note_of(self._path)) as file:
            file.write(msgspec.json.encode(_Note(self._size, ranges)))


def bytes_here(path: Path, size: int) -> int:
    """Number of bytes that are here of the file at ``path``, which is to have ``size``. Raises OSError."""
    ranges = _ranges_noted(path, size)
    return path.stat().st_size if ranges is None else size - sum(each.end - each.have for each in ranges)


def is_in_ranges(path: Path, size: int) -> bool:
    """Whether more of the file at ``path`` is here than its beginning, or may be."""
    return _ranges_noted(path, size) is not None


def keep_beginning(path: Path, size: int) -> None:
    """Leave of the file at ``path`` only what is here without a gap. Raises OSError."""
    ranges = _ranges_noted(path, size)
    if ranges is not None:
        os.truncate(path, ranges[0].have)
    _note_of(path).unlink(missing_ok=True)


def _cut(have: int, size: int, most: int) -> list[Range]:
    """What is missing of a file of ``size`` bytes that has the first ``have``, in ``most`` ranges of one length."""
    length = -(-(size - have) // most)
    starts = range(have, size, length)
    return [Range(start, min(start + length, size), start) for start in starts]


def _ranges_noted(path: Path, size: int) -> list[Range] | None:
    """The ranges in the note of ``path``; None if there is no note, or one of another file."""
    try:
        note = msgspec.json.decode(read_text(_note_of(path), _MOST_NOTE), type=_Note)
        here = path.stat().st_size
    except (ModelError, OSError, msgspec.DecodeError, RecursionError):
        return None
    place = note.ranges[0][0] if note.ranges else -1
    for have, end in note.ranges:
        if not place <= have <= end <= size or have > here:
            return None
        place = end
    if note.size != size or place != size:
        return None
    return [Range(have, end, have) for have, end in note.ranges]


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.ranges.part")
