"""Beam search through whole sessions of the torch and native runtimes, with the caches they really have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine.ipc.messages import Finished, Generate, Load, RuntimeName
from engine.moe.kernels.bindings import choose
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload import local_torch
from engine.session.loading import load_session
from engine.session.session import Session
from tests.support.controls import Nobody
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

PROMPT = [5, 17, 101, 42, 9, 77, 30]
LENGTH = 12
FAMILIES = ("llama", "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
NATIVE_FAMILIES = (
    (
        "llama",
        "mistral",
        "mixtral",
        "qwen2_moe",
        "olmoe",
        "qwen3_5_moe_text",
        "glm4_moe_lite",
        "lfm2_moe",
        "gemma4_text",
    )
    if choose("float32").native
    else ()
)
CASES = [*(("torch", family) for family in FAMILIES), *(("native", family) for family in NATIVE_FAMILIES)]


def open_session(folder: Path, runtime: RuntimeName = "torch", **options: Any) -> Session:
    return load_session(Load(id=1, model=str(folder), runtime=runtime, **options), lambda *_: None)


def ask(session: Session, **options: Any) -> Finished:
    request = Generate(id=2, prompt_ids=PROMPT, max_tokens=LENGTH, **options)
    return session.generate(request, lambda event: None, Nobody())


def frequent_ends(session: Session, count: int) -> list[int]:
    """Tokens that a search without an end likes: as ends they end beams early and at different lengths."""
    session._ends = frozenset()
    found = ask(session, beams=8)
    counts = Counter(token for beam in found.beams for token in beam.token_ids[2:])
    return sorted(token for token, _ in counts.most_common(count))


SEARCHES = (((4, 1.0, 1), (16, -0.5, 3)), ((5, 0.4, 2), (3, 2.0, 2)))
"""Widths, penalties of the length and numbers of ends: two searches for a family, the other two for the next."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("runtime", "family", "searches"),
    [
        *((*case, SEARCHES[number % 2]) for number, case in enumerate(CASES)),
        *(pytest.param(*case, SEARCHES[number % 2 - 1], marks=pytest.mark.soak) for number, case in enumerate(CASES)),
    ],
)
def test_equals_transformers(
    tiny_model: Callable[..., Path],
    runtime: RuntimeName,
    family: str,
    searches: tuple[tuple[int, float, int], ...],
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    session = open_session(folder, runtime)
    assert_same_beams(session, reference, searches)
    session.close()


@pytest.mark.soak
def test_beams_of_a_packed_model_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On what its weights stand for; in torch, as the native kernels round the inputs of packed weights."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    truth = tmp_path / "truth"
    packed = write_tiny_gguf(tmp_path / "m.gguf", source, "qwen3moe", quantised=GGMLQuantizationType.Q4_K, truth=truth)
    reference = AutoModelForCausalLM.from_pretrained(truth, dtype=torch.float32).eval()
    session = open_session(packed, "torch", dtype="float32")
    assert_same_beams(session, reference, SEARCHES[0])
    session.close()


def assert_same_beams(session: Session, reference: Any, searches: tuple[tuple[int, float, int], ...]) -> None:
    """The beams of ``session`` are those of transformers' model ``reference``."""
    ended_early = 0
    for width, penalty, count in searches:
        ends = frequent_ends(session, count)
        session._ends = frozenset(ends)
        found = ask(session, beams=width, length_penalty=penalty)
        theirs = reference.generate(
            torch.tensor([PROMPT]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=LENGTH,
            length_penalty=penalty,
            eos_token_id=ends,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert len(found.beams) == width
        for beam, row, score in zip(found.beams, theirs.sequences, theirs.sequences_scores, strict=True):
            tokens = row[len(PROMPT) :].tolist()
            cut = next((index + 1 for index, token in enumerate(tokens) if token in ends), LENGTH)
            assert beam.token_ids == tokens[:cut]
            assert beam.score == pytest.approx(float(score), rel=1e-4)
            ended_early += len(beam.token_ids) < LENGTH
    assert ended_early


def test_each_expert_is_read_once_per_step_for_all_beams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In torch, where every expert is a call that can be counted; the native kernels count theirs themselves.
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    session = open_session(write_tiny_model(tmp_path / "mixtral", "mixtral", eos_token_id=None))
    steps: list[tuple[str, int, list[tuple[int, int]]]] = []
    run_model, run_expert = TorchModel.run, local_torch.run_expert

    def counted_step(model: TorchModel, phase: Any, tokens: list[list[int]], *others: Any) -> Any:
        steps.append((phase, len(tokens) * len(tokens[0]), []))
        return run_model(model, phase, tokens, *others)

    def counted_expert(weights: local_torch.ExpertTensors, gate: local_torch.Gate, hidden: torch.Tensor) -> Any:
        steps[-1][2].append((weights.down.data_ptr(), hidden.shape[0]))
        return run_expert(weights, gate, hidden)

    monkeypatch.setattr(TorchModel, "run", counted_step)
    monkeypatch.setattr(local_torch, "run_expert", counted_expert)
    found = ask(session, beams=8)
    assert found.prefilled_tokens == len(PROMPT)
    # The prompt runs once, as one row; then one step for all eight beams, each token of the answer but the last.
    assert [(phase, tokens) for phase, tokens, _ in steps] == [("prefill", len(PROMPT))] + [("decode", 8)] * (
        LENGTH - 1
    )
    layers, chosen = len(session.facts.moe_layers), session.facts.experts_per_token
    for phase, tokens, read in steps:
        assert len({expert for expert, _ in read}) == len(read)
        # Of a prompt, the last layer's experts run for its last token only.
        in_last_layer = 1 if phase == "prefill" else tokens
        assert sum(rows for _, rows in read) == chosen * (tokens * (layers - 1) + in_last_layer)
    session.close()
