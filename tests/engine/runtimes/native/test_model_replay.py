"""Tokens that were decoded one by one are run again in passes of several, steps of several conversations are one pass,
and prompts are read in chunks: the bits are the same for every family, format and instruction set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.moe.expert_parallel import Mode, RankContext
from engine.moe.kernels.bindings import available
from engine.runtimes.native.bindings import STEPS_TOGETHER
from engine.runtimes.protocol import LoadedModel, RingPlace, TokenRows
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, on_all_ranks
from tests.engine.cluster.ring_places import placement_for, places
from tests.engine.runtimes.native.test_model_chunks import check_chunks, content
from tests.engine.runtimes.native.test_runtime_experts import experts_of
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import (
    FP8,
    GROUPED_MODELS,
    NATIVE,
    PACKED_FAMILIES,
    PACKED_MODELS,
    PUBLISHED,
    StoredModel,
    prompt_of,
)
from tests.support.pairwise import in_turn

pytestmark = needs_kernels

TinyModel = Callable[..., Path]
COUNTS = [STEPS_TOGETHER, 3, 1, 2, 9, 5, STEPS_TOGETHER]


def two_ways(
    model: LoadedModel, prompt: int, counts: list[int], before: Callable[[], None] = lambda: None
) -> tuple[list[bytes], list[bytes]]:
    """What rows hold after a prompt of so many tokens and the logits after each pass of ``counts`` tokens: run again in
    these passes, and in single steps. ``before`` is called before each pass."""
    tokens = prompt_of(prompt + sum(counts), seed=prompt)
    again, single = model.start(), model.start()
    found: list[bytes] = []
    expected: list[bytes] = []
    for rows in (again, single):
        if prompt:
            before()
            rows.extend(tokens[:prompt], want_logits=False)
    done = prompt
    for number, count in enumerate(counts):
        part = tokens[done : done + count]
        before()
        logits = again.replay(part, want_logits=number % 3 != 2)
        assert again.length == done + count and (logits is None) == (number % 3 == 2)
        for token in part:
            before()
            last = single.step([token])[0]
        if logits is not None and logits.size:
            assert np.isfinite(logits).all()
            found.append(logits.tobytes())
            expected.append(last.tobytes())
        done += count
    return [*found, *content(again)], [*expected, *content(single)]


def assert_equal(model: LoadedModel, prompt: int = 30, counts: list[int] = COUNTS) -> None:
    found, expected = two_ways(model, prompt, counts)
    assert len(found) > 2 and found == expected


LENGTHS = (3, 40, 17, 131, 8, 64, 1, 22, 5, 33, 12, 2, 50, 9)
STEPS = 5


def conversations(model: LoadedModel, lengths: Sequence[int]) -> list[TokenRows]:
    """Rows that have read prompts of ``lengths`` tokens, and two that are alike but for their last tokens."""
    begun = []
    for length in lengths:
        rows = model.start()
        rows.extend(prompt_of(length, seed=length), want_logits=False)
        begun.append(rows)
    return [*begun, begun[1].fan_out(1), begun[0].fan_out(1)]


def assert_alone(model: LoadedModel, lengths: Sequence[int] = LENGTHS) -> None:
    """Rows of several conversations are stepped in one pass, and each gets the bits that it gets alone."""
    assert model.rows_together == STEPS_TOGETHER == len(lengths) + 2
    together, alone = conversations(model, lengths), conversations(model, lengths)
    for step in range(STEPS):
        tokens = [[5 + (13 * step + 7 * number) % 80] for number in range(len(together))]
        # Every other time one is left out.
        chosen = [number for number in range(len(together)) if step % 2 or number != step % len(together)]
        found = model.step_together([(together[number], tokens[number]) for number in chosen])
        for number, logits in zip(chosen, found, strict=True):
            expected = alone[number].step(tokens[number])
            assert np.isfinite(logits).all() and logits.tobytes() == expected.tobytes(), (step, number)
    assert [content(rows) for rows in together] == [content(rows) for rows in alone]


def assert_verified(model: LoadedModel, prompt: int = 30) -> None:
    """Logits after every token of a pass are those of single steps, and tokens that are cut off leave nothing."""
    drafted, single = model.start(), model.start()
    if not drafted.verified_together:
        assert not drafted.can_truncate
        return
    tokens = prompt_of(prompt + sum(COUNTS), seed=prompt)
    for rows in (drafted, single):
        if prompt:
            rows.extend(tokens[:prompt], want_logits=False)
    for count in COUNTS:
        right = tokens[drafted.length : drafted.length + count]
        wrong = [token + 1 for token in right[: drafted.verified_together - count]]
        logits = drafted.verify([*right, *wrong])
        drafted.truncate(drafted.length - len(wrong))
        expected = [single.step([token])[0].tobytes() for token in right]
        assert logits.shape == (count + len(wrong), model.facts.vocabulary)
        assert [after.tobytes() for after in logits[:count]] == expected
    assert content(drafted) == content(single)


def check_bits(model: LoadedModel) -> None:
    """Those of replayed and of verified tokens, of rows that are stepped together, and of prompts that are read in
    chunks."""
    assert_equal(model)
    assert_verified(model)
    assert_alone(model)
    check_chunks(model)


BY_TURNS = in_turn(NATIVE.families, NATIVE.stored)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        pytest.param(*row, marks=() if row in BY_TURNS else pytest.mark.soak)
        for row in product(NATIVE.families, NATIVE.stored)
    ],
)
def test_every_family(family: str, stored: str, stored_model: StoredModel) -> None:
    check_bits(NATIVE.load(stored_model(NATIVE, family, stored)))


@pytest.mark.sampled
@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("stored", ["float16", *PACKED_MODELS, *GROUPED_MODELS, FP8, PUBLISHED])
def test_every_format_and_instruction_set(
    stored: str, instructions: str, stored_model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    check_bits(NATIVE.load(stored_model(NATIVE, "gpt_oss" if stored == PUBLISHED else "qwen2_moe", stored)))


@pytest.mark.soak
@pytest.mark.parametrize("stored", PACKED_MODELS)
@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_every_packed_family(family: str, stored: str, stored_model: StoredModel) -> None:
    check_bits(NATIVE.load(stored_model(NATIVE, family, stored)))


@pytest.mark.parametrize(
    "instructions", [*available()[:1], *(pytest.param(name, marks=pytest.mark.soak) for name in available()[1:])]
)
@pytest.mark.parametrize("key_values", ["auto", "q8_0"])
def test_where_attention_is_cut_into_parts(
    key_values: str, instructions: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pages, and the position after which the parts of a row become longer; one head of keys."""
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    options = {
        "num_hidden_layers": 1,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    }
    model = load_native(tiny_model("qwen3_moe", **options), cpu_threads=3, key_values=key_values)
    for prompt in (0, 250, 4090):
        assert_equal(model, prompt)
        assert_verified(model, prompt)


def test_more_than_equal_as_many_steps_is_refused(tiny_model: TinyModel) -> None:
    rows = load_native(tiny_model("mixtral")).start()
    for run in (rows.replay, rows.verify):
        with pytest.raises(ValueError, match=f"at most {STEPS_TOGETHER}"):
            run([3] * (STEPS_TOGETHER + 1))


RING_FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "qwen3_5_moe_text", "gpt_oss")


@pytest.mark.sampled
@pytest.mark.parametrize(("mode", "how"), [("exact", "overlapping"), ("fast", "even")])
@pytest.mark.parametrize("family", RING_FAMILIES)
def test_in_a_ring(family: str, mode: Mode, how: str, stored_model: StoredModel) -> None:
    """In mode fast the machine that runs an expert of several machines is chosen by all tokens of a pass, so that sums
    differ; nobody promises the same bits there."""
    folder = stored_model(NATIVE, family)
    ring = places(placement_for(folder, 3, how), mode)
    models = [NATIVE.load(folder, place) for place in ring]

    def work(rank: int) -> tuple[list[bytes], list[bytes]]:
        layers = ring[rank].exchange
        assert isinstance(layers, RingLayers)
        assert_alone(models[rank])
        return two_ways(models[rank], 30, COUNTS, layers.begin_pass)

    for found, expected in must_succeed(on_all_ranks(work, 3)):
        assert len(found) > 2 and found == expected


@pytest.mark.sampled
@pytest.mark.parametrize("family", RING_FAMILIES)
def test_in_a_central_ring(family: str, stored_model: StoredModel) -> None:
    folder = stored_model(NATIVE, family)
    placement, memory = placement_for(folder, 3, "overlapping"), MemoryRing(3)
    contexts = [RankContext("epoch", rank, placement, "central", "selected") for rank in range(3)]

    def work(rank: int) -> tuple[list[bytes], list[bytes]]:
        if rank:
            CentralNode(contexts[rank], memory.ends[rank], experts_of(folder, contexts[rank])).serve()
        head = CentralHead(contexts[0], memory.ends[0])
        try:
            model = NATIVE.load(folder, RingPlace(contexts[0], head))
            assert_alone(model)
            return two_ways(model, 30, COUNTS)
        finally:
            memory.ends[0].close()

    found, expected = on_all_ranks(work, 3)[0]
    assert len(found) > 2 and found == expected
