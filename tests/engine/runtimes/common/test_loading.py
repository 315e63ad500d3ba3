"""Loading, on every runtime: what it says, what may stop it, and what is refused in one sentence that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import Cancelled, ModelError
from tests.engine.runtimes.subjects import NATIVE, TORCH, StoredModel, Subject, case, each_runtime, prompt_of

Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(subject: Subject, stored_model: StoredModel, tmp_path: Path) -> Path:
    """A copy of a tiny model that may be changed."""
    return Path(shutil.copytree(stored_model(subject, "mixtral"), tmp_path / "model"))


def reconfigure(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def refused(subject: Subject, folder: Path, text: str, **options: Any) -> ModelError:
    with pytest.raises(ModelError, match=text) as error:
        subject.load(folder, **options)
    assert "\n" not in str(error.value)
    return error.value


def take_an_expert_out(tensors: Tensors) -> None:
    tensors.pop(next(name for name in tensors if "layers.1." in name and "experts" in name))


DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing in a layer": (
        lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"),
        r"layers\.1\.self_attn\.k_proj\.weight",
    ),
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight"),
    "expert": (take_an_expert_out, "expert"),
    "extra": (lambda tensors: tensors.update({"model.layers.0.extra.weight": np.zeros(3, np.float32)}), "extra"),
    "shape": (lambda tensors: tensors.update({"model.norm.weight": np.zeros(3, np.float32)}), r"model\.norm\.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@each_runtime
def test_files_that_do_not_fit_are_named(subject: Subject, damage: str, folder: Path) -> None:
    change, text = DAMAGES[damage]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(subject, folder, text)


@each_runtime
def test_files_that_are_no_model(subject: Subject, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(subject, folder, r"model\.safetensors")
    (folder / "config.json").unlink()
    refused(subject, folder, r"config\.json")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_type": "rwkv9"}, "rwkv9"),
        ({"auto_map": {"AutoModelForCausalLM": "model.Model"}}, "asks for code from"),
        ({"model_file": "model.py"}, "asks for code from"),
        ({"num_key_value_heads": 4}, "4"),
        ({"hidden_size": -1}, "-1"),
        ({"rms_norm_eps": "x"}, "x"),
        ({"num_attention_heads": 0}, "0"),
        ({"num_experts_per_tok": 9}, "to 9 experts, but there are 8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "(?i)gptq"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@each_runtime
def test_settings_that_cannot_be_used_are_named(
    subject: Subject, settings: dict[str, Any], text: str, folder: Path
) -> None:
    reconfigure(folder, **settings)
    refused(subject, folder, text)


@each_runtime
def test_a_ring_without_a_place_in_one_is_refused(subject: Subject, folder: Path) -> None:
    refused(subject, folder, "ring", partitioning="ring")


@pytest.mark.parametrize("subject", [case(NATIVE), case(TORCH)])
def test_no_threads_are_refused(subject: Subject, folder: Path) -> None:
    assert refused(subject, folder, "0 CPU threads", cpu_threads=0).kind == "bad-input"


@each_runtime
def test_the_context_is_the_smaller_one(subject: Subject, folder: Path) -> None:
    for asked, limit in ((None, 512), (100, 100), (10**6, 512)):
        assert subject.load(folder, context_limit=asked).facts.context_limit == limit


@each_runtime
def test_facts(subject: Subject, folder: Path) -> None:
    facts = subject.load(folder).facts
    assert (facts.name, facts.family, facts.runtime, facts.dtype) == ("model", "mixtral", subject.name, "float32")
    assert (facts.layers, facts.vocabulary, facts.hidden, facts.moe_layers) == (3, 160, 48, [0, 1, 2])
    assert (facts.experts, facts.experts_per_token) == (8, 2)
    assert facts.expert_bytes == 3 * 8 * 3 * 56 * 48 * 4
    assert facts.parameters == sum(array.size for array in load_file(folder / "model.safetensors").values())
    assert facts.trunk_bytes == facts.parameters * 4 - facts.expert_bytes
    assert facts.key_value_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert facts.load_s > 0 and facts.notices == []


@pytest.mark.sampled
@each_runtime
def test_progress_runs_from_opening_to_all_and_may_stop_the_loading(subject: Subject, folder: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    subject.load(folder, progress=lambda *report: seen.append(report))
    assert seen[0][0] == "opening the model"
    read = [(done, total) for _, done, total, unit in seen if unit == "bytes"]
    assert [done for done, _ in read] == sorted(done for done, _ in read) and read[-1][0] == read[-1][1] > 0
    for at in range(len(seen)):
        left = at

        def stop(*_: Any) -> None:
            nonlocal left
            if left == 0:
                raise Cancelled("Stopped.")
            left -= 1

        with pytest.raises(Cancelled):
            subject.load(folder, progress=stop)


@pytest.mark.parametrize("subject", [case(NATIVE), case(TORCH)])
def test_a_changed_file_is_noticed_before_it_is_read(subject: Subject, folder: Path) -> None:
    """Where the weights stay in the file."""
    model = subject.load(folder)
    model.start().extend(prompt_of(3))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="changed while the model was open"):
        model.start()
