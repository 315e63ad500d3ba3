"""The shards that a node keeps: finding what it lacks of an offer, receiving it, and freeing disk space.

Bytes are written at their places in the head's files; the rest of a file is a hole. An item counts as present once it
is on the disk, its checksum was compared, and ``share.json`` names it, in this order. A machine that dies at any moment
therefore loses at most what arrived since the manifest was last written. A loaded shard notices changes by its files'
modification times, so it must be loaded again after receiving.

Only the head vouches for the identity and the bytes of a model. Each head therefore has its own shards here: what one
head sent is used with that head only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.transfer import (
    Item,
    Offer,
    Wanted,
    check_offer,
    decode_chunk,
    expert_of,
)
from engine.cluster.weights.weight_fingerprint import ItemChecksums, is_of_tokenizer
from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders import model_folder
from engine.models.folders.shard_files import FORMAT, Begun, FileSize, ShardManifest, is_shard, read_shard, shards_in
from engine.models.folders.weight_layout import WeightLayout, config_fingerprint, layout_of
from engine.planning.units import byte_size
from engine.system.durable_files import new_file

SYNC_BYTES = 64 * 1024 * 1024
"""Bytes received between two syncs to the disk."""
RESERVE_BYTES = 64 * 1024 * 1024
"""Bytes left free on the disk."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Need:
    """The items that a node lacks of an offer.

    ``folder`` is the folder to load: the node's shard, or a whole copy of the same model that it has anyway.
    """

    folder: Path
    wanted: tuple[Wanted, ...]
    nbytes: int
    """Bytes to receive."""
    has_bytes: int
    """Bytes of the offer that are here."""
    whole: bool = False
    """Whether ``folder`` is a whole model."""


class ShardStore:
    """The shards in the folder ``models`` that the head with the node id ``head`` sent."""

    def __init__(self, models: Path, head: str) -> None:
        self._models = models
        self._head = head

    def need(self, offered: Offer, progress: ProgressCallback) -> Need:
        """Find out what of the offer is not here.

        A whole copy of the model is looked for first: its offered bytes are read once and compared. ``progress`` may
        raise Cancelled. Raises ModelError, RingProtocolError.
        """
        check_offer(offered)
        total = offered.nbytes
        for layout in self._copies(offered):
            if _agrees(layout, offered, progress):
                return Need(layout.folder, (), 0, total, whole=True)
        folder = self.folder(offered)
        wanted = missing_in(folder, offered, self._head)
        missing = sum(offered.items[want.item].nbytes - want.start for want in wanted)
        return Need(folder, wanted, missing, total - missing)

    def folder(self, offered: Offer) -> Path:
        """The folder of the offered model's shard, which may not exist yet."""
        for path, manifest in shards_in(self._models):
            if _is_of(manifest, offered, self._head):
                return path
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", offered.identity.name).strip(".-")[:60] or "model"
        said = "-".join((offered.identity.weights[:12], offered.layout[:8], self._head[:8]))
        return self._models / f"{name}--{said}{model_folder.SHARD}"

    def receive(
        self,
        offered: Offer,
        wanted: Sequence[Wanted],
        chunks: Iterable[bytes],
        progress: ProgressCallback,
        should_stop: Callable[[], bool] | None = None,
    ) -> Path:
        """Write the encoded chunks, which must be what is ``wanted`` (of :meth:`need`), in this order.

        Experts of the shard that the offer does not name are deleted if the space is needed. Returns the shard's
        folder. Received bytes are kept in any case and not requested again.

        Raises ModelError (disk, with the missing bytes), RingProtocolError for chunks that were not requested or are
        damaged, Cancelled.
        """
        check_offer(offered)
        folder = self.folder(offered)
        self._models.mkdir(parents=True, exist_ok=True, mode=0o700)
        receive_into(folder, offered, self._head, wanted, chunks, progress, should_stop, may_give_up=True)
        return folder

    @staticmethod
    def keep_only(folder: Path, held: Mapping[int, Sequence[int]]) -> int:
        """Delete the experts of a shard that ``held`` does not name. No model may have the shard loaded.

        Returns the bytes of disk that were freed, which is 0 if the file system cannot free a part of a file. Raises
        ModelError.
        """
        layout = layout_of(folder)
        manifest = read_shard(folder)
        remaining = {
            layer: tuple(expert for expert in experts if expert in held.get(layer, ()))
            for layer, experts in manifest.experts.items()
        }
        gone = [(layer, expert) for layer, experts in manifest.experts.items() for expert in experts]
        gone = [place for place in gone if place[1] not in remaining[place[0]]]
        # The manifest is written first, so that it never names what was deleted.
        _write_manifest(folder, msgspec.structs.replace(manifest, experts=remaining))
        spans = [
            (layout.files[run.file][0], run.start, run.stop) for place in gone for run in layout.experts.get(place, ())
        ]
        return punch(folder, spans)

    def _copies(self, offered: Offer) -> Iterator[WeightLayout]:
        """Whole models here with the same files and layout as the offered one."""
        for path in sorted(self._models.iterdir()) if self._models.is_dir() else ():
            if path.name.startswith(".") or not model_folder.is_complete(path):
                continue
            try:
                layout = layout_of(path)
                is_same = layout.files == offered.files and layout.fingerprint == offered.layout
            except (ModelError, OSError):
                continue
            if is_same:
                yield layout


def missing_in(folder: Path, offered: Offer, head: str) -> tuple[Wanted, ...]:
    """The items of the offer that are not in ``folder``; see :func:`receive_into`."""
    state = _ItemsOnDisk.of(folder, offered, head)
    return tuple(
        Wanted(index, state.begun_at(item)) for index, item in enumerate(offered.items) if not state.has(item.key)
    )


def receive_into(
    folder: Path,
    offered: Offer,
    head: str,
    wanted: Sequence[Wanted],
    chunks: Iterable[bytes],
    progress: ProgressCallback,
    should_stop: Callable[[], bool] | None = None,
    *,
    may_give_up: bool = False,
) -> None:
    """Do what :meth:`ShardStore.receive` does, in ``folder``, which has or gets the manifest of a shard that ``head``
    sent.

    ``may_give_up``: experts that the offer does not name are deleted if the disk space is needed.
    """
    with model_folder.exclusive(folder):
        receiver = _Receiver(folder, offered, head, wanted, progress)
        try:
            receiver.prepare(may_give_up)
            receiver.run(chunks, should_stop or (lambda: False))
        except OSError as error:
            raise _explained(error, folder, receiver.missing) from error
        finally:
            receiver.close()


def _is_of(manifest: ShardManifest, offered: Offer, head: str) -> bool:
    """Whether the manifest is of a shard of the model that ``head`` offers."""
    same = (manifest.layout, manifest.identity.weights) == (offered.layout, offered.identity.weights)
    return same and manifest.head == head


def _agrees(layout: WeightLayout, offered: Offer, progress: ProgressCallback) -> bool:
    """Whether this whole model contains everything that is offered, as their checksums say."""
    if config_fingerprint(layout.config) != offered.identity.config:
        return False
    checksums = ItemChecksums(layout)
    settings = {path.name: path for path in layout.settings}
    total, done = offered.nbytes, 0
    try:
        for item in offered.items:
            if _checksum(item, checksums, settings, layout) != item.checksum:
                return False
            done += item.nbytes
            progress("checking the model that is here", done, total, "bytes")
    finally:
        checksums.keep()
    return True


def _checksum(item: Item, checksums: ItemChecksums, settings: Mapping[str, Path], layout: WeightLayout) -> int | None:
    kind, _, rest = item.key.partition("/")
    place = expert_of(item.key)
    if place is not None:
        return checksums.expert(*place) if place in layout.experts else None
    if kind == "setting":
        if rest not in settings:
            return None
        # Other settings may differ without changing the model. Those that change it have their own fingerprints.
        return checksums.setting(settings[rest]) if is_of_tokenizer(rest) else item.checksum
    number = int(rest)
    if kind == "header":
        return checksums.header(number) if number < len(layout.headers) else None
    return checksums.trunk(number) if number < len(layout.trunk) else None


# --- what is here -------------------------------------------------------------------------------------------------


@dataclass
class _ItemsOnDisk:
    """The items of an offered model that are on the disk."""

    offered: Offer
    head: str
    other: set[str] = field(default_factory=set)
    experts: dict[int, set[int]] = field(default_factory=dict)
    begun: Begun | None = None

    @classmethod
    def of(cls, folder: Path, offered: Offer, head: str) -> _ItemsOnDisk:
        """The state of ``folder``; empty if its shard is damaged, of another model or of another head."""
        state = cls(offered, head)
        if not is_shard(folder):
            return state
        try:
            manifest = read_shard(folder)
            whole = all((folder / file.name).stat().st_size == file.size for file in manifest.files)
        except (ModelError, OSError):
            return state
        if not _is_of(manifest, offered, head) or not whole or manifest.trunk_pieces != offered.trunk_pieces:
            return state
        state.other = set(manifest.other)
        state.experts = {layer: set(experts) for layer, experts in manifest.experts.items()}
        state.begun = manifest.begun
        for item in offered.items:
            name = item.key.removeprefix("setting/")
            if name != item.key and not _is_file_of(folder / name, item):
                state.other.discard(item.key)
        return state

    def has(self, key: str) -> bool:
        place = expert_of(key)
        return key in self.other if place is None else place[1] in self.experts.get(place[0], ())

    def add(self, key: str) -> None:
        place = expert_of(key)
        if place is None:
            self.other.add(key)
        else:
            self.experts.setdefault(place[0], set()).add(place[1])

    def begun_at(self, item: Item) -> int:
        """The bytes of an unfinished item that arrived before.

        0 if all arrived: they were not compared with the checksum, so the item is received again.
        """
        begun = self.begun
        if begun is None or begun.key != item.key or not item.runs or begun.done >= item.nbytes:
            return 0
        return begun.done

    def manifest(self) -> ShardManifest:
        return ShardManifest(
            format=FORMAT,
            identity=self.offered.identity,
            head=self.head,
            layout=self.offered.layout,
            files=tuple(FileSize(name, size) for name, size in self.offered.files),
            experts={layer: tuple(sorted(experts)) for layer, experts in sorted(self.experts.items())},
            other=tuple(sorted(self.other)),
            trunk_pieces=self.offered.trunk_pieces,
            begun=self.begun,
        )


def _is_file_of(path: Path, item: Item) -> bool:
    try:
        return zlib.crc32(path.read_bytes()) == item.checksum
    except OSError:
        return False


def _write_manifest(folder: Path, manifest: ShardManifest) -> None:
    with new_file(folder / model_folder.SHARD_MANIFEST) as file:
        file.write(msgspec.json.encode(manifest))


# --- receiving ----------------------------------------------------------------------------------------------------


class _Receiver:
    """Receives one stream into one shard."""

    def __init__(
        self, folder: Path, offered: Offer, head: str, wanted: Sequence[Wanted], progress: ProgressCallback
    ) -> None:
        self._folder = folder
        self._offered = offered
        self._wanted = list(wanted)
        self._progress = progress
        self._state = _ItemsOnDisk.of(folder, offered, head)
        self._resumed = self._state.begun
        """The item that was begun before. With another placement others may come before it."""
        self._files: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._unsynced = 0
        self._done_keys: list[str] = []
        """Keys of items that are complete and compared, but not yet synced to the disk."""
        self._total = sum(offered.items[want.item].nbytes - want.start for want in wanted)
        self._arrived = 0
        self._settled = 0
        """Bytes of received items that ``share.json`` names."""

    @property
    def missing(self) -> int:
        return self._total - self._settled

    def prepare(self, may_give_up: bool) -> None:
        """Check what is wanted, free disk space if needed, and create the sparse files. Raises ModelError."""
        for want in self._wanted:
            item = self._offered.items[want.item]
            if self._state.has(item.key) or want.start != self._state.begun_at(item):
                raise ModelError(f"{self._folder} was changed since it was looked at; form the ring again.")
        self._make_room(may_give_up)
        for folder in {(self._folder / name).parent for name, _ in self._offered.files}:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number, (name, size) in enumerate(self._offered.files):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            self._files[number] = descriptor = os.open(self._folder / name, flags, 0o600)
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
        _write_manifest(self._folder, self._state.manifest())

    def run(self, chunks: Iterable[bytes], should_stop: Callable[[], bool]) -> None:
        """Receive everything that is wanted. Raises RingProtocolError, OSError, Cancelled."""
        stream: Iterator[bytes] = iter(chunks)
        try:
            for want in self._wanted:
                self._receive_item(want, stream, should_stop)
            if next(stream, None) is not None:
                raise RingProtocolError("more weights came than were asked for")
        except BaseException:
            # Received bytes are kept, whatever ended the stream, if the disk still takes them.
            with contextlib.suppress(OSError):
                self._sync()
            raise
        self._sync()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _receive_item(self, want: Wanted, stream: Iterator[bytes], should_stop: Callable[[], bool]) -> None:
        item = self._offered.items[want.item]
        offset, checksum = want.start, 0
        if want.start and self._resumed is not None:
            checksum = self._resumed.checksum
        setting = bytearray()
        while offset < item.nbytes:
            if should_stop():
                raise Cancelled("Stopped receiving weights; what has arrived is kept.")
            data = next(stream, None)
            if data is None:
                raise ModelError(
                    f"The head stopped sending after {self._arrived} of {self._total} bytes; form the ring again, "
                    "which goes on from there."
                )
            chunk = decode_chunk(data)
            if (chunk.item, chunk.offset) != (want.item, offset) or not 0 < len(chunk.data) <= item.nbytes - offset:
                raise RingProtocolError(
                    f"byte {chunk.offset} of item {chunk.item} came, not byte {offset} of {want.item}"
                )
            if item.runs:
                self._write(item, offset, chunk.data)
            else:
                setting += chunk.data
            offset += len(chunk.data)
            checksum = zlib.crc32(chunk.data, checksum)
            self._note_arrival(item, offset, checksum, len(chunk.data))
        if checksum != item.checksum:
            self._state.begun = None
            raise RingProtocolError(f"{item.key} arrived with another checksum than was offered; form the ring again")
        if not item.runs:
            with new_file(self._folder / item.key.removeprefix("setting/")) as file:
                file.write(setting)
        self._state.begun = None
        self._done_keys.append(item.key)

    def _note_arrival(self, item: Item, done: int, checksum: int, count: int) -> None:
        self._arrived += count
        self._unsynced += count
        if item.runs:
            self._state.begun = Begun(item.key, done, checksum)
        self._progress("receiving weights", self._arrived, self._total, "bytes")
        if self._unsynced >= SYNC_BYTES:
            self._sync()

    def _write(self, item: Item, offset: int, data: bytes) -> None:
        """Write ``data``, which begins at ``offset`` of the item, to its places in the files."""
        view = memoryview(data)
        for file, start, stop in item.runs:
            if offset >= stop - start:
                offset -= stop - start
                continue
            count = min(len(view), stop - start - offset)
            _write_at(self._files[file], view[:count], start + offset)
            self._dirty.add(file)
            view, offset = view[count:], 0
            if not view:
                return

    def _sync(self) -> None:
        """Sync the files to the disk, then name the items in the manifest."""
        for file in self._dirty:
            os.fsync(self._files[file])
        self._dirty.clear()
        for key in self._done_keys:
            self._state.add(key)
        self._done_keys.clear()
        _write_manifest(self._folder, self._state.manifest())
        self._unsynced = 0
        self._settled = self._arrived

    def _make_room(self, may_give_up: bool) -> None:
        """Delete unwanted experts if the disk needs the space. Raises ModelError if the missing items still do not
        fit."""
        free = self._free()
        if self._total + RESERVE_BYTES <= free:
            return
        wanted = self._offered.held
        surplus = any(not experts <= set(wanted.get(layer, ())) for layer, experts in self._state.experts.items())
        if surplus and may_give_up and is_shard(self._folder):
            ShardStore.keep_only(self._folder, wanted)
            self._state = _ItemsOnDisk.of(self._folder, self._offered, self._state.head)
            free = self._free()
        if self._total + RESERVE_BYTES > free:
            short = self._total + RESERVE_BYTES - free
            raise ModelError(
                f"This machine's share of {self._offered.identity.name} needs another "
                f"{byte_size(self._total)} on the disk of {self._folder.parent}, which has "
                f"{byte_size(free)} free: {byte_size(short)} are missing; make room, or lend less.",
                "disk",
            )

    def _free(self) -> int:
        return shutil.disk_usage(self._folder.parent).free


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _explained(error: OSError, folder: Path, missing: int) -> ModelError:
    reason = error.strerror or str(error)
    if error.errno in _DISK_FULL:
        return ModelError(
            f"The disk of {folder.parent} is full ({reason}): {byte_size(missing)} of this machine's share did "
            "not fit; make room, and form the ring again, which goes on with what is here.",
            "disk",
        )
    return ModelError(f"{folder} could not be written ({reason}); check the disk.", "disk")


# --- holes in files --------------------------------------------------------------------------------------------------

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MAC_PUNCH_HOLE = 99
"""``F_PUNCHHOLE`` of ``fcntl``."""
_MAC_BLOCK = 4096
_UNABLE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


def punch(folder: Path, spans: Iterable[tuple[str, int, int]]) -> int:
    """Free the disk space of ``spans`` (file, start, stop) of ``folder``. Returns the freed bytes.

    Nothing is freed if the file system cannot punch holes. Raises OSError.
    """
    by_file: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in spans:
        by_file.setdefault(name, []).append((start, stop))
    freed = 0
    for name, holes in by_file.items():
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            before = os.fstat(descriptor).st_blocks
            for start, stop in holes:
                _punch(descriptor, start, stop)
            os.fsync(descriptor)
            freed += max(0, before - os.fstat(descriptor).st_blocks) * 512
        finally:
            os.close(descriptor)
    return freed


def _punch(descriptor: int, start: int, stop: int) -> None:
    try:
        if sys.platform == "darwin":
            _punch_mac(descriptor, start, stop)
        elif sys.platform == "linux":
            _punch_linux(descriptor, start, stop)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise


def _punch_linux(descriptor: int, start: int, stop: int) -> None:
    allocate = ctypes.CDLL(None, use_errno=True).fallocate64
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if allocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, stop - start):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _punch_mac(descriptor: int, start: int, stop: int) -> None:
    """Punch whole blocks only, as macOS requires."""
    import fcntl

    first, last = start + -start % _MAC_BLOCK, stop - stop % _MAC_BLOCK
    if first < last:
        fcntl.fcntl(descriptor, _MAC_PUNCH_HOLE, struct.pack("IIqq", 0, 0, first, last - first))
