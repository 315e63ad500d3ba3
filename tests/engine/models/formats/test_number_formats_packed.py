"""A number format nobody computes with is carried all the same: slots, copies, shards, sizes and plans take its bytes.

The format packs 32 weights in 18 bytes, another one 7 weights in 5; a layer may store its matrices in others than the
next. Only what would multiply by them refuses, and says the format's name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.stand_in_device import StandInDevice
from engine.calibration.calibration_file import shape_of
from engine.cluster.weights.shard_store import ShardStore
from engine.cluster.weights.transfer import decode_offer, encode_offer
from engine.errors import ModelError
from engine.models.folders.sizes import sizes_of
from engine.models.folders.weight_layout import layout_of
from engine.models.formats.byte_map import ExpertPlace, FileSpan, MatrixPlace
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.model_files import (
    Experts,
    ExpertWeights,
    ModelFiles,
    StoredTensor,
    whole_bytes,
    whole_weights,
)
from engine.models.formats.safetensors_files import encode_header
from engine.moe.held import HeldExperts
from engine.moe.popularity import model_of
from engine.planning.calibration import Processor, guessed
from engine.planning.hybrid import Device, gpu_room, workspace_bytes
from engine.planning.placement import ExpertGrid
from engine.planning.policy import policy_named
from engine.planning.prediction import Shares, cpu_speed
from engine.planning.ring_nodes import GpuFacts, NodeFacts, expert_room, gpu_slabs, memory_room
from engine.runtimes.torch.offload.device_cache import DeviceCache
from engine.runtimes.torch.offload.devices import tensors_in
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.host_memory import ALIGNMENT, HostExperts
from engine.runtimes.torch.offload.local import make_cpu_backend
from tests.support.progress import quiet
from tests.support.shards import offer_part, send
from tests.support.tiny_models import write_tiny_model

HIDDEN, FFN, COUNT = 64, 96, 5
BLOCKS = {"P18": (32, 18), "P5": (7, 5), "BF16": (1, 2), "F32": (1, 4)}
"""Weights and bytes of a block, by number format."""
FORMATS = {
    0: {"gate": "P18", "up": "P18", "down": "P5", "down_bias": "F32"},
    2: {"gate": "P5", "up": "P18", "down": "BF16", "down_bias": "F32"},
}
SHAPES = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN), "down_bias": (HIDDEN,)}
GAP = 3
"""Bytes of padding between matrices, which leave them at odd addresses."""


def size_of(name: str, layer: int) -> int:
    weights, nbytes = BLOCKS[FORMATS[layer][name]]
    return -(-int(np.prod(SHAPES[name])) // weights) * nbytes


class PackedExperts:
    """See :class:`engine.models.formats.model_files.Experts`: random bytes in two files per layer, ``down`` in the
    second."""

    layers = (0, 2)
    count = COUNT
    dtype = "P18"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.files: dict[tuple[int, bool], MappedFile] = {}
        random = np.random.default_rng(0)
        for layer in self.layers:
            for second in (False, True):
                path = folder / f"{layer}-{second}"
                path.write_bytes(random.bytes(self.stride(layer, second) * COUNT))
                self.files[layer, second] = MappedFile(path)

    @staticmethod
    def parts(second: bool) -> tuple[str, ...]:
        return ("down", "down_bias") if second else ("gate", "up")

    def stride(self, layer: int, second: bool) -> int:
        return sum(size_of(name, layer) + GAP for name in self.parts(second))

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        return tuple(self.files.values())

    @property
    def nbytes(self) -> int:
        return sum(COUNT * size_of(name, layer) for layer in self.layers for name in SHAPES)

    def held(self, layer: int) -> range:
        return range(COUNT)

    def place(self, layer: int, expert: int) -> ExpertPlace:
        spans, matrices = [], {}
        for span, second in enumerate((False, True)):
            start, offset = expert * self.stride(layer, second), 0
            for name in self.parts(second):
                shape, nbytes = SHAPES[name], size_of(name, layer)
                stride = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
                matrices[name] = MatrixPlace(FORMATS[layer][name], span, offset, nbytes, shape, stride)
                offset += nbytes + GAP
            spans.append(FileSpan(self.files[layer, second], start, start + offset))
        return ExpertPlace(tuple(spans), matrices)

    def stored(self, layer: int, expert: int, name: str) -> bytes:
        """What the file holds of a matrix."""
        place = self.place(layer, expert)
        matrix = place.matrices[name]
        span = place.spans[matrix.span]
        start = span.start + matrix.offset
        return Path(span.file.path).read_bytes()[start : start + matrix.nbytes]

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        def tensor(name: str) -> StoredTensor:
            words = np.frombuffer(self.stored(layer, expert, name), np.uint8)
            return StoredTensor(FORMATS[layer][name], words)

        return ExpertWeights(tensor("gate"), tensor("up"), tensor("down"), down_bias=tensor("down_bias"))

    def check_unchanged(self, layer: int | None = None) -> None:
        """Nobody changes them."""


@dataclass(frozen=True)
class PackedFiles:
    """See :class:`engine.models.formats.model_files.ModelFiles`, as far as sizes need it."""

    config: dict[str, Any]
    experts: Experts

    def trunk(self) -> Iterator[tuple[str, StoredTensor]]:
        yield "model.embed_tokens.weight", StoredTensor("BF16", np.zeros((50, HIDDEN), np.uint16))
        yield "model.norm.weight", StoredTensor("BF16", np.ones(HIDDEN, np.uint16))

    def tables(self) -> Iterator[tuple[str, StoredTensor]]:
        return iter(())


@pytest.fixture
def experts(tmp_path: Path) -> PackedExperts:
    return PackedExperts(tmp_path / "experts")


# --- slots and copies -----------------------------------------------------------------------------------------------


def test_a_slot_is_a_layout_of_matrices_each_in_its_own_format(experts: PackedExperts) -> None:
    host = HostExperts(experts)
    for layer in experts.layers:
        layout = host.layout(layer)
        assert {name: matrix.format for name, matrix in layout.matrices.items()} == FORMATS[layer]
        assert {name: matrix.nbytes for name, matrix in layout.matrices.items()} == {
            name: size_of(name, layer) for name in SHAPES
        }
        assert {name: matrix.shape for name, matrix in layout.matrices.items()} == SHAPES
        ends = sorted((matrix.offset, matrix.offset + matrix.nbytes) for matrix in layout.matrices.values())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= layout.size <= host.slot_bytes and layout.size % ALIGNMENT == 0
    assert host.layout(0) != host.layout(2)


def assert_in_slots(host: HostExperts, experts: PackedExperts, cache: DeviceCache, device: StandInDevice) -> int:
    """Every expert that the cache knows lies in its slot as in the file; how many they are."""
    found = 0
    for layer in experts.layers:
        for expert in cache.slabs.resident(layer):
            slot = cache.slabs.slot_of(layer, expert)
            assert slot is not None
            there = device.buffers[slot][device._shifts[slot] :].numpy().tobytes()
            for name, matrix in host.layout(layer).matrices.items():
                stored = experts.stored(layer, expert, name)
                assert there[matrix.offset : matrix.offset + matrix.nbytes] == stored
            found += 1
    return found


@pytest.mark.parametrize("slots", [1, 4, 2 * COUNT])
def test_copies_are_the_files_bytes(experts: PackedExperts, slots: int) -> None:
    host, device = HostExperts(experts), StandInDevice(10**7)
    cache = DeviceCache(host, device, policy_named("balanced"), lambda text: None)
    order = [(layer, expert) for expert in range(COUNT) for layer in experts.layers]
    assert cache.open(slots * host.slot_bytes, order, 0, quiet) == []
    assert cache.nbytes == slots * host.slot_bytes
    assert assert_in_slots(host, experts, cache, device) == slots
    # Another size, and the other experts in the same slots.
    cache.resize(2 * host.slot_bytes)
    cache.resize(2 * COUNT * host.slot_bytes)
    device.synchronize()
    assert assert_in_slots(host, experts, cache, device) == 2 * COUNT
    locked: dict[int, int] = {}
    host.lock(lambda address, nbytes: locked.update({address: nbytes}), lambda address: None, quiet)  # type: ignore[func-returns-value]
    assert sum(locked.values()) == sum(file.size for file in experts.mapped_files)
    cache.close()
    host.close()


# --- sizes and plans ------------------------------------------------------------------------------------------------


def files_of(experts: Experts) -> ModelFiles:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 3,
        "num_local_experts": COUNT,
        "num_experts_per_tok": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    return PackedFiles(config, experts)  # type: ignore[return-value]


def test_sizes_are_the_byte_maps(experts: PackedExperts) -> None:
    assert whole_bytes(experts) == experts.nbytes
    assert whole_weights(experts) == 2 * COUNT * sum(int(np.prod(shape)) for shape in SHAPES.values())
    shard = HeldExperts(experts, {0: (1, 3), 2: (4,)})
    one, other = (sum(size_of(name, layer) for name in SHAPES) for layer in (0, 2))
    assert shard.nbytes == 2 * one + other
    assert whole_bytes(shard) == experts.nbytes
    assert model_of(shard) == model_of(experts)
    assert shape_of(experts).expert_bytes == -(-(one + other) // 2)
    sizes = sizes_of(files_of(experts))
    assert sizes_of(files_of(shard)) == sizes, "a shard's slots are as large as the whole model's"
    assert (sizes.expert_bytes, sizes.expert_weights) == (experts.nbytes, whole_weights(experts))
    # The rest is computed in what the trunk is stored in.
    assert (sizes.dtype, sizes.width, sizes.trunk_bytes) == ("bfloat16", 2, 51 * HIDDEN * 2)


def test_plans_count_bytes_for_memory_and_weights_for_arithmetic(experts: PackedExperts) -> None:
    sizes = sizes_of(files_of(experts))
    largest = max(sum(size_of(name, layer) for name in SHAPES) for layer in (0, 2))
    assert sizes.slab_bytes == -(-experts.nbytes // (2 * COUNT)) < largest == sizes.slot_bytes
    assert sizes.slab_weights == 3 * HIDDEN * FFN + HIDDEN
    assert sizes.grid == ExpertGrid((0, 2), COUNT, sizes.experts_per_token, sizes.slab_bytes)
    node = NodeFacts(memory_total=1 << 34, memory_free=1 << 33)
    taken = workspace_bytes(sizes, gpu=True)
    gpu = GpuFacts(name="a GPU", memory_total=taken + 3 * largest, memory_free=taken + 3 * largest)
    assert gpu_slabs(sizes, NodeFacts(memory_total=1 << 34, memory_free=1 << 33, gpu=gpu)) == 3
    assert expert_room(sizes, node) == memory_room(sizes, node)
    assert gpu_room(sizes, Device("", taken, taken)) < 0
    # Many tokens take the operations of the weights, however few bytes they are packed in.
    calibration = guessed(shape_of(experts))
    assert calibration.cpu.at(4096) == pytest.approx(2 * 4096 * 3 * HIDDEN * FFN / 1e12, rel=0.5)
    slow = Processor(memory_rate=1e15, operations_rate=1e9).curve(shape_of(experts))
    assert slow.seconds == pytest.approx([2 * n * 3 * HIDDEN * FFN / 1e9 for n in slow.tokens])
    assert cpu_speed(sizes, calibration, Shares.even(COUNT)).step_s > 0


# --- shards ---------------------------------------------------------------------------------------------------------


def write_packed_folder(folder: Path) -> Path:
    """A folder whose experts are rows of stacked bytes of an odd length: 18 for 32 weights."""
    source = write_tiny_model(folder / "source", "qwen3_moe", num_experts=COUNT)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"mode": "made-up", "bits": 4, "group_size": 32}
    random, made = np.random.default_rng(1), folder / "packed"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    tensors = [("model.norm.weight", "BF16", (config["hidden_size"],))]
    for layer in range(config["num_hidden_layers"]):
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.switch_mlp.{matrix}.weight"
            tensors.append((name, "U8", (COUNT, 7, 18 + layer)))
    header = encode_header(iter(tensors), {"format": "mlx"})
    nbytes = sum(int(np.prod(shape)) * (2 if dtype == "BF16" else 1) for _, dtype, shape in tensors)
    (made / "model.safetensors").write_bytes(header + random.bytes(nbytes))
    return made


def test_a_shard_has_the_bytes_of_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    folder = write_packed_folder(tmp_path)
    layout = layout_of(folder)
    assert layout.opened is None and layout.count == COUNT
    held = {layer: [layer % COUNT, (layer + 2) % COUNT] for layer in layout.layers}
    offered = decode_offer(encode_offer(offer_part(folder, held)))
    (tmp_path / "node").mkdir()
    shards = ShardStore(tmp_path / "node", "head")
    need = send(shards, folder, offered)
    assert layout_of(need.folder).expert_bytes == layout.expert_bytes
    whole, mine = ((each / "model.safetensors").read_bytes() for each in (folder, need.folder))
    assert len(mine) == len(whole)
    for (layer, expert), runs in layout.experts.items():
        for run in runs:
            same = mine[run.start : run.stop] == whole[run.start : run.stop]
            assert same == (expert in held[layer])


# --- who refuses ----------------------------------------------------------------------------------------------------


def test_only_what_computes_refuses_and_names_the_format(experts: PackedExperts) -> None:
    silu = Activation("silu")
    with pytest.raises(ModelError, match="stored as P18, which the torch runtime cannot run"):
        make_cpu_backend(experts, dict.fromkeys(experts.layers, FamilyGate(silu, silu)), torch.bfloat16)
    host = HostExperts(experts)
    with pytest.raises(ModelError, match="stored as P5, which"):
        tensors_in(torch.zeros(host.slot_bytes, dtype=torch.uint8), host.layout(2), torch.bfloat16)
