"""Experts never become anonymous memory: a model of 270 MB of experts runs in its own process, which is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.prepare import prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

MARGIN = 340 * 10**6
"""What the process may hold besides the trunk and keys and values: Python, torch and transformers themselves, and what
a chunk of a prompt needs while it runs."""

LONG_PROMPT = 4000

_MEASURE = """
import json, sys, threading, time
from pathlib import Path
from engine.system.free_memory import give_back
from engine.ipc.messages import Load
from engine.runtimes import runtime_named

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}

peak, after = 0, {}
def look():
    global peak, after
    after = resident()
    peak = max(peak, after["RssAnon"])

ended = threading.Event()
def watch():
    while not ended.wait(0.01):
        look()
threading.Thread(target=watch, daemon=True).start()

model = runtime_named("torch").load(Path(sys.argv[1]), Load(id=1, model="m", cpu_threads=1), lambda *_: look())
look()
rows = model.start()
prompt = [3 + place * 7 % 500 for place in range(int(sys.argv[2]))]
for start in range(0, len(prompt), 512):
    rows.extend(prompt[start : start + 512], want_logits=start + 512 >= len(prompt))
    give_back()
if len(prompt) < 512:
    beams = rows.fan_out(4)
    for step in range(12):
        beams.step([5 + 4 * step, 6 + 4 * step, 7 + 4 * step, 8 + 4 * step])
        rows.step([9 + step])
ended.set()
look()
used = [sum(count > 0 for count in model.executor.popularity.counts(layer)) for layer in model.facts.moe_layers]
print(json.dumps({
    "peak": peak, "file": after["RssFile"], "used": used,
    "trunk": model.facts.trunk_bytes, "experts": model.facts.expert_bytes, "executor": model.facts.executor,
    "cached": model.facts.key_value_bytes_per_token * len(prompt),
}))
"""


def write_big_model(folder: Path) -> Path:
    """A mixtral of two layers of 135 MB of bfloat16 experts each: one of them is more than the margin leaves room for.
    The numbers only need to send tokens everywhere."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.fill_(0.001)
            else:
                parameter.normal_(0.0, 1.0 if "gate" in name or "embed" in name else 0.02)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_big_model(tmp_path_factory.mktemp("big") / "plain")


@pytest.mark.parametrize("kind", ["plain", "prepared"])
def test_experts_stay_file_backed(big_model: Path, kind: str) -> None:
    folder = big_model
    if kind == "prepared":
        folder = big_model.parent / "prepared"
        prepare(big_model, folder, lambda *_: None)
    found = measured(folder, 128)
    assert found["experts"] > 270 * 10**6
    assert found["used"] == [8, 8]
    assert found["peak"] <= found["trunk"] + MARGIN
    # All experts were read, and are there as pages of the file.
    assert found["file"] >= 0.9 * found["experts"]


def test_a_long_prompt_costs_its_keys_and_values(big_model: Path) -> None:
    found = measured(big_model, LONG_PROMPT)
    assert found["peak"] <= found["trunk"] + 1.2 * found["cached"] + MARGIN


def measured(folder: Path, prompt_tokens: int) -> dict[str, Any]:
    """What a process says of itself that ran so many tokens of a prompt, and some steps after a short one."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), str(prompt_tokens)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
