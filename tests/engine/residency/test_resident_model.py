"""The host keeps what it has loaded in memory: it tells of the warm-up, measures the probe, and ends with the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.host import Host
from engine.ipc.messages import (
    AnyEvent,
    Bench,
    BenchResult,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Notice,
    WarmUp,
)
from engine.residency import page_warmer as keeper
from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_zero_points import Form, write_zero_points

pytestmark = pytest.mark.usefixtures("home")


TinyModel = Callable[..., Path]
PATIENCE_S = 120.0


class Events:
    """What the host says."""

    def __init__(self) -> None:
        self.all: list[AnyEvent] = []
        self._changed = threading.Condition()

    def add(self, event: AnyEvent) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait(self, wanted: Callable[[AnyEvent], bool]) -> AnyEvent:
        until = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for event in self.all:
                    if wanted(event):
                        return event
                assert self._changed.wait(until - time.monotonic()), self.all

    def answer(self, request: int) -> AnyEvent:
        return self.wait(
            lambda event: event.id == request and isinstance(event, Loaded | Finished | Failed | BenchResult)
        )


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def host(events: Events) -> Iterator[Host]:
    made = Host(events.add)
    made.start()
    yield made
    made._release()
    assert not [thread for thread in threading.enumerate() if thread.name == "residency"]


def load(model: Path, **options: object) -> Load:
    return Load(id=1, model=str(model), cpu_threads=1, **options)  # type: ignore[arg-type]


def ask(request: int) -> Generate:
    return Generate(id=request, prompt_ids=[5, 6, 7], max_tokens=2)


@pytest.mark.parametrize(
    ("kind", "kept"), [("gptq", "nothing"), ("gptq", "self_attn"), ("gptq", "layers"), ("pack-quantized", "nothing")]
)
def test_what_was_computed_at_loading_is_not_read_from_its_files_again(
    tiny_model: TinyModel, host: Host, events: Events, tmp_path: Path, kind: str, kept: str
):
    """What lies in them as it is used is."""
    form = Form(kind, scales=torch.float16)
    source = tiny_model("qwen3_moe", **whole_blocks("qwen3_moe"))
    folder, _ = write_zero_points(tmp_path / "model", source, form, kept=lambda module: kept in module)
    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    stored = {name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()}
    computed = sum(nbytes for name, nbytes in stored.items() if name.endswith(endings))
    assert bool(computed) == (kind == "gptq" and kept != "layers")
    host.take(load(folder, runtime="native", lock_memory=True))
    assert isinstance(events.answer(1), Loaded)
    done = events.wait(lambda event: isinstance(event, WarmUp) and event.done == event.total)
    assert isinstance(done, WarmUp)
    assert done.total == sum(stored.values()) - computed
    said = [event.text for event in events.all if isinstance(event, Notice) and "computed when" in event.text]
    assert said == [
        f"{computed / 1e9:.1f} GB of weights are not locked in memory: they were computed when the model was loaded."
    ] * bool(computed)
    host.take(ask(2))
    assert isinstance(events.answer(2), Finished)


@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_a_loaded_model_is_warmed_up(tiny_model: TinyModel, host: Host, events: Events, runtime: str):
    host.take(load(tiny_model("mixtral"), runtime=runtime))
    loaded = events.answer(1)
    assert isinstance(loaded, Loaded)
    last = events.wait(lambda event: isinstance(event, WarmUp) and event.done == event.total)
    assert isinstance(last, WarmUp)
    assert last.total == loaded.facts.trunk_bytes + loaded.facts.expert_bytes
    host.take(ask(2))
    finished = events.answer(2)
    assert isinstance(finished, Finished) and finished.probe_s is None


def test_the_first_token_after_idling_is_told(
    tiny_model: TinyModel, host: Host, events: Events, monkeypatch: pytest.MonkeyPatch
):
    host.take(load(tiny_model("mixtral")))
    assert isinstance(events.answer(1), Loaded)
    monkeypatch.setattr(keeper, "IDLE_S", 0.0)
    host.take(ask(2))
    finished = events.answer(2)
    assert isinstance(finished, Finished)
    assert finished.probe_s is not None and 0.0 < finished.probe_s <= finished.ttft_s


def test_it_can_be_switched_off(tiny_model: TinyModel, host: Host, events: Events):
    host.take(load(tiny_model("mixtral"), keep_resident=False))
    assert isinstance(events.answer(1), Loaded)
    host.take(ask(2))
    assert isinstance(events.answer(2), Finished)
    assert not [thread for thread in threading.enumerate() if thread.name == "residency"]
    assert not [event for event in events.all if isinstance(event, WarmUp)]


def test_what_could_not_be_locked_is_said(
    tiny_model: TinyModel, host: Host, events: Events, monkeypatch: pytest.MonkeyPatch
):
    from engine.residency import mapped

    monkeypatch.setattr(mapped, "_allowed_to_lock", lambda: 0)
    host.take(load(tiny_model("mixtral"), lock_memory=True))
    assert isinstance(events.answer(1), Loaded)
    said = events.wait(lambda event: isinstance(event, Notice))
    assert isinstance(said, Notice)
    assert said.text.startswith("0.0 of 0.0 GB of weights are locked in memory (this process may lock 0.0 MB")


def test_another_model_takes_the_place_of_the_first(tiny_model: TinyModel, host: Host, events: Events):
    host.take(load(tiny_model("mixtral")))
    assert isinstance(events.answer(1), Loaded)
    host.take(Load(id=2, model=str(tiny_model("qwen3_moe")), cpu_threads=1))
    assert isinstance(events.answer(2), Loaded)
    assert len([thread for thread in threading.enumerate() if thread.name == "residency"]) == 1


def test_bench_residency_loads_no_model(host: Host, events: Events):
    host.take(Bench(id=1, kind="residency", load=Load(id=1, model="no such model", runtime="native"), rounds=1))
    result = events.answer(1)
    assert isinstance(result, BenchResult), result
    assert "nothing to measure on this system" in result.notes[0]
