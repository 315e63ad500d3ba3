"""Which runtime ``auto`` is, and that a refused load costs nothing: no download, and not the model that is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine.calibration.calibration_file import MLX_GPU, calibration_key, save_speed
from engine.doctor_facts import doctor_facts
from engine.errors import ModelError
from engine.ipc.messages import Load, Plan
from engine.models.folders.opening import read_config
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes import choosing
from engine.runtimes.choosing import as_ring_node, choose_runtime, on_one_machine, refuse_download
from engine.runtimes.mlx import eligible
from engine.runtimes.mlx.configuration import complete_config
from engine.runtimes.mlx.families import FAMILIES, check_settings, unsupported_config
from engine.session.loading import load_session
from engine.session.plan_model import plan_model
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("home")


pytest.importorskip("mlx.core", reason="mlx is not installed")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """This machine as a Mac with Apple Silicon; called with the bytes that its GPU may take."""

    def budget(nbytes: int) -> None:
        monkeypatch.setattr(eligible, "working_set_bytes", lambda: nbytes)

    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: True)
    budget(10**12)
    return budget


def ask_for(folder: Path, **options: Any) -> Load:
    return Load(id=1, model=str(folder), **options)


def as_mlx_lm_writes(folder: Path, family: str = "mixtral") -> Path:
    """A folder whose config.json says that it is quantised."""
    folder = write_tiny_model(folder, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 32}}))
    return folder


@pytest.mark.parametrize(
    ("family", "overrides", "options", "chosen", "reason"),
    [
        ("mixtral", {}, {}, "mlx", None),
        ("granitemoe", {}, {}, "mlx", None),
        ("mixtral", {}, {"partitioning": "ring"}, "mlx", None),
        ("minimax", {}, {}, "torch", "does not run the family 'minimax'"),
        ("llama4_text", {}, {}, "torch", "does not run the family 'llama4_text'"),
        ("olmoe", {"clip_qkv": 4.0}, {}, "native", "setting clip_qkv 4.0"),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
            {},
            "native",
            "setting rope_type 'linear'",
        ),
        ("mixtral", {}, {"partitioning": "hybrid"}, "native", "GPU and CPU share one memory"),
    ],
)
def test_auto_on_a_mac_looks_at_the_model(
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    chosen: str,
    reason: str | None,
    mac: Callable[[int], None],
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "m", family, **overrides)
    choice = choose_runtime(ask_for(folder, **options), folder)
    assert (choice.name, choice.is_fallback) == (chosen, reason is not None)
    assert (reason or "the default on Apple Silicon") in choice.reason


def test_the_cpu_alone_is_a_choice_and_no_fallback(mac: Callable[[int], None], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "mixtral")
    assert choose_runtime(ask_for(folder, partitioning="cpu"), folder) == RuntimeChoice(
        "native", "the default on a CPU"
    )


def test_a_model_too_large_for_the_gpu_runs_elsewhere(mac: Callable[[int], None], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "mixtral", dtype="bfloat16")
    needed = eligible.weight_bytes(folder, "auto")
    assert eligible.weight_bytes(folder, "float32") == 2 * needed
    mac(needed)
    assert choose_runtime(ask_for(folder), folder).name == "mlx"
    assert choose_runtime(ask_for(folder, dtype="float32"), folder).name == "native"
    mac(needed - 1)
    choice = choose_runtime(ask_for(folder), folder)
    assert (choice.name, choice.is_fallback) == ("native", True)
    assert "GB too little" in choice.reason
    with pytest.raises(ModelError, match="--runtime native") as refused:
        load_session(ask_for(folder, runtime="mlx"), lambda *_: None)
    assert refused.value.kind == "memory"


def test_what_nothing_else_reads_stays_with_mlx(mac: Callable[[int], None], tmp_path: Path) -> None:
    folder = as_mlx_lm_writes(tmp_path / "m", "phimoe")
    mac(1)
    assert choose_runtime(ask_for(folder), folder).name == "mlx"


def test_without_mlx_a_mac_runs_the_native_trunk(
    mac: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "mlx_installed", lambda: False)
    folder = write_tiny_model(tmp_path / "m", "mixtral")
    choice = choose_runtime(ask_for(folder), folder)
    assert (choice.name, choice.is_fallback) == ("native", True)
    assert "pip install mlx-lm" in choice.reason


def test_loading_planning_and_doctor_say_the_same(mac: Callable[[int], None], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "olmoe", clip_qkv=4.0)
    session = load_session(ask_for(folder), lambda *_: None)
    planned = {choice.what: choice for choice in plan_model(Plan(id=1, load=ask_for(folder))).choices}["runtime"]
    facts = doctor_facts(ask_for(folder))
    assert session.facts.runtime == planned.choice == facts.runtime == "native"
    assert session.facts.notices == [f"Running on native: {planned.reason}."]
    assert planned.reason == facts.runtime_reason
    assert "clip_qkv 4.0" in planned.reason


def test_loading_planning_and_doctor_refuse_the_same(tmp_path: Path) -> None:
    request = ask_for(write_tiny_model(tmp_path / "m", "minimax"), runtime="native")
    with pytest.raises(ModelError, match="native runtime cannot run") as refused:
        load_session(request, lambda *_: None)
    with pytest.raises(ModelError) as unplanned:
        plan_model(Plan(id=1, load=request))
    assert str(unplanned.value) == str(refused.value) == doctor_facts(request).model_problem


def test_a_plan_for_mlx_rests_on_what_its_gpu_was_measured_at(mac: Callable[[int], None], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "mixtral")
    save_speed(calibration_key("float32", None, None), 1e9, "native", 1.0)
    save_speed(calibration_key("float32", None, MLX_GPU), 1e12, "mlx", 1e-3)
    on_gpu = plan_model(Plan(id=1, load=ask_for(folder))).tokens_per_s
    on_cpu = plan_model(Plan(id=1, load=ask_for(folder, runtime="native"))).tokens_per_s
    assert on_gpu is not None and on_cpu is not None and on_gpu > 100 * on_cpu


@pytest.mark.sampled
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_file_says_what_the_completed_configuration_says(family: str, tmp_path: Path) -> None:
    """What is chosen without transformers is what the runtime finds with it."""
    folder = write_tiny_model(tmp_path / "m", family)
    config = read_config(folder)
    found = unsupported_config(config)
    name = config["model_type"]
    if name not in FAMILIES:
        assert found is not None and repr(name) in found
        return
    refused = None
    try:
        check_settings(complete_config(folder, config), FAMILIES[name])
    except ModelError as error:
        refused = str(error)
    assert (found is None) == (refused is None)
    assert found is None or (refused or "").startswith(found)


def test_older_names_of_rotary_settings_are_seen() -> None:
    config = {"model_type": "mixtral", "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert "rope_type 'yarn'" in (unsupported_config(config) or "")
    assert unsupported_config({"model_type": "glm4_moe", "partial_rotary_factor": 0.5}) is None
    assert "partial_rotary_factor 0.5" in (
        unsupported_config({"model_type": "llama", "partial_rotary_factor": 0.5}) or ""
    )


def test_a_node_of_a_ring_shares_its_experts_with_a_gpu_by_torch() -> None:
    request = Load(id=1, model="m", partitioning="ring")
    assert as_ring_node(request, "native").partitioning == "cpu"
    assert as_ring_node(request, "torch").partitioning == as_ring_node(request, "mlx").partitioning == "auto"


def test_one_machine_runs_on_the_cpu_or_by_mlx() -> None:
    request = Load(id=1, model="m", partitioning="ring")
    assert on_one_machine(request, "mlx").partitioning == "auto"
    assert on_one_machine(request, "native").partitioning == on_one_machine(request, "torch").partitioning == "cpu"


class TestDownloads:
    mxfp4: ClassVar[dict[str, Any]] = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}

    def test_what_mlx_reads_may_be_fetched(self, mac: Callable[[int], None]) -> None:
        refuse_download(self.mxfp4, 10**9)
        refuse_download({"model_type": "qwen3_moe", "quantization": {"bits": 4, "group_size": 64}}, 10**9)
        refuse_download({"model_type": "minimax"}, 10**15)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (
                {"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}},
                "quantised with GPTQ with None bits, which does not run here; take a GGUF",
            ),
            ({"model_type": "minimax", "quantization": {"bits": 4}}, "the family 'minimax'"),
            ({"model_type": "olmoe", "clip_qkv": 4.0, "quantization": {"bits": 4}}, "clip_qkv 4.0"),
        ],
    )
    def test_what_nothing_here_runs_is_refused(
        self, mac: Callable[[int], None], config: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(ModelError, match=reason):
            refuse_download(config, 10**9)

    def test_what_is_too_large_for_the_gpu_is_refused_unless_the_native_runtime_reads_it(
        self, mac: Callable[[int], None]
    ) -> None:
        mac(11 * 10**9)
        refuse_download(self.mxfp4, 12 * 10**9)
        refuse_download({"model_type": "qwen3_next", "quantization": {"bits": 4, "group_size": 64}}, 20 * 10**9)
        with pytest.raises(ModelError, match=r"need 12\.0 GB and the GPU may take 11\.0 GB") as refused:
            refuse_download({"model_type": "phimoe", "quantization": {"bits": 4, "group_size": 64}}, 12 * 10**9)
        assert refused.value.kind == "memory"
        assert "native" not in str(refused.value)

    def test_without_mlx_only_what_the_other_runtimes_read_is_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "mlx_installed", lambda: False)
        refuse_download(self.mxfp4, 10**9)
        refuse_download({"model_type": "mixtral", "quantization": {"bits": 4, "group_size": 64}}, 10**9)
        with pytest.raises(ModelError, match="MXFP4"):
            refuse_download(self.mxfp4 | {"model_type": "mixtral"}, 1)
        with pytest.raises(ModelError, match="quantised with mlx's affine method as mlx-lm stores the family phimoe"):
            refuse_download({"model_type": "phimoe", "quantization": {"bits": 4, "group_size": 64}}, 1)


@pytest.mark.parametrize(
    ("total", "asks"),
    [(64 * 10**9, True), (12 * 10**9, False)],
)
def test_a_higher_limit_is_advised_where_there_is_memory_for_it(total: int, asks: bool) -> None:
    advice = eligible.memory_advice(12 * 2**30, only_here=False, total=total)
    assert ("sudo sysctl iogpu.wired_limit_mb=13517" in advice) == asks


@pytest.mark.parametrize("runtime", ["native", "torch", "mlx"])
class TestARefusedLoadKeepsTheModel:
    def refused(self, folder: Path, runtime: str) -> None:
        released: list[bool] = []
        with pytest.raises(ModelError):
            load_session(ask_for(folder, runtime=runtime), lambda *_: None, release=lambda: released.append(True))
        assert released == []

    def test_for_a_family_it_does_not_run(self, runtime: str, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "m", "mixtral")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "rwkv9"}))
        self.refused(folder, runtime)

    def test_for_a_setting_it_does_not_honour(self, runtime: str, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "m", "mixtral")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "no such thing"}))
        self.refused(folder, runtime)

    def test_for_a_damaged_tokenizer(self, runtime: str, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "m", "mixtral")
        (folder / "tokenizer.json").write_text("{")
        (folder / "tokenizer_config.json").write_text("{}")
        self.refused(folder, runtime)

    def test_and_one_that_is_not_releases_it_once(self, runtime: str, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "m", "mixtral")
        released: list[bool] = []
        request = ask_for(folder, runtime=runtime)
        load_session(request, lambda *_: None, release=lambda: released.append(True)).close()
        assert released == [True]


@pytest.mark.parametrize(
    ("chosen", "architecture", "chunk"),
    [
        (512, "applegpu_g16s", 2048),
        (512, "applegpu_g15d", 2048),
        (512, "applegpu_g16g", 512),
        (512, "", 512),
        (64, "applegpu_g16s", 64),
    ],
)
def test_only_the_largest_chips_read_prompts_in_long_chunks(chosen: int, architecture: str, chunk: int) -> None:
    assert eligible.prefill_chunk(chosen, architecture) == chunk
