"""The same session over the mlx runtime: what is above the runtimes does not know which one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from engine.ipc.messages import AnyEvent, Finished, Generate, Load
from engine.runtimes import choosing
from engine.runtimes.mlx import eligible
from engine.session import turn_cache
from engine.session.loading import load_session
from engine.session.session import Session
from tests.support.controls import Nobody
from tests.support.tiny_gguf import whole_blocks, write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

pytest.importorskip("mlx_lm")

PROMPT = [5, 17, 101, 42, 9, 77, 30]


def open_session(folder: Path, runtime: Any) -> Session:
    session = load_session(
        Load(id=1, model=str(folder), runtime=runtime, dtype="float32", prefill_chunk=3), lambda *_: None
    )
    session._ends = frozenset()
    return session


def answer(session: Session, prompt: list[int], **options: Any) -> Finished:
    events: list[AnyEvent] = []
    found = session.generate(Generate(id=2, prompt_ids=prompt, **options), events.append, Nobody())
    rows = session._cache.rows
    assert rows is not None and rows.length == len(session.cached_tokens)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "qwen3_5_text", "lfm2_moe"])
def test_both_runtimes_answer_the_same(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path / family, family)
    mlx, torch = open_session(folder, "mlx"), open_session(folder, "torch")
    assert (mlx.facts.runtime, torch.facts.runtime) == ("mlx", "torch")
    first = [answer(session, PROMPT, max_tokens=12) for session in (mlx, torch)]
    assert first[0].token_ids == first[1].token_ids
    longer = [*PROMPT, *first[0].token_ids, 3]
    second = [answer(session, longer, max_tokens=8, beams=4, length_penalty=0.7) for session in (mlx, torch)]
    assert [beam.token_ids for beam in second[0].beams] == [beam.token_ids for beam in second[1].beams]
    assert second[0].beams[0].score == pytest.approx(second[1].beams[0].score, rel=1e-3)
    assert second[0].prefilled_tokens == second[1].prefilled_tokens == 2
    branch = [*PROMPT[:5], 8]
    third = [answer(session, branch, max_tokens=8) for session in (mlx, torch)]
    assert third[0].token_ids == third[1].token_ids
    mlx.close()
    torch.close()


@pytest.mark.parametrize(("architecture", "chunk"), [("applegpu_g16s", 2048), ("applegpu_g16g", 512)])
def test_the_session_reads_prompts_in_chunks_for_its_chip(
    architecture: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligible, "architecture", lambda: architecture)
    folder = write_tiny_model(tmp_path / "m", "mixtral")
    for runtime, expected in (("mlx", chunk), ("torch", 512)):
        load = Load(id=1, model=str(folder), runtime=runtime, dtype="float32")  # type: ignore[arg-type]
        session = load_session(load, lambda *_: None)
        assert session.prefill_chunk == expected
        session.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_a_gguf_file_on_a_mac_runs_on_the_gpu_or_is_told_its_like(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    source = write_tiny_model(tmp_path / "source", "qwen3_moe", **whole_blocks("qwen3_moe"))
    quantised = GGMLQuantizationType[kind]
    packed = write_tiny_gguf(tmp_path / f"Qwen3-30B-A3B-{kind}.gguf", source, "qwen3moe", quantised=quantised)
    instead = "The catalogue has qwen3-30b-4bit, which this Mac's GPU runs."
    for mac in (True, False):
        monkeypatch.setattr(choosing, "on_apple_silicon", lambda mac=mac: mac)
        session = load_session(Load(id=1, model=str(packed), cpu_threads=1), lambda *_: None)
        assert (session.facts.runtime == "mlx") == (mac and kind == "Q4_0")
        assert (instead in session.facts.notices) == (mac and kind == "Q6_K")
        assert any("laid out for mlx" in said for said in session.facts.notices) == (mac and kind == "Q4_0")
        assert session.facts.weights == kind
        session.close()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_windowed_layers_forget_and_what_is_cut_further_back_is_prefilled_again(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / family, family, max_position_embeddings=4096)
    document = [3 + number * number % 157 for number in range(640)]
    found = []
    for back in (64, 10**9):
        monkeypatch.setattr(turn_cache, "CUT_BACK_TOKENS", back)
        session = load_session(
            Load(id=1, model=str(folder), runtime="mlx", dtype="float32", prefill_chunk=128), lambda *_: None
        )
        session._ends = frozenset()
        first = answer(session, document, max_tokens=100)
        shortest = session._cache.rows.shortest_cut if session._cache.rows is not None else 0
        assert shortest == (384 - 64 if back == 64 else 0)  # the last chunk but one was worth a copy of the rest
        # The thoughts before an answer are dropped.
        second = answer(session, [*document, *first.token_ids[60:], *PROMPT], max_tokens=8)
        beams = answer(session, [*document, *first.token_ids[60:], *PROMPT, 4], max_tokens=8, beams=3)
        edited = answer(session, [*document[:630], 9, 8, 7], max_tokens=8)
        early = answer(session, [*document[:300], 9, 8, 7], max_tokens=8)
        again = answer(session, document, max_tokens=100)
        assert again.token_ids == first.token_ids
        found.append([first, second, beams, edited, early])
        session.close()
    short, whole = found
    assert [each.token_ids for each in short] == [each.token_ids for each in whole]
    assert [each.prefilled_tokens for each in short[:4]] == [each.prefilled_tokens for each in whole[:4]]
    assert (short[4].prefilled_tokens, whole[4].prefilled_tokens) == (303, 3)
