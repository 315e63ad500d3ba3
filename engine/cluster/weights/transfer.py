"""Transfer of weights between machines: offers, requests and chunks.

An offer lists the items that one machine needs of a model: configuration and tokenizer files, the headers of the weight
files, the trunk in pieces, and experts. Each item has its place in the files and its checksum. The other machine
answers with the items that it lacks (:mod:`.shard_store`), and receives them in chunks of at most 1 MiB. The transport
of the messages is not known here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.weight_fingerprint import (
    ItemChecksums,
    expert_key,
    header_key,
    identity_with,
    read_runs,
    setting_key,
    trunk_key,
)
from engine.errors import ModelError, shown
from engine.ipc.progress import ProgressCallback
from engine.models.folders.model_folder import SHARD_MANIFEST
from engine.models.folders.shard_files import ModelIdentity, is_shard, read_shard
from engine.models.folders.weight_layout import WeightLayout, layout_of, runs_of
from engine.models.formats.byte_map import Run, Runs

CHUNK_BYTES = 1024 * 1024
OFFER_LIMIT = 8 * 1024 * 1024
"""Maximum bytes of an encoded offer. An offer of 384 experts in each of 60 layers has 4 MB, and about 25 times as much
once it is decoded."""
_CHUNK_OVERHEAD = 64
_SETTINGS_LIMIT = 1_000_000_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}\.(safetensors|gguf)|experts/layer-[0-9]{5}\.slabs")
_SETTING_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}")
_MOST_ITEMS = 100_000
_MOST_RUNS = 100_000
"""Maximum runs of one item. The bytes of a trunk piece may be scattered."""
_MOST_FILES = 1000
"""Maximum number of files, all of which are open while weights are received."""
_LARGEST_FILE = 1 << 46
_LONGEST_WORD = 200


Spans = tuple[tuple[int, int, int], ...]
"""Byte ranges (file, start, stop) in a model's files."""


class Item(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A unit of transfer.

    ``runs`` are its byte ranges (file, start, stop) in the model's files. A setting has none: its key names the file.
    ``checksum`` is the CRC-32 of the bytes.
    """

    key: str
    nbytes: int
    checksum: int
    runs: Annotated[Spans, msgspec.Meta(max_length=_MOST_RUNS)] = ()

    @property
    def is_small(self) -> bool:
        """Whether it is configuration, tokenizer or header, which show the model's size and whether it can run."""
        return not self.runs or self.key.startswith("header/")


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The items of a model that one node needs. Made by :func:`offer`; :func:`decode_offer` checks a received one."""

    identity: ModelIdentity
    layout: str
    files: Annotated[tuple[tuple[str, int], ...], msgspec.Meta(max_length=_MOST_ITEMS)]
    """Names and sizes of the weight files."""
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=_MOST_ITEMS)]
    trunk_pieces: int

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def version(self) -> tuple[object, ...]:
        """A key that is equal for all offers of the same version of a model."""
        return self.layout, self.identity.weights, self.files, self.trunk_pieces

    def part(self, held: Mapping[int, Sequence[int]], trunk: bool) -> Offer:
        """The part for a node with the experts ``held`` (by decoder layer). ``trunk`` is False for a node that serves
        experts only."""
        experts = {expert_key(layer, expert) for layer, row in held.items() for expert in row}

        def is_needed(item: Item) -> bool:
            return item.key in experts if expert_of(item.key) else trunk or not item.key.startswith("trunk/")

        return msgspec.structs.replace(self, items=tuple(filter(is_needed, self.items)))

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """The offered experts by layer."""
        experts: dict[int, list[int]] = {}
        for layer, expert in filter(None, (expert_of(item.key) for item in self.items)):
            experts.setdefault(layer, []).append(expert)
        return {layer: tuple(sorted(row)) for layer, row in sorted(experts.items())}


class Wanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A requested item, by its index in the offer. Its first ``start`` bytes have arrived before."""

    item: int
    start: int = 0


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes of an item, beginning at ``offset``. ``checksum`` is their CRC-32."""

    item: int
    offset: int
    checksum: int
    data: bytes


def offer(folder: Path, progress: ProgressCallback, name: str = "") -> Offer:
    """The offer of everything in ``folder``: a whole model, or a shard with the identity that its head gave it.

    ``name`` is the head's name of a whole model. Weights whose checksums are unknown are read. Raises ModelError.
    ``progress`` may raise Cancelled.
    """
    layout = layout_of(folder)
    checksums = ItemChecksums(layout)
    pieces: Iterable[int] = range(len(layout.trunk))
    experts: Iterable[tuple[int, int]] = layout.experts
    if is_shard(folder):
        manifest = read_shard(folder)
        identity = manifest.identity
        pieces = [piece for piece in pieces if trunk_key(piece) in manifest.other]
        experts = [(layer, expert) for layer, held in manifest.experts.items() for expert in held]
    else:
        identity = identity_with(layout, checksums, progress)
        identity = msgspec.structs.replace(identity, name=shown(name or identity.name, _LONGEST_WORD))
    items = [_setting_item(path, checksums) for path in layout.settings if path.stat().st_size]
    items += [
        Item(header_key(file), size, checksums.header(file), ((file, 0, size),))
        for file, size in enumerate(layout.headers)
        if size
    ]
    items += [_item(trunk_key(piece), runs_of(layout.trunk[piece]), checksums.trunk(piece)) for piece in pieces]
    items += [_item(expert_key(*at), layout.experts[at], checksums.expert(*at)) for at in sorted(experts)]
    checksums.keep()
    return Offer(
        identity=identity,
        layout=layout.fingerprint,
        files=layout.files,
        items=tuple(items),
        trunk_pieces=len(layout.trunk),
    )


def places_of_items(layout: WeightLayout) -> dict[str, Spans]:
    """The byte ranges of all items of ``layout`` by key, without settings."""
    headers = [(file, size) for file, size in enumerate(layout.headers) if size]
    places: dict[str, Spans] = {header_key(file): ((file, 0, size),) for file, size in headers}
    places |= {trunk_key(piece): _spans(runs_of(tensors)) for piece, tensors in enumerate(layout.trunk)}
    return places | {expert_key(*place): _spans(runs) for place, runs in layout.experts.items()}


def stream(folder: Path, offered: Offer, wanted: Sequence[Wanted]) -> Iterator[bytes]:
    """The encoded chunks of the ``wanted`` items, in this order.

    Raises ModelError if a file was changed since the offer, RingProtocolError if an item was not offered.
    """
    _check_same_files(folder, offered)
    if len({want.item for want in wanted}) != len(wanted):
        raise RingProtocolError("the same weights were wanted more than once")
    names = [name for name, _ in offered.files]
    for want in wanted:
        if not 0 <= want.item < len(offered.items) or not 0 <= want.start <= offered.items[want.item].nbytes:
            raise RingProtocolError(f"item {want.item} from byte {want.start} on was wanted and not offered")
        item = offered.items[want.item]
        if item.runs:
            blocks = read_runs(folder, names, _after(item.runs, want.start), CHUNK_BYTES)
        else:
            path = folder / item.key.removeprefix("setting/")
            blocks = _read_setting(path, want.start)
        offset = want.start
        for block in blocks:
            yield encode_chunk(Chunk(want.item, offset, zlib.crc32(block), block))
            offset += len(block)
        if offset != item.nbytes:
            raise ModelError(f"{folder} was changed while it was sent; form the ring again.")


def expert_of(key: str) -> tuple[int, int] | None:
    """Layer and expert of an item's key; None if the item is not an expert."""
    parts = key.split("/")
    if parts[0] != "expert" or len(parts) != 3:
        return None
    return int(parts[1]), int(parts[2])


# --- encoding -----------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(Offer)
_chunks = msgspec.msgpack.Decoder(Chunk)
_wanted = msgspec.msgpack.Decoder(Annotated[tuple[Wanted, ...], msgspec.Meta(max_length=_MOST_ITEMS)])


def encode_offer(offered: Offer) -> bytes:
    return _encoder.encode(offered)


def decode_offer(data: bytes | memoryview) -> Offer:
    """The decoded and checked offer. Raises RingProtocolError for a name, place or size that no model can have."""
    if len(data) > OFFER_LIMIT:
        raise RingProtocolError(f"an offer of {len(data)} bytes is over the limit of {OFFER_LIMIT}")
    try:
        offered = _offers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RingProtocolError(f"an offer could not be read: {error}") from error
    check_offer(offered)
    return offered


def encode_wanted(wanted: Sequence[Wanted]) -> bytes:
    return _encoder.encode(list(wanted))


def decode_wanted(data: bytes | memoryview) -> tuple[Wanted, ...]:
    """The decoded request. Raises RingProtocolError. :func:`stream` checks that the items were offered."""
    if len(data) > OFFER_LIMIT:
        raise RingProtocolError(f"a request of {len(data)} bytes is over the limit of {OFFER_LIMIT}")
    try:
        wanted: tuple[Wanted, ...] = _wanted.decode(data)
        return wanted
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RingProtocolError(f"a request for weights could not be read: {error}") from error


def encode_chunk(chunk: Chunk) -> bytes:
    return _encoder.encode(chunk)


def decode_chunk(data: bytes | memoryview) -> Chunk:
    """The decoded chunk. Raises RingProtocolError if it is too large, malformed, or has a wrong checksum."""
    if len(data) > CHUNK_BYTES + _CHUNK_OVERHEAD:
        raise RingProtocolError(f"a chunk of {len(data)} bytes is over the limit of {CHUNK_BYTES}")
    try:
        chunk = _chunks.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RingProtocolError(f"a chunk of weights could not be read: {error}") from error
    if zlib.crc32(chunk.data) != chunk.checksum:
        raise RingProtocolError(f"a chunk of weights was damaged on its way (item {chunk.item}, byte {chunk.offset})")
    return chunk


# --- checking -----------------------------------------------------------------------------------------------------


def check_offer(offered: Offer) -> None:
    """Raises RingProtocolError for a file name that no model has, or bytes outside of the files."""
    names = [name for name, _ in offered.files]
    if len({name.casefold() for name in names}) != len(names) or not all(map(_FILE_NAME.fullmatch, names)):
        raise RingProtocolError("an offer names a file that is no file of weights")
    if len(names) > _MOST_FILES:
        raise RingProtocolError(f"an offer names {len(names)} files of weights; {_MOST_FILES} are allowed")
    if any(not 0 < size <= _LARGEST_FILE for _, size in offered.files):
        raise RingProtocolError("an offer names a file of an impossible size")
    if len({item.key.casefold() for item in offered.items}) != len(offered.items):
        raise RingProtocolError("an offer has one item twice")
    if not re.fullmatch(r"[0-9a-f]{8,64}", offered.layout) or not re.fullmatch(
        r"[0-9a-f]{8,64}", offered.identity.weights
    ):
        raise RingProtocolError("an offer has an impossible fingerprint")
    words = msgspec.structs.astuple(offered.identity)
    if any(isinstance(word, str) and (len(word) > _LONGEST_WORD or not word.isprintable()) for word in words):
        raise RingProtocolError("an offer names its model with what cannot be shown")
    for item in offered.items:
        _check_item(item, offered)
    if sum(item.nbytes for item in offered.items if not item.runs) > _SETTINGS_LIMIT:
        raise RingProtocolError("an offer has too large configuration files")


def _check_item(item: Item, offered: Offer) -> None:
    kind, _, rest = item.key.partition("/")
    if not _is_good_key(kind, rest, item, offered):
        raise RingProtocolError("an offer has an item that no model has")
    before: tuple[int, int] = (-1, 0)
    for file, start, stop in item.runs:
        inside = 0 <= file < len(offered.files) and 0 <= start < stop <= offered.files[file][1]
        if not inside or (file, start) < before:
            raise RingProtocolError(f"the offered item {item.key} does not lie in the model's files")
        before = (file, stop)
    if item.runs and sum(stop - start for _, start, stop in item.runs) != item.nbytes:
        raise RingProtocolError(f"the offered item {item.key} has not the size it should have")
    if not 0 <= item.nbytes <= _LARGEST_FILE:
        raise RingProtocolError(f"the offered item {item.key} has an impossible size")


def _is_good_key(kind: str, rest: str, item: Item, offered: Offer) -> bool:
    if kind == "setting":
        return not item.runs and _SETTING_NAME.fullmatch(rest) is not None and _is_setting_name(rest)
    if kind == "expert":
        return bool(item.runs) and re.fullmatch(r"\d{1,6}/\d{1,6}", rest, re.ASCII) is not None
    if not re.fullmatch(r"\d{1,6}", rest, re.ASCII):
        return False
    return len(item.runs) == 1 if kind == "header" else kind == "trunk" and int(rest) < offered.trunk_pieces


def _is_setting_name(name: str) -> bool:
    """Whether ``name`` can be a file beside the weights.

    Names of weight files, of our own files and of code are excluded, also where a file system ignores case, dots or
    spaces.
    """
    folded = name.casefold().rstrip(". ")
    return folded != SHARD_MANIFEST and not folded.endswith((".safetensors", ".gguf", ".slabs", ".part", ".py"))


def _check_same_files(folder: Path, offered: Offer) -> None:
    try:
        same = all((folder / name).stat().st_size == size for name, size in offered.files)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read ({error.strerror or error}); check the disk.", "disk") from error
    if not same:
        raise ModelError(f"{folder} was changed since it was offered; form the ring again.")


def _setting_item(path: Path, checksums: ItemChecksums) -> Item:
    return Item(setting_key(path.name), path.stat().st_size, checksums.setting(path))


def _item(key: str, runs: Runs, checksum: int) -> Item:
    return Item(key, sum(run.nbytes for run in runs), checksum, _spans(runs))


def _spans(runs: Runs) -> Spans:
    return tuple((run.file, run.start, run.stop) for run in runs)


def _after(runs: Sequence[tuple[int, int, int]], start: int) -> list[Run]:
    """``runs`` without their first ``start`` bytes."""
    left = []
    for file, first, stop in runs:
        skipped = min(start, stop - first)
        start -= skipped
        if first + skipped < stop:
            left.append(Run(file, first + skipped, stop))
    return left


def _read_setting(path: Path, start: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(CHUNK_BYTES):
                yield block
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the disk.", "disk") from error
