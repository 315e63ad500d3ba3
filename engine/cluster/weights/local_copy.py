"""Making a shard from a plain checkpoint that is on this machine anyway, if its head offers a bank of that model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from engine.cluster.weights.transfer import CHUNK_BYTES, Chunk, Item, Offer, Wanted, encode_chunk, expert_of
from engine.errors import ModelError
from engine.models.architectures.families import check_supported
from engine.models.folders import model_folder
from engine.models.folders.bank import EXPERTS_FOLDER, TRUNK, layer_path
from engine.models.folders.checkpoint import Checkpoint
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.prepare import BankPlan, fill_slab, is_setting, plan_bank
from engine.models.folders.weight_layout import config_fingerprint


class LocalCopy:
    """The bank that a checkpoint on this machine would become, with the layout of the offered bank."""

    def __init__(self, plan: BankPlan, offered: Offer) -> None:
        self._plan = plan
        self._offered = offered
        self._trunk_file = [name for name, _ in offered.files].index(TRUNK)
        self._starts: list[int] = []
        position = len(plan.trunk_header)
        for _, tensor in plan.trunk:
            self._starts.append(position)
            position += tensor.nbytes

    def wanted(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The items that can be made here with the right checksum, each from its first byte."""
        return [want for want in wanted if want.start == 0 and self._is_right(self._offered.items[want.item])]

    def chunks(self, wanted: Sequence[Wanted]) -> Iterator[bytes]:
        """As :func:`engine.cluster.weights.transfer.stream`."""
        for want in wanted:
            data = self._bytes(self._offered.items[want.item])
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                yield encode_chunk(Chunk(want.item, start, zlib.crc32(piece), piece))

    def _is_right(self, item: Item) -> bool:
        made = not item.runs or expert_of(item.key) is not None or self._in_trunk(item)
        return made and zlib.crc32(self._bytes(item)) == item.checksum

    def _in_trunk(self, item: Item) -> bool:
        return all(file == self._trunk_file for file, _, _ in item.runs)

    def _bytes(self, item: Item) -> bytes:
        if not item.runs:
            return self._setting(item.key.removeprefix("setting/"))
        place = expert_of(item.key)
        if place is None:
            return b"".join(self._trunk_bytes(start, stop) for _, start, stop in item.runs)
        experts = self._plan.experts
        if place[0] not in experts.layers or place[1] >= experts.count:
            return b""
        slab = np.zeros(self._plan.slab.size, dtype=np.uint8)
        fill_slab(slab, self._plan.slab, experts.expert(*place))
        return slab.tobytes()

    def _setting(self, name: str) -> bytes:
        """The contents of a file beside the weights; empty if it is not here."""
        path = self._plan.files.folder / name
        return path.read_bytes() if is_setting(path) else b""

    def _trunk_bytes(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of the trunk's file."""
        parts = [self._plan.trunk_header[start:stop]]
        for first, (_, tensor) in zip(self._starts, self._plan.trunk, strict=True):
            if first < stop and start < first + tensor.nbytes:
                data = tensor.words.reshape(-1).view(np.uint8)
                parts.append(data[max(0, start - first) : stop - first].tobytes())
        return b"".join(parts)


def local_copy(models: Path, offered: Offer) -> LocalCopy | None:
    """A checkpoint in ``models`` from which the offered bank could have been made, or None."""
    if offered.form != "bank":
        return None
    for path in sorted(models.iterdir()) if models.is_dir() else ():
        if path.name.startswith(".") or not model_folder.is_complete(path) or model_folder.has_bank(path):
            continue
        try:
            config = read_config(path)
            if config_fingerprint(config) != offered.identity.config:
                continue
            check_supported(config)
            files = open_model(path)
            plan = plan_bank(files) if isinstance(files, Checkpoint) else None
        except (ModelError, OSError):
            continue
        if plan is not None and _sizes(plan) == dict(offered.files):
            return LocalCopy(plan, offered)
    return None


def _sizes(plan: BankPlan) -> Mapping[str, int]:
    """Names and sizes of the weight files that the bank would have."""
    slabs = {f"{EXPERTS_FOLDER}/{layer_path(Path(), layer).name}": plan.layer_bytes for layer in plan.experts.layers}
    return {TRUNK: plan.trunk_bytes, **slabs}
