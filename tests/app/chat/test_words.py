"""Sizes, progress and the engine's name in words."""

from __future__ import annotations

import msgspec
import pytest

from app.chat.state import Guesses, Phase, PromptRead, Status
from app.chat.words import (
    engine_name,
    guesses_words,
    progress_text,
    prompt_words,
    share_words,
    size,
    slowest_layer_words,
    slowest_layers,
    slowest_words,
    status_words,
    timing_words,
)
from engine.ipc.messages import (
    LayerTimes,
    MemoryUse,
    PassShare,
    Progress,
    ReadAgain,
    Timing,
)
from tests.app.fake_engine import FACTS
from tests.app.tui.screens.test_machines import FORMED, NODES
from tests.app.tui.screens.test_screens_pictures import TIMING


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (250_000_000, "250 MB"), (3.4e12, "3.4 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_progress_is_said_in_its_unit() -> None:
    assert progress_text(Progress(stage="weights", done=3, total=30, unit="layers")) == "weights 3 of 30 layers"
    assert progress_text(Progress(stage="x", done=10**9, total=2 * 10**9, unit="bytes")) == "x 1.0 GB of 2.0 GB"
    assert progress_text(Progress(stage="thinking")) == "thinking"


def test_the_slowest_layers_are_named() -> None:
    layers = [LayerTimes(1, 0, 2), LayerTimes(5, 0, 1), LayerTimes(0, 0, 4)]
    assert slowest_layers(layers, 2) == [(1, 6.0, "attention"), (2, 4.0, "experts")]
    assert slowest_layer_words(layers).startswith("Layer 1 takes longest: attention ")
    assert slowest_layer_words(layers).endswith(" of 6.0 ms")
    assert slowest_layer_words([LayerTimes()]) == slowest_layer_words([]) == ""


@pytest.mark.parametrize(
    ("trunk", "executor", "expected"),
    [
        ("", "local (torch, cpu)", "torch · local (torch, cpu)"),
        ("", "torch (cpu)", "torch (cpu)"),
        ("native (avx2, 2 threads)", "native (avx2, cpu)", "native (avx2, 2 threads)"),
        ("native (avx2, 2 threads)", "none (dense)", "native (avx2, 2 threads) · none (dense)"),
        ("transformers (torch, cpu)", "local (avx2, cpu)", "transformers (torch, cpu) · local (avx2, cpu)"),
    ],
)
def test_the_trunk_is_named(trunk: str, executor: str, expected: str) -> None:
    assert engine_name(msgspec.structs.replace(FACTS, trunk=trunk, executor=executor)) == expected


FULL = Status(
    phase=Phase.READY, facts=msgspec.structs.replace(FACTS, weights="Q4_K_M"), context_used=512, tokens_per_s=12.3,
    ttft_s=0.21, memory=MemoryUse(own=1_200_000_000, mapped=4_000_000_000), beams=4, unsaved="The disk is full.",
)  # fmt: skip


def test_the_status_is_told_in_sentences() -> None:
    assert status_words(FULL) == [
        "Activity: ready.",
        "Model: starter, Q4_K_M, 393 M parameters, 4 experts, 2 active per token.",
        "Engine: torch · local (torch, cpu).",
        "Context: 512 of 2,048 tokens (25%).",
        "Memory: 1.2 GB of the engine's own, and 4.0 GB of mapped files, which the system drops when it needs room.",
        "Speed of the last answer: 12.3 tok/s, first token after 210 ms.",
        "Beams: 4.",
        "Not saved: The disk is full.",
    ]
    on_a_ring = msgspec.structs.replace(FACTS, ring=FORMED)
    assert "Machines: ring of 2 · tls, encrypted." in status_words(Status(facts=on_a_ring))
    assert status_words(Status(model="big", problem="It does not fit."))[1:] == [
        "No model is loaded: It does not fit.", "Model: big, not loaded.",
    ]  # fmt: skip


def test_what_guessing_ahead_saved_is_said() -> None:
    text = "Guessing ahead: 2.5 tokens a pass; 60% of 100 guessed ones were right."
    assert guesses_words(Guesses(tokens=101, drafted=100, accepted=60)) == text
    assert text in status_words(Status(guesses=Guesses(101, 100, 60)))


def test_why_a_prompt_was_read_again_is_said() -> None:
    assert prompt_words(PromptRead(1234, 1200)) == (
        "Prompt of the last answer: 1,234 tokens, 1,200 of them kept from before."
    )
    why = ReadAgain(
        cause="changed", shared_tokens=9, message=0, role="system", before="is Monday", now="is \x1b[31mSunday\n"
    )
    text = prompt_words(PromptRead(50, 9, why))
    assert text.endswith(
        "Older ones were read again because an earlier message differs from what was kept: message 1 (system), "
        "“is Monday” became “is Sunday”."
    ), text
    assert prompt_words(PromptRead(50, 0, ReadAgain(cause="restarted"))).endswith("because the model was loaded again.")
    others = msgspec.structs.replace(why, before="", now="")
    assert prompt_words(PromptRead(50, 9, others)).endswith("was kept: message 1 (system).")
    assert prompt_words(PromptRead(50, 9, why)) in status_words(Status(prompt=PromptRead(50, 9, why)))


def test_who_shares_a_pass_is_said_where_there_is_more_than_one_row() -> None:
    shares = [
        PassShare(program="chat", answers=1, rows=1.0, tokens_per_s=9.8),
        PassShare(program="serve", answers=2, rows=1.6, tokens_per_s=14.26),
        PassShare(program="ask", answers=1, rows=0.0, tokens_per_s=0.0),
        PassShare(program="", answers=1, rows=1.0, tokens_per_s=3.0),
    ]
    shared = msgspec.structs.replace(TIMING, rows_per_pass=2.61, shares=shares)
    assert share_words(shared) == [
        "5 answers, 2.6 rows per pass",
        "chat: 1 answer, 1.0 rows, 9.8 tok/s",
        "serve: 2 answers, 1.6 rows, 14.3 tok/s",
        "ask: 1 answer, reading",
        "another program: 1 answer, 1.0 rows, 3.0 tok/s",
    ]
    assert timing_words(shared)[:5] == [f"{line}." for line in share_words(shared)]
    assert share_words(msgspec.structs.replace(TIMING, rows_per_pass=1.0, shares=shares[:1])) == []
    beams = msgspec.structs.replace(shares[0], rows=4.0)
    assert share_words(msgspec.structs.replace(TIMING, rows_per_pass=4.0, shares=[beams]))[1].startswith("chat: 1 ans")


def test_the_slowest_layer_or_node_is_named() -> None:
    layers = [LayerTimes(experts=1.0), LayerTimes(attention=0.5, experts=1.9), LayerTimes()]
    assert slowest_layer_words(layers) == "Layer 1 takes longest: experts 1.9 of 2.4 ms"
    assert slowest_words(TIMING) == "Layer 4 takes longest: experts 8.0 of 9.8 ms"
    ring = Timing(prefill=NODES[0].prefill, decode=NODES[0].decode, nodes=list(NODES))
    assert " is slowest in " in slowest_words(ring)
    assert timing_words(TIMING)[0] == "Layer 4 takes longest: experts 8.0 of 9.8 ms."
    assert timing_words(TIMING)[1].startswith("Decoding 57.2 ms per token: attention 20%, ")
    assert slowest_words(Timing(prefill=TIMING.prefill, decode=msgspec.structs.replace(TIMING.decode, layers=[]))) == ""
