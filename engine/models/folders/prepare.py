"""Preparing a model: writing its experts stacked, one safetensors file per layer, with the trunk in a file beside them.

The result is an ordinary folder of safetensors with an index. Only one matrix of an expert at a time is in memory. The
folder is written as ``<destination>.partial`` and renamed when it is complete. Each file is written under a temporary
name, synced, read back and compared before the journal records it. A run that was killed, stopped or ended by a full
disk is resumed where the journal ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.composite import language_name
from engine.models.architectures.families import prepared_layout, stored_shape
from engine.models.architectures.record import ExpertTensor
from engine.models.folders import model_folder
from engine.models.folders.checkpoint import Checkpoint, PlainExperts, safetensors_headers
from engine.models.folders.model_folder import BANK_MANIFEST, INDEX, JOURNAL
from engine.models.folders.opening import open_model
from engine.models.formats.json_files import SMALL_FILE
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.model_files import StoredTensor
from engine.models.formats.number_formats import WIDTHS
from engine.models.formats.safetensors_files import encode_header
from engine.system.durable_files import flush, flush_folder, forget_cached, new_file

FORMAT = 2
"""Version of the journal."""
_DATA_ALIGNMENT = 4096
"""Bytes whose multiple the first tensor begins at: rows that divide a page then lie in one, which reads faster."""
_CHUNK = 8 * 1024 * 1024
_TILE = (64, 256)
"""Rows and columns of a tile; the fastest size measured."""

_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE")
SETTING_LIMIT = 200_000_000
"""Maximum bytes of a file that is copied beside the weights."""
_INDEX_LIMIT = 200_000_000
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def needs_preparing(folder: Path) -> tuple[bool, str]:
    """Whether preparing the model in ``folder`` gains anything, and the reason in one sentence.

    Raises ModelError if the folder cannot be opened.
    """
    files = open_model(folder)
    if is_old(folder):
        return True, "It was prepared by an earlier version, whose files only this program reads."
    if read_prepared(folder) is not None:
        return False, "It is prepared already."
    experts = files.experts
    if experts is None:
        return False, "It is a dense model: there are no routed experts to prestack."
    if files.is_gguf:
        return False, "A GGUF file's weights are used where they lie: preparing gains nothing."
    if experts.packed:
        return False, "Its weights are packed and used where they lie: preparing gains nothing."
    if len(experts.formats) > 1:
        return False, "Its experts are stored in several number formats, which a prepared copy cannot hold."
    if experts.strided:
        return True, (
            "Its experts are stored transposed or interleaved: unprepared, every use of an expert reads its matrices "
            "in strides; prepared, as contiguous rows."
        )
    return False, (
        "Its experts' matrices are stored as they are used, each one contiguous: preparing would only put those of a "
        "layer into one file, for twice the disk space."
    )


def prepare(
    source: Path,
    destination: Path,
    progress: ProgressCallback,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Write the model in ``source``, prepared, as the folder ``destination``; they may be the same for a model that an
    earlier version prepared.

    If ``destination`` was prepared from this source and is sound, it is only checked. Progress is in bytes, written and
    checked. Raises ModelError (kind ``disk`` if there is no room), or Cancelled. Finished parts are then kept in
    ``<destination>.partial`` for the next call.
    """
    files = open_model(source)
    if read_prepared(source) is not None:
        raise ModelError(f"{source} is prepared already; use it as it is.", "bad-input")
    plan = _plan(files)
    _check_destination(source, destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with model_folder.exclusive(destination):
            writer = _Writer(plan, destination, progress, should_stop or (lambda: False))
            if not writer.is_already_written():
                writer.run()
    except OSError as error:
        raise _explained(error, destination) from error


# --- what is to be written ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlannedFile:
    """A file of weights: of a layer's experts, or of the trunk (``layer`` is None)."""

    name: str
    layer: int | None
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, number format and shape, in the order in which they are written."""

    @cached_property
    def header(self) -> bytes:
        return encode_header(self.tensors, {"format": "pt"}, _DATA_ALIGNMENT)

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(int(np.prod(shape)) * WIDTHS[dtype] for _, dtype, shape in self.tensors)


@dataclass(frozen=True)
class _Preparation:
    """The files that are to be written of the checkpoint ``files``, without the index."""

    files: Checkpoint
    experts: PlainExperts
    layout: tuple[ExpertTensor, ...]
    source: str
    """Identity of the source's files: names, sizes, modification times."""
    trunk: list[tuple[str, StoredTensor]]
    written: tuple[_PlannedFile, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(planned.nbytes for planned in self.written)


def _plan(files: Checkpoint) -> _Preparation:
    """Raises ModelError for a dense model, a GGUF file, whose weights may be in another order, packed weights, or
    experts in several number formats."""
    experts = files.experts
    if files.is_gguf:
        raise ModelError(
            f"{files.folder} holds the weights of a GGUF file, which are used where they lie; use it as it is.",
            "bad-input",
        )
    if experts is None:
        raise ModelError(
            f"{files.folder} is a dense {files.family.model_type} model without routed experts: there is nothing to "
            "prepare, use it as it is.",
            "bad-input",
        )
    if experts.packed:
        raise ModelError(
            f"{files.folder} holds packed weights, which are used where they lie; use it as it is.", "bad-input"
        )
    if len(experts.formats) > 1:
        raise ModelError(
            f"{files.folder} holds experts in several number formats ({', '.join(sorted(experts.formats))}), and a "
            "prepared copy has one; use it as it is.",
            "bad-input",
        )
    has_bias = experts.expert(experts.layers[0], 0).down_bias is not None
    layout = prepared_layout(files.family, has_bias)
    # Wide types first: then every tensor begins at a multiple of its own width. By name, so that copies made of the
    # same weights in other files are equal.
    tensors = (*files.trunk(), *files.tables(), *_of_senses(files))
    trunk = sorted(tensors, key=lambda item: (-WIDTHS[item[1].dtype], item[0]))
    count = 1 + len(experts.layers)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    of_trunk = _PlannedFile(names[0], None, tuple((name, tensor.dtype, tensor.shape) for name, tensor in trunk))
    of_layers = (
        _PlannedFile(name, layer, _layer_tensors(experts, layout, layer))
        for name, layer in zip(names[1:], experts.layers, strict=True)
    )
    return _Preparation(files, experts, layout, _fingerprint(files), trunk, (of_trunk, *of_layers))


def _of_senses(files: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of what sees and hears, by their names in the whole model."""
    if (files.folder / BANK_MANIFEST).is_file():  # an old preparation, which has left them out
        return
    for file_name, header in safetensors_headers(files.folder).items():
        here = {name: entry for name, entry in header.items() if language_name(name) is None and entry.dtype in WIDTHS}
        mapped = MappedFile(files.folder / file_name) if here else None
        for name, entry in here.items():
            assert mapped is not None
            yield name, mapped.tensor(entry.dtype, entry.shape, entry.start)


def _layer_tensors(
    experts: PlainExperts, layout: tuple[ExpertTensor, ...], layer: int
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple(
        (tensor.template.format(layer=layer), experts.dtype, stored_shape(tensor, experts.shape)) for tensor in layout
    )


def _fingerprint(files: Checkpoint) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in (files.folder / "config.json", *files.files):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_destination(source: Path, destination: Path) -> None:
    """Raises ModelError if something is at ``destination`` that is not ours to replace."""
    if is_old(destination):
        return
    if destination.resolve() == source.resolve():
        raise ModelError(f"The prepared copy of {source} cannot be written over it; name another folder.", "bad-input")
    if not destination.exists():
        return
    if not destination.is_dir() or (any(destination.iterdir()) and read_prepared(destination) is None):
        raise ModelError(f"{destination} exists and is not a prepared model; name another folder.", "bad-input")


# --- prepared folders ---------------------------------------------------------------------------------------------


class Prepared(msgspec.Struct, frozen=True):
    """What the index of a prepared folder says of it, beside the file of each tensor."""

    prepared_from: str
    """Identity of the source's files."""
    checksums: dict[str, int]
    """CRC-32 of each file of weights, by name."""


class _Index(msgspec.Struct, frozen=True):
    metadata: Prepared


def read_prepared(folder: Path) -> Prepared | None:
    """None for a folder that was not prepared, or whose index is damaged."""
    path = folder / INDEX
    try:
        if path.stat().st_size > _INDEX_LIMIT:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Index).metadata
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_old(folder: Path) -> bool:
    """Whether ``folder`` was prepared by a version before ordinary safetensors."""
    return (folder / BANK_MANIFEST).is_file()


def verify(folder: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read a prepared folder and compare every file of weights with its checksum.

    ``on_bytes`` is called with the number of bytes read since the last call. Raises ModelError naming the file that
    differs.
    """
    prepared = read_prepared(folder)
    if prepared is None:
        raise ModelError(f"{folder} has no checksums of its weights; prepare the model again.")
    for name, checksum in prepared.checksums.items():
        _verify_file(folder / name, checksum, on_bytes or (lambda count: None))


def _verify_file(path: Path, wanted: int, report: Callable[[int], None]) -> None:
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(_CHUNK, max(1, os.fstat(file.fileno()).st_size))))
            while count := file.readinto(buffer):
                checksum = zlib.crc32(buffer[:count], checksum)
                report(count)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); prepare the model again.") from error
    if checksum != wanted:
        raise ModelError(f"{path} is damaged: its checksum is wrong; prepare the model again.")


# --- the journal --------------------------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the journal: the source, or a file that is finished with its checksum."""

    source: str | None = None
    format: int | None = None
    file: str | None = None
    checksum: int = 0


def _read_journal(path: Path, source: str) -> dict[str, int] | None:
    """The checksums of the finished files of ``source``; None if the journal is of something else. A torn last line is
    ignored."""
    try:
        if path.stat().st_size > SMALL_FILE:
            return None
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    finished: dict[str, int] | None = None
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
        if finished is None:
            if entry.source != source or entry.format != FORMAT:
                return None
            finished = {}
        if entry.file is not None:
            finished[entry.file] = entry.checksum
    return finished


# --- writing ------------------------------------------------------------------------------------------------------


class _Writer:
    """One run of a preparation."""

    def __init__(
        self, plan: _Preparation, destination: Path, progress: ProgressCallback, should_stop: Callable[[], bool]
    ) -> None:
        self._plan = plan
        self._destination = destination
        self._folder = destination.with_name(destination.name + model_folder.PARTIAL)
        self._progress = progress
        self._should_stop = should_stop
        self._stage = "writing experts"
        self._done = 0
        self._finished: dict[str, int] = {}
        """Checksums of the finished files."""

    def is_already_written(self) -> bool:
        """Whether the destination was prepared from this source and its contents are right."""
        prepared = read_prepared(self._destination)
        if prepared is None or prepared.prepared_from != self._plan.source:
            return False
        self._stage = "checking"
        try:
            verify(self._destination, self._report)
        except Cancelled:
            raise
        except ModelError:
            self._done = 0
            return False
        return True

    def run(self) -> None:
        """Write everything that is not there yet."""
        plan = self._plan
        self._take_up()
        kept = sum(planned.nbytes for planned in plan.written if planned.name in self._finished)
        model_folder.check_space(self._folder, plan.nbytes - kept, f"Preparing {plan.files.folder.name}")
        for planned in plan.written:
            if planned.name not in self._finished:
                self._finish(planned)
        plan.files.check_unchanged()
        self._copy_settings()
        self._publish()

    def _take_up(self) -> None:
        """Keep what an earlier run finished, if it was of the same source and is sound; delete the rest."""
        journal = self._folder / JOURNAL
        noted = _read_journal(journal, self._plan.source)
        self._stage = "checking what is there"
        if noted is None and self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for planned in self._plan.written:
            checksum = (noted or {}).get(planned.name)
            if checksum is not None and self._is_sound(self._folder / planned.name, checksum):
                self._finished[planned.name] = checksum
        entries = [_Entry(source=self._plan.source, format=FORMAT)]
        entries += [_Entry(file=name, checksum=checksum) for name, checksum in self._finished.items()]
        with new_file(journal) as file:
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        for path in self._folder.iterdir():
            if path.name not in self._finished and path != journal:
                path.unlink()

    def _is_sound(self, path: Path, checksum: int) -> bool:
        before = self._done
        try:
            _verify_file(path, checksum, self._report)
        except Cancelled:
            raise
        except ModelError:
            self._done = before
            return False
        return True

    def _finish(self, planned: _PlannedFile) -> None:
        """Write one file, read it back and note it."""
        self._stage = "writing the trunk" if planned.layer is None else "writing experts"
        path = self._folder / planned.name
        with new_file(path) as file:
            checksum = self._write(file, np.frombuffer(planned.header, dtype=np.uint8), 0)
            for words in self._contents(planned):
                checksum = self._write(file, _as_bytes(words), checksum)
        self._plan.files.check_unchanged()
        self._read_back(path, checksum)
        self._finished[planned.name] = checksum
        with (self._folder / JOURNAL).open("ab") as journal:
            journal.write(msgspec.json.encode(_Entry(file=planned.name, checksum=checksum)) + b"\n")
            flush(journal)

    def _contents(self, planned: _PlannedFile) -> Iterator[NDArray[Any]]:
        """The tensors of a file, one after the other: of the trunk whole, of experts part by part."""
        if planned.layer is None:
            yield from (tensor.words for _, tensor in self._plan.trunk)
            return
        for tensor in self._plan.layout:
            for expert in range(self._plan.experts.count):
                weights = self._plan.experts.expert(planned.layer, expert)
                for part in tensor.parts:
                    yield in_rows(getattr(weights, part).words)

    def _write(self, file: BinaryIO, data: NDArray[np.uint8], checksum: int) -> int:
        """Write ``data`` in pieces. Returns the CRC-32 continued from ``checksum``."""
        view = data.data
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            file.write(piece)
            checksum = zlib.crc32(piece, checksum)
            self._report(len(piece))
        return checksum

    def _read_back(self, path: Path, checksum: int) -> None:
        """Compare a file just written with its checksum, from the disk rather than the page cache."""
        self._stage = "checking"
        forget_cached(path)
        try:
            _verify_file(path, checksum, lambda count: self._stop_if_asked())
        except Cancelled:
            raise
        except ModelError as error:
            path.unlink(missing_ok=True)
            raise ModelError(
                f"{path} does not read back as it was written ({error}); check the disk, then prepare the model again.",
                "disk",
            ) from error

    def _report(self, count: int) -> None:
        self._stop_if_asked()
        self._done += count
        self._progress(self._stage, min(self._done, self._plan.nbytes), self._plan.nbytes, "bytes")

    def _stop_if_asked(self) -> None:
        """Raises Cancelled if somebody asked to stop."""
        if self._should_stop():
            layers = [planned for planned in self._plan.written if planned.layer is not None]
            count = sum(planned.name in self._finished for planned in layers)
            raise Cancelled(
                f"Stopped preparing {self._plan.files.folder.name} with {count} of {len(layers)} layers finished; "
                "preparing it again goes on from there."
            )

    def _copy_settings(self) -> None:
        """Configuration, tokenizer, chat template and licence: the small files beside the weights."""
        for path in sorted(self._plan.files.folder.iterdir()):
            if is_setting(path):
                with path.open("rb") as original, new_file(self._folder / path.name) as copy:
                    shutil.copyfileobj(original, copy)

    def _publish(self) -> None:
        """Write the index, the last of the files, and give the folder its name."""
        plan = self._plan
        prepared = Prepared(plan.source, {planned.name: self._finished[planned.name] for planned in plan.written})
        index = {
            "metadata": {"total_size": plan.nbytes, **msgspec.to_builtins(prepared)},
            "weight_map": {name: planned.name for planned in plan.written for name, _, _ in planned.tensors},
        }
        with new_file(self._folder / INDEX) as file:
            file.write(msgspec.json.format(msgspec.json.encode(index), indent=1))
        replaced = self._destination.with_name(f"{self._destination.name}.replaced{model_folder.PARTIAL}")
        if self._destination.exists():
            # Aside first: an old copy that is half deleted must not lie under the name of a complete one.
            shutil.rmtree(replaced, ignore_errors=True)
            self._destination.rename(replaced)
        self._folder.rename(self._destination)
        flush_folder(self._destination.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        (self._destination / JOURNAL).unlink()
        self._progress("prepared", plan.nbytes, plan.nbytes, "bytes")


def is_setting(path: Path) -> bool:
    """Whether ``path`` is one of the small files that belong to a model in any form: configuration, tokenizer, chat
    template, licence."""
    ours = path.name in (BANK_MANIFEST, JOURNAL) or path.name.endswith(".index.json")
    return is_setting_name(path.name) and not ours and path.is_file() and path.stat().st_size <= SETTING_LIMIT


def is_setting_name(name: str) -> bool:
    """Whether files called ``name`` are configuration, tokenizer, chat template or licence, by their kind."""
    path = Path(name)
    return path.suffix in _COPIED_SUFFIXES or path.stem.upper() in _COPIED_NAMES


def in_rows(words: NDArray[Any]) -> NDArray[Any]:
    """``words`` as contiguous rows, copied if they are not.

    What lies column by column is copied in tiles, each first as it lies. Without tiles every word misses the cache,
    which is ten times slower where the row length is a power of two.
    """
    if words.ndim != 2 or words.strides[0] >= words.strides[1]:
        return np.ascontiguousarray(words)
    ordered = np.empty(words.shape, words.dtype)
    rows, columns = _TILE
    for row in range(0, words.shape[0], rows):
        for column in range(0, words.shape[1], columns):
            tile = words[row : row + rows, column : column + columns]
            ordered[row : row + rows, column : column + columns] = np.ascontiguousarray(tile.T).T
    return ordered


def _as_bytes(words: NDArray[Any]) -> NDArray[np.uint8]:
    return words.reshape(-1).view(np.uint8)


def _explained(error: OSError, destination: Path) -> ModelError:
    reason = error.strerror or str(error)
    if error.errno in _DISK_ERRORS:
        return ModelError(
            f"The disk is full: the prepared model could not be written to {destination.parent} ({reason}); make room "
            "and prepare the model again, which goes on with what is finished.",
            "disk",
        )
    return ModelError(
        f"The prepared model could not be written to {destination.parent} ({reason}); check the folder.", "disk"
    )
