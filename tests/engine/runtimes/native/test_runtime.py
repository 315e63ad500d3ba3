"""When the native trunk runs, what it says when it does not, and what it costs to load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.packed_blocks import random_blocks, unpacked
from engine import runtimes
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import StoredTensor
from engine.models.formats.number_formats import BLOCKS
from engine.models.formats.safetensors_files import read_header
from engine.moe.kernels.layers import unreadable
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes import choosing
from engine.runtimes.choosing import choose_runtime, native_unsupported_reason
from engine.runtimes.model_headers import read_headers
from engine.runtimes.native import model as native_model
from engine.runtimes.native import weights
from engine.runtimes.native.runtime import NativeRuntime, check_native, open_native
from engine.runtimes.native.weights import opened
from engine.session.loading import load_session
from engine.system.free_memory import Memory
from tests.engine.runtimes.native_oracle import FAMILIES, PREPARED_ONLY, load_native, needs_kernels
from tests.engine.runtimes.torch_oracle import prompt
from tests.support.progress import quiet
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "mixtral", "mixtral")


def ask_for(folder: Path, **options: Any) -> Load:
    return Load(id=1, model=str(folder), **options)


def test_auto_is_native_on_a_cpu(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: False)
    monkeypatch.setattr(runtimes, "gpu_present", lambda: False)
    assert choose_runtime(ask_for(mixtral), mixtral) == RuntimeChoice("native", "the default on a CPU")


def test_auto_is_torch_with_a_gpu_unless_the_cpu_is_asked_for(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: False)
    monkeypatch.setattr(runtimes, "gpu_present", lambda: True)
    for partitioning, name in (("auto", "torch"), ("hybrid", "torch"), ("cpu", "native")):
        request = ask_for(mixtral, partitioning=partitioning)
        choice = choose_runtime(request, mixtral)
        assert (choice.name, choice.is_fallback) == (name, False)


def test_a_gpu_that_is_asked_for_is_not_left_idle(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask_for(mixtral, partitioning="hybrid")
    monkeypatch.setattr(runtimes, "gpu_present", lambda: True)
    assert native_unsupported_reason(mixtral, request) == "it runs on the CPU alone, and the partitioning is hybrid"
    monkeypatch.setattr(runtimes, "gpu_present", lambda: False)
    assert load_native(mixtral, partitioning="hybrid").facts.notices == [
        "No GPU was found, so everything runs on the CPU."
    ]


@pytest.mark.parametrize(
    ("family", "config", "request_options", "why"),
    [
        ("phimoe", {}, {}, "does not run the family 'phimoe'"),
        (
            "gpt_oss",
            {},
            {},
            "its experts cannot be run where they lie (the values of a row do not lie side by side; those of a "
            "prepared copy can)",
        ),
        ("llama", {"hidden_act": "tanh"}, {}, "the activation tanh has no kernel"),
        ("llama", {}, {"dtype": "bfloat16"}, "would have to be converted to bfloat16"),
        ("mixtral", {}, {"partitioning": "ring"}, "the partitioning is ring"),
        ("qwen3_5_text", {"attention_bias": True}, {}, "its gated attention has biases"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 17}, {}, "its convolutions are over 17 tokens, and the most is 16"),
        ("kimi_linear", {"linear_conv_kernel_dim": 17}, {}, "its convolutions are over 17 tokens, and the most is 16"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, {}, "its delta-nets have the activation gelu"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, {}, "the projections of its Mamba-2 layers have biases"),
        ("nemotron_h", {"use_bias": True}, {}, "the projections of its Mamba-2 layers have biases"),
        (
            "nemotron_h",
            {"moe_latent_size": 24, "mlp_bias": True},
            {},
            "the projections of the latents that its experts read have biases",
        ),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, {}, "the logits of its routers have a limit"),
        (
            "granite_swa",
            {"layer_rope_theta": [0, 1e4, 1e4, 2e4, 0]},
            {},
            "its heads are of 3 kinds, and the most is 2",
        ),
        ("gemma3n_text", {"altup_active_idx": 1}, {}, "its layers run on another residual stream than the first"),
        ("gemma3n_text", {"altup_num_inputs": 17}, {}, "it has more than 16 residual streams"),
        ("nemotron_h_dense", {"mlp_hidden_act": "silu"}, {}, "the activation silu has no kernel"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, {}, "its Mamba-2 layers have another activation than silu"),
        ("granitemoehybrid", {"mamba_d_conv": 17}, {}, "its convolutions are over 17 tokens, and the most is 16"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}},
            {},
            "its rotary scaling dynamic is not one of default, linear, llama3, yarn",
        ),
    ],
)
def test_what_is_not_eligible_says_why(
    family: str, config: dict[str, Any], request_options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model", family, **config)
    request = ask_for(folder, **request_options)
    reason = native_unsupported_reason(folder, request)
    assert reason is not None and why in reason
    with pytest.raises(ModelError, match="choose the runtime auto or torch") as failure:
        runtimes.runtime_named("native").load(folder, request, quiet)
    assert reason in str(failure.value)


def test_biases_of_mamba_layers_are_those_of_the_configuration(tmp_path: Path) -> None:
    for stated, why in ((False, "has no place in a granitemoehybrid model"), (True, "conv1d.bias is missing")):
        folder = write_tiny_model(tmp_path / str(stated), "granitemoehybrid", mamba_conv_bias=not stated)
        config = json.loads((folder / "config.json").read_text()) | {"mamba_conv_bias": stated}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=why):
            runtimes.runtime_named("native").load(folder, ask_for(folder), quiet)


def test_a_model_that_falls_back_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(choosing, "on_apple_silicon", lambda: False)
    monkeypatch.setattr(runtimes, "gpu_present", lambda: False)
    folder = write_tiny_model(tmp_path / "model", "llama")
    assert not load_session(ask_for(folder), quiet).facts.notices
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    facts = load_session(ask_for(folder), quiet).facts
    assert facts.runtime == "torch"
    assert [line for line in facts.notices if "PRIVATELLM_KERNELS=off" in line] == [
        "Running on torch: the faster native trunk is not used, because its kernels cannot be used: "
        "switched off by PRIVATELLM_KERNELS=off."
    ]
    assert load_session(ask_for(folder, runtime="torch"), quiet).facts.runtime == "torch"


def test_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_native(folder).start().extend([3, 4]).shape == (160,)


def changed(folder: Path, **settings: Any) -> Path:
    """``folder`` with other settings; what is None is left out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("deepseek_v2", {"kv_lora_rank": 15}, "15 for kv_lora_rank, which must be even"),
        ("glm4_moe", {"n_group": 3, "topk_group": None}, "3 experts out of 1 of 3 groups of 8 experts"),
        ("glm4_moe", {"n_group": 200, "topk_group": None}, "3 experts out of 1 of 200 groups of 8 experts"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "of which the first must be 'full'"),
        ("deepseek_v32", {"index_topk": 0}, "0 for index_topk"),
        ("deepseek_v3", {"n_group": None}, "3 experts out of 2 of 8 groups of 8 experts"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "does not say num_experts_per_tok"),
        ("gemma4_text", {"rope_parameters": {"sliding_attention": 7}}, "7 for the rotary embeddings of layers with s"),
        ("olmo3", {"rope_parameters": {"full_attention": 7}}, "7 for the rotary embeddings of layers with f"),
        ("gemma4_text", {"layer_types": None}, "None for layer_types"),
    ],
)
def test_settings_that_do_not_fit_are_said(tmp_path: Path, family: str, settings: dict[str, Any], said: str) -> None:
    folder = changed(write_tiny_model(tmp_path / "model", family), **settings)
    with pytest.raises(ModelError, match=said):
        load_native(folder)


@pytest.mark.parametrize(
    "settings", [{"tie_word_embeddings": None}, {"tie_word_embeddings": None, "tie_embedding": True}]
)
@pytest.mark.parametrize("family", ["lfm2_moe", "gemma4_text"])
def test_the_head_is_the_embedding_where_the_family_says_so(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "model", family, tie_word_embeddings=True)
    expected = load_native(folder).start().extend([3, 4])
    assert (load_native(changed(folder, **settings)).start().extend([3, 4]) == expected).all()


@pytest.mark.parametrize(("family", "factor"), [("deepseek_v3", 2.5), ("glm4_moe_lite", 1.8), ("glm4_moe", 1.0)])
def test_a_scale_of_experts_that_is_not_stated_is_the_familys(tmp_path: Path, family: str, factor: float) -> None:
    folder = write_tiny_model(tmp_path / "model", family, routed_scaling_factor=factor)
    expected = load_native(folder).start().extend([3, 4])
    assert (load_native(changed(folder, routed_scaling_factor=None)).start().extend([3, 4]) == expected).all()


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_next"])
def test_what_has_to_be_copied_is_not_copied_to_see_whether_it_runs(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_model(write_tiny_model(tmp_path / "model", family))
    request = Load(id=1, model=family)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a matrix was copied")

    monkeypatch.setattr(weights, "_plain", refuse)
    monkeypatch.setattr(weights, "_apart", refuse)
    check_native(files, request, in_ring=False)
    with pytest.raises(AssertionError, match="a matrix was copied"):
        open_native(files, request, None, in_ring=False)


@pytest.mark.sampled(least=5)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PREPARED_ONLY])
def test_headers_tell_what_the_loaded_model_tells(tmp_path: Path, family: str) -> None:
    """The states, keys and values, the trunk with the copies that are made of it, and the identity of the experts."""
    folder = write_tiny_model(tmp_path / "model", family, dtype="bfloat16")
    model, headers = load_native(folder), read_headers(folder, ask_for(folder, partitioning="cpu"))
    facts, sizes = model.facts, headers.sizes.for_runtime("native")
    assert headers.profile == (None if model.popularity is None else model.popularity.model)
    assert sizes.trunk_bytes == facts.trunk_bytes
    assert sizes.state_bytes == facts.state_bytes
    assert sizes.key_value_bytes_per_token == facts.key_value_bytes_per_token


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_facts(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    model, files = load_native(folder, context_limit=100), open_model(folder)
    facts = model.facts
    assert (facts.runtime, facts.device, facts.dtype, facts.family) == ("native", "cpu", "float32", family)
    assert facts.context_limit == 100
    assert facts.trunk_bytes == files.trunk_bytes
    assert facts.parameters * 4 == facts.trunk_bytes + facts.expert_bytes
    rows = model.start()
    rows.extend([3] * 16)
    assert rows._cache.nbytes == 16 * facts.key_value_bytes_per_token * rows._cache._segments[0].page.capacity / 16
    if family == "llama":
        assert (facts.executor, facts.experts, facts.moe_layers) == ("none (dense)", 0, [])
        assert model.popularity is None
    else:
        assert facts.executor.startswith("native (") and facts.executor.endswith(", cpu)")
        assert (facts.experts, facts.experts_per_token, facts.moe_layers) == (6, 3, [0, 2])


_MEASURE = """
import json, sys, threading
from pathlib import Path
from engine.ipc.messages import Load
from engine.runtimes import runtime_named

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}

runtime = runtime_named("native")
before = resident()["RssAnon"]
model = runtime.load(Path(sys.argv[1]), Load(id=1, model="m", cpu_threads=2), lambda *_: None)
rows = model.start()
rows.extend([3 + i % 97 for i in range(700)])
beams = rows.fan_out(8)
for step in range(4):
    beams.step([5 + step + row for row in range(8)])
after = resident()
print(json.dumps({
    "anonymous": after["RssAnon"] - before, "file": after["RssFile"],
    "cache": (700 + 8 * 4) * model.facts.key_value_bytes_per_token,
    "weights": model.facts.trunk_bytes + model.facts.expert_bytes,
    "foreign": sorted({"torch", "transformers", "mlx"} & set(sys.modules)),
}))
"""

BUFFERS = 48 * 10**6
"""What the threads' buffers and a page of keys and values per beam may take."""


@pytest.mark.parametrize("name", BLOCKS)
def test_packed_routers_and_gates_are_multiplied_in_float32(name: str) -> None:
    words = random_blocks(name, 6, 512)
    found = opened(StoredTensor(name, words))
    assert found.dtype == "F32"
    assert np.array_equal(found.words.view(np.float32), unpacked(name, words))


@pytest.mark.parametrize(("free", "kept"), [(1_000_000, False), (1_000_000_000_000, True)])
def test_a_prompts_workspace_is_kept_where_there_is_plenty_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: bool
) -> None:
    monkeypatch.setattr(native_model, "KEPT_BYTES", 0)
    monkeypatch.setattr(native_model, "memory", lambda: Memory(free, free, free))
    model = load_native(write_tiny_model(tmp_path / "model", "mixtral"))
    tokens = prompt(model, 200)
    first = model.start().extend(tokens)
    assert bool(model._workspaces) == kept
    rows = model.start()
    assert (rows.extend(tokens) == first).all()
    monkeypatch.setattr(native_model, "memory", lambda: pytest.fail("looked at after a token, which takes long"))
    rows.step([3])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_all_weights_stay_file_backed(tmp_path: Path) -> None:
    options = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 20000, "head_dim": 64}
    folder = write_tiny_model(tmp_path / "model", "mixtral", dtype="bfloat16", **options)
    run = subprocess.run([sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["foreign"] == []
    assert found["weights"] > 2 * BUFFERS
    assert found["anonymous"] < found["cache"] + BUFFERS
    assert found["file"] > 0.6 * found["weights"]


@pytest.mark.parametrize("family", ["llama", "mixtral", "granitemoe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_file_whose_tensors_lie_at_odd_addresses_runs_all_the_same(tmp_path: Path, family: str, dtype: str) -> None:
    """Old programs wrote headers of any length; a number at an odd address is not for C to read."""
    folder = write_tiny_model(tmp_path / "model", family, dtype=dtype)
    load = Load(id=1, model="tiny", partitioning="cpu")
    straight = NativeRuntime().load(folder, load, lambda *report: None)
    expected = straight.start().extend([5, 17, 42])
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    entries = read_header(path)
    assert any(entry.start % 2 for entry in entries.values())
    odd = NativeRuntime().load(folder, load, lambda *report: None)
    assert np.array_equal(odd.start().extend([5, 17, 42]), expected)
    experts = open_model(folder).experts
    if experts is not None:
        one = experts.expert(experts.layers[0], 0)
        assert one.gate.words.flags.aligned and one.down.words.flags.aligned


def test_the_kernels_take_no_number_at_an_odd_address() -> None:
    words = np.zeros(65, np.uint8)[1:].view(np.uint16).reshape(4, 8)
    assert not words.flags.aligned
    assert unreadable(StoredTensor("BF16", words)) == "they do not begin at a whole number of values"
