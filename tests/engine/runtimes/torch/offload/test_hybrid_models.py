"""Whole models on the torch runtime with a stand-in device: the same logits and tokens whatever is shared and how."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from benchmarks.stand_in_device import StandInDevice
from engine.errors import ModelError
from engine.ipc.messages import ExpertPolicy, Generate, Load, Notice, Piece
from engine.models.folders.prepare import prepare
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.runtime import TorchRuntime
from engine.session.session import Session
from tests.support.controls import Watching
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_MOE_FAMILIES

pytestmark = pytest.mark.usefixtures("home")


POLICIES: tuple[ExpertPolicy, ...] = get_args(ExpertPolicy)
MEMORY = 2 * GPU_RUNTIME_BYTES
STEPS = 12
FEW = 5
"""Steps of the models of every family."""
PROMPT = [5, 9, 23, 77, 102, 3, 3, 41, 8, 61, 130, 90, 14, 155, 66, 31, 7]


def load(folder: Path, device: StandInDevice | None, **options: Any) -> TorchModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, **options)
    return TorchRuntime(lambda: device).load(folder, request, quiet)


def executor_of(model: TorchModel) -> HybridBackend:
    assert model.executor is not None and isinstance(model.executor.backend, HybridBackend)
    return model.executor.backend


def greedy(model: TorchModel, prompt: list[int] = PROMPT, chunks: int = 2, steps: int = STEPS) -> list[np.ndarray]:
    """The logits of a prompt in chunks and ``steps`` greedy steps, and of one step of three beams."""
    rows = model.start()
    size = -(-len(prompt) // chunks)
    for start in range(0, len(prompt), size):
        logits = rows.extend(prompt[start : start + size])
    found = [logits]
    for _ in range(steps):
        found.append(rows.step([int(found[-1].argmax())])[0])
    found.append(rows.fan_out(3).step([4, 17, 99]).ravel())
    return found


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def cached(experts_per_layer: int, kept: str) -> int | None:
    """Experts for which the cache has room: of none, of a few, of all (None)."""
    return {"nothing": 0, "some": experts_per_layer + 1, "everything": None}[kept]


PLACES: tuple[tuple[ExpertPolicy, str], ...] = (
    ("balanced", "everything"),
    ("lru-offload", "some"),
    ("stream", "nothing"),
    ("layers", "nothing"),
)
"""The device runs all experts, what it holds or is sent, what it is sent, and none. Each family has one of them with
one form of the files, and each form has all."""
ALL_PLACES = [*product(POLICIES, ("nothing", "some")), ("balanced", "everything")]
FORMS = ("plain", "prepared")


@pytest.fixture(scope="module")
def answers() -> dict[Path, tuple[list[np.ndarray], list[np.ndarray]]]:
    """By folder: the logits of the CPU alone, and those with a device, which are the same whatever it does."""
    return {}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "form", "policy", "kept"),
    [
        *((family, FORMS[number % 2], *PLACES[number // 2 % 4]) for number, family in enumerate(TINY_MOE_FAMILIES)),
        *(
            pytest.param(family, form, *place, marks=pytest.mark.soak, id=f"all-{family}-{form}-{'-'.join(place)}")
            for family, form, place in product(TINY_MOE_FAMILIES, FORMS, ALL_PLACES)
        ),
    ],
)
def test_families_give_the_same_bits_for_every_policy_and_cache(
    family: str,
    form: str,
    policy: ExpertPolicy,
    kept: str,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    answers: dict[Path, tuple[list[np.ndarray], list[np.ndarray]]],
) -> None:
    folder = tiny_model(family)
    if form == "prepared":
        bank = tmp_path_factory.getbasetemp() / f"hybrid-{family}"
        if not bank.exists():
            prepare(folder, bank, quiet)
        folder = bank
    experts = experts_of(folder)
    if folder not in answers:
        streaming = load(folder, StandInDevice(MEMORY), policy="stream")
        answers[folder] = (greedy(load(folder, None), steps=FEW), greedy(streaming, steps=FEW))
    alone, reference = answers[folder]
    slab = experts.nbytes // (experts.count * len(experts.layers)) + 64
    slots = cached(experts.count, kept)
    device = StandInDevice(MEMORY, runs_routes=kept == "everything")
    model = load(folder, device, policy=policy, gpu_expert_bytes=None if slots is None else slots * slab)
    assert model.facts.policy == policy
    assert model.facts.executor.startswith(f"hybrid ({policy}")
    found = greedy(model, steps=FEW)
    assert same(found, reference)
    # With nothing on the device, Twiddler leaves experts with few tokens to the processor, as their copies take longer.
    left_alone = policy == "layers" or (policy, kept) == ("twiddler", "nothing")
    assert left_alone or any(op.kind in ("copy", "run") for op in device.trace)
    model.close()
    for ours, theirs in zip(found, alone, strict=True):
        assert int(ours.argmax()) == int(theirs.argmax())
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.soak
def test_bfloat16_and_another_dtype_than_the_stored_one(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3_moe", dtype="bfloat16")
    for dtype in ("auto", "float32"):
        expected = greedy(load(folder, None, dtype=dtype), steps=FEW)
        reference = None
        for policy in POLICIES:
            model = load(folder, StandInDevice(MEMORY), policy=policy, dtype=dtype, gpu_expert_bytes=100_000)
            found = greedy(model, steps=FEW)
            reference = reference or found
            assert same(found, reference)
        assert [int(x.argmax()) for x in reference or []] == [int(x.argmax()) for x in expected]


def test_facts_and_a_plan_that_cannot_fit(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    model = load(folder, StandInDevice(MEMORY))
    experts = experts_of(folder)
    assert model.facts.gpu_expert_bytes == experts.nbytes
    assert model.facts.executor.startswith("hybrid (balanced; 100% of the experts on the stand-in; CPU: local (")
    assert model.recorder.frame(0).resident == [list(range(8))] * 3
    with pytest.raises(ModelError, match=r"the stand-in has .* free and lacks .* for 5\.0 GB of experts") as refused:
        load(folder, StandInDevice(MEMORY), gpu_expert_bytes=5 * 10**9)
    assert refused.value.kind == "memory"
    with pytest.raises(ModelError, match=r"lacks .* for the trunk, keys and values, and workspace"):
        load(folder, StandInDevice(GPU_RUNTIME_BYTES), partitioning="hybrid")
    alone = load(folder, StandInDevice(GPU_RUNTIME_BYTES))
    assert alone.facts.policy is None
    assert any("the stand-in lacks" in notice for notice in alone.facts.notices)
    assert any("No GPU" in notice for notice in load(folder, None, partitioning="hybrid").facts.notices)
    assert any("bench experts" in notice for notice in model.facts.notices)


def test_the_person_is_told_and_shown(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    device = StandInDevice(MEMORY)
    model = load(folder, device, policy="lru-offload", gpu_expert_bytes=100_000)
    device.faults.copies_refused = {device._counts["copy"] + 2}
    session = Session(model, None, ends=(), defaults={})
    events: list[Any] = []
    for turn in (1, 2):
        request = Generate(id=turn, prompt_ids=PROMPT, max_tokens=6)
        finished = session.generate(request, events.append, Watching())
        assert finished.timing is not None
        movement = finished.timing.movement
        assert movement is not None
        # Asked again, nothing of the prompt is run: the logits after it were kept.
        assert movement.tokens == (len(PROMPT) + 5 if turn == 1 else 5)
        assert movement.moved > 0
        assert movement.hits + movement.misses > movement.moved
        assert [len(row) for row in finished.timing.resident] != [0, 0, 0]
        assert sum(layer.experts for layer in finished.timing.decode.layers) > 0
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert "to the stand-in failed" in notice.text
    pieces = [place for place, event in enumerate(events) if isinstance(event, Piece)]
    assert events.index(notice) < pieces[-1], "while the answer runs, not after it"
    session.close()
    assert device.buffers == {}
