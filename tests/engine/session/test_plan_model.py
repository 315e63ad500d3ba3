"""Plans of machines that are not this one: what is found out about model and machine reaches the planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.calibration.calibration_file import calibration_key, load_speed, save_calibration, save_speed, shape_of
from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts, Plan, Planned
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.store.local_models import profile_key
from engine.moe.kernels import pool
from engine.moe.popularity import model_of, save_profile
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve
from engine.runtimes.mlx import eligible
from engine.session import plan_model as planning
from engine.session.plan_model import plan_model
from engine.system.locations import profile_paths
from engine.system.machine import Gpu
from tests.support.opened_experts import experts_of

GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral")


def give_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 8 * GIB) -> Gpu:
    found = Gpu("A graphics card", total, free)
    monkeypatch.setattr(planning, "gpu", lambda: found)
    return found


def planned(folder: Path, loaded: ModelFacts | None = None, **choices: Any) -> Planned:
    return plan_model(Plan(id=7, load=Load(id=0, model=str(folder), **choices)), loaded)


def reasons(plan: Planned) -> dict[str, str]:
    return {choice.what: f"{choice.choice}: {choice.reason}" for choice in plan.choices}


def measure(folder: Path, gpu: str | None, dtype: str = "float32", threads: int | None = None) -> Calibration:
    experts = experts_of(folder)
    calibration = Calibration(
        version=CALIBRATION_VERSION,
        machine=calibration_key(dtype, threads, gpu),
        shape=shape_of(experts),
        cpu=Curve((1, 64), (1e-3, 2e-3)),
        memory_read=1e9,
        gpu=Curve((1, 64), (1e-5, 1e-5)) if gpu else None,
        weight_copy=1e-2 if gpu else 0.0,
        activation_copy=Curve((1, 64), (1e-6, 1e-6)) if gpu else None,
    )
    save_calibration(calibration)
    return calibration


def test_with_a_gpu_the_trunk_goes_there_and_experts_as_far_as_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = give_gpu(monkeypatch, free=6 * GIB)
    plan = planned(folder)
    on_gpu, on_cpu = plan.memory
    assert (plan.id, plan.fits, on_gpu.device, on_gpu.free) == (7, True, card.name, card.free)
    assert on_gpu.trunk > 0 and on_gpu.key_values > 0 and on_cpu.trunk == 0
    experts = open_model(folder).experts
    assert experts is not None and on_gpu.experts == experts.nbytes
    assert reasons(plan)["runtime"].startswith("torch")
    limited = planned(folder, gpu_expert_bytes=experts.nbytes // 2)
    assert 0 < limited.memory[0].experts <= experts.nbytes // 2


def test_a_gpu_that_is_too_small_is_a_shortfall_where_it_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch, free=1000)
    plan = planned(folder, partitioning="hybrid")
    assert not plan.fits and plan.shortfall > 0
    auto = planned(folder)
    assert auto.fits and [device.device for device in auto.memory] == ["CPU"]
    give_gpu(monkeypatch, free=6 * GIB)
    wanted = planned(folder, partitioning="hybrid", policy="stream")
    assert wanted.fits and wanted.memory[0].experts == 0


def test_what_is_loaded_now_would_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch, free=GIB)
    facts = ModelFacts(
        name="other", family="mixtral", runtime="torch", executor="hybrid", device="cuda", dtype="float32", layers=1,
        experts=1, experts_per_token=1, moe_layers=[0], vocabulary=1, hidden=1, context_limit=1, trunk_bytes=2 * GIB,
        expert_bytes=9, key_value_bytes_per_token=1, parameters=1, gpu_expert_bytes=3 * GIB,
    )  # fmt: skip
    assert planned(folder, facts).memory[0].free == 6 * GIB
    on_cpu = msgspec.structs.replace(facts, device="cpu", gpu_expert_bytes=0)
    beside = (
        planned(folder, on_cpu, partitioning="cpu").memory[0].free - planned(folder, partitioning="cpu").memory[0].free
    )
    assert beside == pytest.approx(2 * GIB, rel=0.2)
    assert planned(folder, msgspec.structs.replace(facts, trunk_bytes=99 * GIB)).memory[0].free == 8 * GIB


def test_predictions_rest_on_what_was_measured_here_and_only_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    assert planned(folder).tokens_per_s is None
    monkeypatch.setattr(pool, "usable_cpus", lambda: 4)
    measure(folder, None, threads=3)
    assert planned(folder).tokens_per_s is None  # with other threads
    found = planned(folder, cpu_threads=3)
    assert found.tokens_per_s is not None and "bench experts" in found.basis and "at best" in found.basis
    measure(folder, None)
    save_speed(calibration_key("float32", None, None), 1e9, "native", 0.5)
    unknown = planned(folder, runtime="torch")
    assert unknown.tokens_per_s == planned(folder, runtime="native").tokens_per_s  # never faster than what was measured
    assert f"privatellm bench decode {folder} --runtime torch" in unknown.basis and "at best" in unknown.basis
    save_speed(calibration_key("float32", None, None), 1e9, "torch", 0.25)
    native, torch = planned(folder, runtime="native"), planned(folder, runtime="torch")
    assert native.tokens_per_s is not None and torch.tokens_per_s is not None
    assert native.tokens_per_s < torch.tokens_per_s < found.tokens_per_s
    assert "at best" not in native.basis


def test_what_was_not_measured_is_measured_by_a_command_that_names_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    assert f"`privatellm bench experts {folder}`" in planned(folder).basis


@pytest.mark.parametrize(
    ("asked", "threads"),
    [
        (None, "2: one per physical core"),
        (3, "3: as chosen"),
        (600, "4: 600 were asked for, but this machine runs no more at once"),
    ],
)
def test_threads_and_why(folder: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, threads: str) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    monkeypatch.setattr(pool, "usable_cpus", lambda: 4)
    monkeypatch.setattr(pool, "physical_cores", lambda: 2)
    assert reasons(planned(folder, cpu_threads=asked))["threads"] == threads


def test_a_context_longer_than_the_model_takes_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    most = int(open_model(folder).config["max_position_embeddings"])
    plan = planned(folder, context_limit=most + 5)
    assert f"{most} tokens: what the model was made for, though {most + 5} were asked for" in reasons(plan)["context"]


def test_with_a_gpu_its_own_calibration_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = give_gpu(monkeypatch, free=6 * GIB)
    measure(folder, None)
    assert planned(folder, partitioning="hybrid").tokens_per_s is None
    measure(folder, card.name)
    hybrid = planned(folder, partitioning="hybrid")
    assert hybrid.tokens_per_s is not None
    # The CPU's part of it serves a plan for the CPU alone.
    alone = planned(folder, partitioning="cpu")
    assert alone.tokens_per_s is not None and alone.tokens_per_s < hybrid.tokens_per_s


def test_a_calibration_that_cannot_be_used_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    measure(folder, None)
    (path,) = (home / "data" / "calibration").glob("experts-*.json")
    path.write_text("{")
    plan = planned(folder)
    assert plan.tokens_per_s is None and "damaged" in reasons(plan)["note"]


def test_the_persons_own_use_raises_the_prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = give_gpu(monkeypatch, free=6 * GIB)
    measure(folder, card.name)
    experts = experts_of(folder)
    quarter = experts.nbytes // 4
    even = planned(folder, partitioning="hybrid", gpu_expert_bytes=quarter)
    favourites = {layer: [1000.0, 1000.0, *[1.0] * (experts.count - 2)] for layer in experts.layers}
    save_profile(profile_paths(profile_key(folder))[0], model_of(experts), favourites)
    known = planned(folder, partitioning="hybrid", gpu_expert_bytes=quarter)
    assert even.tokens_per_s is not None and known.tokens_per_s is not None
    assert known.tokens_per_s > even.tokens_per_s


@pytest.mark.parametrize("runtime", ["native", "mlx"])
def test_runtimes_that_use_no_gpu_of_ours_are_planned_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    give_gpu(monkeypatch, free=6 * GIB)
    plan = planned(folder, runtime=runtime)
    assert [device.device for device in plan.memory] == ["CPU"] and reasons(plan)["runtime"].startswith(runtime)


def test_hybrid_without_a_gpu_is_the_cpu_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    plan = planned(folder, partitioning="hybrid")
    assert plan.fits and "no GPU" in reasons(plan)["partitioning"]


def test_the_runtime_is_the_one_that_loading_takes(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "gpu", lambda: None)
    assert reasons(planned(tiny_model("gpt_oss")))["runtime"].startswith("torch: the faster native trunk is not used")
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    assert reasons(planned(tiny_model("mixtral")))["runtime"].startswith("torch: ")


def test_a_model_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "starter"):
        with pytest.raises(ModelError):
            plan_model(Plan(id=1, load=Load(id=0, model=name)))


@pytest.mark.parametrize("data", ["", "{}", "[1]", '{"version": 99, "machines": {}}', '{"version": 1, "machines": 3}'])
def test_a_damaged_file_of_speeds_is_replaced(home: Path, data: str) -> None:
    save_speed("a", 2e9, "native", 0.1)
    (home / "data" / "calibration" / "machine.json").write_text(data)
    assert load_speed("a") is None
    save_speed("a", 3e9, "torch", -1.0)
    save_speed("b", 4e9, "native", 0.2)
    found = load_speed("a")
    assert found is not None and found.memory_read == 3e9 and found.layer_overhead_s == {"torch": 0.0}
    assert found.read_share == {}
    save_speed("a", 3e9, "native", 0.1, 1.5)
    save_speed("a", 3e9, "torch", 0.0)
    assert (kept := load_speed("a")) is not None and kept.read_share == {"native": 1.0}
    save_speed("a", 3e9, "native", 0.1, 0.0)
    assert load_speed("a") is None


def test_what_native_takes_beside_streaming_is_a_share_and_not_a_time_per_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one model are as much as twenty times as large as those of another, and native does little else."""
    monkeypatch.setattr(planning, "gpu", lambda: None)
    key = calibration_key("float32", None, None)
    save_speed(key, 1e9, "native", 0.5, 0.8)
    native = planned(folder, runtime="native").tokens_per_s
    save_speed(key, 1e9, "native", 99.0, 0.4)
    assert native == pytest.approx(2 * (planned(folder, runtime="native").tokens_per_s or 0.0))
    save_speed(key, 1e9, "torch", 0.25)
    assert 1 / (planned(folder, runtime="torch").tokens_per_s or 0.0) > 2 * 0.25 > 1 / (native or 0.0)


def test_mlx_is_planned_with_what_windowed_layers_keep(tiny_model: Callable[..., Path]) -> None:
    pytest.importorskip("mlx_lm")
    folder = tiny_model("gpt_oss", max_position_embeddings=8192)
    sizes = sizes_of(open_model(folder))
    (memory,) = planned(folder, runtime="mlx", context_limit=8000).memory
    (whole,) = planned(folder, runtime="torch", context_limit=8000).memory
    assert whole.key_values == 8000 * sizes.key_value_bytes_per_token
    assert whole.key_values - memory.key_values == sizes.windowed_bytes_per_token * (8000 - 16 - 1024 - 512 - 256) > 0


def test_the_largest_macs_are_planned_with_their_long_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm")

    def workspace(architecture: str) -> int:
        monkeypatch.setattr(eligible, "architecture", lambda: architecture)
        (memory,) = planned(folder, runtime="mlx").memory
        return memory.workspace

    assert workspace("applegpu_g16s") == 4 * workspace("applegpu_g16g") > 0
