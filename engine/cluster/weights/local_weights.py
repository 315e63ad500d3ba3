"""The weights on this machine's disk that belong to the model of a head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelError
from engine.models.folders.model_folder import SHARD
from engine.models.folders.shard_files import ShardManifest, read_shard
from engine.models.store.local_models import installed
from engine.system.locations import locate


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
    for path in sorted(locate("models").glob(f"*{SHARD}")):
        with contextlib.suppress(ModelError):
            manifest = read_shard(path)
            if manifest.head == head:
                yield path, manifest


def _on_disk(folder: Path) -> int:
    """Bytes that ``folder`` occupies, without the holes in its files."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return 0
