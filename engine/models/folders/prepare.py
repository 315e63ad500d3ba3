"""Writing the bank of a model: routed experts prestacked into slabs, the trunk beside them.

Only one expert at a time is in memory. The bank is written as ``<destination>.partial`` and renamed when it is
complete. Each file is written under a temporary name, synced, read back and compared before the journal records it. A
run that was killed, stopped or ended by a full disk is resumed where the journal ends.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.models.folders import model_folder
from engine.models.folders.bank import (
    EXPERTS_FOLDER,
    FORMAT,
    JOURNAL,
    MANIFEST,
    TRUNK,
    LayerFile,
    Manifest,
    SlabLayout,
    TrunkFile,
    layer_path,
    read_manifest,
    slab_layout,
    verify,
    verify_layer,
    verify_trunk,
)
from engine.models.folders.checkpoint import Checkpoint, PlainExperts
from engine.models.folders.opening import open_model
from engine.models.formats.json_files import SMALL_FILE
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import WIDTHS, words_dtype
from engine.models.formats.safetensors_files import encode_header
from engine.system.durable_files import flush, flush_folder, forget_cached, new_file

_CHUNK = 8 * 1024 * 1024
_TILE = (64, 256)
"""Rows and columns of a tile; the fastest size measured."""

_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE")
SETTING_LIMIT = 200_000_000
"""Maximum bytes of a file that is copied beside the weights."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def needs_preparing(folder: Path) -> tuple[bool, str]:
    """Whether writing a bank of the model in ``folder`` gains anything, and the reason in one sentence.

    Raises ModelError if the folder cannot be opened.
    """
    files = open_model(folder)
    if files.prepared:
        return False, "It is prepared already."
    experts = files.experts
    if experts is None:
        return False, "It is a dense model: there are no routed experts to prestack."
    assert isinstance(experts, PlainExperts)
    assert isinstance(files, Checkpoint)
    if files.is_gguf:
        return False, "A GGUF file's weights are used where they lie: preparing gains nothing."
    if experts.packed:
        return False, "Its weights are packed and used where they lie: preparing gains nothing."
    if len(experts.formats) > 1:
        return False, "Its experts are stored in several number formats, which a prepared copy cannot hold."
    if experts.strided:
        return True, (
            "Its experts are stored transposed or interleaved: unprepared, every use of an expert reads its matrices "
            "in strides; prepared, as one contiguous slab."
        )
    return False, (
        "Its experts' matrices are stored as they are used, each one contiguous: preparing would only put an expert's "
        "matrices side by side, for twice the disk space."
    )


def prepare(
    source: Path,
    destination: Path,
    progress: ProgressCallback,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Write the bank of the model in ``source`` as the folder ``destination``.

    If ``destination`` is already a valid bank of this source, it is only checked. Progress is in bytes, written and
    checked. Raises ModelError (kind ``disk`` if there is no room), or Cancelled. Finished parts are then kept in
    ``<destination>.partial`` for the next call.
    """
    files = open_model(source)
    if not isinstance(files, Checkpoint):
        raise ModelError(f"{source} is prepared already; use it as it is.", "bad-input")
    plan = plan_bank(files)
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
class BankPlan:
    """The plan of a checkpoint's bank: all of its bytes except the manifest."""

    files: Checkpoint
    experts: PlainExperts
    slab: SlabLayout
    source: str
    """Identity of the source's files: names, sizes, modification times."""
    trunk: list[tuple[str, StoredTensor]]
    trunk_header: bytes

    @property
    def layer_bytes(self) -> int:
        return self.slab.size * self.experts.count

    @cached_property
    def trunk_bytes(self) -> int:
        return len(self.trunk_header) + self.files.trunk_bytes

    @cached_property
    def nbytes(self) -> int:
        return self.trunk_bytes + self.layer_bytes * len(self.experts.layers)


def plan_bank(files: Checkpoint) -> BankPlan:
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
    assert isinstance(experts, PlainExperts)
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
    has_bias = experts.expert(experts.layers[0], 0).down_bias is not None if experts.layers else False
    # Wide types first: then every tensor begins at a multiple of its own width.
    trunk = sorted(files.trunk(), key=lambda item: -WIDTHS[item[1].dtype])
    header = encode_header(((name, tensor.dtype, tensor.shape) for name, tensor in trunk), {"format": "pt"})
    slab = slab_layout(experts.dtype, experts.shape, has_bias)
    return BankPlan(files, experts, slab, _fingerprint(files), trunk, header)


def _fingerprint(files: Checkpoint) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in (files.folder / "config.json", *files.files):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_destination(source: Path, destination: Path) -> None:
    """Raises ModelError if something is at ``destination`` that is not ours to replace."""
    if destination.resolve() == source.resolve():
        raise ModelError(f"The bank of {source} cannot be written over it; name another folder.", "bad-input")
    if not destination.exists():
        return
    if not destination.is_dir() or (any(destination.iterdir()) and not (destination / MANIFEST).is_file()):
        raise ModelError(f"{destination} exists and is not a prepared model; name another folder.", "bad-input")


# --- the journal --------------------------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the journal: the source, or a file that is finished."""

    source: str | None = None
    format: int | None = None
    trunk: TrunkFile | None = None
    layer: LayerFile | None = None


@dataclass
class _Finished:
    """What the journal says is finished."""

    trunk: TrunkFile | None = None
    layers: dict[int, LayerFile] = field(default_factory=dict)


def _read_journal(path: Path, source: str) -> _Finished | None:
    """What is finished of ``source``; None if the journal is of something else. A torn last line is ignored."""
    try:
        if path.stat().st_size > SMALL_FILE:
            return None
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    finished: _Finished | None = None
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
        if finished is None:
            if entry.source != source or entry.format != FORMAT:
                return None
            finished = _Finished()
        if entry.trunk is not None:
            finished.trunk = entry.trunk
        if entry.layer is not None:
            finished.layers[entry.layer.layer] = entry.layer
    return finished


# --- writing ------------------------------------------------------------------------------------------------------


class _Writer:
    """One run of a preparation."""

    def __init__(
        self, plan: BankPlan, destination: Path, progress: ProgressCallback, should_stop: Callable[[], bool]
    ) -> None:
        self._plan = plan
        self._destination = destination
        self._folder = destination.with_name(destination.name + model_folder.PARTIAL)
        self._progress = progress
        self._should_stop = should_stop
        self._stage = "writing experts"
        self._done = 0
        self._finished = _Finished()

    def is_already_written(self) -> bool:
        """Whether the destination is a bank of this source whose contents are right."""
        if not (self._destination / MANIFEST).is_file():
            return False
        self._stage = "checking"
        try:
            sound = read_manifest(self._destination).source == self._plan.source
            if sound:
                verify(self._destination, self._report)
        except Cancelled:
            raise
        except ModelError:
            sound = False
        self._done = 0
        return sound

    def run(self) -> None:
        """Write everything that is not there yet."""
        plan = self._plan
        self._take_up()
        kept = self._kept_bytes()
        model_folder.check_space(self._folder, plan.nbytes - kept, f"Preparing {plan.files.folder.name}")
        if self._finished.trunk is None:
            self._finish_trunk()
        buffer = np.zeros(plan.slab.size, dtype=np.uint8)
        for layer in plan.experts.layers:
            if layer not in self._finished.layers:
                self._finish_layer(layer, buffer)
        plan.files.check_unchanged()
        self._copy_settings()
        self._publish()

    def _take_up(self) -> None:
        """Keep what an earlier run finished, if it was of the same source and is sound; delete the rest."""
        journal = self._folder / JOURNAL
        finished = _read_journal(journal, self._plan.source)
        self._stage = "checking what is there"
        if finished is not None:
            self._finished = self._sound_part(finished)
        elif self._folder.exists():
            shutil.rmtree(self._folder)
        (self._folder / EXPERTS_FOLDER).mkdir(parents=True, exist_ok=True)
        self._rewrite_journal(journal)
        kept = {layer_path(self._folder, layer).name for layer in self._finished.layers}
        for path in (self._folder / EXPERTS_FOLDER).iterdir():
            if path.name not in kept:
                path.unlink()

    def _sound_part(self, finished: _Finished) -> _Finished:
        sound = _Finished()
        if finished.trunk is not None and self._passes(verify_trunk, self._folder / TRUNK, finished.trunk):
            sound.trunk = finished.trunk
        for layer, file in finished.layers.items():
            path = layer_path(self._folder, layer)
            if len(file.checksums) == self._plan.experts.count and self._passes(
                verify_layer, path, file, self._plan.slab.size
            ):
                sound.layers[layer] = file
        return sound

    def _passes(self, check: Callable[..., None], *arguments: Any) -> bool:
        before = self._done
        try:
            check(*arguments, self._report)
        except Cancelled:
            raise
        except ModelError:
            self._done = before
            return False
        return True

    def _kept_bytes(self) -> int:
        kept = self._plan.layer_bytes * len(self._finished.layers)
        return kept + (self._plan.trunk_bytes if self._finished.trunk is not None else 0)

    def _rewrite_journal(self, journal: Path) -> None:
        entries = [_Entry(source=self._plan.source, format=FORMAT)]
        if self._finished.trunk is not None:
            entries.append(_Entry(trunk=self._finished.trunk))
        entries += [_Entry(layer=file) for file in self._finished.layers.values()]
        with new_file(journal) as file:
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def _note(self, entry: _Entry) -> None:
        with (self._folder / JOURNAL).open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            flush(file)

    def _finish_trunk(self) -> None:
        self._stage = "writing the trunk"
        path = self._folder / TRUNK
        with new_file(path) as file:
            checksum = self._write(file, np.frombuffer(self._plan.trunk_header, dtype=np.uint8), 0)
            for _, tensor in self._plan.trunk:
                checksum = self._write(file, _as_bytes(tensor.words), checksum)
        trunk = TrunkFile(self._plan.trunk_bytes, checksum)
        self._read_back(verify_trunk, path, trunk)
        self._finished.trunk = trunk
        self._note(_Entry(trunk=trunk))

    def _finish_layer(self, layer: int, buffer: NDArray[np.uint8]) -> None:
        self._stage = "writing experts"
        path = layer_path(self._folder, layer)
        checksums = []
        with new_file(path) as file:
            for expert in range(self._plan.experts.count):
                fill_slab(buffer, self._plan.slab, self._plan.experts.expert(layer, expert))
                checksums.append(self._write(file, buffer, 0))
        self._plan.files.check_unchanged()
        layer_file = LayerFile(layer, tuple(checksums))
        self._read_back(verify_layer, path, layer_file, self._plan.slab.size)
        self._finished.layers[layer] = layer_file
        self._note(_Entry(layer=layer_file))

    def _write(self, file: BinaryIO, data: NDArray[np.uint8], checksum: int) -> int:
        """Write ``data`` in pieces. Returns the CRC-32 continued from ``checksum``."""
        view = data.data
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            file.write(piece)
            checksum = zlib.crc32(piece, checksum)
            self._report(len(piece))
        return checksum

    def _read_back(self, check: Callable[..., None], path: Path, *arguments: Any) -> None:
        """Compare a file just written with its checksums, from the disk rather than the page cache."""
        self._stage = "checking"
        forget_cached(path)
        try:
            check(path, *arguments, lambda count: self._stop_if_asked())
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
            count, layers = len(self._finished.layers), len(self._plan.experts.layers)
            raise Cancelled(
                f"Stopped preparing {self._plan.files.folder.name} with {count} of {layers} layers finished; "
                "preparing it again goes on from there."
            )

    def _copy_settings(self) -> None:
        """Configuration, tokenizer, chat template and licence: the small files beside the weights."""
        for path in sorted(self._plan.files.folder.iterdir()):
            if is_setting(path):
                with path.open("rb") as original, new_file(self._folder / path.name) as copy:
                    shutil.copyfileobj(original, copy)

    def _publish(self) -> None:
        """Write the manifest, the last of the files, and give the folder its name."""
        plan, trunk = self._plan, self._finished.trunk
        assert trunk is not None
        manifest = Manifest(
            format=FORMAT,
            family=plan.files.family.model_type,
            activation=plan.files.family.activation,
            source=plan.source,
            trunk=trunk,
            experts=plan.experts.count,
            slab=plan.slab,
            layers=tuple(self._finished.layers[layer] for layer in plan.experts.layers),
        )
        with new_file(self._folder / MANIFEST) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        replaced = self._destination.with_name(f"{self._destination.name}.replaced{model_folder.PARTIAL}")
        if self._destination.exists():
            # Aside first: an old bank that is half deleted must not lie under the name of a complete one.
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
    ours = path.name in (MANIFEST, JOURNAL) or path.name.endswith(".index.json")
    return is_setting_name(path.name) and not ours and path.is_file() and path.stat().st_size <= SETTING_LIMIT


def is_setting_name(name: str) -> bool:
    """Whether files called ``name`` are configuration, tokenizer, chat template or licence, by their kind."""
    path = Path(name)
    return path.suffix in _COPIED_SUFFIXES or path.stem.upper() in _COPIED_NAMES


def fill_slab(buffer: NDArray[np.uint8], layout: SlabLayout, expert: ExpertWeights) -> None:
    """Copy the parts of ``expert``, however they are stored, to their places in ``buffer`` ([slab size] bytes)."""
    dtype = words_dtype(layout.dtype)
    for place in layout.parts:
        tensor = getattr(expert, place.name)
        assert tensor is not None
        nbytes = tensor.words.size * dtype.itemsize
        target = buffer[place.offset : place.offset + nbytes].view(dtype).reshape(place.shape)
        if tensor.words.ndim == 2 and tensor.words.strides[0] < tensor.words.strides[1]:
            _copy_transposed(target, tensor.words)
        else:
            target[...] = tensor.words


def _copy_transposed(target: NDArray[Any], words: NDArray[Any]) -> None:
    """``target[...] = words`` for words that lie column by column: in tiles, each first copied as it lies.

    Without tiles every word misses the cache, which is ten times slower where the row length is a power of two.
    """
    rows, columns = _TILE
    for row in range(0, words.shape[0], rows):
        for column in range(0, words.shape[1], columns):
            tile = words[row : row + rows, column : column + columns]
            target[row : row + rows, column : column + columns] = np.ascontiguousarray(tile.T).T


def _as_bytes(words: NDArray[Any]) -> NDArray[np.uint8]:
    return words.reshape(-1).view(np.uint8)


def _explained(error: OSError, destination: Path) -> ModelError:
    reason = error.strerror or str(error)
    if error.errno in _DISK_ERRORS:
        return ModelError(
            f"The disk is full: the bank could not be written to {destination.parent} ({reason}); make room and "
            "prepare the model again, which goes on with what is finished.",
            "disk",
        )
    return ModelError(f"The bank could not be written to {destination.parent} ({reason}); check the folder.", "disk")
