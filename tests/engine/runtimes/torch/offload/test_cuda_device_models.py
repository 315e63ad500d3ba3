"""Whole models on a real NVIDIA GPU: the library's logits, whatever form the weights have and wherever experts run.

These run where a GPU is at hand; the same code runs on the stand-in everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from benchmarks.packed_blocks import WRITTEN, block_of, random_blocks, unpacked
from engine.ipc.messages import ExpertPolicy, Load
from engine.models.folders.opening import open_model
from engine.models.formats.number_formats import BLOCKS
from engine.pictures.folders import read_sight
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.torch_unpacking import unpack
from engine.runtimes.torch.runtime import TorchRuntime
from engine.runtimes.torch.tower import VisionTower
from tests.engine.cluster.ring_conversation import all_conversations, conversation
from tests.engine.cluster.ring_places import placed, places
from tests.engine.runtimes.seeing_oracle import see, tokens_of, whole_logits
from tests.engine.runtimes.subjects import FP8, GROUPED_MODELS, PUBLISHED, prompt_of
from tests.engine.runtimes.torch_oracle import library_run, our_run, typical, worst
from tests.support.opened_experts import experts_of
from tests.support.pairwise import in_turn
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_gguf import ARCHITECTURES
from tests.support.tiny_seeing import TINY_SEEING, random_picture, write_tiny_seeing

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

CLOSE = 1e-4
"""Both compute in float32; the GPU adds up in another order."""
POLICIES: tuple[ExpertPolicy, ...] = get_args(ExpertPolicy)


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield
    torch.cuda.empty_cache()


def load(folder: Path, place: RingPlace | None = None, **options: Any) -> TorchModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, dtype="float32", **options)
    return TorchRuntime().load(folder, request, quiet, place)


def room_for(folder: Path, experts: int) -> int:
    found = experts_of(folder)
    return experts * found.place(found.layers[0], found.held(found.layers[0])[0]).nbytes + 1000


def assert_like_the_library(folder: Path, truth: Path, **options: Any) -> None:
    model = load(folder, partitioning="hybrid", **options)
    try:
        assert model.device.type == "cuda"
        if model.executor is not None:
            assert isinstance(model.executor.backend, HybridBackend)
        tokens = prompt_of(40)
        answer, theirs = library_run(truth, tokens, chunks=1)
        assert worst(our_run(model, tokens, 2, answer), theirs) < CLOSE
        beams = model.start()
        beams.extend(tokens)
        several = beams.fan_out(3).step([4, 5, answer[0]])
        assert np.abs(several[2] - theirs[1]).max() < CLOSE * np.abs(theirs[1]).max()
    finally:
        model.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("held", [0, 5, None])
def test_bfloat16_and_our_cpu_kernels(policy: ExpertPolicy, held: int | None, tiny_model: Callable[..., Path]) -> None:
    """As close to float32 as the CPU alone is. One router that chooses another of two equal experts shows in a step."""
    folder = tiny_model("qwen3_moe", dtype="bfloat16")
    tokens = prompt_of(87)
    answer, exact = library_run(folder, tokens, chunks=1, dtype="float32")
    apart = []
    room = None if held is None else room_for(folder, held)
    for request in (
        Load(id=1, model=folder.name, partitioning="cpu"),
        Load(id=1, model=folder.name, partitioning="hybrid", policy=policy, gpu_expert_bytes=room),
    ):
        model = TorchRuntime().load(folder, request, quiet)
        apart.append(typical(our_run(model, tokens, 1, answer), exact))
        model.close()
    assert apart[1] <= max(1.5 * apart[0], 0.02)


@pytest.mark.parametrize(("family", "policy"), in_turn(TINY_FAMILIES, POLICIES))
def test_every_family(family: str, policy: ExpertPolicy, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    room = None if open_model(folder).experts is None else room_for(folder, 5)
    assert_like_the_library(folder, folder, policy=policy, gpu_expert_bytes=room)


@pytest.mark.parametrize(("family", "policy", "kind"), in_turn(tuple(ARCHITECTURES), POLICIES, WRITTEN))
def test_packed_files(
    family: str, policy: ExpertPolicy, kind: str, packed_model: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, truth = packed_model(family, kind)
    room = None if open_model(folder).experts is None else room_for(folder, 3)
    assert_like_the_library(folder, truth, policy=policy, gpu_expert_bytes=room)


@pytest.mark.parametrize(
    ("family", "stored"),
    [*in_turn(("mixtral", "qwen3_moe", "gpt_oss"), tuple(GROUPED_MODELS)), ("gpt_oss", PUBLISHED), ("qwen3_moe", FP8)],
)
@pytest.mark.parametrize("held", [0, 3, None])
def test_quantised_safetensors(
    family: str, stored: str, held: int | None, grouped: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, truth = grouped(family, stored)
    assert_like_the_library(folder, truth, gpu_expert_bytes=None if held is None else room_for(folder, held))


@pytest.mark.parametrize("kind", TINY_SEEING)
def test_pictures(kind: str, tmp_path: Path) -> None:
    folder, picture = write_tiny_seeing(tmp_path / "seeing", kind), random_picture(40, 24)
    sight = read_sight(folder)
    assert sight is not None
    on_gpu, on_cpu = (VisionTower(folder, sight, device).rows(picture, quiet) for device in ("cuda", "cpu"))
    assert np.abs(on_gpu - on_cpu).max() < CLOSE * np.abs(on_cpu).max()
    model = load(folder, partitioning="hybrid")
    try:
        assert model.device.type == "cuda"
        see(model, folder, picture)
        prompt = [*prompt_of(9), picture, *prompt_of(5)]
        row = model.start()
        row.extend(tokens_of(model, prompt)[:-1])
        expected = whole_logits(folder, prompt)[-1]
        assert np.abs(row.step([prompt_of(5)[-1]])[0] - expected).max() < CLOSE * np.abs(expected).max()
    finally:
        model.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_unpack_as_on_the_cpu(kind: str, dtype: torch.dtype) -> None:
    words = random_blocks(kind, 70, 3 * block_of(kind)[0])
    found = unpack(torch.from_numpy(words).cuda(), kind, dtype).cpu()
    assert torch.equal(found, torch.from_numpy(unpacked(kind, words)).to(dtype))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_ring_in_which_one_machine_has_a_gpu(mode: Any, tiny_model: Callable[..., Path]) -> None:
    """The trunk is on the CPU, the GPU runs experts alone."""
    folder = tiny_model("qwen3_moe")
    experts = experts_of(folder)
    alone = conversation(load(folder, partitioning="cpu"))
    made = places(placed(tuple(experts.layers), experts.count, 2, "overlapping"), mode)
    models = [
        load(folder, made[0], gpu_expert_bytes=room_for(folder, 4)),
        load(folder, made[1], partitioning="cpu"),
    ]
    assert models[0].executor is not None and isinstance(models[0].executor.backend, HybridBackend)
    assert models[0].device.type == "cpu"
    for found in all_conversations(models):
        for ours, theirs in zip(found, alone, strict=True):
            assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= CLOSE * np.abs(np.asarray(theirs)).max()
    for model in models:
        model.close()
