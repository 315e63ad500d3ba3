"""A runtime that implements no more than it must: what the base classes say for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.errors import ModelError, PeerLost
from engine.generation.sampling import Sampler, SamplingRule
from engine.ipc.messages import ModelFacts
from engine.moe.timing import Recorder
from engine.runtimes.protocol import LoadedModel, TokenRows


class PlainModel(LoadedModel):
    @property
    def facts(self) -> ModelFacts:
        return cast(ModelFacts, SimpleNamespace(name="tiny", runtime="native"))

    @property
    def recorder(self) -> Recorder:
        return Recorder(1, (), 0)

    def start(self) -> TokenRows:
        raise AssertionError("no pass is run")

    def close(self) -> None:
        return


def test_experts_of_a_runtime_without_a_gpu_cannot_be_given_its_memory() -> None:
    model = PlainModel()
    with pytest.raises(ModelError, match="tiny runs on native, which shares no experts with a GPU") as refused:
        model.resize_experts(1 << 20)
    assert refused.value.kind == "bad-input"
    assert model.memory_for_rows() is None


def test_a_model_of_one_machine_is_never_formed_again() -> None:
    model = PlainModel()
    assert model.context is None
    assert not model.between_turns(lambda *_: None, lambda text: None)
    with pytest.raises(ModelError, match="A machine of the ring is gone: studio left") as gone:
        model.recover(PeerLost("studio left"), lambda *_: None, lambda text: None)
    assert gone.value.kind == "network"


def test_weights_are_in_files_and_routes_not_counted_unless_a_runtime_says_so() -> None:
    model = PlainModel()
    assert (model.kept_weights(), model.popularity, tuple(model.mapped_files)) == (None, None, ())
    assert not model.weights_are_wired


def test_tokens_are_chosen_on_the_host_unless_the_rows_choose() -> None:
    rows = SimpleNamespace()
    assert TokenRows.step_choosing(cast(Any, rows), 3, Sampler(SamplingRule())) is None


@pytest.mark.parametrize("base", [LoadedModel, TokenRows])
def test_what_a_runtime_must_implement_cannot_be_left_out(base: Any) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()
