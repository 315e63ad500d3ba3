"""What a running engine holds in memory beside the mapped experts."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from engine.ipc.messages import Finished, Generate, Load, Loaded
from engine.models.folders.prepare import prepare
from tests.engine.engine_process import EngineProcess
from tests.support.tiny_models import write_tiny_model

MARGIN = 400 * 10**6
"""What the engine may hold besides the trunk."""

PROMPT_TOKENS = 2048


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_a_long_prefill_and_beams_leave_nothing_behind(tmp_path: Path) -> None:
    """Every expert of every layer gets another number of rows in every chunk, each of which has a kernel of its own."""
    plain = write_tiny_model(
        tmp_path / "plain",
        "mixtral",
        dtype="bfloat16",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=4 * PROMPT_TOKENS,
        eos_token_id=None,
    )
    prepare(plain, tmp_path / "prepared", lambda *_: None)
    draw = random.Random(0)
    prompt = [draw.randrange(160) for _ in range(PROMPT_TOKENS)]
    with EngineProcess(tmp_path / "home") as engine:
        loaded = engine.ask(Load(id=1, model=str(tmp_path / "prepared")))[-1]
        assert isinstance(loaded, Loaded)
        for number, options in enumerate(({}, {"beams": 16}), start=2):
            engine.send(Generate(id=number, prompt_ids=prompt, max_tokens=4, **options))
            seen = [(event, anonymous_bytes(engine.process.pid)) for event in engine.events(number)]
            assert isinstance(seen[-1][0], Finished)
            cached = loaded.facts.key_value_bytes_per_token * PROMPT_TOKENS * options.get("beams", 1)
            assert max(held for _, held in seen) - loaded.facts.trunk_bytes - cached <= MARGIN
