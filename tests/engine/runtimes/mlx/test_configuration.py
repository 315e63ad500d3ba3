"""Translating configurations for mlx-lm, and refusing what it would ignore. Needs no mlx."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.runtimes.mlx import runtime
from engine.runtimes.mlx.configuration import complete_config, context_of, translate_config
from engine.runtimes.mlx.families import FAMILIES, check_settings, family_of
from engine.runtimes.mlx.runtime import MlxRuntime

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
}


def translated(config: dict[str, Any]) -> dict[str, Any]:
    return translate_config(complete_config(Path("model"), config))


def test_rope_of_transformers_5_goes_to_the_top() -> None:
    found = translated(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert found["rope_theta"] == 5e5
    assert found["rope_scaling"] is None
    assert "rope_parameters" not in found


def test_rope_of_older_configurations_stays() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    found = translated(LLAMA | {"rope_theta": 7e4, "rope_scaling": scaling})
    assert found["rope_theta"] == 7e4
    assert found["rope_scaling"]["type"] == "linear"
    assert found["rope_scaling"]["factor"] == 4.0


def test_defaults_are_those_of_transformers() -> None:
    """mlx-lm ties llama's embeddings when the key is missing; transformers does not."""
    found = translated(LLAMA)
    assert found["tie_word_embeddings"] is False
    assert found["rope_theta"] == 10000.0
    assert found["head_dim"] == 16
    assert found["num_key_value_heads"] == 4


def test_renamed_keys() -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_local_experts": 16}
    assert translated(config)["num_experts"] == 16
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_experts": 12}
    assert translated(config)["num_experts"] == 12
    assert translated(config)["head_dim"] == 16


def test_dbrx_keeps_its_settings_one_level_down() -> None:
    config = {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2}, "rope_parameters": {"rope_theta": 3e5}}
    attention = translated(config)["attn_config"]
    assert attention["rope_theta"] == 3e5
    assert attention["clip_qkv"] == float("inf")
    config = {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 4e5}}
    attention = translated(config)["attn_config"]
    assert attention["clip_qkv"] == 8.0
    assert attention["rope_theta"] == 4e5


def test_translation_changes_nothing_in_place() -> None:
    config = complete_config(Path("model"), {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2}})
    before = repr(config)
    translate_config(config)
    assert repr(config) == before


def test_a_setting_of_the_wrong_type_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"config\.json has a setting that cannot be used"):
        complete_config(Path("model"), LLAMA | {"hidden_size": "many"})


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("mixtral", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping None"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping None"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic' without alpha",
        ),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights 2.0"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn 'gelu'"),
    ],
)
def test_a_setting_that_mlx_lm_ignores_is_refused(family: str, settings: dict[str, Any], named: str) -> None:
    plain = complete_config(Path("model"), {"model_type": family})
    check_settings(plain, FAMILIES[family])
    config = complete_config(Path("model"), {"model_type": family} | settings)
    with pytest.raises(ModelError, match=f"{named}: choose the torch runtime"):
        check_settings(config, FAMILIES[family])


@pytest.mark.parametrize("name", ["jamba", None, 7])
def test_another_family_is_refused_with_what_may_run_it(name: object) -> None:
    with pytest.raises(ModelError) as caught:
        family_of({"model_type": name})
    assert repr(name) in str(caught.value)
    assert "--runtime torch" in str(caught.value)


def test_windows() -> None:
    """The same window in all layers is kept by the cache; in some layers only, the context ends with it."""

    def context(family: str, **settings: Any) -> tuple[int, int | None, bool]:
        config = {"model_type": family, "max_position_embeddings": 1000} | settings
        found = context_of(complete_config(Path("model"), config), FAMILIES[family])
        return found.limit, found.window, found.notice is not None

    assert context("llama") == (1000, None, False)
    assert context("mistral", sliding_window=100) == (1000, 100, False)
    assert context("mistral", sliding_window=None) == (1000, None, False)
    assert context("mistral", sliding_window=4096) == (1000, None, False)
    assert context("gpt_oss", sliding_window=128) == (1000, None, False)
    layers = {"num_hidden_layers": 4, "max_window_layers": 2, "sliding_window": 64}
    assert context("qwen2", use_sliding_window=False, **layers) == (1000, None, False)
    assert context("qwen2", use_sliding_window=True, **layers) == (64, None, True)


def test_without_mlx_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else object())
    with pytest.raises(ModelError, match=r"needs mlx-lm, which is not installed.*pip install.*torch runtime"):
        MlxRuntime().load(tmp_path, Load(id=1, model="x"), lambda *_: None)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert "mlx and mlx-lm, which are not" in str(runtime.available())


def test_importing_the_runtime_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.runtimes.mlx.runtime, engine.runtimes.mlx.families, engine.runtimes.mlx.configuration\n"
        "print([name for name in ('mlx', 'mlx_lm', 'torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.soak
def test_mlx_lm_lowers_no_limit_of_open_files() -> None:
    pytest.importorskip("mlx_lm")
    code = """
import resource
from pathlib import Path
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.runtimes.mlx.runtime import MlxRuntime
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3000, before[1]))
try:
    MlxRuntime().load(Path("/nowhere"), Load(id=1, model="tiny"), lambda *_: None)
except ModelError:
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (3000, before[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
from engine.runtimes.mlx.runtime import open_files_kept
import importlib, mlx_lm.utils
with open_files_kept():
    importlib.reload(mlx_lm.utils)
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (2048, before[1]))
"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("this machine allows fewer open files than mlx-lm does")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True"]
