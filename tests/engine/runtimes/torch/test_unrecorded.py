"""Families without a record are run by transformers, if a small model of them runs here as it does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load
from engine.models.architectures.families import FAMILIES, check_supported
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.runtimes.choosing import choose_runtime
from engine.runtimes.mlx.eligible import unsupported_reason as not_mlx
from engine.runtimes.native.runtime import unsupported_reason as not_native
from engine.runtimes.protocol import Interrupted
from engine.runtimes.torch import unrecorded
from engine.runtimes.torch.cache import GrowingLayer
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.runtime import TorchRuntime
from tests.support.progress import quiet

TEXT = [3, 9, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
_COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A window and scaled logits; biases and norms of another kind; other names of layers; experts; a recurrent state.
MODELS: dict[str, dict[str, Any]] = {
    "vaultgemma": {"head_dim": 8, "sliding_window": 6},
    "stablelm": {"partial_rotary_factor": 0.5},
    "falcon": {"alibi": False},
    "bamba": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "attn_layer_indices": [1],
    },
}  # fmt: skip


def written(folder: Path, family: str, **settings: Any) -> Any:
    """A tiny random model of ``family``, which is written into ``folder``."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**_COMMON | MODELS[family] | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))


def loaded(folder: Path, **options: Any) -> TorchModel:
    model = TorchRuntime().load(folder, Load(id=1, model=folder.name, dtype="float32", **options), quiet)
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_the_library(family: str, tmp_path: Path) -> None:
    assert family not in FAMILIES
    library = written(tmp_path / family, family)
    model = loaded(tmp_path / family)
    wanted = library(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    rows = model.start()
    scale = 1e-4 * np.abs(wanted).max()
    assert np.abs(rows.extend(TEXT[:7]) - wanted[6]).max() < scale
    assert np.abs(rows.extend(TEXT[7:12]) - wanted[11]).max() < scale
    beams = rows.fan_out(2)
    for position in range(12, len(TEXT)):
        logits = beams.step([TEXT[position], TEXT[position]])
        assert np.abs(logits - wanted[position]).max() < scale
    assert (model.facts.family, model.facts.experts, model.facts.runtime) == (family, 0, "torch")
    assert model.facts.parameters == sum(parameter.numel() for parameter in library.parameters())
    assert model.facts.notices == [unrecorded.UNRECORDED]
    model.close()


def test_settings_may_have_the_names_of_older_families(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["gpt2"](vocab_size=48, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    library = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    library.save_pretrained(tmp_path / "m")
    model = loaded(tmp_path / "m")
    wanted = library(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0, -1].detach().numpy()
    assert np.abs(model.start().extend(TEXT) - wanted).max() < 1e-4
    assert (model.facts.layers, model.facts.context_limit) == (3, 128)
    assert model.facts.key_value_bytes_per_token == 3 * 2 * 32 * 4


def test_states_are_counted(tmp_path: Path) -> None:
    written(tmp_path / "m", "bamba")
    model = loaded(tmp_path / "m")
    rows = model.start()
    rows.extend(TEXT)
    states = [array.read() for array in rows.contents() or () if "keys" not in array.part.name]
    assert 0 < model.facts.state_bytes <= sum(len(state) for state in states)


@pytest.mark.parametrize("part", ["difference", "small_settings"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (ModelError("4 GB are missing.", kind="memory"), ModelError),
        (OSError(28, "No space left on device"), ModelError),
        (ImportError("it needs mamba_ssm"), ModelError),
        (Interrupted("stopped"), Interrupted),
        (Cancelled("Stopped."), Cancelled),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_trial_that_this_machine_let_fail_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception, raised: type[Exception]
) -> None:
    written(tmp_path / "m", "stablelm")
    with monkeypatch.context() as patched:
        patched.setattr(unrecorded, part, raises(error))
        with pytest.raises(raised, match=str(error)[-12:]):
            loaded(tmp_path / "m")
    loaded(tmp_path / "m").close()


@pytest.mark.parametrize("error", [ValueError("a defect"), ModelError("a defect."), RuntimeError("a defect of shapes")])
def test_a_trial_that_fails_whenever_it_is_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    written(tmp_path / "m", "stablelm")
    with monkeypatch.context() as patched:
        patched.setattr(unrecorded, "difference", raises(error))
        with pytest.raises(ModelError, match=r"as it does there: a defect"):
            loaded(tmp_path / "m")
    with pytest.raises(ModelError, match=r"as it does there: a defect"):
        loaded(tmp_path / "m")


def test_a_result_that_cannot_be_kept_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "m", "stablelm")
    monkeypatch.setattr(unrecorded, "new_file", raises(PermissionError("read-only")))
    loaded(tmp_path / "m").close()


def raises(error: Exception) -> Any:
    def fail(*given: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("family", ["cwm", "cohere2"])
def test_a_small_model_keeps_the_types_of_settings(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    assert unrecorded.small_module(config).config.vocab_size == unrecorded.VOCABULARY


def test_torch_is_chosen_and_the_others_say_why_not(tmp_path: Path) -> None:
    written(tmp_path / "m", "stablelm")
    request = Load(id=1, model="m")
    assert choose_runtime(request, tmp_path / "m", on_gpu=False).name == "torch"
    files = open_model(tmp_path / "m")
    assert "does not run the family 'stablelm'" in str(not_native(files.config, files, request))
    assert "stablelm" in str(not_mlx(tmp_path / "m", request))
    sizes = sizes_of(files)
    assert (sizes.layers, sizes.experts, sizes.key_value_bytes_per_token) == (3, 0, 3 * 2 * 2 * 8 * 4)


def test_a_family_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "m", "stablelm")
    loaded(tmp_path / "m").close()

    def again(config: Any) -> Any:
        raise AssertionError("it was tried again")

    monkeypatch.setattr(unrecorded, "small_module", again)
    loaded(tmp_path / "m").close()
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings | {"rope_theta": 99.0, "rope_parameters": None}))
    with pytest.raises(ModelError, match="it was tried again"):
        loaded(tmp_path / "m")


_rows_copied = GrowingLayer.rows_copied


def zeros_copied(layer: GrowingLayer, position: Any, rows: int) -> GrowingLayer:
    copy = _rows_copied(layer, position, rows)
    for buffer in copy.buffers().values():
        buffer.zero_()
    return copy


@pytest.mark.parametrize(
    ("part", "fault", "said"),
    [
        (
            "_first_in_reach",
            lambda layer: max(0, layer.position.length - 2) if layer.window else 0,
            "a prompt in two parts",
        ),
        ("get_mask_sizes", lambda layer, length: (length, 0), "in two parts"),
        ("move", lambda layer, rows, parents, start: 0, "an answer that was copied"),
        ("rows_copied", zeros_copied, "two answers at once"),
    ],
)
def test_a_family_that_would_be_wrong_is_refused_by_name(
    part: str, fault: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "m", "vaultgemma")
    monkeypatch.setattr(GrowingLayer, part, fault)
    for _ in range(2):  # the result is kept
        with pytest.raises(
            ModelError, match=r"family vaultgemma .* as it does there: .*; choose another model"
        ) as error:
            loaded(tmp_path / "m")
        assert said in str(error.value) or part == "get_mask_sizes"


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    written(tmp_path / "m", "stablelm")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    for change, name in (
        ({"model.layers.1.mlp.up_proj.weight": None}, "model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.1.mlp.other.weight": torch.zeros(4)}, "model.layers.1.mlp.other.weight"),
        ({"model.norm.weight": torch.zeros(5)}, "model.norm.weight"),
    ):
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(ModelError, match=name):
            loaded(tmp_path / "m")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "no_such_family"}, "'no_such_family' are not supported"),
        ({"architectures": ["StableLmModel"]}, "'stablelm' are not supported"),
        ({"architectures": 7}, "architectures"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"model_type": "../stablelm"}, "are not supported"),
        ({"text_config": {"model_type": "stablelm"}}, "'stablelm' are not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "FP8.* in the family stablelm",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "code"),
    ],
)
def test_what_is_not_run(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    written(tmp_path / "m", "stablelm")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=said):
        loaded(tmp_path / "m")


def test_the_families_are_those_of_the_library() -> None:
    defined = {name for name, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING}

    def supported(name: str) -> bool:
        try:
            return check_supported({**_COMMON, "model_type": name, "architectures": ["ForCausalLM"]}).model_type == name
        except ModelError:
            return False

    for name in ("phi3", "gemma2", "olmo2", "cohere2", "stablelm", "starcoder2", "gpt2", "bamba"):
        assert name in defined and supported(name)
    for name in ("clip", "vit", "wav2vec2", "t5"):
        assert name in CONFIG_MAPPING and name not in defined and not supported(name)
