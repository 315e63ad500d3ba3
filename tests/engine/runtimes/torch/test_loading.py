"""What cannot be loaded is refused in one sentence that names it; which runtime runs is never a guess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import runtimes
from engine.errors import ModelError
from engine.models.folders.prepare import prepare
from engine.runtimes.torch import loading
from tests.engine.runtimes.torch_oracle import load, prompt
from tests.support.tiny_models import write_tiny_model

Tensors = dict[str, torch.Tensor]


def damaged(folder: Path, change: Callable[[Tensors], None], family: str = "mixtral") -> Path:
    """A tiny model whose tensors went through ``change``."""
    write_tiny_model(folder, family)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reconfigured(folder: Path, family: str = "mixtral", **changes: object) -> Path:
    write_tiny_model(folder, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(4, 4)
        tensors["model.layers.3.shared_head.norm.weight"] = torch.zeros(4)

    plain = load(write_tiny_model(tmp_path / "plain", "deepseek_v3"))
    more = load(damaged(tmp_path / "more", add, "deepseek_v3"))
    tokens = prompt(plain, 12)
    np.testing.assert_allclose(more.start().extend(tokens), plain.start().extend(tokens), rtol=1e-4, atol=1e-4)


def test_an_untied_head_is_missed_and_a_tied_one_is_not(tmp_path: Path) -> None:
    tied = load(write_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True))
    module = tied._module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    folder = reconfigured(tmp_path / "untied", "llama", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_two_threads_never_build_a_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces methods of its classes meanwhile, for all threads: the replacements would stay."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    folder = write_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    config = loading.read_config(folder, json.loads((folder / "config.json").read_text()))
    methods = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights)
    build, alone = AutoModelForCausalLM.from_config, threading.Lock()

    def counted(*arguments: Any, **options: Any) -> Any:
        assert alone.acquire(blocking=False)
        try:
            return build(*arguments, **options)
        finally:
            alone.release()

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", counted)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: loading.build_skeleton(config, torch.float32), range(8)))
    assert len(made) == 8
    assert (PreTrainedModel.tie_weights, PreTrainedModel.init_weights) == methods


def test_numbers_that_do_not_fit_together(tmp_path: Path) -> None:
    folder = reconfigured(tmp_path, "llama", num_attention_heads=7)
    with pytest.raises(
        ModelError, match=r"config\.json cannot be used: .*not a multiple of the number of attention heads"
    ):
        load(folder)


def test_hybrid_without_a_gpu_runs_on_the_cpu_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = load(write_tiny_model(tmp_path, "mixtral"), partitioning="hybrid")
    assert model.facts.device == "cpu"
    assert any("No GPU" in notice for notice in model.facts.notices)
    assert load(tmp_path, partitioning="cpu").facts.notices == []


def test_one_row_uses_other_kernels_and_puts_them_back(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, "llama"))
    enabled = torch.backends.mkldnn.enabled
    seen = []
    handle = model._module.lm_head.register_forward_hook(lambda *_: seen.append(torch.backends.mkldnn.enabled))
    rows = model.start()
    rows.extend([3, 4, 5])
    rows.step([6])
    handle.remove()
    assert seen == [enabled, False]
    assert torch.backends.mkldnn.enabled == enabled


def test_a_runtime_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="no runtime named 'jax'"):
        runtimes.runtime_named("jax")


def test_a_runtime_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModelError, match="mlx-lm"):
        runtimes.runtime_named("mlx")


def test_experts_stored_transposed_are_said_to_be_slow_until_prepared(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "gpt_oss")
    prepare(plain, tmp_path / "prepared", lambda *_: None)
    assert any("stored transposed" in notice for notice in load(plain).facts.notices)
    assert load(tmp_path / "prepared").facts.notices == []


def test_dbrx_keeps_the_rotary_base_of_the_published_configuration(tmp_path: Path) -> None:
    attention = {"clip_qkv": 4.0, "kv_n_heads": 2, "rope_theta": 500000.0}
    folder = write_tiny_model(tmp_path / "dbrx", "dbrx", attn_config=attention)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = prompt(load(folder), 30)
    wanted = load(folder).start().extend(tokens)

    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    kept = load(folder).start().extend(tokens)
    config["attn_config"]["rope_theta"] = 10000.0
    (folder / "config.json").write_text(json.dumps(config))
    other = load(folder).start().extend(tokens)

    np.testing.assert_array_equal(kept, wanted)
    assert np.abs(other - wanted).max() > 1e-3


KERNELS = """
from pathlib import Path
from unittest.mock import MagicMock

def get_kernel(*args, **kwargs):
    with (Path(__file__).parent / "asked.txt").open("a") as file:
        file.write(repr((args, kwargs)) + "\\n")
    raise RuntimeError("no kernel is fetched here")

has_kernel = load_kernel = get_local_kernel = kernelize = get_kernel

def use_kernel_forward_from_hub(*names):
    return lambda same: same

use_kernelized_func = use_kernel_forward_from_hub

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""
HOSTILE_IMPLEMENTATIONS: tuple[dict[str, Any], ...] = (
    {"attn_implementation": "flash_attention_2"},
    {"_attn_implementation": "flash_attention_3"},
    {"_attn_implementation": "attacker/evil-kernel"},
    {"attn_implementation": "paged|attacker/evil-kernel"},
    {"attn_implementation": {"": "attacker/evil-kernel"}},
    {"experts_implementation": "attacker/evil"},
    {"_experts_implementation": "deepgemm"},
    {"use_kernels": True},
    {"kernel_config": {"RMSNorm": "attacker/evil:Layer"}},
)


@pytest.mark.soak
def test_no_setting_has_a_kernel_fetched(tmp_path: Path) -> None:
    """With the package ``kernels`` installed, transformers would fetch what these settings name and run it."""
    folder = write_tiny_model(tmp_path / "model", "mixtral")
    config = json.loads((folder / "config.json").read_text())
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(KERNELS)
    about = tmp_path / "site" / "kernels-0.18.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    program = """
import json, sys
from pathlib import Path
import kernels
from transformers.utils import is_kernels_available
assert is_kernels_available()
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.runtimes.torch.runtime import TorchRuntime
folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
for settings in json.loads(sys.argv[3]):
    (folder / "config.json").write_text(json.dumps(config | settings))
    try:
        model = TorchRuntime().load(folder, Load(id=1, model="m", partitioning="cpu"), lambda *report: None)
        model.start().extend([5, 7])
        print("ran")
    except ModelError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[4]), str(package.parent)])}
    arguments = [str(folder), json.dumps(config), json.dumps(HOSTILE_IMPLEMENTATIONS)]
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = result.stdout.splitlines()
    assert len(lines) == len(HOSTILE_IMPLEMENTATIONS), result.stderr
    assert all(line == "ran" or "asks for code from" in line for line in lines), lines
    assert lines[0] == lines[1] == "ran" and "attacker/evil-kernel" in lines[2]
    assert not (package / "asked.txt").exists()
