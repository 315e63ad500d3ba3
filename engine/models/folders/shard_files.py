"""A shard: the part of a model that one node of a ring keeps, as a sparse copy of another machine's model folder.

Every file has the same name and size as there. Only the trunk and the node's own experts are written; the rest of each
file is a hole that takes no disk space. A shard is therefore read by the same code, in the same layout and with the
same results as the whole model. ``share.json`` names the items that are complete and compared with their checksums;
other bytes of the files do not count. A shard can be loaded only as a node's part of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.models.folders.model_folder import SHARD, SHARD_MANIFEST

FORMAT = 1
_MANIFEST_LIMIT = 64 * 1024 * 1024


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that two machines compare before they share a model. All but ``name`` must be equal.

    ``weights`` and ``tokenizer`` are fingerprints in hexadecimal digits. That of the weights depends on how an expert
    lies in the files.
    """

    version: int
    """Version of this description and of the transfer of weights."""
    name: str
    family: str
    quantisation: str
    """``bfloat16``, ``4-bit in groups of 64``, ..."""
    config: str
    """Fingerprint of ``config.json``, without entries that do not change the model."""
    tokenizer: str
    weights: str


class FileSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the model that holds tensors: its name relative to the folder, and its size in bytes."""

    name: str
    size: int


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of which the first ``done`` bytes are on the disk; ``checksum`` is their CRC-32."""

    key: str
    done: int
    checksum: int


class ShardManifest(msgspec.Struct, frozen=True):
    """``share.json``. ``layout`` is the fingerprint of the folder's files
    (:mod:`engine.models.folders.weight_layout`). Unknown fields are ignored: earlier versions wrote one more."""

    format: int
    identity: ModelIdentity
    head: str
    """Node id of the machine that sent this."""
    layout: str
    files: tuple[FileSize, ...]
    experts: dict[int, tuple[int, ...]]
    """The experts that are here by layer, ascending."""
    other: tuple[str, ...] = ()
    """Keys of the other items that are here: configuration and tokenizer files, headers and trunk pieces."""
    trunk_pieces: int = 0
    """Number of pieces of the whole trunk; 0 for a model without one."""
    begun: Begun | None = None

    @property
    def has_trunk(self) -> bool:
        return sum(key.startswith("trunk/") for key in self.other) >= self.trunk_pieces


def is_shard(folder: Path) -> bool:
    """Whether ``folder`` is a shard, complete or not."""
    return (folder / SHARD_MANIFEST).is_file()


def read_shard(folder: Path) -> ShardManifest:
    """``share.json`` of ``folder``. Raises ModelError if it is missing, damaged, or of another version."""
    path = folder / SHARD_MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ModelError(f"{path} is damaged: it is over {_MANIFEST_LIMIT} bytes; {_remedy(folder)}.")
        manifest = msgspec.json.decode(path.read_bytes(), type=ShardManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error}); {_remedy(folder)}.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); {_remedy(folder)}.") from error
    if manifest.format != FORMAT:
        raise ModelError(f"{path} is of format {manifest.format}, not {FORMAT}; {_remedy(folder)}.")
    return manifest


def shards_in(models: Path) -> Iterator[tuple[Path, ShardManifest]]:
    """The readable shards in the folder ``models``, by name."""
    for path in sorted(models.glob(f"*{SHARD}")):
        try:
            manifest = read_shard(path)
        except ModelError:
            continue
        yield path, manifest


class ShardPart:
    """The experts that are present in a shard. An opened folder hands out no others."""

    def __init__(self, folder: Path, manifest: ShardManifest) -> None:
        self._folder = folder
        self._name = manifest.identity.name
        self.has_trunk = manifest.has_trunk
        self._held = {layer: tuple(sorted(experts)) for layer, experts in manifest.experts.items()}

    def held(self, layer: int) -> tuple[int, ...]:
        """The experts of ``layer`` that are here, ascending."""
        return self._held.get(layer, ())

    @property
    def count(self) -> int:
        """Number of (layer, expert) pairs that are here."""
        return sum(map(len, self._held.values()))

    def require_trunk(self) -> None:
        """Raises ModelError if the trunk is not here."""
        if not self.has_trunk:
            raise ModelError(
                f"{self._folder} holds experts of {self._name} without its trunk: it serves in a ring whose head "
                "routes (central), and runs no model by itself."
            )


def part_of(folder: Path) -> ShardPart | None:
    """The part of a shard that is here; None for a whole model. Raises ModelError if ``share.json`` is damaged."""
    return ShardPart(folder, read_shard(folder)) if is_shard(folder) else None


def _remedy(folder: Path) -> str:
    return f"delete {folder}, and the head sends it again"
