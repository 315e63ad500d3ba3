"""The local executor: equal to running every token through its experts one by one, each expert read once."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from engine.models.folders.prepare import prepare
from engine.models.formats.model_files import Experts
from engine.runtimes.torch.offload import local_torch
from engine.runtimes.torch.offload.local_torch import FEW_ROUTES, ExpertTensors, TorchBackend
from tests.engine.runtimes.torch.offload.test_local import LAYER, K, one_by_one, routes
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model


def gate(gate_out: torch.Tensor, up_out: torch.Tensor) -> torch.Tensor:
    return silu(gate_out) * up_out


@pytest.fixture(scope="module", params=["plain", "prepared"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Experts:
    root = tmp_path_factory.mktemp("experts")
    folder = write_tiny_model(root / "plain", "mixtral")
    if request.param == "prepared":
        prepare(folder, root / "prepared", lambda *_: None)
        folder = root / "prepared"
    found = experts_of(folder)
    return found


def executor_on(experts: Experts, dtype: torch.dtype = torch.float32) -> TorchBackend:
    return TorchBackend(experts, dict.fromkeys(experts.layers, gate), dtype)


def summed(
    experts: Experts, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool = False
) -> torch.Tensor:
    """The experts' results in float64, each computed by itself, weighted and added up."""
    each = one_by_one(experts, hidden, indices, weights if scale_input else torch.ones_like(weights))
    shares = torch.ones_like(weights) if scale_input else weights
    return (each * shares.double().reshape(-1, 1)).view(len(hidden), K, -1).sum(dim=1)


@pytest.mark.parametrize("tokens", [1, 2, 7, FEW_ROUTES // K, FEW_ROUTES // K + 1, 90])
def test_equals_one_by_one(experts: Experts, tokens: int) -> None:
    hidden, indices, weights = routes(experts, tokens)
    executor = executor_on(experts)
    expected = summed(experts, hidden, indices, weights)
    torch.testing.assert_close(executor.run(LAYER, hidden, indices, weights).double(), expected, atol=1e-5, rtol=1e-5)
    expected = summed(experts, hidden, indices, weights, scale_input=True)
    scaled = executor.run(LAYER, hidden, indices, weights, scale_input=True)
    torch.testing.assert_close(scaled.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 12, 90])
def test_each_expert_is_read_once_for_all_its_tokens(
    experts: Experts, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(weights: ExpertTensors, inner: local_torch.Gate, hidden: torch.Tensor) -> torch.Tensor:
        read.append(weights.down.data_ptr())
        return local_torch_run(weights, inner, hidden)

    local_torch_run = local_torch.run_expert
    monkeypatch.setattr(local_torch, "run_expert", counted)
    hidden, indices, weights = routes(experts, tokens)
    executor_on(experts).run(LAYER, hidden, indices, weights)
    assert len(read) == len(set(read)) == len(indices.unique())


def test_weights_are_views_of_the_files(experts: Experts) -> None:
    executor = executor_on(experts)
    for expert in range(experts.count):
        tensors, stored = executor._tensors(LAYER, expert), experts.expert(LAYER, expert)
        assert tensors.gate.data_ptr() == stored.gate.words.ctypes.data
        assert tensors.down.data_ptr() == stored.down.words.ctypes.data


def test_another_dtype_is_made_per_use_and_not_kept(experts: Experts) -> None:
    hidden, indices, weights = routes(experts, 9)
    executor = executor_on(experts, torch.bfloat16)
    assert executor.description == "local (torch, cpu, converted to bfloat16)"
    first = executor._tensors(LAYER, 0)
    assert first.down.dtype == torch.bfloat16
    assert executor._tensors(LAYER, 0).down.data_ptr() != first.down.data_ptr()
    out = executor.run(LAYER, hidden.bfloat16(), indices, weights)
    assert out.dtype == torch.bfloat16
    expected = summed(experts, hidden.bfloat16(), indices, weights)
    assert (out.double() - expected).abs().max() < 0.03 * expected.abs().max()
