"""GPU memory for experts changes while a model is loaded: by request, without loading it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.stand_in_device import Faults, StandInDevice
from engine.host import Host
from engine.ipc.messages import AnyEvent, Failed, Generate, Loaded, Notice, Resize
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.runtimes.torch.offload.devices import OutOfDeviceMemory, Slot
from engine.session.session import Session
from tests.engine.runtimes.torch.offload.test_hybrid_models import MEMORY, PROMPT, executor_of, load
from tests.support.controls import Watching

pytestmark = pytest.mark.usefixtures("home")


ONE_EXPERT = 3 * 48 * 56 * 4


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral")


def asked(session: Session, nbytes: int | None) -> list[AnyEvent]:
    """What the engine says to a Resize."""
    events: list[AnyEvent] = []
    host = Host(events.append)
    host._model.session = session
    host._finish(host._accept(Resize(id=7, gpu_expert_bytes=nbytes), host._clients[0]))
    assert events[-1].id == 7
    return events


def answer(session: Session, tokens: int = 6) -> list[int]:
    request = Generate(id=1, prompt_ids=PROMPT, max_tokens=tokens)
    return session.generate(request, lambda event: None, Watching()).token_ids


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["balanced", "twiddler", "lru-offload"])
def test_the_conversation_goes_on_with_other_memory(folder: Path, policy: str) -> None:
    expected = answer(Session(load(folder, None), None, ends=(), defaults={}))
    model = load(folder, StandInDevice(MEMORY), policy=policy, gpu_expert_bytes=3 * ONE_EXPERT)
    session = Session(model, None, ends=(), defaults={})
    assert answer(session) == expected
    for slots in (12, 0, 21, 6):
        cached = session.cached_tokens
        (event,) = asked(session, slots * ONE_EXPERT)
        assert isinstance(event, Loaded)
        assert event.facts.gpu_expert_bytes == slots * ONE_EXPERT == executor_of(model).gpu_expert_bytes
        assert f"; {slots / 24:.0%} of the experts" in event.facts.executor
        assert event.facts == session.facts
        assert len(executor_of(model).cache) == slots, "filled at once"
        assert session.cached_tokens == cached, "the conversation stays"
        assert answer(session) == expected
    (event,) = asked(session, None)
    assert isinstance(event, Loaded)
    assert event.facts.gpu_expert_bytes == 24 * ONE_EXPERT, "all that is free"
    assert answer(session) == expected
    session.close()


def test_memory_that_is_not_there_is_refused_with_the_shortfall(folder: Path) -> None:
    model = load(folder, StandInDevice(MEMORY), gpu_expert_bytes=3 * ONE_EXPERT)
    session = Session(model, None, ends=(), defaults={})
    (event,) = asked(session, 3 * GPU_RUNTIME_BYTES)
    assert isinstance(event, Failed)
    assert event.kind == "memory"
    assert "lacks" in event.error and "or less" in event.error
    assert executor_of(model).gpu_expert_bytes == 3 * ONE_EXPERT


def test_less_than_was_promised_is_said(folder: Path) -> None:
    device = StandInDevice(MEMORY)
    session = Session(load(folder, device, gpu_expert_bytes=0), None, ends=(), defaults={})
    allocate = device.allocate

    def half(slot_bytes: int, count: int) -> list[Slot]:
        if len(device.buffers) >= 5:
            raise OutOfDeviceMemory("taken by another program")
        return allocate(slot_bytes, 1)

    device.allocate = half  # type: ignore[method-assign]
    notice, event = asked(session, 8 * ONE_EXPERT)
    assert isinstance(event, Loaded)
    assert isinstance(notice, Notice)
    assert notice.text.startswith("Only 97 kB of GPU memory instead of 258 kB")
    assert event.facts.gpu_expert_bytes == 3 * ONE_EXPERT


def test_a_cache_that_was_switched_off_gets_another_chance(folder: Path) -> None:
    model = load(folder, StandInDevice(MEMORY), gpu_expert_bytes=3 * ONE_EXPERT)
    session = Session(model, None, ends=(), defaults={})
    executor = executor_of(model)
    executor._uses_cache = False
    executor._memory.switch_off()
    (event,) = asked(session, 8 * ONE_EXPERT)
    assert isinstance(event, Loaded)
    assert executor._worth.asks
    assert sum(map(len, executor.resident())) == 8


def test_what_shares_nothing_says_so(folder: Path) -> None:
    session = Session(load(folder, None), None, ends=(), defaults={})
    (event,) = asked(session, 0)
    assert isinstance(event, Failed)
    assert event.kind == "bad-input"
    assert "not shared with a GPU; load it with partitioning hybrid" in event.error


def test_a_lost_device_is_one_sentence(folder: Path) -> None:
    device = StandInDevice(MEMORY, faults=Faults())
    session = Session(load(folder, device), None, ends=(), defaults={})
    device.faults.lost_at = 1
    (event,) = asked(session, 0)
    assert isinstance(event, Failed)
    assert "stopped working (a fault to order); load the model again" in event.error


def test_a_failed_copy_is_said_with_it(folder: Path) -> None:
    device = StandInDevice(MEMORY)
    session = Session(load(folder, device, gpu_expert_bytes=0), None, ends=(), defaults={})
    device.faults.copies_refused = {device._counts["copy"] + 1}
    notice, event = asked(session, 4 * ONE_EXPERT)
    assert isinstance(event, Loaded)
    assert isinstance(notice, Notice)
    assert notice.text.startswith("Copying 1 of 4 experts to the stand-in failed")
