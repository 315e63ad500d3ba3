"""The local executor on the native kernels: equal to running every token through its experts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from engine.errors import ModelError
from engine.models.folders.prepare import prepare
from engine.models.formats.model_files import Experts
from engine.moe.executor import LocalExecutor
from engine.moe.kernels import bindings
from engine.moe.timing import Recorder
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.local import TorchKernelBackend, make_cpu_backend
from engine.runtimes.torch.offload.local_torch import TorchBackend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.runtimes.torch.offload.torch_tensors import view
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model

LAYER, K = 1, 2
CPU = torch.device("cpu")
SILU = FamilyGate(Activation("silu"), Activation("silu"))

needs_kernels = pytest.mark.skipif(bindings.path() is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny mixtral by stored dtype, prepared; and one as it is."""
    root = tmp_path_factory.mktemp("native")
    found = {}
    for dtype in ("float32", "bfloat16"):
        plain = write_tiny_model(root / dtype, "mixtral", dtype=dtype)
        found[dtype] = root / f"{dtype}-prepared"
        prepare(plain, found[dtype], lambda *_: None)
        found[f"{dtype}-plain"] = plain
    return found


def recorder_for(experts: Experts) -> Recorder:
    return Recorder(3, experts.layers, experts.count)


def executor_on(experts: Experts, dtype: torch.dtype) -> TensorBackend:
    return make_cpu_backend(experts, dict.fromkeys(experts.layers, SILU), dtype, cpu_threads=2)[0]


def routes(experts: Experts, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, experts.expert(LAYER, 0).gate.shape[1], generator=generator)
    weights, indices = torch.rand(tokens, experts.count, generator=generator).topk(K, dim=-1)
    return hidden, indices, weights


def one_by_one(experts: Experts, hidden: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each route's own result, [tokens * k, hidden], in float64; ``scale`` [tokens, k] multiplies what goes in."""
    out = torch.zeros(indices.numel(), hidden.shape[1], dtype=torch.float64)
    for route, expert in enumerate(indices.reshape(-1).tolist()):
        if expert < 0:
            continue
        stored = experts.expert(LAYER, expert)
        x = hidden[route // K].double() * scale.reshape(-1)[route].double()
        inner = Activation("silu")(linear(x, view(stored.gate).double()), linear(x, view(stored.up).double()))
        out[route] = linear(inner, view(stored.down).double())
    return out


def close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    return bool((found.double() - expected).abs().max() <= limit * expected.abs().max())


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("tokens", [1, 2, 12, 40, 90])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float32-plain", "bfloat16-plain"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
def test_equals_one_by_one(
    folders: dict[str, Path], stored: str, dtype: torch.dtype, limit: float, tokens: int
) -> None:
    experts = experts_of(folders[stored])
    hidden, indices, weights = routes(experts, tokens)
    hidden, weights = hidden.to(dtype), weights.to(dtype)
    executor = executor_on(experts, dtype)
    assert isinstance(executor, TorchKernelBackend)

    def summed(results: torch.Tensor) -> torch.Tensor:
        return results.view(tokens, K, -1).sum(dim=1)

    each = one_by_one(experts, hidden, indices, torch.ones_like(weights))
    out = executor.run(LAYER, hidden, indices, weights)
    assert out.dtype == dtype
    assert close(out, summed(each * weights.double().reshape(-1, 1)), limit)
    scaled = one_by_one(experts, hidden, indices, weights)
    assert close(executor.run(LAYER, hidden, indices, weights, True), summed(scaled), limit)


@needs_kernels
def test_strided_inputs_are_read_right(folders: dict[str, Path]) -> None:
    experts = experts_of(folders["float32"])
    hidden, indices, weights = routes(experts, 20)
    executor = executor_on(experts, torch.float32)
    expected = executor.run(LAYER, hidden, indices, weights)
    wide = torch.cat((hidden, hidden), dim=1)[:, : hidden.shape[1]]
    crossed = indices.t().contiguous().t()
    assert not crossed.is_contiguous() and not wide.is_contiguous()
    assert torch.equal(executor.run(LAYER, wide, crossed.int(), weights.t().contiguous().t()), expected)


@pytest.mark.parametrize("kernels", [pytest.param("", marks=needs_kernels), "off"])
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_single_routes(folders: dict[str, Path], kernels: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's side of a hybrid executor: only its own routes, neither weighted nor added up."""
    monkeypatch.setenv(bindings.VARIABLE, kernels)
    experts = experts_of(folders["float32"])
    hidden, indices, weights = routes(experts, tokens)
    cpu, _ = make_cpu_backend(experts, dict.fromkeys(experts.layers, SILU), torch.float32)
    assert isinstance(cpu, TorchBackend if kernels == "off" else TorchKernelBackend)
    for mask in (lambda chosen: chosen >= 0, lambda chosen: chosen % 2 == 0, lambda chosen: chosen < 0):
        mine = torch.where(mask(indices), indices, -1)
        out = cpu.outputs(LAYER, hidden, mine)
        assert out.dtype == torch.float32 and out.shape == (tokens * K, hidden.shape[1])
        expected = one_by_one(experts, hidden, mine, torch.ones_like(weights))
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        scaled = cpu.outputs(LAYER, hidden, mine, weights)
        expected = one_by_one(experts, hidden, mine, weights)
        torch.testing.assert_close(scaled.double(), expected, atol=1e-5, rtol=1e-5)


@needs_kernels
def test_single_routes_add_up_to_the_weighted_sum(folders: dict[str, Path]) -> None:
    """To the bit: so a hybrid executor's answer does not depend on where an expert ran."""
    experts = experts_of(folders["bfloat16"])
    for tokens in (1, 3, 12):
        hidden, indices, weights = routes(experts, tokens)
        executor = executor_on(experts, torch.bfloat16)
        each = executor.outputs(LAYER, hidden, indices).view(tokens, K, -1)
        total = torch.zeros_like(hidden)
        for position in range(K):
            total = torch.addcmul(total, each[:, position], weights[:, position, None])
        assert close(executor.run(LAYER, hidden, indices, weights), total.double(), 1e-6)
        other = torch.where(indices % 2 == 0, indices, -1)
        parts = executor.outputs(LAYER, hidden, other) + executor.outputs(
            LAYER, hidden, torch.where(other < 0, indices, -1)
        )
        assert torch.equal(parts.view_as(each), each)


@pytest.mark.parametrize("kernels", [pytest.param("", marks=needs_kernels), "off"])
@pytest.mark.parametrize("stored", ["float32", "float32-plain"])
def test_popularity_and_routes_are_counted(
    folders: dict[str, Path], stored: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bindings.VARIABLE, kernels)
    experts = experts_of(folders[stored])
    recorder = recorder_for(experts)
    executor = LocalExecutor(executor_on(experts, torch.float32), recorder)
    assert executor.popularity is not None
    hidden, indices, weights = routes(experts, 40)
    executor.run(LAYER, hidden, indices, weights)
    expected = tuple(indices.flatten().bincount(minlength=experts.count).tolist())
    assert executor.popularity.counts(LAYER) == expected
    recorder.enabled = True
    recorder.begin_step("prefill", 40)
    executor.run(LAYER, hidden, indices, weights)
    recorder.end_step()
    frame = recorder.frame(0)
    assert tuple(frame.expert_use[frame.moe_layers.index(LAYER)]) == expected
    assert frame.prefill.layers[LAYER].experts > 0
    assert executor.popularity.counts(LAYER) == tuple(2 * count for count in expected)


@needs_kernels
def test_a_wrong_route_is_refused(folders: dict[str, Path]) -> None:
    experts = experts_of(folders["float32"])
    hidden, indices, weights = routes(experts, 3)
    indices[1, 1] = experts.count
    with pytest.raises(ModelError, match="out of range"):
        executor_on(experts, torch.float32).run(LAYER, hidden, indices, weights)


# --- which one runs -----------------------------------------------------------------------------------------------


def choose_for(folder: Path, dtype: torch.dtype = torch.float32, gate: FamilyGate = SILU) -> tuple[str, str]:
    """The description of the chosen executor, and its notices."""
    experts = experts_of(folder)
    backend, notices = make_cpu_backend(experts, dict.fromkeys(experts.layers, gate), dtype, 2)
    return backend.description, " ".join(notices)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_kernels_run_where_they_can(folders: dict[str, Path], dtype: torch.dtype) -> None:
    description, notices = choose_for(folders["bfloat16"], dtype)
    best = bindings.choose("bfloat16" if dtype == torch.bfloat16 else "float32").name
    assert description == f"local (native {best}, 2 threads)"
    assert notices == ""


def test_switched_off_is_said(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.VARIABLE, "off")
    description, notices = choose_for(folders["bfloat16"], torch.bfloat16)
    assert description == "local (torch, cpu)"
    assert notices == ("The experts run in torch, not in the native kernels: switched off by PRIVATELLM_KERNELS=off.")
    _, notices = choose_for(folders["bfloat16"])
    assert "converted to float32 each time" in notices


def test_a_missing_library_is_said_with_the_way_out(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = bindings.KernelChoice("none", "they were not built", "install a C compiler")
    monkeypatch.setattr(bindings, "_opened", lambda: (None, missing))
    description, notices = choose_for(folders["bfloat16"], torch.bfloat16)
    assert description == "local (torch, cpu)"
    assert "not built" in notices and "install a C compiler" in notices


@needs_kernels
def test_a_set_that_the_cpu_lacks_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = next(name for name in bindings.SETS if name not in bindings.available())
    monkeypatch.setenv(bindings.VARIABLE, lacking)
    with pytest.raises(ModelError, match=f"{lacking}.*this CPU lacks it"):
        choose_for(folders["bfloat16"], torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("name", bindings.available())
def test_every_set_of_this_cpu_runs(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.VARIABLE, name)
    experts = experts_of(folders["bfloat16"])
    hidden, indices, weights = routes(experts, 7)
    executor = executor_on(experts, torch.bfloat16)
    assert executor.description == f"local (native {name}, 2 threads)"
    each = one_by_one(experts, hidden, indices, torch.ones_like(weights))
    assert close(executor.outputs(LAYER, hidden, indices), each, 1.5e-2)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "gate", "why"),
    [
        (torch.float16, SILU, "not in float16"),
        (torch.float32, FamilyGate(torch.hypot, None), "activation"),
    ],
)
def test_what_the_kernels_cannot_do_runs_in_torch(
    folders: dict[str, Path], dtype: torch.dtype, gate: FamilyGate, why: str
) -> None:
    description, notices = choose_for(folders["float32"], dtype, gate)
    assert description.startswith("local (torch, cpu")
    assert why in notices


@needs_kernels
def test_transposed_weights_run_in_torch_and_say_what_helps(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "gpt_oss")
    description, notices = choose_for(plain)
    assert description == "local (torch, cpu)"
    assert "side by side" in notices and "models prepare" in notices
    prepare(plain, tmp_path / "prepared", lambda *_: None)
    assert choose_for(tmp_path / "prepared")[1] == ""
