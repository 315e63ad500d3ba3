"""The identity of a model folder, by which two machines find out whether they have the same model.

Checksums (CRC-32) are of items: files beside the weights, headers, trunk pieces, and single experts. They are computed
once and kept until a file's size or modification time changes. They detect damage and mix-ups, not malice, as items
travel between paired machines only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from engine.errors import ModelError, damaged
from engine.ipc.progress import ProgressCallback
from engine.models.folders.model_folder import PREPARED
from engine.models.folders.shard_files import ModelIdentity, ShardManifest, is_shard, read_shard, shards_in
from engine.models.folders.weight_layout import (
    WeightLayout,
    config_fingerprint,
    layout_of,
    quantisation_words,
    runs_of,
    settings_fingerprint,
)
from engine.models.formats.byte_map import Run, Runs
from engine.models.store.local_models import installed, profile_key
from engine.system.durable_files import new_file
from engine.system.locations import locate

VERSION = 1
"""Version of :class:`ModelIdentity` and of the transfer of weights."""

_BLOCK = 8 * 1024 * 1024
_TOKENIZER_PREFIXES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "spiece")
_KEPT_LIMIT = 64 * 1024 * 1024


def _no_progress(stage: str, done: int, total: int, unit: str) -> None:
    """Ignore the progress."""


def identity_of(folder: Path, progress: ProgressCallback = _no_progress) -> ModelIdentity:
    """The identity of the whole model in ``folder``.

    The first call reads all weights. ``progress`` may raise Cancelled; checksums computed until
    then are kept. Raises ModelError if the folder is no model or is damaged.
    """
    layout = layout_of(folder)
    return identity_with(layout, ItemChecksums(layout), progress)


class _UnreadError(Exception):
    """The weights would have to be read."""


def known_weights(folder: Path) -> str:
    """The weight fingerprint of the model in ``folder`` (see :class:`ModelIdentity`); for a shard, of the whole model.

    Empty if the weights would have to be read, or the folder is no model.
    """

    def unread(stage: str, done: int, total: int, unit: str) -> None:
        raise _UnreadError

    try:
        return read_shard(folder).identity.weights if is_shard(folder) else identity_of(folder, unread).weights
    except (_UnreadError, ModelError):
        return ""


def identity_with(layout: WeightLayout, checksums: ItemChecksums, progress: ProgressCallback) -> ModelIdentity:
    """The identity of the model with this layout and its checksums; see :func:`identity_of`."""
    return _described(layout, checksums.fingerprint(progress))


def _described(layout: WeightLayout, weights: str) -> ModelIdentity:
    """The identity with the fingerprint ``weights``. Everything else comes from headers and the files beside them."""
    stored = layout.opened.experts.dtype if layout.opened is not None and layout.opened.experts is not None else ""
    if not stored:
        entries = [entry for piece in layout.trunk for _, _, entry in piece]
        stored = max(entries, key=lambda entry: entry.nbytes).dtype if entries else "F32"
    tokenizer = [path for path in layout.settings if is_of_tokenizer(path.name)]
    return ModelIdentity(
        version=VERSION,
        name=layout.folder.name.removesuffix(PREPARED),
        family=str(layout.config.get("model_type", "")),
        quantisation=quantisation_words(layout.config, stored),
        config=config_fingerprint(layout.config),
        tokenizer=settings_fingerprint(tokenizer),
        weights=weights,
    )


def is_of_tokenizer(name: str) -> bool:
    """Whether the file ``name`` beside the weights affects tokenization."""
    return name.lower().startswith(_TOKENIZER_PREFIXES)


def why_unlike(other: ModelIdentity, here: str, elsewhere: str) -> str | None:
    """The first of the :func:`differences` to this machine's whole model with the name of ``other``; None if it has
    none.

    Weights are not compared: a damaged copy here would differ, too, and sending the weights repairs that.
    """
    for model in installed():
        if model.name == other.name:
            # A model that cannot be opened is not compared.
            with contextlib.suppress(ModelError, OSError):
                return differences(_described(layout_of(model.path), ""), other, here, elsewhere)
    return None


def differences(
    mine: ModelIdentity, other: ModelIdentity, here: str = "this machine", elsewhere: str = "the other"
) -> str | None:
    """A sentence about the first difference between two models, with both values; None if they are the same.

    ``here`` and ``elsewhere`` are the names of the machines. An empty weight fingerprint is unknown, and not compared.
    """
    named = [
        ("version of the model's description", str(mine.version), str(other.version)),
        ("family", mine.family, other.family),
        ("quantisation", mine.quantisation, other.quantisation),
        ("configuration", mine.config[:12], other.config[:12]),
        ("tokenizer", mine.tokenizer[:12], other.tokenizer[:12]),
    ]
    if mine.weights and other.weights:
        named.append(("weights", mine.weights[:12], other.weights[:12]))
    for what, ours, value in named:
        if ours != value:
            return (
                f"The models differ in the {what}: {ours} ({mine.name}) on {here}, {value} ({other.name}) on "
                f"{elsewhere}; use the same model on both, or remove it from {here}, which is sent its share then."
            )
    return None


def setting_key(name: str) -> str:
    return f"setting/{name}"


def header_key(file: int) -> str:
    return f"header/{file}"


def trunk_key(piece: int) -> str:
    return f"trunk/{piece}"


def expert_key(layer: int, expert: int) -> str:
    return f"expert/{layer}/{expert}"


class _KeptChecksums(msgspec.Struct, frozen=True):
    """The stored checksums of a folder. ``stamps`` are the size and modification time of each of its files."""

    version: int
    layout: str
    stamps: tuple[tuple[str, int, int], ...]
    items: dict[str, int]
    parts: dict[str, int]


class ItemChecksums:
    """The checksums of one folder's items, each computed when it is first needed. Not thread-safe."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout
        self._items: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        """Checksums of the trunk's tensors by name."""
        which = "prepared" if layout.folder.name.endswith(PREPARED) else "plain"
        self._path = locate("data") / "checksums" / f"{profile_key(layout.folder)}.{which}.json"
        self._stamps = self._stamp()
        kept = self._read()
        if kept is not None:
            self._items, self._parts = dict(kept.items), dict(kept.parts)
        self._known = len(self._items)

    def setting(self, path: Path) -> int:
        return zlib.crc32(path.read_bytes())

    def header(self, file: int) -> int:
        return self._of(header_key(file), (Run(file, 0, self._layout.headers[file]),), None)

    def trunk(self, piece: int, report: Callable[[int], None] | None = None) -> int:
        """The checksum of one trunk piece, whose tensors follow one another. Each tensor's own checksum is noted,
        too."""
        key = trunk_key(piece)
        if key not in self._items:
            whole = 0
            for name, file, entry in self._layout.trunk[piece]:
                alone = 0
                for block in self._blocks(runs_of([(name, file, entry)]), report):
                    whole, alone = zlib.crc32(block, whole), zlib.crc32(block, alone)
                self._parts[name] = alone
            self._items[key] = whole
        return self._items[key]

    def expert(self, layer: int, expert: int, report: Callable[[int], None] | None = None) -> int:
        return self._of(expert_key(layer, expert), self._layout.experts[layer, expert], report)

    def fingerprint(self, progress: ProgressCallback) -> str:
        """The fingerprint of all weights: of each tensor of the trunk, and of each expert's bytes as they are
        stored."""
        total = self._layout.trunk_bytes + self._layout.expert_bytes * len(self._layout.experts)
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress("checking the weights", min(done, total), total, "bytes")

        digest = hashlib.blake2b(self._kind().encode(), digest_size=16)
        try:
            for piece in range(len(self._layout.trunk)):
                self.trunk(piece, report)
            tensors = {name: entry for piece in self._layout.trunk for name, _, entry in piece}
            for name, entry in sorted(tensors.items()):
                digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0{self._parts[name]}\n".encode())
            for layer, expert in sorted(self._layout.experts):
                digest.update(f"{layer}\0{expert}\0{self.expert(layer, expert, report)}\n".encode())
        finally:
            self.keep()
        return digest.hexdigest()

    def keep(self) -> None:
        """Store the checksums if the files have not changed since. Errors are ignored."""
        if len(self._items) == self._known or self._stamp() != self._stamps:
            return
        checksums = _KeptChecksums(VERSION, self._layout.fingerprint, self._stamps, self._items, self._parts)
        # If this fails, the weights are read again the next time.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with new_file(self._path) as file:
                file.write(msgspec.json.encode(checksums))
            self._known = len(self._items)

    def _kind(self) -> str:
        """The number format of the experts, or that mlx-lm wrote them or that they are quantised."""
        opened = self._layout.opened
        return "library" if opened is None else "" if opened.experts is None else opened.experts.dtype

    def _of(self, key: str, runs: Runs, report: Callable[[int], None] | None) -> int:
        if key not in self._items:
            checksum = 0
            for block in self._blocks(runs, report):
                checksum = zlib.crc32(block, checksum)
            self._items[key] = checksum
        return self._items[key]

    def _blocks(self, runs: Runs, report: Callable[[int], None] | None) -> Iterator[bytes]:
        for block in read_runs(self._layout.folder, [name for name, _ in self._layout.files], runs, _BLOCK):
            yield block
            if report is not None:
                report(len(block))

    def _stamp(self) -> tuple[tuple[str, int, int], ...]:
        try:
            found = [(name, (self._layout.folder / name).stat()) for name, _ in self._layout.files]
        except OSError:
            return ()
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)

    def _read(self) -> _KeptChecksums | None:
        try:
            if self._path.stat().st_size > _KEPT_LIMIT:
                return None
            kept = msgspec.json.decode(self._path.read_bytes(), type=_KeptChecksums)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        fits = (kept.version, kept.stamps, kept.layout) == (VERSION, self._stamps, self._layout.fingerprint)
        return kept if fits else None


def read_runs(folder: Path, files: Sequence[str], runs: Iterable[Run], block: int) -> Iterator[bytes]:
    """The bytes of ``runs``, one after the other, in blocks of at most ``block`` bytes.

    Raises ModelError if a file cannot be read or became shorter.
    """
    for run in runs:
        yield from _read_span(folder / files[run.file], run.start, run.stop, block)


def _read_span(path: Path, start: int, stop: int, block: int) -> Iterator[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < stop:
                data = os.pread(descriptor, min(block, stop - start), start)
                if not data:
                    raise damaged(f"{path} became shorter while it was read")
                yield data
                start += len(data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the disk.", "disk") from error


# --- weights of a model on this disk ---------------------------------------------------------------------------------


def held_of(weights: str, head: str) -> tuple[dict[int, list[int]], bool]:
    """The experts by layer, and whether the trunk is here, of the model with the weight fingerprint ``weights``.

    Only shards that ``head`` sent count.
    """
    has: dict[int, set[int]] = {}
    trunk = False
    for _, manifest in _shards_of(head) if weights else ():
        if manifest.identity.weights == weights:
            trunk = trunk or manifest.has_trunk
            for layer, experts in manifest.experts.items():
                has.setdefault(layer, set()).update(experts)
    return {layer: sorted(experts) for layer, experts in has.items()}, trunk


def reusable_bytes(weights: str, family: str, head: str) -> int:
    """Upper bound of the bytes on this disk that could be reused for the model, so that a full disk does not yet
    exclude this machine.

    A whole model of the family ``family`` may turn out to be the same model. If the head does not know its weight
    fingerprint yet, a shard that it sent may be of it, too.
    """
    found = [model.nbytes for model in installed() if model.family == family]
    if not weights:
        found += [_on_disk(path) for path, shard in _shards_of(head) if shard.identity.family == family]
    return max(found, default=0)


def _shards_of(head: str) -> Iterator[tuple[Path, ShardManifest]]:
    return ((path, manifest) for path, manifest in shards_in(locate("models")) if manifest.head == head)


def _on_disk(folder: Path) -> int:
    """Bytes that ``folder`` occupies, without the holes in its files."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return 0
