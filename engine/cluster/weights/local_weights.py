"""What this machine has on its disk of the model that a head asks about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelError
from engine.models.locations import locate
from engine.models.share_files import ShareManifest, read_share
from engine.models.store import SHARE, installed


def here_already(weights: str, head: str) -> tuple[dict[int, list[int]], bool]:
    """What shares on this disk hold that ``head`` sent, of the model with this fingerprint of its weights: layer to
    experts, and whether the trunk is there."""
    has: dict[int, set[int]] = {}
    trunk = False
    for _, manifest in _shares_of(head) if weights else ():
        if manifest.identity.weights == weights:
            trunk = trunk or manifest.has_trunk
            for layer, experts in manifest.experts.items():
                has.setdefault(layer, set()).update(experts)
    return {layer: sorted(experts) for layer, experts in has.items()}, trunk


def perhaps_here(weights: str, family: str, head: str) -> int:
    """Bytes on this disk that could be of the model, so that a full disk is no reason yet to do without this machine.

    A whole model of its family may turn out to be the same, and is then used where it lies. As long as the head does
    not say which weights it has, so may a share that it sent.
    """
    found = [model.nbytes for model in installed() if model.family == family]
    if not weights:
        found += [_on_disk(path) for path, share in _shares_of(head) if share.identity.family == family]
    return max(found, default=0)


def _shares_of(head: str) -> Iterator[tuple[Path, ShareManifest]]:
    for path in sorted(locate("models").glob(f"*{SHARE}")):
        with contextlib.suppress(ModelError):
            manifest = read_share(path)
            if manifest.head == head:
                yield path, manifest


def _on_disk(folder: Path) -> int:
    """Bytes that ``folder`` takes, the holes in its files not counted."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return 0
