"""A dense GGUF becomes the model it was made from; anything else is refused by name; damage is said, never a crash."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import write_tiny_gguf
from tiny_models import write_tiny_model

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load, Plan
from engine.models import gguf_model, store
from engine.models.fetching import pull
from engine.models.gguf_file import GgufFile
from engine.models.gguf_model import convert_gguf, dense_config, llama3_divisors, to_bfloat16
from engine.models.opening import open_model
from engine.models.tokenizer import load_tokenizer
from engine.session.plan_model import plan_model

PROMPT = [5, 17, 80, 3, 44, 120, 9, 61, 33, 12]
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def silent(stage: str, done: int, total: int, unit: str) -> None:
    pass


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "source", "llama"), "llama")


def logits(folder: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).float().eval()
    with torch.no_grad():
        return np.asarray(model(torch.tensor([PROMPT])).logits[0].numpy())


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_converted_model_is_the_model_it_was_made_from(tmp_path: Path, family: str) -> None:
    source = write_tiny_model(tmp_path / "source", family)
    extra = {"attention.sliding_window": 16} if family == "mistral" else {}
    path = write_tiny_gguf(tmp_path / f"{family}.gguf", source, ARCHITECTURES[family], extra=extra)
    folder = convert_gguf(path, silent)
    assert store.family_of(folder) == family
    expected, found = logits(source), logits(folder)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    opened = open_model(folder)
    assert opened.experts is None
    assert {name for name, _ in opened.trunk()} >= {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_become_what_they_stand_for(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(tmp_path / "source", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    quantised = GGMLQuantizationType[kind]
    path = write_tiny_gguf(tmp_path / "q.gguf", source, "llama", quantised=quantised)
    trunk = dict(open_model(convert_gguf(path, silent)).trunk())
    plain = dict(open_model(source).trunk())
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.q_proj.weight"):
        found = (trunk[name].words.astype(np.uint32) << 16).view(np.float32)
        exact = plain[name].words.view(np.float32)
        tolerance = {"F16": 0.005, "BF16": 0.005, "Q8_0": 0.02}.get(kind, 0.15)
        assert np.abs(found - exact).max() <= tolerance * np.abs(exact).max()


def test_llama_3_positions_are_recognised(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    source = write_tiny_model(tmp_path / "source", "llama", head_dim=8, rope_parameters=rope)
    parameters = {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(parameters, 8).astype(np.float32)
    assert divisors[0] == 1.0 and divisors[-1] == 8.0
    path = write_tiny_gguf(tmp_path / "l3.gguf", source, "llama", extra_tensors={"rope_freqs.weight": divisors})
    config = json.loads((convert_gguf(path, silent) / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "llama3", **parameters}
    strange = write_tiny_gguf(
        tmp_path / "long.gguf", source, "llama", extra_tensors={"rope_freqs.weight": divisors[::-1].copy()}
    )
    with pytest.raises(ModelError, match="not Llama 3's"):
        convert_gguf(strange, silent)


def test_llama_3_divisors_are_those_of_transformers() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    assert np.allclose(plain / scaled.numpy(), llama3_divisors(parameters, 64), rtol=1e-5)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaled_positions_are_carried_over(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any]) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen2")
    path = write_tiny_gguf(tmp_path / "scaled.gguf", source, "qwen2", extra=extra)
    with GgufFile(path) as gguf:
        assert dense_config(gguf)["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_the_tokenizer_comes_along(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(convert_gguf(tiny_llama, silent))
    assert tokenizer is not None
    assert tokenizer.end_of_turn_ids == {0, 2}
    assert tokenizer.decode(tokenizer.encode("bade Hi!\nfine?")) == "bade Hi!\nfine?"
    assert not tokenizer.has_chat_template


def test_converting_is_done_once_and_found_by_name(tiny_llama: Path) -> None:
    folder = pull(str(tiny_llama), silent)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(tiny_llama, silent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    resolved = store.resolve(str(tiny_llama))
    assert (resolved.kind, resolved.folder, resolved.name) == ("gguf", folder, "tiny.gguf")
    (model,) = store.installed()
    assert model.name == folder.name and store.resolve(model.name).folder == folder
    assert store.remove(str(tiny_llama)) > 0
    assert tiny_llama.exists() and not folder.exists()


def test_a_changed_file_is_another_model(tiny_llama: Path, tmp_path: Path) -> None:
    first = store.resolve(str(tiny_llama)).plain_folder
    source = write_tiny_model(tmp_path / "other", "llama", seed=1)
    write_tiny_gguf(tiny_llama, source, "llama")
    assert store.resolve(str(tiny_llama)).plain_folder != first


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("qwen2moe", {}, "Mixture-of-Experts GGUF .qwen2moe."),
        ("llama", {"expert_count": 8}, "Mixture-of-Experts GGUF"),
        ("gemma2", {}, "architecture gemma2; supported GGUF architectures: llama, qwen2, qwen3"),
        ("llama", {"rope.dimension_count": 4}, "rotates 4 of 8"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": "four"}, "scaling.factor is four"),
        ("evil\x1b[2J\n", {}, r"architecture 'evil.x1b.2J"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, architecture: str, extra: dict[str, Any], message: str
) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "other.gguf", source, architecture, extra=extra)
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, silent)
    assert store.installed() == []


def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "less.gguf", source, "llama", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        convert_gguf(path, silent)
    more = {"blk.0.attn_q.bias": np.zeros(48, np.float32)}
    path = write_tiny_gguf(tmp_path / "more.gguf", source, "llama", extra_tensors=more)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf(path, silent)
    path = write_tiny_gguf(tmp_path / "wide.gguf", source, "llama", extra={"feed_forward_length": 999})
    with pytest.raises(ModelError, match=r"ffn_gate\.weight has the shape"):
        convert_gguf(path, silent)


def test_a_truncated_file_is_refused(tiny_llama: Path) -> None:
    data = tiny_llama.read_bytes()
    for length in (0, 3, 20, 100, 3000, len(data) // 2, len(data) - 100):
        tiny_llama.write_bytes(data[:length])
        with pytest.raises(ModelError):
            convert_gguf(tiny_llama, silent)
    assert store.installed() == []


def test_claims_of_enormous_sizes_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "claims.gguf"
    key = struct.pack("<Q", 1) + b"a"
    for kind in (4, 8):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, 1 << 62))
        with pytest.raises(ModelError, match="middle of its header"):
            GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(ModelError, match="claims"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_count": 2**31 - 1}, r"block_count is 2147483647, not a whole number from 1 to 10000"),
        ({"block_count": 9_999}, r"no tensor blk\.3\.attn_norm\.weight"),
        ({"context_length": 2**31}, r"context_length is 2147483648, not a whole number"),
        ({"attention.head_count": 2**32 - 1}, r"head_count is 4294967295, not a whole number"),
        ({"rope.freq_base": 0.5}, r"gives 0\.5 for rope_theta, which must be a number over 1"),
    ],
)
def test_numbers_beyond_any_model_are_refused_before_anything_is_counted(
    tmp_path: Path, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    path = write_tiny_gguf(tmp_path / "claims.gguf", source, "llama", extra=extra)
    looked: list[str] = []
    look = gguf_model._tensor_shape
    monkeypatch.setattr(gguf_model, "_tensor_shape", lambda gguf, name: looked.append(name) or look(gguf, name))
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, silent)
    assert len(looked) < 100, "it ends at the first tensor that is missing"


def test_a_plan_refuses_a_gguf_that_cannot_be_converted(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    experts = write_tiny_gguf(tmp_path / "moe.gguf", source, "llama", extra={"expert_count": 8})
    future = write_tiny_gguf(tmp_path / "future.gguf", source, "llama", split="from-the-future")
    for path, said in ((experts, "Mixture-of-Experts GGUF"), (future, "splits text by the rule 'from-the-future'")):
        with pytest.raises(ModelError, match=said):
            plan_model(Plan(id=1, load=Load(id=1, model=str(path), partitioning="cpu")))
        with pytest.raises(ModelError, match=said):
            convert_gguf(path, silent)
    sound = write_tiny_gguf(tmp_path / "sound.gguf", source, "llama")
    with pytest.raises(ModelError, match="has not been converted yet; run: privatellm models prepare"):
        plan_model(Plan(id=1, load=Load(id=1, model=str(sound), partitioning="cpu")))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_crashes(tmp_path: Path, tiny_llama: Path, data: st.DataObject) -> None:
    original = tiny_llama.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 4500))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with GgufFile(path) as gguf:
            assert dense_config(gguf)["model_type"]
    except ModelError as error:
        assert "\n" not in str(error)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
    found = (to_bfloat16(array).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)


def test_stopping_leaves_nothing(tiny_llama: Path) -> None:
    calls = 0

    def later() -> bool:
        nonlocal calls
        calls += 1
        return calls > 5

    with pytest.raises(Cancelled):
        convert_gguf(tiny_llama, silent, later)
    assert store.installed() == [] and store.partial_downloads() == []


def test_a_killed_conversion_is_begun_again(tiny_llama: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.models.gguf_model import convert_gguf\n"
        "convert_gguf(Path(sys.argv[1]), lambda s, d, t, u: (print(d, flush=True), sys.stdin.read()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tiny_llama)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert store.installed() == []
    assert store.partial_downloads()
    assert store.is_complete(convert_gguf(tiny_llama, silent))
    assert store.partial_downloads() == []


def test_a_file_that_is_not_gguf_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model at all, only a text of some length")
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        convert_gguf(path, silent)
    with pytest.raises(ModelError, match="no file or folder"):
        convert_gguf(tmp_path / "absent.gguf", silent)
